"""Notes about values that are allowed and very probably a mistake. A run prints them at its start."""

from collections.abc import Iterator

from legato.config import lora_lr
from legato.config.messages import show_value
from legato.config.resolved import Resolved

_HIGHEST_USUAL_LR = 1e-2
_LOWEST_USUAL_LR = 1e-9


def unusual_values(resolved: Resolved) -> list[str]:
    """A sentence for each value that is very probably a mistake, with the value and its origin."""
    values = resolved.values
    return [
        f"{path} = {show_value(values[path])} ({resolved.provenance.get(path, 'default')}) {sentence}"
        for path, sentence in _findings(resolved)
    ]


def _findings(resolved: Resolved) -> Iterator[tuple[str, str]]:
    """(option, what it will probably do)."""
    for check in (_learning_rates, _optimizer, _sampling, _model):
        yield from check(resolved)


def _learning_rates(resolved: Resolved) -> Iterator[tuple[str, str]]:
    training, warm_up = resolved.config.training, resolved.config.policy.warm_up
    rates = {"training.lr": training.lr, "training.value_lr": training.value_lr}
    rates["policy.warm_up.lr"] = None if warm_up is None else warm_up.lr
    for path, rate in rates.items():
        if rate is not None and rate > _HIGHEST_USUAL_LR:
            yield (
                path,
                "is above 0.01: AdamW moves every weight by about that much in each update, more than most weights are",
            )
        if rate is not None and rate < _LOWEST_USUAL_LR:
            yield path, "is below 1e-9: most float32 weights cannot change by so little, so next to nothing will be learned"

    if resolved.config.policy.lora is not None and _LOWEST_USUAL_LR <= training.lr < lora_lr.LOWEST_USUAL:
        yield "training.lr", "is a learning rate for all weights; adapters (policy.lora) need about ten times as much, 1e-5"


def _optimizer(resolved: Resolved) -> Iterator[tuple[str, str]]:
    training = resolved.config.training
    if 0 < training.gradient_clip < 1e3 * training.epsilon:
        yield (
            "training.gradient_clip",
            f"leaves gradients of the size of training.epsilon = {training.epsilon:g}, which slows every update down",
        )
    if training.lr * training.weight_decay > 0.01:
        yield (
            "training.weight_decay",
            "times the learning rate is above 0.01: each update shrinks every matrix by that share",
        )
    if training.epochs_per_step > 50:
        yield (
            "training.epochs_per_step",
            "trains on each response more than 50 times; the clip ends most of its effect long before",
        )
    if training.load_balance > 1:
        yield "training.load_balance", "is above 1: the routers will follow the balance of the load and not the reward"


def _sampling(resolved: Resolved) -> Iterator[tuple[str, str]]:
    rollouts, evaluation = resolved.config.rollouts, resolved.config.evaluation
    alike = "leaves one token to choose from in most places: responses of a group will be alike and train nothing"
    if rollouts.temperature < 0.1:
        yield "rollouts.temperature", alike
    if rollouts.top_k == 1:
        yield "rollouts.top_k", alike
    if rollouts.top_p < 0.1:
        yield "rollouts.top_p", alike
    if rollouts.min_p > 0.9:
        yield "rollouts.min_p", alike
    for path, temperature in (
        ("rollouts.temperature", rollouts.temperature),
        ("evaluation.temperature", evaluation.temperature),
    ):
        if temperature > 2:
            yield path, "is above 2: most responses will be noise"


def _model(resolved: Resolved) -> Iterator[tuple[str, str]]:
    policy, mismatch = resolved.config.policy, resolved.config.rollouts.mismatch
    if policy.lora is not None and policy.lora.alpha is not None and policy.lora.alpha > 64 * policy.lora.rank:
        yield "policy.lora.alpha", f"scales adapters by {policy.lora.alpha / policy.lora.rank:g}; 1 or 2 is usual"
    if policy.upcycle is not None and policy.upcycle.noise > 1:
        yield "policy.upcycle.noise", "is more noise than weight: the experts will know little of the dense model"
    if mismatch.size is not None and mismatch.size > 1:
        yield "rollouts.mismatch.size", "is more noise than weight: the sampler will know little of the policy"
