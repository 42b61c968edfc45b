"""The variance of the gradient of one response, by its length and by the ratio that weights its tokens.

"The noise of token ratios grows with length" is a sentence about gradients, so the gradient is what is measured here. A tiny
Qwen3 learns to count; the old policy samples responses of exactly L tokens (the end token has probability 0). The new
policy is the old one plus a move along the first update of Adam on random advantages, of the size at which the token
log-ratios have a given standard deviation. Then, at the new weights, each response has a gradient:

    none       A mean_t grad log pi_t                the gradient without a ratio
    token      A mean_t w_t grad log pi_t            (GRPO)
    sequence   A s mean_t grad log pi_t              (GSPO)
    product    A (prod_t w_t) mean_t grad log pi_t   (the importance weight of the whole response)

Nothing is clipped. A is +1 for one half of the responses and -1 for the other. The variance is the trace of the covariance
over responses. The value of an arm is log2 of its variance over that of "none" at the same length: the variance that its
ratio adds. Responses of different lengths are beginnings of the same ones, so lengths are paired too.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from legato.compare.registration import Study
from legato.errors import InputError
from legato.lab.ratio_bias import solve
from legato.policy.model.tiny import ALPHABET, TinyShape, tiny_model

FIRST = 3
"""The tokens before it are padding, the end and the unknown one: they are never sampled."""
ARMS = ("none", "token", "sequence", "product")


def measure(study: Study, seed: int) -> Iterator[dict[str, Any]]:
    """The values of one seed, with the variances and what the log-ratios were."""
    unknown = [arm for arm in study.definition.arms if arm not in ARMS]
    if unknown:
        raise InputError(f"expected arms out of {', '.join(ARMS)}, got {unknown[0]!r}")
    settings, lengths = study.settings, list(study.definition.sweep["length"])
    generator = torch.Generator().manual_seed(seed)
    model = tiny_model(
        TinyShape(hidden=settings["hidden"], layers=settings["layers"], heads=4), vocabulary=FIRST + len(ALPHABET), seed=seed
    )
    loss = teach_counting(model, settings["teaching_steps"], settings["teaching_batch"], max(lengths), generator)
    responses = sample(model, settings["responses"], max(lengths), generator)
    direction = first_update(model, sample(model, settings["responses"], settings["moving_length"], generator), generator)
    old_weights = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():
        old = torch.cat([token_logprobs(model, rows) for rows in torch.split(responses, 8)])
    advantages = torch.tensor([1.0, -1.0]).repeat(len(responses) // 2)

    def move(size: float) -> None:
        with torch.no_grad():
            for parameter, before, step in zip(model.parameters(), old_weights, direction, strict=True):
                parameter.copy_(before + size * step)

    def spread(size: float) -> float:
        move(size)
        with torch.no_grad():
            return float((token_logprobs(model, responses[:8]) - old[:8]).double().std())

    for drift in study.definition.sweep["drift"]:
        move(solve(spread, drift, rounds=20))
        for length in lengths:
            variances, moved = gradient_variances(model, responses[:, : length + 1], old[:, :length], advantages)
            for arm in study.definition.arms:
                yield {
                    "arm": arm,
                    "point": {"length": length, "drift": drift},
                    "value": math.log2(variances[arm] / variances["none"]),
                    "variance": variances[arm],
                    "token_log_std": float(moved.std()),
                    "sequence_log_std": float(moved.mean(1).std()),
                    "teaching_loss": loss,
                }


def gradient_variances(model: Any, responses: Tensor, old: Tensor, advantages: Tensor) -> tuple[Mapping[str, float], Tensor]:
    """The trace of the covariance of response gradients for each arm, and the token log-ratios [n, L] in float64."""
    parameters = list(model.parameters())
    sums: dict[str, Tensor] = {}
    squares = dict.fromkeys(ARMS, 0.0)
    moved = []
    for row in range(len(responses)):
        logprobs = token_logprobs(model, responses[row : row + 1])[0]
        ratio = (logprobs.detach() - old[row]).double()
        moved.append(ratio)
        weights = {
            "none": torch.ones_like(ratio),
            "token": ratio.exp(),
            "sequence": ratio.mean().exp().expand_as(ratio),
            "product": ratio.sum().exp().expand_as(ratio),
        }
        shared: Tensor | None = None
        for arm, weight in weights.items():
            if arm == "token":
                value = (weight.to(logprobs.dtype) * logprobs).mean()
                pieces = torch.autograd.grad(value, parameters, retain_graph=True)
                gradient = torch.cat([piece.flatten() for piece in pieces]).double()
            else:
                # One weight for the whole response: a multiple of the gradient without a ratio.
                if shared is None:
                    pieces = torch.autograd.grad(logprobs.mean(), parameters, retain_graph=True)
                    shared = torch.cat([piece.flatten() for piece in pieces]).double()
                gradient = float(weight[0]) * shared
            gradient = float(advantages[row]) * gradient
            sums[arm] = sums[arm] + gradient if arm in sums else gradient
            squares[arm] += float(gradient @ gradient)
    count = len(responses)
    variances = {arm: (squares[arm] - float(sums[arm] @ sums[arm]) / count) / (count - 1) for arm in ARMS}
    return variances, torch.stack(moved)


def token_logprobs(model: Any, tokens: Tensor) -> Tensor:
    """[n, L]: the log-probs of all tokens but the first, under the policy that never ends."""
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    logprobs = _endless(logits).log_softmax(-1)
    return logprobs.gather(-1, tokens[:, 1:, None]).squeeze(-1)


def sample(model: Any, count: int, length: int, generator: torch.Generator) -> Tensor:
    """[count, 1 + length]: a random digit, then tokens of the policy at temperature 1."""
    tokens = torch.randint(FIRST, FIRST + 10, (count, 1), generator=generator)
    pieces, cache = [tokens], None
    with torch.no_grad():
        for _ in range(length):
            output = model(input_ids=pieces[-1], past_key_values=cache, use_cache=True)
            cache = output.past_key_values
            probabilities = _endless(output.logits[:, -1]).softmax(-1)
            pieces.append(torch.multinomial(probabilities, 1, generator=generator))
    return torch.cat(pieces, dim=1)


def teach_counting(model: Any, steps: int, batch: int, length: int, generator: torch.Generator) -> float:
    """Train on texts that count down by steps of 1 to 5, as long as the longest response; the last loss."""
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    loss = torch.zeros(())
    for _ in range(steps):
        tokens = torch.tensor([_counting(length + 1, generator) for _ in range(batch)])
        loss = -token_logprobs(model, tokens).mean()
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return float(loss.detach())


def first_update(model: Any, responses: Tensor, generator: torch.Generator) -> list[Tensor]:
    """The direction of Adam's first update, the sign of the gradient, for random advantages."""
    advantages = torch.randint(0, 2, (len(responses), 1), generator=generator) * 2.0 - 1.0
    value = (advantages * token_logprobs(model, responses)).mean()
    return [gradient.sign() for gradient in torch.autograd.grad(value, list(model.parameters()))]


def _endless(logits: Tensor) -> Tensor:
    """Logits without the tokens that are never sampled."""
    hidden = torch.arange(logits.shape[-1]) < FIRST
    return logits.masked_fill(hidden, -math.inf)


def _counting(length: int, generator: torch.Generator) -> list[int]:
    """Tokens of "53 50 47 ... 2 88 84 ...": one count down after another."""
    text = ""
    while len(text) < length:
        step, begin = (int(number) for number in torch.randint(1, 1_000_000, (2,), generator=generator))
        text += "".join(f"{number} " for number in range(20 + begin % 80, 0, -(1 + step % 5)))
    return [FIRST + ALPHABET.index(letter) for letter in text[:length]]
