"""From a checked configuration to the objects of a run. Nothing is decided here that the configuration does not say."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from legato.config.kinds import is_import_path, make
from legato.config.resolved import Resolved
from legato.config.schema import Config
from legato.core.importing import import_object
from legato.core.rollout import Problem
from legato.errors import InputError
from legato.policy.model.adapters import Lora
from legato.policy.model.load import Loading, load_policy
from legato.policy.model.reference import Reference
from legato.policy.model.supervised import Example, supervise
from legato.policy.model.tiny import TinyShape
from legato.policy.model.upcycle import Upcycling
from legato.policy.policy import Policy
from legato.rewards.importing import import_reward
from legato.rewards.overlong import OverlongPunishment
from legato.rewards.scoring import Component, WeightedSum
from legato.rollouts.engine import Engine, Limits
from legato.rollouts.mismatch import Mismatch
from legato.rollouts.registry import EngineOptions, build_engine
from legato.rollouts.render import Rendering, end_tokens
from legato.rollouts.sampling import Sampling
from legato.tasks.source import Generated, Joined, Pool, Source
from legato.tasks.task import Split
from legato.training.anchor import needs_reference
from legato.training.collect import Collector, Tally
from legato.training.memory.kept import training_bytes
from legato.training.optimizer import Optimizer, OptimizerSettings, Schedule, check_eight_bit
from legato.training.step import Trainer, TrainingSettings, routing_options
from legato.training.tables import needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """What a Python caller hands over in place of names in the configuration."""

    model: Any = None
    tokenizer: Any = None
    problems: Sequence[Problem] | None = None
    reward: Callable[..., Any] | None = None


def policy_of(resolved: Resolved, given: Given, saved: Path | None = None) -> Policy:
    """The policy to train: as configured, or with the weights of a saved model folder."""
    model = resolved.config.policy.model if given.model is None else given.model
    return load_policy(model, loading_of(resolved), tokenizer=given.tokenizer, saved=saved)


def loading_of(resolved: Resolved) -> Loading:
    config = resolved.config.policy
    tiny = config.tiny
    return Loading(
        dtype=config.dtype,
        device=config.device,
        trust_remote_code=config.trust_remote_code,
        gradient_checkpointing=config.gradient_checkpointing is True,
        packing=config.packing,
        frozen=config.frozen,
        lora=None
        if config.lora is None
        else Lora(rank=config.lora.rank, alpha=config.lora.alpha, targets=config.lora.targets),
        upcycle=None
        if config.upcycle is None
        else Upcycling(
            experts=config.upcycle.experts,
            experts_per_token=config.upcycle.experts_per_token,
            noise=config.upcycle.noise,
        ),
        tiny=TinyShape(
            hidden=tiny.hidden,
            layers=tiny.layers,
            heads=tiny.heads,
            experts=tiny.experts,
            experts_per_token=tiny.experts_per_token,
        ),
        seed=resolved.config.training.seed,
        value_head="values" in needs(resolved.algorithm) | set(resolved.algorithm.advantage.needs()),
    )


def source_of(config: Config, given: Given) -> Source:
    """Where the problems come from."""
    task, seed = config.task, config.training.seed
    if given.problems is not None:
        return Pool(given.problems, share=task.held_out_share, seed=seed, shuffle=task.shuffle)
    first = _source(task.kind, task.options, config)
    if task.stages == 1 or task.second is None:
        return first
    second = _source(task.second.kind, task.second.options, config)
    assert task.second_after_steps is not None
    return Joined(first=first, second=second, after_steps=task.second_after_steps)


def _source(kind: str, options: Mapping[str, Any], config: Config) -> Source:
    task, seed = config.task, config.training.seed
    made: Any = import_object("task.kind =", kind, options) if is_import_path(kind) else make("task", kind, options)
    if hasattr(made, "load"):
        return Pool(made.load(), share=task.held_out_share, seed=seed, shuffle=task.shuffle)
    if not hasattr(made, "problem"):
        raise InputError(f"task.kind = {kind!r} has neither problem(random) nor load(); a task needs one of them")
    return Generated(split=Split(task=made, share=task.held_out_share), seed=seed, size=task.problems_per_epoch)


def reward_of(config: Config, given: Given) -> WeightedSum:
    """What scores a rollout."""
    reward = config.reward
    overlong = None
    if reward.overlong is not None:
        longest = config.rollouts.max_response_tokens
        overlong = OverlongPunishment(
            max_response_tokens=longest, cache_tokens=reward.overlong.cache_share * longest, factor=reward.overlong.factor
        )
    if given.reward is not None:
        named = {getattr(given.reward, "__name__", "reward"): (given.reward, 1.0, True)}
    elif reward.components:
        named = {name: (_reward(c.kind, c.options), c.weight, c.judges) for name, c in reward.components.items()}
    else:
        assert reward.kind is not None
        named = {reward.kind.rpartition(":")[2]: (_reward(reward.kind, reward.options), 1.0, True)}
    return WeightedSum(
        components={
            name: Component(reward=call, weight=weight, is_accuracy=judges, timeout_seconds=reward.timeout_seconds)
            for name, (call, weight, judges) in named.items()
        },
        overlong=overlong,
    )


def _reward(kind: str, options: Mapping[str, Any]) -> Any:
    return import_reward(kind, options) if is_import_path(kind) else make("reward", kind, options)


def rendering_of(config: Config, policy: Policy) -> Rendering:
    """How problems become prompts."""
    return Rendering(
        tokenizer=policy.tokenizer,
        chat=config.policy.chat,
        system_prompt=config.task.system_prompt,
        template_options=config.policy.chat_template_kwargs,
    )


def limits_of(config: Config, policy: Policy) -> Limits:
    """When a response ends."""
    return Limits(
        max_response_tokens=config.rollouts.max_response_tokens,
        end_tokens=end_tokens(policy.tokenizer, policy.body.generation_config, config.policy.end_tokens),
        stop_strings=config.rollouts.stop,
    )


def sampling_of(config: Config) -> Sampling:
    """How tokens are chosen."""
    rollouts = config.rollouts
    return Sampling(temperature=rollouts.temperature, top_p=rollouts.top_p, top_k=rollouts.top_k, min_p=rollouts.min_p)


def collector_of(config: Config, policy: Policy, source: Source, reward: WeightedSum, *, trains: bool = True) -> Collector:
    """prompts -> rollouts -> rewards, as configured. Not `trains`: no memory is kept back for updates."""
    rollouts = config.rollouts
    longest = config.policy.max_prompt_tokens + rollouts.max_response_tokens
    if policy.context_length is not None and longest > policy.context_length:
        raise InputError(
            f"policy.max_prompt_tokens + rollouts.max_response_tokens = {longest} is more than {policy.name} can read"
            f" ({policy.context_length} tokens); lower one of them"
        )
    engine, evaluator = _engines(config, policy, trains=trains)
    return Collector(
        source=source,
        engine=engine,
        evaluator=evaluator,
        rendering=rendering_of(config, policy),
        judge=reward.score_all,
        sampling=sampling_of(config),
        limits=limits_of(config, policy),
        samples_per_prompt=rollouts.samples_per_prompt,
        seed=config.training.seed,
        max_prompt_tokens=config.policy.max_prompt_tokens,
        too_long=config.policy.too_long,
        resampling=config.task.resampling,
        max_refills=config.task.max_refills,
    )


def _engines(config: Config, policy: Policy, *, trains: bool) -> tuple[Engine, Engine | None]:
    """What samples, and what evaluations sample with where that is another."""
    options, name = _engine_options(config, policy, trains=trains), config.rollouts.engine
    if options.mismatch is None:
        engine = build_engine(name, policy, options)
        evaluator = None
    else:
        if name != "local":
            raise InputError(
                f"expected rollouts.engine = 'local' where rollouts.mismatch.kind = {options.mismatch.kind!r}, got {name!r}"
                " (rollouts.engine): a copy of the policy that differs on purpose is made by the engine 'local' alone"
            )
        # Two engines share what keys and values may take.
        options = replace(options, kv_memory_share=options.kv_memory_share / 2)
        engine = build_engine(name, policy, options)
        evaluator = build_engine(name, policy, replace(options, mismatch=None, record_routes=False))
    if trains:
        check_engine(config, policy, engine)
    return engine, evaluator


def sampling_engine(config: Config, policy: Policy) -> Engine:
    """The engine of a policy that is only sampled from."""
    options = replace(_engine_options(config, policy, trains=False), mismatch=None, record_routes=False)
    return build_engine(config.rollouts.engine, policy, options)


def _engine_options(config: Config, policy: Policy, *, trains: bool) -> EngineOptions:
    rollouts, training = config.rollouts, config.training
    later = 0
    if trains:
        later = training_bytes(
            policy.parameters().values(),
            eight_bit=training.optimizer == "adamw-8bit",
            offload=training.offload_optimizer,
        )
    return EngineOptions(
        rows_at_once=rollouts.rows_at_once,
        kv_memory_share=rollouts.kv_memory_share,
        training_bytes=later,
        record_routes=rollouts.record_routes is not False,
        mismatch=mismatch_of(config),
        seed=training.seed,
    )


def check_engine(config: Config, policy: Policy, engine: Engine) -> None:
    """Refuse settings that need more than the engine can do. A model without experts is refused by `check_training`."""
    can, rollouts, training = engine.capabilities, config.rollouts, config.training
    lacking = {}
    if not can.routes and policy.routers is not None:
        lacking["routes"] = {
            "training.routing_replay = 'R3'": training.routing_replay == "R3",
            "rollouts.record_routes = true": rollouts.record_routes is True,
        }
    if not can.truncation:
        lacking["truncation"] = {
            f"rollouts.top_p = {rollouts.top_p}": rollouts.top_p < 1,
            f"rollouts.top_k = {rollouts.top_k}": rollouts.top_k > 0,
            f"rollouts.min_p = {rollouts.min_p}": rollouts.min_p > 0,
        }
    if not can.logprobs_at_temperature:
        lacking["logprobs_at_temperature"] = {"training.anchor = 'sampler'": training.anchor == "sampler"}
    for capability, settings in lacking.items():
        for setting in (setting for setting, wanted in settings.items() if wanted):
            raise InputError(
                f"expected an engine with the capability {capability!r} for {setting}, got {engine.name!r}"
                f" (rollouts.engine = {rollouts.engine!r}); drop that setting or take another engine"
            )


def mismatch_of(config: Config) -> Mismatch | None:
    """How the sampler differs from the trainer; None: not at all."""
    given = config.rollouts.mismatch
    if given.kind == "none":
        return None
    sized = {name: value for name in ("size", "updates") if (value := getattr(given, name)) is not None}
    return Mismatch(kind=given.kind, seed=config.training.seed, **sized)


def held_out_of(config: Config, source: Source, collector: Collector, notes: list[str]) -> list[Problem]:
    """The held-out problems whose prompts fit, as many as asked for; what differs is noted."""
    listed = source.held_out(config.task.held_out)
    longest = config.policy.max_prompt_tokens
    fitting = [problem for problem in listed if len(collector.rendering.prompt(problem)) <= longest]
    if len(fitting) < len(listed) and config.policy.too_long == "error":
        raise InputError(
            f"{len(listed) - len(fitting)} held-out problems have prompts of more than policy.max_prompt_tokens = {longest}"
            " tokens; raise it, or drop them with policy.too_long = 'drop'"
        )
    if not fitting:
        raise InputError(
            f"no held-out problem has a prompt of at most policy.max_prompt_tokens = {longest} tokens; raise it"
        )
    if len(fitting) < config.task.held_out:
        notes.append(
            f"evaluated on {len(fitting)} held-out problems: no more than that fit (task.held_out = {config.task.held_out})"
        )
    return fitting


def fingerprint(source: Source) -> str:
    """A hash of the problems a run is made of: all of a pool, the first of a task that makes them."""
    count = source.size if source.size is not None and source.size <= 100_000 else 256
    digest = hashlib.blake2b(digest_size=16)
    for problem in (source.training(number) for number in range(count)):
        digest.update(f"{problem.key} {problem.answer}\n".encode())
    return digest.hexdigest()


def weights_fingerprint(policy: Policy) -> str:
    """A hash of the weights to the bit, whichever algorithm will train them: a value head is not counted."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in policy.model.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_training(resolved: Resolved, policy: Policy, collector: Collector) -> None:
    """What would stop the first step is told before anything is written."""
    if not policy.parameters():
        raise InputError("nothing is left to train: policy.frozen covers every parameter")
    if resolved.config.training.optimizer == "adamw-8bit":
        check_eight_bit()
    for option in routing_options(resolved.algorithm, _settings(resolved)):
        policy.known_routers(option)
    if resolved.config.rollouts.record_routes is True:
        policy.known_routers("rollouts.record_routes = true")
    cursor = collector.cursor
    collector.draw(Tally())
    collector.cursor = cursor


def trainer_of(resolved: Resolved, policy: Policy, collector: Collector, reference: Reference | None) -> Trainer:
    """The trainer, as configured."""
    training = resolved.config.training
    total = training.steps * training.updates_per_step * training.epochs_per_step
    return Trainer(
        policy=policy,
        algorithm=resolved.algorithm,
        collector=collector,
        reference=reference,
        optimizer=Optimizer(
            policy.parameters(),
            OptimizerSettings(
                lr=training.lr,
                betas=training.betas,
                epsilon=training.epsilon,
                weight_decay=training.weight_decay,
                gradient_clip=training.gradient_clip,
                kind=training.optimizer,
                offload=training.offload_optimizer,
                value_lr=training.value_lr,
            ),
            Schedule(
                kind=training.schedule,
                warm_up=training.warm_up_updates,
                total=total,
                final_share=training.final_lr_share,
            ),
        ),
        settings=_settings(resolved),
    )


def _settings(resolved: Resolved) -> TrainingSettings:
    training = resolved.config.training
    return TrainingSettings(
        seed=training.seed,
        prompts_per_step=training.prompts_per_step,
        updates_per_step=training.updates_per_step,
        epochs_per_step=training.epochs_per_step,
        anchor=training.anchor,
        accept_unsafe_anchor=training.accept_unsafe_anchor,
        update_passes=training.update_passes,
        skip_silent_rows=training.skip_silent_rows,
        tokens_per_pack=training.tokens_per_pack,
        probe_every_steps=training.probe_every_steps,
        minimum_scored=training.minimum_scored,
        routing_replay=training.routing_replay,
        load_balance=training.load_balance,
    )


def wants_reference(resolved: Resolved) -> bool:
    return needs_reference(resolved.algorithm)


_WARM_UP_FROM = 10**9
"""Warm-up problems are numbered from here, so that the first steps do not repeat them in order."""


def warm_up_examples(config: Config, policy: Policy, source: Source, collector: Collector) -> Callable[[int], list[Example]]:
    """What a step of the supervised stage is taught: training problems with their answers, never held-out ones."""
    stage = config.policy.warm_up
    assert stage is not None
    end = collector.limits.end_tokens[0]

    def examples(step: int) -> list[Example]:
        found = []
        for number in range(step * stage.examples_per_step, (step + 1) * stage.examples_per_step):
            problem = source.training(_WARM_UP_FROM + number)
            if problem.answer is None:
                raise InputError("policy.warm_up needs problems with answers; this task has none")
            said = policy.tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
            found.append((collector.rendering.prompt(problem), torch.tensor([*said, end])))
        return found

    return examples


def warm_up(
    config: Config, policy: Policy, examples: Callable[[int], list[Example]], after: Callable[[int, float], None]
) -> None:
    """The supervised stage."""
    stage = config.policy.warm_up
    assert stage is not None
    supervise(policy, examples, steps=stage.steps, lr=stage.lr, stop_loss=stage.stop_loss, after_step=after)
