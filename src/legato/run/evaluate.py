"""Evaluates a policy on a task or a file: greedy, avg@n and pass@k with 95 % intervals."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from legato.core.generators import seed_generators
from legato.core.rollout import Problem, Unscorable
from legato.diagnostics.statistics.intervals import mean_interval, wilson_interval
from legato.errors import InputError
from legato.rollouts.sampling import Sampling
from legato.run import wire
from legato.run.sizes import check_samples
from legato.run.target import Target
from legato.tasks.data import Jsonl, Parquet
from legato.training.evaluate import Answered, pass_at


@dataclass(frozen=True, slots=True, kw_only=True)
class AccuracyRow:
    """One accuracy with its 95 % interval."""

    name: str
    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationResult:
    """The result of an evaluation."""

    problems: int
    samples: int
    rows: tuple[AccuracyRow, ...]
    answered: tuple[tuple[Answered, ...], ...]
    unscorable: int


def evaluate(
    target: Target,
    *,
    samples: int = 1,
    greedy: bool = True,
    temperature: float | None = None,
    problems: int | None = None,
    file: Path | None = None,
) -> EvaluationResult:
    """Evaluate the target on the held-out problems of its task, or on all problems of a file."""
    config = target.resolved.config
    missing = [name for name in target.python_inputs if name == "reward" or (name == "problems" and file is None)]
    if missing:
        raise InputError(
            f"this run was given its {' and '.join(missing)} in Python, which its configuration does not hold; evaluate its"
            " model folder with a task and a reward of your choice: legato eval FOLDER task.kind=... reward.kind=..."
        )
    check_samples(samples, "samples")
    if file is not None:
        chosen: Sequence[Problem] = (Parquet if file.suffix == ".parquet" else Jsonl)(path=str(file)).load()
        source = wire.source_of(config, wire.Given(problems=_pad_for_pool(chosen)))
        chosen = chosen if problems is None else chosen[:problems]
    else:
        source = wire.source_of(config, wire.Given())
        chosen = source.held_out(config.task.held_out if problems is None else problems)
    seed_generators(config.training.seed)
    policy = target.policy()
    collector = wire.collector_of(config, policy, source, wire.reward_of(config, wire.Given()), trains=False)
    longest = config.policy.max_prompt_tokens
    chosen = [problem for problem in chosen if len(collector.runner.rendering.prompt(problem)) <= longest]
    if not chosen:
        raise InputError(f"no problem has a prompt of at most policy.max_prompt_tokens = {longest} tokens; raise it")
    evaluator = wire.evaluator_of(collector)
    rows: list[AccuracyRow] = []
    answers: list[list[Answered]] = []
    seed = config.training.seed
    if greedy:
        answers = evaluator.answer(chosen, Sampling(temperature=0), 1, seed, 0)
        right = sum(row[0].accuracy for row in answers)
        rows.append(_wilson_row("greedy", right, len(chosen)))
    if samples:
        sampling = Sampling(temperature=config.evaluation.temperature if temperature is None else temperature)
        answers = evaluator.answer(chosen, sampling, samples, seed, 1)
        means = [sum(a.accuracy for a in row) / samples for row in answers]
        low, high = wilson_interval(sum(means), len(means)) if samples == 1 else mean_interval(means)
        rows.append(AccuracyRow(name=f"avg@{samples}", value=sum(means) / len(means), low=low, high=high))
        for k in _powers(samples):
            each = [pass_at(sum(a.accuracy >= 1.0 for a in row), samples, k) for row in answers]
            low, high = mean_interval(each)
            rows.append(AccuracyRow(name=f"pass@{k}", value=sum(each) / len(each), low=low, high=high))
    reasons = [a.score.reason for row in answers for a in row if isinstance(a.score, Unscorable)]
    if reasons and len(reasons) == sum(map(len, answers)):
        raise InputError(
            f"expected a reward that scores answers, got no score for any of {len(reasons)}: {reasons[0]};"
            " correct the reward"
        )
    return EvaluationResult(
        problems=len(chosen), samples=samples, rows=tuple(rows), answered=tuple(map(tuple, answers)), unscorable=len(reasons)
    )


def _pad_for_pool(problems: Sequence[Problem]) -> list[Problem]:
    """Add dummy problems: a pool needs at least one training problem, although evaluation uses none."""
    return [*problems, Problem(prompt="-"), Problem(prompt="+"), Problem(prompt="*"), Problem(prompt="/")]


def _wilson_row(name: str, right: float, count: int) -> AccuracyRow:
    low, high = wilson_interval(right, count)
    return AccuracyRow(name=name, value=right / count, low=low, high=high)


def _powers(samples: int) -> list[int]:
    powers, k = [], 2
    while k <= samples:
        powers.append(k)
        k *= 2
    return powers
