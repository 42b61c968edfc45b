"""Builds the objects of a run from its checked configuration."""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from legato.config.kinds import make
from legato.config.resolved import Resolved
from legato.config.schema import Config
from legato.core.importing import is_import_path
from legato.core.rollout import Problem
from legato.core.settings import select
from legato.errors import InputError
from legato.policy.model.load import load_policy
from legato.policy.model.reference import Reference
from legato.policy.model.supervised import Example, supervise
from legato.policy.policy import Policy
from legato.rewards.scoring import Component, RewardSettings, WeightedSum, check_reward, is_async, is_batched
from legato.rewards.separate import SeparateReward, check_separate
from legato.rollouts.engine import Engine, Limits
from legato.rollouts.episodes import Environment, Runner, SingleTurn
from legato.rollouts.mismatch import Mismatch
from legato.rollouts.registry import EngineOptions, build_engine
from legato.rollouts.render import Rendering, end_tokens
from legato.rollouts.sampling import Sampling
from legato.run.sizes import check_weights
from legato.tasks.source import Joined, Source
from legato.training.anchor import needs_reference
from legato.training.collect import Collector, CollectorSettings
from legato.training.evaluate import Evaluator
from legato.training.memory.training_bytes import training_bytes
from legato.training.optimizer import Optimizer, check_eight_bit
from legato.training.step import Trainer, routing_options
from legato.training.tables import needs


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """Objects that a Python caller passes in place of names in the configuration."""

    model: Any = None
    tokenizer: Any = None
    problems: Sequence[Problem] | Any = None
    """A list of problems, or a task: an object with `problem(random)` or `load()`."""
    reward: Callable[..., Any] | None = None


def policy_of(resolved: Resolved, given: Given, saved: Path | None = None) -> Policy:
    """The policy to train, with the configured weights or those of a saved model folder."""
    config, algorithm = resolved.config, resolved.algorithm
    if given.model is None and saved is None:
        check_weights(resolved)
    return load_policy(
        config.policy.model if given.model is None else given.model,
        config.policy,
        seed=config.training.seed,
        tokenizer=given.tokenizer,
        saved=saved,
        value_head="values" in needs(algorithm) | set(algorithm.advantage.needs()),
    )


def source_of(config: Config, given: Given) -> Source:
    """The source of problems."""
    task, seed = config.task, config.training.seed
    if isinstance(given.problems, Sequence):
        return task.pool(given.problems, seed)
    if given.problems is not None:
        return _problems_of(given.problems, "problems", config)
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
    if hasattr(task_object, "load"):
        return task.pool(task_object.load(), seed)
    if not hasattr(task_object, "problem"):
        raise InputError(f"expected a task with problem(random) or load(), got {type(task_object).__name__} ({name})")
    return task.generated(task_object, seed)


def reward_of(config: Config, given: Given) -> WeightedSum:
    """The reward function, as configured or given."""
    reward = config.reward
    if reward.separate_process:
        kinds = [] if given.reward is not None else [reward.kind or "", *(each.kind for each in reward.components.values())]
        check_separate([kind for kind in kinds if is_import_path(kind)])
    if given.reward is not None:
        components = {getattr(given.reward, "__name__", "reward"): Component(reward=given.reward)}
    elif reward.components:
        components = {
            name: select(Component, [each], reward=_reward(each.kind, each.options, reward))
            for name, each in reward.components.items()
        }
    else:
        assert reward.kind is not None
        components = {reward.kind.rpartition(":")[2]: Component(reward=_reward(reward.kind, reward.options, reward))}
    longest = config.rollouts.max_response_tokens
    return select(WeightedSum, [reward], components=components, longest_response=longest)


def _reward(kind: str, options: Mapping[str, Any], settings: RewardSettings) -> Any:
    reward = make("reward", kind, options)
    check_reward(reward, kind)
    if settings.separate_process and is_import_path(kind):
        whole = is_batched(reward) or is_async(reward)
        return SeparateReward(path=kind, options=options, seconds=settings.timeout_seconds, batch=whole)
    return reward


def rendering_of(config: Config, policy: Policy) -> Rendering:
    """The rendering of problems as prompts."""
    return select(Rendering, [config.policy, config.task], tokenizer=policy.tokenizer)


def limits_of(config: Config, policy: Policy) -> Limits:
    """The limits of a response: end tokens, stop strings and length."""
    ends = end_tokens(policy.tokenizer, policy.body.generation_config, config.policy.end_tokens)
    return select(Limits, [config.rollouts], end_tokens=ends)


def collector_of(config: Config, policy: Policy, source: Source, reward: WeightedSum, *, trains: bool = True) -> Collector:
    """The collector (prompts -> rollouts -> rewards). With `trains` False no memory is reserved for updates."""
    rollouts = config.rollouts
    longest = config.policy.max_prompt_tokens + rollouts.max_response_tokens
    if policy.context_length is not None and longest > policy.context_length:
        raise InputError(
            f"expected at most {policy.context_length} tokens, the context length of {policy.name}, got {longest}"
            " (policy.max_prompt_tokens + rollouts.max_response_tokens); lower one of them"
        )
    engine, other = _engines(config, policy, trains=trains)
    runner = Runner(
        engine=engine,
        rendering=rendering_of(config, policy),
        limits=limits_of(config, policy),
        environment=environment_of(config),
        weights=policy.model.named_parameters,
    )
    return Collector(
        source=source,
        runner=runner,
        evaluation=None if other is None else replace(runner, engine=other),
        judge=reward.score_all,
        sampling=select(Sampling, [rollouts]),
        settings=select(CollectorSettings, [rollouts, config.policy, config.task]),
        seed=config.training.seed,
    )


def environment_of(config: Config) -> Environment:
    """The environment; single-turn by default."""
    kind = config.task.environment
    if kind is None:
        return SingleTurn()
    environment: Any = make("environment", kind, {})
    if not isinstance(environment, Environment):
        raise InputError(
            f"expected an environment (max_turns, deterministic, episode(problem)), got {type(environment).__name__}"
            f" (task.environment = {kind!r}); docs/environments.md shows one"
        )
    return environment


def evaluator_of(collector: Collector) -> Evaluator:
    """The evaluator. It samples from the policy itself, even if the collector uses a mismatched sampler."""
    return Evaluator(runner=collector.evaluation or collector.runner, judge=collector.judge)


def _engines(config: Config, policy: Policy, *, trains: bool) -> tuple[Engine, Engine | None]:
    """The sampling engine, and a separate engine for evaluations if the sampler differs from the policy."""
    options, name = _engine_options(config, policy, trains=trains), config.rollouts.engine
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
    return engine, evaluator


def sampling_engine(config: Config, policy: Policy) -> Engine:
    """The engine for a policy that is sampled but not trained."""
    options = replace(_engine_options(config, policy, trains=False), mismatch=Mismatch(), record_routes=False)
    engine = build_engine(config.rollouts.engine, policy, options)
    if engine.capabilities.holds_weights:
        engine.publish(policy.model.named_parameters(), engine.version)
    return engine


def _engine_options(config: Config, policy: Policy, *, trains: bool) -> EngineOptions:
    rollouts, training = config.rollouts, config.training
    later = 0
    if trains:
        later = training_bytes(
            policy.parameters().values(),
            eight_bit=training.optimizer == "adamw-8bit",
            offload=training.offload_optimizer,
        )
    return select(EngineOptions, [rollouts], mismatch=rollouts.mismatch, training_bytes=later, run_seed=training.seed)


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


def held_out_of(config: Config, source: Source, rendering: Rendering, notes: list[str]) -> list[Problem]:
    """Up to task.held_out held-out problems whose prompts fit; a note is added if there are fewer."""
    listed = source.held_out(config.task.held_out)
    longest = config.policy.max_prompt_tokens
    fitting = [problem for problem in listed if len(rendering.prompt(problem)) <= longest]
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
    """A hash of the training problems: all of a pool, or the first 256 of a generated task."""
    count = source.size if source.size is not None and source.size <= 100_000 else 256
    digest = hashlib.blake2b(digest_size=16)
    for problem in (source.training(number) for number in range(count)):
        digest.update(f"{problem.key} {problem.answer}\n".encode())
    return digest.hexdigest()


def weights_fingerprint(policy: Policy, *, adapters: bool = True) -> str:
    """A hash of the exact weights without a value head, so that it does not depend on the algorithm.

    With `adapters` False, the trained matrices of LoRA are left out.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in policy.model.state_dict().items():
        if not adapters and ".lora_" in name:
            continue
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
    training = resolved.config.training
    return Trainer(
        policy=policy,
        algorithm=resolved.algorithm,
        source=collector,
        reference=reference,
        optimizer=Optimizer(policy.parameters(), training, total_updates=training.total_updates),
        settings=training,
    )


def wants_reference(resolved: Resolved) -> bool:
    return needs_reference(resolved.algorithm)


_WARM_UP_FROM = 10**9
"""Warm-up problems are numbered from here, so that the first steps do not repeat them in order."""


def warm_up_examples(config: Config, policy: Policy, source: Source, collector: Collector) -> Callable[[int], list[Example]]:
    """A function from a warm-up step to its examples: training problems with answers, never held-out ones."""
    stage = config.policy.warm_up
    assert stage is not None
    end = collector.runner.limits.end_tokens[0]

    def examples(step: int) -> list[Example]:
        examples_of_step = []
        for number in range(step * stage.examples_per_step, (step + 1) * stage.examples_per_step):
            problem = source.training(_WARM_UP_FROM + number)
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
