"""Builds the objects of a run from its checked configuration."""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from legato.config.checks import samples_of_set
from legato.config.kinds import make, usual_evaluation
from legato.config.resolved import Resolved
from legato.config.schema import Config, EvaluationSet
from legato.core.importing import is_import_path
from legato.core.rollout import Problem
from legato.core.settings import select
from legato.core.user_code import CallFailedError, UserCode, is_own
from legato.core.world import OneProcess, World
from legato.diagnostics.words import count as counted
from legato.environments.adapt import adapt_environment, is_agent
from legato.environments.tools import tools_of
from legato.errors import InputError
from legato.policy.model.load import load_policy
from legato.policy.model.reference import Reference
from legato.policy.model.supervised import Example, supervise
from legato.policy.policy import Policy
from legato.records.directory import RunDirectory
from legato.rewards.judge import LOCAL, JudgeReward
from legato.rewards.scoring import Component, RewardSettings, WeightedSum, check_reward
from legato.rewards.separate import SeparateReward, check_separate
from legato.rewards.trl import AsyncTrlReward, Schedule, TrlReward, adapt_trl_reward
from legato.rollouts.engine import Engine, Limits
from legato.rollouts.episodes import Environment, EpisodeSettings, Runner, SingleTurn
from legato.rollouts.mismatch import Mismatch
from legato.rollouts.registry import EngineOptions, build_engine, is_remote
from legato.rollouts.render import Rendering, end_tokens
from legato.rollouts.sampling import Sampling
from legato.run.sizes import check_weights
from legato.tasks.own import OwnTask
from legato.tasks.source import Joined, Source
from legato.tasks.task import Split
from legato.training.ahead import Ahead
from legato.training.anchor import needs_reference
from legato.training.collect import Collector, CollectorSettings
from legato.training.evaluate import Evaluator, ProblemSet
from legato.training.journal import Journal
from legato.training.memory.training_bytes import training_bytes
from legato.training.optimizer import Optimizer, check_eight_bit
from legato.training.pieces import Divided, Division
from legato.training.play import Judge
from legato.training.ranks.process_group import ProcessGroup
from legato.training.step import Trainer, routing_options
from legato.training.tables import needs
from legato.training.teacher import Teacher

EXACT_PACK = 16384
"""The largest pack whose products are compared with those of decoding (`policy/layers/products.py`)."""
EXACT_ROWS = 128
"""From so many rows at once on an exact engine costs less than scoring the old policy, which it saves (docs/exact.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PythonObjects:
    """Objects that a Python caller passes in place of names in the configuration."""

    model: Any = None
    tokenizer: Any = None
    problems: Sequence[Problem] | Any = None
    """A list of problems, or a task: an object with `problem(random)` or `load()`."""
    reward: Callable[..., Any] | Mapping[str, Component] | None = None
    """A function, or several with their weights by name."""


def policy_of(resolved: Resolved, objects: PythonObjects, saved: Path | None = None) -> Policy:
    """The policy to train, with the configured weights or those of a saved model folder."""
    config, algorithm = resolved.config, resolved.algorithm
    if objects.model is None and saved is None:
        check_weights(resolved)
    return load_policy(
        config.policy.model if objects.model is None else objects.model,
        config.policy,
        seed=config.training.seed,
        tokenizer=objects.tokenizer,
        saved=saved,
        value_head="values" in needs(algorithm) | set(algorithm.advantage.needs()),
    )


def source_of(config: Config, objects: PythonObjects) -> Source:
    """The source of problems."""
    task, seed = config.task, config.training.seed
    if isinstance(objects.problems, Sequence):
        return task.pool(objects.problems, seed)
    if objects.problems is not None:
        return _problems_of(objects.problems, "problems", config)
    first = _source(task.kind, task.options, config)
    if task.stages == 1 or task.second is None:
        return first
    second = _source(task.second.kind, task.second.options, config)
    assert task.second_after_steps is not None
    return Joined(first=first, second=second, after_steps=task.second_after_steps)


def _source(kind: str, options: Mapping[str, Any], config: Config) -> Source:
    return _problems_of(make("task", kind, options), f"task.kind = {kind!r}", config)


def _problems_of(task_object: Any, name: str, config: Config) -> Source:
    task, seed = config.task, config.training.seed
    loads = hasattr(task_object, "load")
    if not loads and not hasattr(task_object, "problem"):
        raise InputError(f"expected a task with problem(random) or load(), got {type(task_object).__name__} ({name})")
    guarded = OwnTask(task_object, name, task.timeout_seconds) if is_own(task_object) else task_object
    return task.pool(guarded.load(), seed) if loads else task.generated(guarded, seed)


def reward_of(config: Config, objects: PythonObjects) -> WeightedSum:
    """The reward function, as configured or given."""
    reward = config.reward
    if reward.separate_process:
        kinds = (
            [] if objects.reward is not None else [reward.kind or "", *(each.kind for each in reward.components.values())]
        )
        check_separate([kind for kind in kinds if is_import_path(kind)])
    schedule = _schedule(config)
    if isinstance(objects.reward, Mapping):
        components = {
            name: replace(each, reward=adapt_trl_reward(each.reward, schedule)) for name, each in objects.reward.items()
        }
    elif objects.reward is not None:
        name = getattr(objects.reward, "__name__", "reward")
        components = {name: Component(reward=adapt_trl_reward(objects.reward, schedule))}
    elif reward.components:
        components = {
            name: select(Component, [each], reward=_reward(each.kind, each.options, reward, schedule))
            for name, each in reward.components.items()
        }
    else:
        assert reward.kind is not None
        only = Component(reward=_reward(reward.kind, reward.options, reward, schedule))
        components = {reward.kind.rpartition(":")[2]: only}
    longest = config.rollouts.max_response_tokens
    weighted = select(WeightedSum, [reward], components=components, longest_response=longest)
    load_judges(config, weighted)
    return weighted


def _schedule(config: Config) -> Schedule:
    training = config.training
    return Schedule(
        updates_per_step=training.updates_per_step * training.epochs_per_step, total_updates=training.total_updates
    )


def load_judges(config: Config, reward: WeightedSum) -> None:
    """Load the judges of a reward that have no endpoint, and serve them in this process. Each model is loaded once."""
    judges = [each.reward for each in reward.components.values() if isinstance(each.reward, JudgeReward)]
    for model in dict.fromkeys(judge.model for judge in judges if judge.url is None and judge.model not in LOCAL):
        from legato.serve.packages import check_server_packages

        check_server_packages("a judge without a url")
        from legato.serve.in_thread import ThreadServer
        from legato.serve.limits import ServeLimits
        from legato.serve.served import Served
        from legato.serve.weights import Weights

        judge = load_policy(model, replace(config.policy, lora=None, frozen=(), upcycle=None), seed=config.training.seed)
        if not getattr(judge.tokenizer, "chat_template", None):
            raise InputError(f"expected a judge with a chat template, got {model!r} (reward.model)")
        judge.model.requires_grad_(False)
        # Most of the memory belongs to the policy: the judge answers a few questions at a time.
        share = replace(_engine_options(config, judge, trains=False), mismatch=Mismatch(), record_routes=False)
        engine = build_engine("local", judge, replace(share, kv_memory_share=share.kv_memory_share / 8))
        if engine.capabilities.holds_weights:
            engine.publish(judge.model.named_parameters(), engine.version)
        longest = max(each.max_tokens for each in judges)
        context = min(judge.context_length or _JUDGE_CONTEXT, _JUDGE_CONTEXT)
        server = ThreadServer(
            Served(
                name=model,
                policy=judge,
                engine=engine,
                rendering=Rendering(tokenizer=judge.tokenizer),
                end_tokens=end_tokens(judge.tokenizer, judge.body.generation_config, ()),
                limits=ServeLimits(context_tokens=context, response_tokens=min(longest, context - 1)),
                weights=Weights(judge, engine, "0"),
                software="",
            )
        )
        LOCAL[model] = (f"{server.url}/v1", server.key)


_JUDGE_CONTEXT = 8192
"""The most tokens of a question to a judge of this process with its answer."""


def _reward(kind: str, options: Mapping[str, Any], settings: RewardSettings, schedule: Schedule) -> Any:
    if settings.separate_process and is_import_path(kind):
        return SeparateReward.load(kind, options, settings.timeout_seconds, schedule)
    reward = adapt_trl_reward(make("reward", kind, options), schedule)
    check_reward(reward, kind)
    return reward


def reward_notes(reward: WeightedSum) -> list[str]:
    """Sentences about rewards for the start of a run."""
    rewards = [each.reward for each in reward.components.values()]
    return [note for each in rewards if isinstance(each, TrlReward | AsyncTrlReward) for note in each.notes()]


def rendering_of(
    config: Config, policy: Policy, date: str | None = None, tools: tuple[Mapping[str, Any], ...] = ()
) -> Rendering:
    """The rendering of problems as prompts; `date` is what chat templates write that ask for the date.

    `tools` are JSON schemas of the environment's tools.
    """
    return select(Rendering, [config.policy, config.task], tokenizer=policy.tokenizer, date=date, tools=tools)


def limits_of(config: Config, policy: Policy) -> Limits:
    """The limits of a response: end tokens, stop strings and length."""
    ends = end_tokens(policy.tokenizer, policy.body.generation_config, config.policy.end_tokens)
    return select(Limits, [config.rollouts], end_tokens=ends)


def collector_of(
    config: Config,
    policy: Policy,
    source: Source,
    reward: WeightedSum,
    *,
    trains: bool = True,
    date: str | None = None,
    world: World | None = None,
    engine: Engine | None = None,
) -> Collector:
    """The collector (prompts -> rollouts -> rewards). With `trains` False no memory is reserved for updates.

    `date`: as for `rendering_of`. `engine` takes the place of the configured one.
    """
    rollouts = config.rollouts
    check_context(config, policy, rollouts.max_response_tokens, "rollouts.max_response_tokens")
    engine, other = _engines(config, policy, trains=trains, world=world) if engine is None else (engine, None)
    runner = runner_of(config, policy, engine, date)
    parts: dict[str, Any] = {
        "source": source,
        "runner": runner,
        "evaluation": None if other is None else replace(runner, engine=other),
        "judge": reward.score_all,
        "sampling": select(Sampling, [rollouts]),
        "settings": select(CollectorSettings, [rollouts, config.policy, config.task]),
        "seed": config.training.seed,
        "world": world or OneProcess(),
    }
    if not rollouts.ahead or not trains:
        return Collector(**parts)
    return Ahead(**parts, steps_ahead=rollouts.ahead, total_steps=config.training.steps)


def open_journal(collector: Collector, directory: RunDirectory) -> None:
    """Let a collector that samples ahead write complete groups into the run directory; each rank has files of its own."""
    if isinstance(collector, Ahead):
        collector.journal = Journal(directory.journal_path, collector.world.rank, collector.world.size)


def runner_of(config: Config, policy: Policy, engine: Engine, date: str | None = None) -> Runner:
    """The runner of episodes on an engine."""
    environment = environment_of(config)
    kind: Callable[..., Runner] = Runner
    if is_agent(environment):
        kind = agent_runner(config, policy, environment)
        environment = SingleTurn()
    return kind(
        engine=engine,
        rendering=rendering_of(config, policy, date, tools_of(environment)),
        limits=limits_of(config, policy),
        environment=environment,
        environment_seconds=config.task.timeout_seconds,
        weights=policy.model.named_parameters,
        episodes=select(EpisodeSettings, [config.task]),
        longest_prompt=config.policy.max_prompt_tokens,
    )


def agent_runner(config: Config, policy: Policy, agent: Any) -> Callable[..., Runner]:
    """Makes the runner of an agent that owns its loop; InputError for what cannot go with one."""
    from legato.serve.packages import check_server_packages

    check_server_packages("an agent that owns its loop (task.environment)")
    rollouts, reason = config.rollouts, "with an agent that owns its loop (task.environment)"
    if rollouts.ahead:
        raise InputError(f"expected rollouts.ahead = 0 {reason}, got {rollouts.ahead}; drop it")
    if rollouts.record_routes is True or config.training.routing_replay == "R3":
        raise InputError(f"expected no recorded routes {reason}: requests have none; drop rollouts.record_routes and R3")
    if config.task.system_prompt is not None:
        raise InputError(f"expected no task.system_prompt {reason}: the agent writes its own messages; put it there")
    from legato.serve.agents import AgentRunner

    return partial(AgentRunner, agent=agent, policy=policy)


def check_context(config: Config, policy: Policy, response_tokens: int, option: str) -> None:
    """InputError if the longest prompt with a response of that length exceeds the context of the model."""
    longest = config.policy.max_prompt_tokens + response_tokens
    if policy.context_length is not None and longest > policy.context_length:
        raise InputError(
            f"expected at most {policy.context_length} tokens, the context length of {policy.name}, got {longest}"
            f" (policy.max_prompt_tokens + {option}); lower one of them"
        )


def environment_of(config: Config) -> Any:
    """The environment, or the agent that plays by itself; single-turn by default."""
    kind = config.task.environment
    if kind is None:
        return SingleTurn()
    environment: Any = adapt_environment(make("environment", kind, config.task.environment_options))
    if is_agent(environment):
        return environment
    with UserCode("the environment", config.task.timeout_seconds, "task.timeout_seconds") as code:
        try:
            complete = code.call(isinstance, environment, Environment)
        except CallFailedError as error:  # its attributes may be properties
            raise InputError(f"expected an environment, got {error} (task.environment = {kind!r})") from error.__cause__
    if not complete:
        raise InputError(
            f"expected an environment (max_turns, deterministic, episode(problem)) or a function of problem and endpoint,"
            f" got {type(environment).__name__} (task.environment = {kind!r}); docs/environments.md shows both"
        )
    return environment


def evaluator_of(collector: Collector) -> Evaluator:
    """The evaluator. It samples from the policy itself, even if the collector uses a mismatched sampler."""
    return Evaluator(runner=collector.evaluation or collector.runner, judge=collector.judge, world=collector.world)


def _engines(config: Config, policy: Policy, *, trains: bool, world: World | None = None) -> tuple[Engine, Engine | None]:
    """The sampling engine, and a separate engine for evaluations if the sampler differs from the policy."""
    world = world or OneProcess()
    copied, name = divides_layers(config, world), config.rollouts.engine
    options = replace(_engine_options(config, policy, trains=trains, ranks=world.size), copied=copied, world=world)
    if options.mismatch.kind == "none":
        engine = build_engine(name, policy, options)
        evaluator = None
    else:
        if name != "local":
            raise InputError(
                f"expected rollouts.engine = 'local' where rollouts.mismatch.kind = {options.mismatch.kind!r}, got {name!r}"
                " (rollouts.engine): a copy of the policy that differs on purpose is made by the engine 'local' alone"
            )
        # Two engines share the memory of the KV cache.
        options = replace(options, kv_memory_share=options.kv_memory_share / 2)
        engine = build_engine(name, policy, options)
        evaluator = build_engine(name, policy, replace(options, mismatch=Mismatch(), record_routes=False))
    if trains:
        check_engine(config, policy, engine)
    if copied and (not engine.capabilities.holds_weights or options.mismatch.kind == "stale"):
        raise InputError(
            f"expected an engine that holds weights of its own for training.shard = 'layers', got {engine.name!r}"
            f" (rollouts.engine = {name!r}); use training.shard=optimizer"
        )
    return engine, evaluator


def sampling_engine(config: Config, policy: Policy) -> Engine:
    """The engine for a policy that is sampled but not trained."""
    options = replace(_engine_options(config, policy, trains=False), mismatch=Mismatch(), record_routes=False)
    # Servers belong to the run that trains: what is only sampled is sampled here.
    name = "local" if is_remote(config.rollouts.engine) else config.rollouts.engine
    engine = build_engine(name, policy, options)
    if engine.capabilities.holds_weights:
        engine.publish(policy.model.named_parameters(), engine.version)
    return engine


def _engine_options(config: Config, policy: Policy, *, trains: bool, ranks: int = 1) -> EngineOptions:
    rollouts, training = config.rollouts, config.training
    later = 0
    if trains:
        later = training_bytes(
            policy.parameters(),
            eight_bit=training.optimizer == "adamw-8bit",
            offload=training.offload_optimizer,
            ranks=ranks,
            layers=ranks > 1 and training.shard == "layers",
        )
    return select(
        EngineOptions,
        [rollouts],
        exact=_exactness(config, policy, ranks) if trains else "off",
        mismatch=rollouts.mismatch,
        training_bytes=later,
        run_seed=training.seed,
        servers=rollouts.servers,
        context_tokens=config.policy.max_prompt_tokens + longest_response(config),
    )


def _exactness(config: Config, policy: Policy, ranks: int = 1) -> str:
    """`rollouts.exact` as it applies to this run. Settings that rule it out are refused if it must be "on"."""
    rollouts, training = config.rollouts, config.training
    wanted = rollouts.exact
    rows = min(rollouts.rows_at_once, training.prompts_per_step * rollouts.samples_per_prompt // ranks)
    reasons = {
        f"rollouts.engine = {rollouts.engine!r}; only 'local' can be exact": rollouts.engine != "local",
        "training.shard = 'layers' divides the layers among ranks": ranks > 1 and training.shard == "layers",
        f"training.tokens_per_pack = {training.tokens_per_pack}; packs of up to {EXACT_PACK} tokens are exact": (
            training.tokens_per_pack > EXACT_PACK
        ),
        "an environment plays several turns, and a later turn reads the earlier ones as its prompt": config.task.environment,
        "top-p, top-k and min-p cut the distribution after the head": select(Sampling, [rollouts]).truncates,
        f"rollouts.ahead = {rollouts.ahead}: responses are of older weights": rollouts.ahead > 0,
        f"rollouts.mismatch.kind = {rollouts.mismatch.kind!r}": rollouts.mismatch.kind != "none",
    }
    reason = next((reason for reason, holds in reasons.items() if holds), None)
    if wanted == "on" and reason is not None:
        raise InputError(
            f"expected rollouts.exact = 'auto' or 'off', got 'on': engine and trainer cannot be equal to the bit, because"
            f" {reason}"
        )
    if wanted == "auto" and reason is None:
        saves_nothing = {
            f"{rows} rows decode at once; from {EXACT_ROWS} on it costs less than it saves": rows < EXACT_ROWS,
            "training.anchor = 'recompute' scores the old policy all the same": training.anchor == "recompute",
            "one update in a step needs no scoring of the old policy": (
                training.updates_per_step == training.epochs_per_step == 1
            ),
            "a value head is evaluated with the old policy all the same": policy.value_head is not None,
        }
        reason = next((reason for reason, holds in saves_nothing.items() if holds), None)
    if wanted == "auto" and reason is not None:
        if policy.device.type == "cuda":
            policy.notes.append(f"engine and trainer are not equal to the bit (rollouts.exact): {reason}")
        return "off"
    return wanted


def longest_response(config: Config) -> int:
    """The most tokens of a response, in training and in evaluations."""
    sets = [each.max_response_tokens or 0 for each in config.evaluation.sets.values()]
    return max([config.rollouts.max_response_tokens, *sets])


def check_engine(config: Config, policy: Policy, engine: Engine) -> None:
    """Refuse settings that need more than the engine can do. A model without experts is refused by `check_training`."""
    can, rollouts, training = engine.capabilities, config.rollouts, config.training
    unmet = {}
    if not can.routes and policy.routers is not None:
        unmet["routes"] = {
            "training.routing_replay = 'R3'": training.routing_replay == "R3",
            "rollouts.record_routes = true": rollouts.record_routes is True,
        }
    if not can.truncation:
        unmet["truncation"] = {
            f"rollouts.top_p = {rollouts.top_p}": rollouts.top_p < 1,
            f"rollouts.top_k = {rollouts.top_k}": rollouts.top_k > 0,
            f"rollouts.min_p = {rollouts.min_p}": rollouts.min_p > 0,
        }
    if not can.logprobs_at_temperature:
        unmet["logprobs_at_temperature"] = {"training.anchor = 'sampler'": training.anchor == "sampler"}
    for capability, settings in unmet.items():
        for setting in (setting for setting, wanted in settings.items() if wanted):
            raise InputError(
                f"expected an engine with the capability {capability!r} for {setting}, got {engine.name!r}"
                f" (rollouts.engine = {rollouts.engine!r}); drop that setting or take another engine"
            )


def sets_of(config: Config, policy: Policy, runner: Runner, judge: Judge, world: World | None = None) -> list[ProblemSet]:
    """The evaluation sets. They are sampled by the engine of `runner` as single turns; `judge` is the run's own reward."""
    sets = [_set(name, each, config, policy, runner, judge) for name, each in config.evaluation.sets.items()]
    return sets if world is None else [replace(each, world=world) for each in sets]


def _set(name: str, each: EvaluationSet, config: Config, policy: Policy, runner: Runner, judge: Judge) -> ProblemSet:
    path, evaluation = f"evaluation.sets.{name}", config.evaluation
    try:
        problems = _problems_of_set(each, config)
    except InputError as error:
        raise InputError(f"{path}: {str(error).replace('set task.', f'set {path}.task.')}") from None
    fitting = _fitting(problems, runner.rendering, config, f"problems of {path}")
    if len(fitting) < len(problems):
        policy.notes.append(
            f"{path}: {len(problems) - len(fitting)} of {len(problems)} problems are left out, since their prompts have more"
            f" than policy.max_prompt_tokens = {config.policy.max_prompt_tokens} tokens"
        )
    limits, longest = runner.limits, each.max_response_tokens
    if longest is not None:
        check_context(config, policy, longest, f"{path}.max_response_tokens")
        limits = replace(limits, max_response_tokens=longest)
    return ProblemSet(
        name=name,
        problems=fitting,
        runner=runner,
        limits=limits,
        judge=_judge_of_set(path, each, config, policy) or judge,
        sampling=Sampling(
            temperature=evaluation.temperature if each.temperature is None else each.temperature,
            top_p=1.0 if each.top_p is None else each.top_p,
        ),
        samples=samples_of_set(each, evaluation),
        every_steps=evaluation.every_steps if each.every_steps is None else each.every_steps,
    )


def _problems_of_set(each: EvaluationSet, config: Config) -> list[Problem]:
    task_object = make("task", each.task.kind, each.task.options)
    loads = hasattr(task_object, "load")
    if not loads and not hasattr(task_object, "problem"):
        raise InputError(f"expected a task with problem(random) or load(), got {type(task_object).__name__} (task.kind)")
    task = (
        OwnTask(task_object, f"task.kind = {each.task.kind!r}", config.task.timeout_seconds)
        if is_own(task_object)
        else task_object
    )
    if loads:
        problems = list({problem.key: problem for problem in reversed(task.load())}.values())[::-1]
        return problems[: each.problems]
    # The held-out part, in case the run trains on the same task.
    split = Split(task=task, share=config.task.held_out_share)
    return split.held_out(config.task.held_out if each.problems is None else each.problems)


def _judge_of_set(path: str, each: EvaluationSet, config: Config, policy: Policy) -> Judge | None:
    """The judge of a set's own reward, or of the usual one of a published set; None: neither, the run's reward judges."""
    usual = usual_evaluation(each.task.kind)
    if each.reward is not None:
        kind, options = each.reward.kind, each.reward.options
    elif usual is not None:
        kind, options = usual.reward, usual.reward_options
        if find_spec("math_verify") is None:
            policy.notes.append(
                f"{path}: math-verify is not installed, so answers are compared as text and as numbers only; install it with"
                " pip install 'legato[math]'"
            )
    else:
        return None
    components = {kind.rpartition(":")[2]: Component(reward=_reward(kind, options, config.reward, _schedule(config)))}
    longest = config.rollouts.max_response_tokens
    # The punishment of long responses belongs to training.
    return replace(
        select(WeightedSum, [config.reward], components=components, longest_response=longest), overlong=None
    ).score_all


def check_answers(source: Source, reward: WeightedSum) -> None:
    """InputError if the problems have no answer and a reward compares with it."""
    first = source.training(0)
    needing = [name for name, each in reward.components.items() if getattr(each.reward, "needs_answer", False) is True]
    if first.answer is None and needing:
        columns = ", ".join(map(repr, first.fields)) or "none"
        raise InputError(
            f"expected problems with an answer, which the reward {needing[0]!r} compares with, got none (other columns:"
            f" {columns}); set task.answer=COLUMN, or take a reward that reads no answer"
        )


def _fitting(problems: Sequence[Problem], rendering: Rendering, config: Config, what: str) -> list[Problem]:
    """The problems whose prompts are not too long; InputError if none is, or if too long ones are errors."""
    longest = config.policy.max_prompt_tokens
    fitting = [problem for problem in problems if len(rendering.prompt(problem)) <= longest]
    if len(fitting) < len(problems) and config.policy.too_long == "error":
        raise InputError(
            f"{len(problems) - len(fitting)} {what} have prompts of more than policy.max_prompt_tokens = {longest}"
            " tokens; raise it, or drop them with policy.too_long = 'drop'"
        )
    if not fitting:
        raise InputError(f"none of the {what} has a prompt of at most policy.max_prompt_tokens = {longest} tokens; raise it")
    return fitting


def held_out_of(config: Config, source: Source, rendering: Rendering, notes: list[str]) -> list[Problem]:
    """Up to task.held_out held-out problems whose prompts fit; a note is added if there are fewer."""
    held_out = source.held_out(config.task.held_out)
    fitting = _fitting(held_out, rendering, config, "held-out problems")
    if len(fitting) < config.task.held_out:
        reasons = []
        if len(held_out) < config.task.held_out:
            reasons.append(f"no more than {len(held_out)} are held out (task.held_out = {config.task.held_out})")
        if len(fitting) < len(held_out):
            reasons.append(f"{len(held_out) - len(fitting)} have prompts that are too long (policy.max_prompt_tokens)")
        notes.append(f"evaluated on {counted(len(fitting), 'held-out problem')}: {', and '.join(reasons)}")
    return fitting


def fingerprint(source: Source) -> str:
    """A hash of the training problems: all of a pool, or the first 256 of a generated task."""
    count = source.size if source.size is not None and source.size <= 100_000 else 256
    return fingerprint_of(source.training(number) for number in range(count))


def fingerprint_of(problems: Iterable[Problem]) -> str:
    """A hash of some problems in their order."""
    digest = hashlib.blake2b(digest_size=16)
    for problem in problems:
        digest.update(f"{problem.key} {problem.answer}\n".encode())
    return digest.hexdigest()


def base_fingerprint(policy: Policy) -> str:
    """A hash of the exact weights without a value head and without the matrices of LoRA."""
    return _hash_tensors({name: tensor for name, tensor in policy.model.state_dict().items() if ".lora_" not in name})


def weights_fingerprint(policy: Policy, base: str | None = None) -> str:
    """A hash of the exact weights without a value head, so that it does not depend on the algorithm.

    `base` is the policy's `base_fingerprint` where it is known: billions of weights take a while to hash.
    """
    base = base_fingerprint(policy) if base is None else base
    adapters = {name: tensor for name, tensor in policy.model.state_dict().items() if ".lora_" in name}
    return _hash_tensors(adapters, base) if adapters else base


def _hash_tensors(tensors: Mapping[str, Any], first: str = "") -> str:
    digest = hashlib.blake2b(first.encode(), digest_size=16)
    for name, tensor in tensors.items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_training(resolved: Resolved, policy: Policy, collector: Collector) -> None:
    """Raise errors of the first step before anything is written."""
    if not policy.parameters():
        raise InputError("expected a parameter to train, got none: policy.frozen covers every parameter; freeze fewer")
    if resolved.config.training.optimizer == "adamw-8bit":
        check_eight_bit()
    for option in routing_options(resolved.algorithm, resolved.config.training):
        policy.require_routers(option)
    if resolved.config.rollouts.record_routes is True:
        policy.require_routers("rollouts.record_routes = true")
    policy.notes += collector.check_prompts()


def trainer_of(resolved: Resolved, policy: Policy, collector: Collector, reference: Reference | None) -> Trainer:
    """The trainer, as configured."""
    training, world = resolved.config.training, collector.world
    division: Division | None = None
    if isinstance(world, ProcessGroup) and divides_layers(resolved.config, world):
        division = _divide_layers(resolved, policy, reference, collector, world)
    elif isinstance(world, ProcessGroup):
        division = Divided(policy.parameters(), world)
    weights = policy.parameters()
    return Trainer(
        policy=policy,
        algorithm=resolved.algorithm,
        source=collector,
        reference=reference,
        optimizer=Optimizer(weights, training, total_updates=training.total_updates, division=division),
        settings=training,
        world=world,
        teacher=teacher_of(resolved, policy),
        drop_cut=resolved.config.task.environment is not None and not resolved.config.task.train_on_cut,
    )


def teacher_of(resolved: Resolved, policy: Policy) -> Teacher | None:
    """The teacher whose log-probs are advantages; None: there is none, or it is the reference of a penalty."""
    settings = resolved.config.teacher
    if settings.model is None or settings.use != "advantage":
        return None
    return Teacher.of(load_teacher(resolved, settings.model), policy, settings)


def teacher_is_reference(config: Config) -> bool:
    return config.teacher.model is not None and config.teacher.use == "penalty"


def reference_of(resolved: Resolved, policy: Policy) -> Reference:
    """The reference of KL penalties: the policy as it is now, or the teacher."""
    settings = resolved.config.teacher
    if settings.model is not None and teacher_is_reference(resolved.config):
        return Teacher.of(load_teacher(resolved, settings.model), policy, settings).reference
    return Reference.from_policy(policy)


def load_teacher(resolved: Resolved, model: str) -> Policy:
    """The model of a teacher, loaded as the policy is but for adapters."""
    config = resolved.config
    return load_policy(model, replace(config.policy, lora=None, frozen=()), seed=config.training.seed)


def divides_layers(config: Config, world: World) -> bool:
    """Whether the layers of the policy are divided among ranks."""
    return world.size > 1 and config.training.shard == "layers"


def _divide_layers(
    resolved: Resolved, policy: Policy, reference: Reference | None, collector: Collector, world: ProcessGroup
) -> Division:
    """Divide the layers of the policy and of its reference; engines then get the weights gathered."""
    # Imported here: FSDP2 takes a while to import, and `memory` imports this module.
    from legato.run.memory import decide_kept
    from legato.training.ranks.layers import Keep, Layered, divide_layers, gather_weights

    config = resolved.config
    keep = Keep[decide_kept(resolved, policy, world).upper()]
    is_half = policy.model.get_input_embeddings().weight.element_size() < 4
    divide_layers(policy, world)
    if reference is not None and not reference.adapters:
        divide_layers(reference.policy, world)
    for runner in (collector.runner, collector.evaluation):
        if runner is not None:
            # Servers read whole models; a copy beside the policy has what is not trained.
            runner.weights = partial(gather_weights, policy, world, trained=not is_remote(config.rollouts.engine))
    return Layered(policy, world, is_half=is_half, keep=keep)


def wants_reference(resolved: Resolved) -> bool:
    return needs_reference(resolved.algorithm)


_WARM_UP_FROM = 10**9
"""Warm-up problems are numbered from here, so that the first steps do not repeat them in order."""


def warm_up_examples(config: Config, policy: Policy, source: Source, collector: Collector) -> Callable[[int], list[Example]]:
    """A function from a warm-up step to its examples: training problems with answers, never held-out ones."""
    stage = config.policy.warm_up
    assert stage is not None
    end = collector.runner.limits.end_tokens[0]

    environment = collector.runner.environment

    def examples(step: int) -> list[Example]:
        examples_of_step: list[Example] = []
        for number in range(step * stage.examples_per_step, (step + 1) * stage.examples_per_step):
            problem = source.training(_WARM_UP_FROM + number)
            if callable(getattr(environment, "demonstrate", None)):
                examples_of_step += collector.runner.demonstrate(problem)
                continue
            if problem.answer is None:
                raise InputError(
                    "expected problems with answers, got one without (policy.warm_up); drop the warm-up or take another task"
                )
            answer = policy.tokenizer(problem.answer, add_special_tokens=False)["input_ids"]
            examples_of_step.append((collector.runner.rendering.prompt(problem), torch.tensor([*answer, end])))
        return examples_of_step

    return examples


def warm_up(
    config: Config, policy: Policy, examples: Callable[[int], list[Example]], after: Callable[[int, float], None]
) -> None:
    """Run the supervised warm-up stage; `after(step, loss)` is called after each step."""
    stage = config.policy.warm_up
    assert stage is not None
    supervise(policy, examples, stage, after_step=after)
