"""Supervised learning on prompts with answers, to warm up a tiny model before reinforcement learning."""

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from legato.core.fields import integer, number, text
from legato.core.outcome import Coefficients
from legato.core.settings import settings
from legato.core.texts import Texts
from legato.policy.policy import Policy

Example = tuple[Tensor, Tensor]
"""Prompt tokens and response tokens, the end token included."""


@settings(resume="refused")
class WarmUp:
    """A short supervised stage before the first step, on training problems and their answers."""

    steps: int = integer(default=150, says="How many supervised updates.", minimum=1)
    examples_per_step: int = integer(default=256, says="Problems per update.", minimum=1)
    lr: float = number(default=2e-3, says="Learning rate of these updates.", above=0.0, maximum=1.0)
    cache: str | None = text(
        default=None,
        says="A folder for the weights after the stage: runs that begin with the same weights, examples and stage take them"
        " from there. `legato compare` and `legato study` set one.",
        optional=True,
    )
    stop_loss: float | None = number(
        default=None,
        says="Ends the stage as soon as the mean loss of its last five steps is at most this; absent: all steps are done.",
        above=0.0,
        optional=True,
    )


def supervise(
    policy: Policy,
    examples: Callable[[int], Sequence[Example]],
    stage: WarmUp,
    *,
    after_step: Callable[[int, float], None] = lambda step, loss: None,
) -> float:
    """Minimise the mean negative log-prob of the responses that `examples(step)` returns; returns the last loss.

    The learning rate rises over the first tenth of the steps and then falls as a cosine to a tenth. With a `stop_loss`,
    training ends once the mean loss of the last five steps is at most that: seeds then end at equal loss, not after equal
    steps.
    """
    parameters = [parameter for parameter in policy.model.parameters() if parameter.requires_grad]
    steps, lr = stage.steps, stage.lr
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=(0.9, 0.95), weight_decay=0.0, fused=True)
    rise = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, 1 / rise, 1.0, rise),
            torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - rise), lr / 10),
        ],
        [rise],
    )
    last, recent = float("nan"), deque[float](maxlen=5)
    for step in range(steps):
        texts = texts_of(examples(step))
        count, losses = texts.mask.sum(), []
        with policy.accumulate_gradient(texts, torch.arange(len(texts))) as forward:
            for piece in forward.pieces():
                logprobs = piece.channels.logprobs
                losses.append(-logprobs.sum() / count)
                piece.backward(Coefficients(logprobs=torch.ones_like(logprobs) / count))
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        last = float(torch.stack(losses).sum())
        recent.append(last)
        after_step(step, last)
        if stage.stop_loss is not None and len(recent) == 5 and sum(recent) / 5 <= stage.stop_loss:
            break
    return last


def texts_of(examples: Sequence[Example]) -> Texts:
    """The examples as one table; each example is a group of its own."""
    prompts, responses = [prompt for prompt, _ in examples], [response for _, response in examples]
    lengths = torch.tensor([len(response) for response in responses])
    tokens = pad_sequence(responses, batch_first=True)
    return Texts(
        prompts=pad_sequence(prompts, batch_first=True),
        prompt_lengths=torch.tensor([len(prompt) for prompt in prompts]),
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        group=torch.arange(len(examples)),
        temperature=torch.ones(len(examples)),
    )
