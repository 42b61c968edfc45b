"""Prompts and responses as padded tables, as a policy reads and scores them."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """G prompts and B responses, padded at the end. Entries beyond a length are never read.

    An example: two groups of two responses, of 2, 3, 1 and 3 tokens.

    group    0 0 1 1
    lengths  2 3 1 3
    mask     1 1 0 / 1 1 1 / 1 0 0 / 1 1 1
    """

    prompts: Tensor
    """[G, P]"""
    prompt_lengths: Tensor
    """[G], at least 1"""
    tokens: Tensor
    """[B, T]"""
    lengths: Tensor
    """[B]: from the first sampled token to the last, tool tokens inside included."""
    mask: Tensor
    """[B, T] bool: the tokens the policy wrote, whose log-probs are wanted."""
    group: Tensor
    """[B], dense from 0: the row of `prompts`."""
    temperature: Tensor
    """[B]"""
    problem: Tensor | None = None
    """[G]: the problem of each prompt, dense from 0. A problem has several prompts where rows of one rollout, or its
    siblings, begin differently. None: a prompt for each problem."""

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def siblings(self) -> Tensor:
        """[B]: the problem of each row. Rows of one problem are compared with each other."""
        return self.group if self.problem is None else self.problem[self.group]

    def prompts_of(self, problem: int) -> list[int]:
        """The prompts of a problem."""
        return [problem] if self.problem is None else torch.nonzero(self.problem == problem).flatten().tolist()

    @property
    def problems(self) -> int:
        """How many problems there are."""
        return len(self.prompts) if self.problem is None else int(self.problem.max()) + 1
