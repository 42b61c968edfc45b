"""Serves a policy over HTTP (docs/serve.md): builds the engine, then listens until interrupted."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from legato import __version__
from legato.core.generators import seed_generators
from legato.errors import InputError
from legato.health.goback import find_checkpoint
from legato.records.directory import RunDirectory
from legato.run import wire
from legato.run.target import Target
from legato.serve.packages import check_server_packages
from legato.training import checkpoint

if TYPE_CHECKING:
    from legato.serve.served import Served

KEY_VARIABLE = "LEGATO_SERVER_KEY"
"""The environment variable with the key of a server, for the server and for its clients."""
ATTEMPTS = 5
"""How often the checkpoint of a running run is looked for while it prunes those before it."""
USUAL_CONTEXT = 4096
"""The most tokens of a prompt with its response, unless the recipe or --context says more."""
USUAL_RESPONSE = 1024
"""The most tokens of a response to a bare model if the request does not say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Where a server listens and how much it takes; None: what fits the target."""

    host: str = "127.0.0.1"
    port: int = 8000
    """0: any free port."""
    key: str | None = None
    """None: a random one."""
    name: str | None = None
    """The model's name for clients; None: the run's or the model's own."""
    follow_seconds: float | None = None
    """How often to look for a newer checkpoint; None: only on request."""
    context_tokens: int | None = None
    response_tokens: int | None = None
    sequences: int | None = None


class RunCheckpoints:
    """The checkpoints of a run directory."""

    def __init__(self, directory: RunDirectory) -> None:
        self.directory = directory

    def newest_step(self) -> int | None:
        steps = self.directory.checkpoint_steps()
        return max(steps) if steps else None

    def model_folder(self, step: int | None) -> tuple[int, Path]:
        if step is None:
            folder, _ = checkpoint.latest(self.directory.path / "checkpoints")
        else:
            folder = find_checkpoint(self.directory, step)
        return int(folder.name.removeprefix("step-")), folder / "model"


def build_served(target: Target, place: str, options: ServeOptions) -> "Served":
    """The policy of a target with its engine, ready to be served. `place` is how the user named the target."""
    check_server_packages("legato serve")
    from legato.serve.limits import ServeLimits
    from legato.serve.served import Served
    from legato.serve.weights import Weights

    config = target.resolved.config
    seed_generators(config.training.seed)
    policy = target.policy()
    engine = wire.sampling_engine(config, policy)
    bare = target.config_file is None and not place.endswith(".toml")
    longest = USUAL_RESPONSE if bare else config.rollouts.max_response_tokens
    own = config.policy.max_prompt_tokens + longest
    context = max(USUAL_CONTEXT, own) if options.context_tokens is None else options.context_tokens
    if policy.context_length is not None and context > policy.context_length:
        if options.context_tokens is not None:
            raise InputError(
                f"expected at most {policy.context_length} tokens, the context length of {policy.name}, got {context}"
                " (--context)"
            )
        context = policy.context_length
    response = min(longest, context - 1) if options.response_tokens is None else options.response_tokens
    if response >= context:
        raise InputError(f"expected fewer tokens than the context of {context}, got {response} (--max-tokens)")
    more = {} if options.sequences is None else {"sequences": options.sequences}
    run = None if target.saved is None else RunDirectory(target.saved.parents[2])
    step = None if target.saved is None else target.saved.parent.name.removeprefix("step-")
    if options.follow_seconds is not None and run is None:
        raise InputError(f"expected a run directory to follow, got {place} (--follow)")
    weights = Weights(
        policy,
        engine,
        "0" if step is None else str(int(step)),
        checkpoints=None if run is None else RunCheckpoints(run),
        trust_remote_code=config.policy.trust_remote_code,
    )
    engine.reserve(min(context, max(config.policy.max_prompt_tokens, context // 4)), response)
    return Served(
        name=options.name or (Path(place).name if run is None else run.path.resolve().name),
        policy=policy,
        engine=engine,
        rendering=wire.rendering_of(config, policy, target.date),
        end_tokens=wire.limits_of(config, policy).end_tokens,
        limits=ServeLimits(context_tokens=context, response_tokens=response, **more),
        weights=weights,
        software=__version__,
    )


def build_served_of_running(find_target: Callable[[], Target], place: str, options: ServeOptions) -> "Served":
    """`build_served` of a target that a run may be writing: a checkpoint that is pruned meanwhile is looked for again."""
    for attempt in range(ATTEMPTS):
        target = find_target()
        try:
            return build_served(target, place, options)
        except (InputError, OSError):
            if target.saved is None or target.saved.exists() or attempt == ATTEMPTS - 1:
                raise
    raise AssertionError("the last attempt returns or raises")


def serve(find_target: Callable[[], Target], place: str, options: ServeOptions, say: Callable[[str], None]) -> None:
    """Serve a target until interrupted. `find_target` finds it, again if its checkpoint is pruned while it is loaded."""
    check_server_packages("legato serve")
    from legato.serve.server import is_loopback, listen, serve_until_interrupted

    listen(options.host, options.port).close()  # a port that is taken is refused before the model is loaded
    served = build_served_of_running(find_target, place, options)
    for note in served.policy.notes:
        say(note)
    listening = listen(options.host, options.port)
    key = secrets.token_urlsafe(24) if options.key is None else options.key
    port = listening.getsockname()[1]
    shown = "127.0.0.1" if options.host in ("0.0.0.0", "::") else options.host
    shown = f"[{shown}]" if ":" in shown else shown

    def on_ready() -> None:
        if not is_loopback(options.host):
            say(
                f"listening on {options.host} without encryption: whoever reads the network reads the key, and whoever has"
                " the key can load other weights (docs/serve.md)"
            )
        say(f"{served.name} (version {served.weights.name}) is served at http://{shown}:{port}/v1")
        if options.key is None:
            say(f"key: {key}")
            say(f"for clients: export OPENAI_BASE_URL=http://{shown}:{port}/v1 OPENAI_API_KEY={key} {KEY_VARIABLE}={key}")

    serve_until_interrupted(
        served, listening, options.host, key=key, follow_seconds=options.follow_seconds, on_ready=on_ready
    )
