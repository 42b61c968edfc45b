"""Prompts alone, as the table a prefill packs."""

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
