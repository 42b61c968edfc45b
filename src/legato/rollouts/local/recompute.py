"""Decoding without a KV cache: every token is a forward pass over the whole text. Works for any model, slowly."""

import torch
from torch import Tensor

from legato.policy.head.head import Head
from legato.policy.policy import Policy


class Recompute:
    """Rows of text that grow by one token per pass. Padding comes last, where causal attention ignores it."""

    def __init__(self, policy: Policy, prompts: list[Tensor], owner: Tensor) -> None:
        self.policy = policy
        self.texts = [prompts[number].tolist() for number in owner.tolist()]

    def first(self) -> Tensor:
        """Logits [n, V] of the next token of each row."""
        device = self.policy.device
        width = max(map(len, self.texts))
        tokens = torch.tensor([text + [text[0]] * (width - len(text)) for text in self.texts], device=device)
        last = torch.tensor([len(text) - 1 for text in self.texts], device=device)
        output = self.policy.body.get_decoder()(input_ids=tokens, use_cache=False)
        return Head.from_body(self.policy.body).exact(output.last_hidden_state[torch.arange(len(last), device=device), last])

    def next(self, tokens: Tensor) -> Tensor:
        """Logits [n, V] after one more token of each row."""
        for text, token in zip(self.texts, tokens.tolist(), strict=True):
            text.append(token)
        return self.first()

    def keep(self, rows: Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]

    def join(self, other: "Recompute") -> None:
        """Add the rows of another decoder."""
        self.texts += other.texts
