"""Evaluates a policy on a task, a file or evaluation sets: greedy, avg@n and pass@k with 95 % intervals."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from legato.core.generators import seed_generators
from legato.core.rollout import Problem, Rollout, Score, Unscorable
from legato.diagnostics.statistics.intervals import clustered_interval, wilson_interval
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.rollouts.engine import Engine
from legato.rollouts.sampling import Sampling
from legato.run import wire
from legato.run.remote import policy_and_engine
from legato.run.sizes import check_samples
from legato.run.target import Target
from legato.tasks.data import Jsonl, Parquet
from legato.tasks.source import Source
from legato.training.evaluate import Answered, ProblemSet, mean_reward, outside_accuracy, values_by_problem


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
    reward: float | None = None
    """The mean reward of the answers that were scored, if verdicts leave 0 to 1: accuracy says less then."""
    sets: "tuple[SetResult, ...]" = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SetResult:
    """The result of one evaluation set."""

    name: str
    keys: tuple[str, ...]
    """The keys of its problems: equal keys are the same problems."""
    values: Mapping[str, Sequence[float]]
    """For each measure (avg@n, pass@k) its value on each problem."""
    rows: tuple[AccuracyRow, ...]
    unscorable: int


def evaluate(
    target: Target,
    *,
    samples: int = 1,
    greedy: bool = True,
    temperature: float | None = None,
    problems: int | None = None,
    file: Path | None = None,
    server: str | None = None,
) -> EvaluationResult:
    """Evaluate the target on the held-out problems of its task, or on all problems of a file. `server`: samples there."""
    config = target.resolved.config
    missing = [name for name in target.python_inputs if name == "reward" or (name == "problems" and file is None)]
    if missing:
        raise InputError(
            f"this run was given its {' and '.join(missing)} in Python, which its configuration does not hold; evaluate its"
            " model folder with a task and a reward of your choice: legato eval FOLDER task.kind=... reward.kind=..."
        )
    check_samples(samples, "samples")
    if file is not None:
        chosen: Sequence[Problem] = _read(file)
        source = wire.source_of(config, wire.PythonObjects(problems=_pad_for_pool(chosen)))
        chosen = chosen if problems is None else chosen[:problems]
    else:
        source = wire.source_of(config, wire.PythonObjects())
        chosen = source.held_out(config.task.held_out if problems is None else problems)
    seed_generators(config.training.seed)
    with ExitStack() as stack:
        engine = None  # the collector makes its own
        if server is None:
            policy = target.policy()
        else:
            policy, engine = stack.enter_context(policy_and_engine(target, server))
        return _evaluate(target, source, chosen, policy, engine, samples, greedy, temperature, stack, with_sets=file is None)


def _evaluate(
    target: Target,
    source: Source,
    chosen: Sequence[Problem],
    policy: Policy,
    engine: Engine | None,
    samples: int,
    greedy: bool,
    temperature: float | None,
    stack: ExitStack,
    *,
    with_sets: bool,
) -> EvaluationResult:
    """Evaluate a policy on chosen problems, and on the evaluation sets of the target if they are wanted."""
    config = target.resolved.config
    reward = wire.reward_of(config, wire.PythonObjects())
    collector = wire.collector_of(config, policy, source, reward, trains=False, date=target.date, engine=engine)
    stack.callback(collector.close)
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
        rows += _rows(values_by_problem(answers))
    unscorable = _count_unscorable(answers)
    sets = wire.sets_of(config, policy, evaluator.runner, evaluator.judge) if with_sets else []
    return EvaluationResult(
        problems=len(chosen),
        samples=samples,
        rows=tuple(rows),
        answered=tuple(map(tuple, answers)),
        unscorable=unscorable,
        reward=None if outside_accuracy(answers) is None else mean_reward(answers),
        sets=tuple(_measure(each, seed, 2 + place) for place, each in enumerate(sets)),
    )


def _read(file: Path) -> list[Problem]:
    kind = Parquet if file.suffix == ".parquet" else Jsonl
    try:
        return kind(path=str(file)).load()
    except InputError as error:  # the columns of a set can be named, those of --file cannot
        advice = f"name the columns in a recipe for --sets: a set with task.kind = {kind.name!r} and "
        raise InputError(str(error).replace("set task.", f"{advice}task.")) from None


def evaluate_sets(target: Target, server: str | None = None) -> tuple[SetResult, ...]:
    """Evaluate the target on the evaluation sets of its configuration alone. `server`: samples there."""
    config = target.resolved.config
    judge = None if "reward" in target.python_inputs else wire.reward_of(config, wire.PythonObjects()).score_all
    seed_generators(config.training.seed)
    with policy_and_engine(target, server) as (policy, engine):
        runner = wire.runner_of(config, policy, engine, target.date)
        sets = wire.sets_of(config, policy, runner, judge or _no_reward)
        return tuple(_measure(each, config.training.seed, place) for place, each in enumerate(sets))


def _no_reward(rollouts: Sequence[Rollout]) -> list[Score | Unscorable]:
    raise InputError(
        "this run was given its reward in Python, which its configuration does not hold; give each set a reward of its own:"
        " evaluation.sets.NAME.reward=..."
    )


def _measure(each: ProblemSet, seed: int, number: int) -> SetResult:
    answers = each.answer(seed, number)
    values = values_by_problem(answers)
    return SetResult(
        name=each.name,
        keys=tuple(problem.key for problem in each.problems),
        values=values,
        rows=tuple(_rows(values)),
        unscorable=_count_unscorable(answers),
    )


def _rows(values: Mapping[str, Sequence[float]]) -> list[AccuracyRow]:
    rows = []
    for name, each in values.items():
        low, high = clustered_interval(each)
        rows.append(AccuracyRow(name=name, value=sum(each) / len(each), low=low, high=high))
    return rows


def _count_unscorable(answers: Sequence[Sequence[Answered]]) -> int:
    """How many answers could not be scored; InputError if none could."""
    reasons = [a.score.reason for row in answers for a in row if isinstance(a.score, Unscorable)]
    if reasons and len(reasons) == sum(map(len, answers)):
        raise InputError(
            f"expected a reward that scores answers, got no score for any of {len(reasons)}: {reasons[0]};"
            " correct the reward"
        )
    return len(reasons)


def _pad_for_pool(problems: Sequence[Problem]) -> list[Problem]:
    """Add dummy problems: a pool needs at least one training problem, although evaluation uses none."""
    return [*problems, Problem(prompt="-"), Problem(prompt="+"), Problem(prompt="*"), Problem(prompt="/")]


def _wilson_row(name: str, right: float, count: int) -> AccuracyRow:
    low, high = wilson_interval(right, count)
    return AccuracyRow(name=name, value=right / count, low=low, high=high)
