"""B4: the update phase on fixed rollouts, ours and TRL's, and ours with one factor off at a time.

Our side is the trainer itself; a scripted engine returns the fixed responses. The phase is a step without its rollouts: old
log-probs, advantages, updates.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu import trl as gpu_trl
from benchmarks.gpu import work as work
from benchmarks.gpu.measure import GIB, Bench, Part
from benchmarks.gpu.work import Work
from legato.core.rollout import Problem, Rollout, Score
from legato.core.world import OneProcess, World
from legato.policy.layers import fused
from legato.rollouts.engine import Limits
from legato.rollouts.episodes import Runner
from legato.rollouts.render import Rendering
from legato.rollouts.sampling import Sampling
from legato.rollouts.scripted import ScriptedEngine
from legato.tasks.source import Pool
from legato.training.collect import Collector, CollectorSettings
from legato.training.optimizer import Optimizer, OptimizerSettings
from legato.training.pieces import Division
from legato.training.step import Trainer, TrainingSettings


@dataclass(frozen=True, slots=True)
class Numbered:
    """A stand-in for a tokenizer: the text of a prompt is its number."""

    prompts: tuple[tuple[int, ...], ...]
    eos_token_id: int | None = None
    chat_template: str | None = None

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": list(self.prompts[int(text)])}


Logprobs = list[list[list[float]]]
"""By prompt and sample."""


def score_workload(policy: Any, workload: Work) -> Logprobs:
    """The policy's log-probs of the fixed responses, computed one group at a time."""
    from legato.core.texts import Texts

    result = []
    for prompt, group in zip(workload.prompts, workload.responses, strict=True):
        lengths = torch.tensor([len(row) for row in group])
        tokens = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in group], batch_first=True)
        texts = Texts(
            prompts=torch.tensor([prompt]),
            prompt_lengths=torch.tensor([len(prompt)]),
            tokens=tokens,
            lengths=lengths,
            mask=torch.arange(tokens.shape[1]) < lengths[:, None],
            group=torch.zeros(len(group), dtype=torch.int64),
            temperature=torch.ones(len(group)),
        )
        table = policy.score(texts, torch.arange(len(group))).logprobs.cpu()
        result.append([table[row, : len(tokens_)].tolist() for row, tokens_ in enumerate(group)])
    return result


def fixed_trainer(
    policy: Any,
    workload: Work,
    logprobs: Logprobs,
    *,
    lr: float = work.LEARNING_RATE,
    optimizer: OptimizerSettings | None = None,
    world: World | None = None,
    division: Division | None = None,
) -> Trainer:
    """Our trainer on fixed responses and a table of rewards; `optimizer`: other settings than the defaults with `lr`.

    `world` and `division`: its ranks and how they divide the weights; None: one process.
    """
    from legato.algorithms import sequence_family  # noqa: F401  (registers gspo)
    from legato.algorithms.catalogue import entry

    samples = len(workload.rewards[0])
    collector = Collector(
        source=Pool([Problem(prompt=str(n)) for n in range(len(workload.prompts))], share=0.0, seed=0, shuffle=False),
        runner=Runner(
            engine=script_rollouts(workload, logprobs),
            rendering=Rendering(tokenizer=Numbered(workload.prompts), chat="never"),
            limits=Limits(max_response_tokens=max(len(r) for g in workload.responses for r in g), end_tokens=()),
        ),
        judge=table_reward(workload.rewards),
        sampling=Sampling(),
        settings=CollectorSettings(samples_per_prompt=samples, max_prompt_tokens=max(map(len, workload.prompts))),
        seed=0,
        world=OneProcess() if world is None else world,
    )
    settings = optimizer or OptimizerSettings(lr=lr)
    return Trainer(
        policy=policy,
        algorithm=entry("gspo").value,
        source=collector,
        optimizer=Optimizer(policy.parameters(), settings, total_updates=10**6, division=division),
        settings=TrainingSettings(
            prompts_per_step=len(workload.prompts), updates_per_step=work.UPDATES, anchor="recompute", probe_every_steps=0
        ),
        world=world,
    )


def script_rollouts(workload: Work, logprobs: Logprobs) -> ScriptedEngine:
    """An engine that returns the fixed responses with these log-probs."""
    by_prompt = {prompt: number for number, prompt in enumerate(workload.prompts)}

    def script(prompt: list[int], sample: int) -> tuple[tuple[int, ...], list[float]]:
        number = by_prompt[tuple(prompt)]
        return workload.responses[number][sample], logprobs[number][sample]

    # Nobody reads the texts; decoding every prefix of every response would take longer than the updates.
    return ScriptedEngine(script, decode=lambda tokens: "")


def table_reward(rewards: tuple[tuple[float, ...], ...]) -> Any:
    """A judge that looks rewards up in the table."""

    def score(rollout: Rollout) -> Score:
        reward = rewards[int(str(rollout.problem.prompt))][rollout.rollout_id % len(rewards[0])]
        return Score(reward=reward, accuracy=reward)

    return lambda rollouts: [score(rollout) for rollout in rollouts]


def measure(
    bench: Bench,
    trainer: Trainer,
    useful: int,
    *,
    steps: int,
    before: int = 0,
    first: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Time trainer steps after one warm-up step, and count the FLOPs that were executed.

    The host waits for the device before and after the old log-probs and at the end of the step, nowhere in between. `first`
    is called before each step and is not timed.
    """
    packs, clock = work.Packs(), dict[str, float]()
    score_old_policy = trainer._score_old_policy

    def timed_scoring(*arguments: Any) -> Any:
        bench.wait()
        clock["begun"], packs.phase = time.perf_counter(), "anchor"
        result = score_old_policy(*arguments)
        bench.wait()
        clock["anchored"], packs.phase = time.perf_counter(), "update"
        return result

    # Replaced on this instance only: the trainer's own method, with waits around it.
    trainer._score_old_policy = timed_scoring  # type: ignore[method-assign]
    samples, reports, result = [], [], dict[str, Any]()
    try:
        for number in range(1 + steps):
            first()
            with work.count_packs(packs), bench.peak(result, before):
                started = time.perf_counter()
                report = trainer.step()
                bench.wait()
                ended = time.perf_counter()
            if number == 0:
                packs.records.clear()
                continue
            phase = ended - started - report.metrics["time/rollouts_seconds"]
            update = ended - clock["anchored"]
            samples.append({"anchor": clock["anchored"] - clock["begun"], "update": update, "phase": phase})
            reports.append(report.metrics)
            if bench.seconds_left() < 0:
                break
    finally:
        del trainer._score_old_policy
    executed = {name: packs.flops(trainer.policy.body, name) / len(samples) for name in ("anchor", "update")}
    return {
        **result,
        **_rates(bench, samples, executed, useful),
        **_describe(reports),
        "static_gib": (bench.held_bytes() - before) / GIB,
    }


def _rates(bench: Bench, samples: list[dict[str, float]], executed: dict[str, float], useful: int) -> dict[str, Any]:
    seconds = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    peak = bench.ceilings["tflops"] * 1e12
    return {
        "samples": samples,
        "seconds": seconds,
        "useful_tokens": useful,
        "useful_per_second": useful / seconds["phase"],
        "useful_per_second_updates": useful / seconds["update"],
        "tflop": {name: value / 1e12 for name, value in executed.items()},
        "mfu_updates": executed["update"] / seconds["update"] / peak,
        "mfu_phase": sum(executed.values()) / seconds["phase"] / peak,
    }


def _describe(reports: list[Any]) -> dict[str, float]:
    keys = {"clipped": "clip/sequences", "skipped_rows": "update/skipped_rows", "two_pass": "update/two_pass"}
    return {name: statistics.mean(float(metrics.get(key, 0.0)) for metrics in reports) for name, key in keys.items()}


@dataclass(slots=True)
class _Built:
    """The trainer of the last part, kept for the next one, because building a trainer takes longer than measuring it."""

    key: tuple[str, float, float]
    trainer: Trainer
    useful: int
    before: int
    weights: dict[str, torch.Tensor]
    """The initial weights, on the host."""

    def renew(self) -> None:
        """Reset the weights, the moments and the record of skipped rows, so that every part starts the same."""
        trainer = self.trainer
        for name, weight in trainer.policy.parameters().items():
            weight.grad = None
            weight.data.copy_(self.weights[name])
        settings, total = trainer.optimizer.settings, trainer.optimizer.total_updates
        # Free the old optimizer first: training never holds two.
        del trainer.optimizer
        trainer.optimizer = Optimizer(trainer.policy.parameters(), settings, total_updates=total)
        trainer.skipped.clear()


_built: list[_Built] = []


def ours(bench: Bench, shape: str, silent: float, lr: float = work.LEARNING_RATE) -> _Built:
    """Our trainer on the fixed rollouts. It is reused if the last part had the same arguments."""
    key = (shape, silent, lr)
    if not _built or _built[0].key != key:
        drop(bench)
        before = bench.held_bytes()
        workload = work.fixed_work(bench.tiny, silent=silent)
        policy = work.make_policy(bench, shape)
        trainer = fixed_trainer(policy, workload, score_workload(policy, workload), lr=lr)
        weights = {name: weight.detach().cpu().clone() for name, weight in policy.parameters().items()}
        _built.append(_Built(key, trainer, workload.useful, before, weights))
    return _built[0]


def drop(bench: Bench) -> None:
    """Drop the kept trainer, because another side needs the memory."""
    _built.clear()
    bench.free()


@contextmanager
def factor(trainer: Trainer, name: str) -> Iterator[None]:
    """Inside this context, the trainer has one factor switched off or one setting changed."""
    policy, settings, model = trainer.policy, trainer.settings, trainer.policy.model
    switch = {"packing off": "packing", "shared prompts off": "shared_prompts", "fused parts off": "fused"}.get(name)
    if switch is not None and not hasattr(policy, switch):
        raise AttributeError(f"the policy has no switch {switch!r}")
    before = None if switch is None else getattr(policy, switch)
    if switch is not None:
        setattr(policy, switch, False)
    changed: dict[str, Any] = {
        "sampler's log-probs as anchor": {"anchor": "sampler"},
        "one pass": {"update_passes": "one"},
        "two passes": {"update_passes": "two"},
        "skipping off": {"skip_silent_rows": False, "update_passes": "one"},
        "8k tokens a pack": {"tokens_per_pack": 8192},
        "32k tokens a pack": {"tokens_per_pack": 32768},
    }.get(name, {})
    trainer.settings = replace(settings, **changed)
    trainer.anchor_choice = trainer.settings.anchor
    plain = fused.is_plain
    if name == "layers part by part":
        fused.is_plain = lambda layer: False
    if name == "gradient checkpointing":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        # transformers recomputes in training mode only; there is no dropout.
        model.train()
    try:
        yield
    finally:
        trainer.settings, trainer.anchor_choice, fused.is_plain = settings, settings.anchor, plain
        if switch is not None:
            setattr(policy, switch, before)
        if name == "gradient checkpointing":
            model.gradient_checkpointing_disable()
            model.eval()


def our_part(shape: str, name: str, *, silent: float = 0.0, steps: int = 3) -> Part:
    def part(bench: Bench) -> dict[str, Any]:
        setup = ours(bench, shape, silent)
        setup.renew()
        trainer = setup.trainer

        def first() -> None:
            # Score with the current policy; otherwise the drift of earlier steps would show up in the ratios.
            if trainer.anchor_choice == "sampler":
                workload = work.fixed_work(bench.tiny, silent=silent)
                trainer.source.runner.engine = script_rollouts(workload, score_workload(trainer.policy, workload))

        with factor(trainer, name):
            result = measure(
                bench, trainer, setup.useful, steps=1 if bench.tiny else steps, before=setup.before, first=first
            )
        return {"side": "Legato", "factor": name, "shape": shape, "silent": silent, **result}

    return part


def trl_part(shape: str, *, strong: bool, silent: float = 0.0) -> Part:
    def part(bench: Bench) -> dict[str, Any]:
        drop(bench)
        workload = work.fixed_work(bench.tiny, silent=silent)
        result = gpu_trl.update_phase(bench, shape, workload, strong=strong, steps=1 if bench.tiny else 2)
        executed = {"anchor": result.pop("flops_anchor"), "update": result.pop("flops_update")}
        rates = _rates(bench, result.pop("samples"), executed, workload.useful)
        return {"side": f"TRL {'strong' if strong else 'defaults'}", "shape": shape, "silent": silent, **result, **rates}

    return part


FACTORS = (
    "sampler's log-probs as anchor",
    "one pass",
    "packing off",
    "shared prompts off",
    "layers part by part",
    "fused parts off",
    "gradient checkpointing",
    "8k tokens a pack",
    "32k tokens a pack",
)
B4: dict[str, Part] = {}
for _shape in work.SHAPES:
    B4[f"{_shape} Legato"] = our_part(_shape, "defaults", steps=5)
    _some = FACTORS if _shape == "0.6B" else (*FACTORS[:2], "32k tokens a pack")
    B4 |= {f"{_shape} Legato, {name}": our_part(_shape, name) for name in _some}
    for _name in ("defaults", "skipping off"):
        B4[f"{_shape} 40 % silent, {_name}"] = our_part(_shape, _name, silent=0.4)
    B4[f"{_shape} TRL strong"] = trl_part(_shape, strong=True)
    B4[f"{_shape} TRL defaults"] = trl_part(_shape, strong=False)
