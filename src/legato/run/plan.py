"""`legato train --dry-run`: what a run would do, after everything is loaded and checked. Nothing is trained or written."""

from collections.abc import Sequence

from legato.config.resolved import Resolved
from legato.config.schema import Output
from legato.core.rollout import Problem
from legato.diagnostics.words import count
from legato.errors import InputError
from legato.policy.policy import Policy
from legato.run.memory import demand_of
from legato.tasks.source import Source
from legato.training.memory.available import available
from legato.training.memory.model import gigabytes


def describe_plan(
    resolved: Resolved, policy: Policy, source: Source, held_out: Sequence[Problem], directory: str
) -> list[str]:
    """The plan of a run in lines."""
    config = resolved.config
    training, rollouts, output, evaluation = config.training, config.rollouts, config.output, config.evaluation
    every = sum(weight.numel() for weight in policy.model.parameters())
    trained = sum(weight.numel() for weight in policy.parameters().values())
    responses = training.prompts_per_step * rollouts.samples_per_prompt
    problems = "made in code" if source.size is None else f"{source.size} to train on"
    rewards = ", ".join(config.reward.components) or config.reward.kind
    checks = f"every {count(evaluation.every_steps, 'step')}" if evaluation.every_steps else "before and after"
    return [
        f"model      {policy.name}: {every:,} parameters, {trained:,} of them trained, {policy.dtype} on {policy.device}",
        f"memory     {_memory(resolved, policy)}",
        f"problems   {config.task.kind}: {problems}, {len(held_out)} held out; reward {rewards}",
        f"steps      {count(training.steps, 'step')} of {training.prompts_per_step} prompts x {rollouts.samples_per_prompt}"
        f" samples ({count(responses, 'response')} of at most {count(rollouts.max_response_tokens, 'token')}),"
        f" {count(training.updates_per_step * training.epochs_per_step, 'update')} each; evaluated {checks}",
        f"reads      {', '.join(_files(resolved)) or 'no file'}",
        f"writes     {directory}: config.toml, environment.json, metrics.jsonl, health.jsonl, report.html,"
        f" rollouts ({_interval(output.rollout_interval(training.steps))}), checkpoints"
        f" ({checkpoint_moments(output)}; the last {output.keep_last} and the best stay)",
    ]


def _memory(resolved: Resolved, policy: Policy) -> str:
    room = available(policy.device)
    there = "" if room is None else f"; there are {gigabytes(room)}"
    try:
        demand = demand_of(resolved, policy)
    except InputError as error:
        return f"not known: {error}{there}"
    recomputing = any(getattr(module, "gradient_checkpointing", False) for module in policy.model.modules())
    return f"about {gigabytes(demand.memory(checkpointing=recomputing).total)} at most{there}"


def _files(resolved: Resolved) -> list[str]:
    """The recipes, and the files that the configuration names."""
    recipes = [origin.rpartition(":")[0] for origin in resolved.provenance.values() if ".toml:" in origin]
    config = resolved.config
    named = [config.task.options.get("path"), *(code.file for code in resolved.code)]
    kinds = [config.task.kind, config.reward.kind, config.task.environment, config.rollouts.engine]
    named += [kind.rpartition(":")[0] for kind in kinds if kind is not None and ".py:" in kind]
    return list(dict.fromkeys([*recipes, *(str(each) for each in named if each)]))


def checkpoint_moments(output: Output) -> str:
    """When a run writes checkpoints, as in: every 100 steps and at the end."""
    moments = [_interval(output.checkpoint_every_steps)] if output.checkpoint_every_steps else []
    moments += ["at the end"] if output.checkpoint_at_end else []
    return " and ".join(moments) or "on a signal only"


def _interval(steps: int) -> str:
    return "none during the run" if not steps else "every step" if steps == 1 else f"every {steps} steps"
