"""Prompts alone, as the table a prefill packs, and prompts with sampled responses."""

from dataclasses import replace

import torch
from torch import Tensor

from legato.core.texts import Texts


def prompt_texts(prompts: list[Tensor]) -> Texts:
    """Prompts alone, as a table without responses."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    table = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    count = len(prompts)
    return Texts(
        prompts=table,
        prompt_lengths=lengths,
        tokens=torch.zeros(count, 1, dtype=torch.int64),
        lengths=torch.zeros(count, dtype=torch.int64),
        mask=torch.zeros(count, 1, dtype=torch.bool),
        group=torch.arange(count),
        temperature=torch.ones(count),
    )


def response_texts(prompts: list[Tensor], tokens: Tensor, group: Tensor | None = None) -> Texts:
    """Responses [B, T], all of T tokens, as the trainer scores them at temperature 1.

    `group` [B] is the prompt of each response; None: one response to each prompt.
    """
    count, length = tokens.shape
    return replace(
        prompt_texts(prompts),
        tokens=tokens,
        lengths=torch.full((count,), length),
        mask=torch.ones_like(tokens, dtype=torch.bool),
        group=torch.arange(count) if group is None else group,
        temperature=torch.ones(count),
    )
