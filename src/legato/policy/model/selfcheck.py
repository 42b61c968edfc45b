"""Checks on a few tokens, before training, which layout of rows is right for a body, and what it costs.

A family whose attention does not go through transformers' interface, or whose state runs along the row (Qwen3.5, LFM2,
Nemotron-H), would be scored wrongly in packs without any error. Four questions, each with its own test:

    head     are logits what `Head` makes of the last hidden state?    same hidden states: up to the rounding of a logit
    leaks    does a text see another?                                  one text changes, the log-probs of others must not
    gross    are log-probs those of the model's own forward?           as far apart as rounding may put them
    slow     what does the layout cost?                                a note that the run prints

A body that leaks in packs gets padded rows, one text per row, with its own attention; if that fails too it is refused.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from legato.core.texts import Texts
from legato.errors import InputError
from legato.policy.experts.routing import Directions, Record
from legato.policy.head.head import Head

_TOKENS = 6
_ROWS = torch.arange(4)


def sample_texts(vocabulary: int) -> Texts:
    """Two prompts with two responses each, ragged."""
    source = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, vocabulary, (4, _TOKENS), generator=source)
    lengths = torch.tensor([_TOKENS, 2, 4, _TOKENS])
    return Texts(
        prompts=torch.randint(0, vocabulary, (2, 5), generator=source),
        prompt_lengths=torch.tensor([5, 3]),
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(_TOKENS) < lengths[:, None],
        group=torch.tensor([0, 0, 1, 1]),
        temperature=torch.ones(4),
    )


def tolerance(dtype: torch.dtype) -> float:
    """How far two correct computations of the same log-probs may differ, for trained weights of usual size.

    In 16 bits it holds for the root mean square: random tokens through a model with outliers (SmolLM2) come out 0.4 apart
    here and there by rounding alone, while a row that sees another is wrong at every token.
    """
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.25)


_MIXTURES = {torch.float64: 1e-10, torch.float32: 1e-5}
_REPLAYED, _FREE = 1e-3, 0.05
"""How far log-probs of a mixture may move with a neighbour where its sums do not repeat to the bit; in 16 bits the first
with all routes replayed, the second where they are not: routers are not known, or the padding of rows chooses afresh."""


def distance(dtype: torch.dtype, left: Tensor, right: Tensor) -> float:
    """How far log-probs are apart: the largest difference, or in 16 bits the root mean square of all."""
    apart = (left - right).abs()
    wide = dtype in (torch.float32, torch.float64)
    return float(apart.max() if wide else apart.square().mean().sqrt())


@dataclass(frozen=True, slots=True, kw_only=True)
class Own:
    """The results of the model's own forward, one text at a time."""

    logprobs: Tensor
    """[B, T], 0 beyond a text's length; on the host."""
    spread: float
    """Standard deviation of the logits over the vocabulary: about how far log-probs of unrelated texts are apart."""
    head_gap: float
    """The largest difference between the model's logits and those that `Head` computes from its last hidden state."""
    largest: float
    """The largest logit in size."""


@torch.no_grad()
def own_forward(policy: Any, texts: Texts) -> Own:
    """Score texts by the model's own forward."""
    table = torch.zeros(texts.tokens.shape, dtype=policy.dtype)
    head, decoder = Head.from_body(policy.body), policy.body.get_decoder()
    spreads, gaps, sizes = [], [], []
    for row, length in enumerate(texts.lengths.tolist()):
        prompt = texts.prompts[texts.group[row], : texts.prompt_lengths[texts.group[row]]]
        whole = torch.cat([prompt, texts.tokens[row, :length]]).to(policy.device)
        logits = policy.model(input_ids=whole.unsqueeze(0), use_cache=False).logits[0].to(policy.dtype)
        hidden = decoder(input_ids=whole.unsqueeze(0), use_cache=False).last_hidden_state[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        table[row, :length] = logprobs.gather(1, whole[len(prompt) :].unsqueeze(1)).squeeze(1).cpu()
        spreads.append(logits.std(-1).mean())
        gaps.append((head.exact(hidden) - logits).abs().max())
        sizes.append(logits.abs().max())
    stacked = [torch.stack(values) for values in (spreads, gaps, sizes)]
    return Own(
        logprobs=table,
        spread=float(stacked[0].mean()),
        head_gap=float(stacked[1].max()),
        largest=float(stacked[2].max()),
    )


def check(policy: Any) -> None:
    """Set `policy.packing` and `policy.views` for this body; InputError if no layout is correct."""
    texts = sample_texts(policy.vocabulary)
    dtype = policy.model.get_input_embeddings().weight.dtype
    own = own_forward(policy, texts)
    if not bool(torch.isfinite(own.logprobs).all()):
        raise InputError(f"policy.model {policy.name}: its log-probs are not finite; the weights hold NaN or infinity")
    # Both read the same hidden states, so they may differ only by the rounding of a logit.
    if not own.head_gap <= 4 * max(torch.finfo(dtype).eps, 1e-5) * max(1.0, own.largest):
        raise InputError(
            f"policy.model {policy.name}: the head of {type(policy.body).__name__} is not a linear layer with the extras"
            f" that are known (scale, soft cap); its logits would be off by up to {own.head_gap:.2g}"
        )
    requested = policy.packing
    policy.packing = True
    reason = _why_wrong(policy, texts, own, dtype)
    policy.views = reason is None
    policy.packing = requested and policy.views
    if not policy.packing:
        failure = _why_wrong(policy, texts, own, dtype)
        if failure is not None:
            raise InputError(
                f"policy.model {policy.name}: {type(policy.body).__name__} can be scored neither in packs"
                f" ({reason or 'switched off by policy.packing = false'}) nor in padded rows ({failure})"
            )
    policy.notes += slow_paths(policy, reason)


def slow_paths(policy: Any, wrong_in_packs: str | None) -> list[str]:
    """A line for each slower way that training takes: why, and about how slow it is. Factors are of B4 and B7 on an H200."""
    family, lines = type(policy.body).__name__, []
    padded = "rows are padded: updates take about 5.5 times as long (0.6B, docs/performance.md B4)"
    if wrong_in_packs is not None:
        lines.append(
            f"{family} cannot be laid out in packs ({wrong_in_packs}): {padded}, and the engine computes the whole text"
            " again for every token (not measured; the slower, the longer the responses)"
        )
    elif not policy.packing:
        lines.append(f"policy.packing = false: {padded}")
    unfused = policy.why_not_fused() if policy.device.type == "cuda" and policy.packing else None
    if unfused is not None:
        lines.append(
            f"training goes through the model's own layers ({unfused}): updates take about 1.9 times as long (0.6B,"
            " docs/performance.md B4)"
        )
    return lines


def _why_wrong(policy: Any, texts: Texts, own: Own, dtype: torch.dtype) -> str | None:
    """Why the current layout is wrong for this body; None if it is right."""
    try:
        leak = _leak(policy, texts, own, dtype)
        logprobs = policy.score(texts, _ROWS).logprobs.cpu()
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, KeyError, IndexError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    if leak is not None:
        return leak
    # In 16 bits rounding grows with depth and with the size of logits, in random weights up to tenths of their spread.
    # Log-probs of other texts would be further apart than the spread.
    scale = max(1.0, own.spread) if dtype in (torch.float32, torch.float64) else max(1.0, 4 * own.spread)
    apart = distance(dtype, logprobs, own.logprobs)
    return None if apart <= tolerance(dtype) * scale else f"its log-probs are off by {apart:.2g}"


def _leak(policy: Any, texts: Texts, own: Own, dtype: torch.dtype) -> str | None:
    """A message if changing one text moves the log-probs of others; None if not. They are compared to the bit."""
    score, replays = _scorer(policy, texts)
    first = score(texts)
    allowed = 0.0
    replays = replays and policy.packing
    if _has_experts(policy.body) and not (replays and torch.equal(score(texts), first)):
        allowed = _MIXTURES.get(dtype, _REPLAYED if replays else _FREE) * max(1.0, own.spread)
    for changed, others in _changes(texts, policy.vocabulary):
        moved = float((score(changed) - first)[others].abs().max())
        if not moved <= allowed:
            return f"texts see one another: changing one moves log-probs of others by {moved:.2g}"
    return None


def _has_experts(body: Any) -> bool:
    """Whether tokens share batches of experts. Some configurations speak of experts that no layer has (Nemotron-H)."""
    return any(name.rpartition(".")[2].startswith("expert") for name, _ in body.named_modules())


def _scorer(policy: Any, texts: Texts) -> tuple[Callable[[Texts], Tensor], bool]:
    """A function that scores texts of one shape, and whether it replays the routes of `texts` each time.

    Without replay a changed text would choose other experts, whose batches would have other sizes and sum in another order.
    """
    routers = policy.routers
    traffic = None if routers is None else policy.score(texts, _ROWS, Directions()).traffic
    if traffic is None:
        return lambda changed: policy.score(changed, _ROWS).logprobs, False
    record = Record.empty(texts, routers, policy.device)
    record.note(traffic)

    def score_replayed(changed: Texts) -> Tensor:
        # A record applies to its own tokens only; with these tokens it is forced on the changed text too.
        tokens = torch.cat([changed.prompts.reshape(-1), changed.tokens.reshape(-1)]).to(record.tokens)
        directions = Directions(replay=replace(record, tokens=tokens), record=False)
        logprobs: Tensor = policy.score(changed, _ROWS, directions).logprobs
        return logprobs

    return score_replayed, True


def _changes(texts: Texts, vocabulary: int) -> Iterator[tuple[Texts, list[int]]]:
    """Texts in which one response or prompt is changed, and the rows whose log-probs must not change."""
    for row in (0, 2, 3):
        tokens = texts.tokens.clone()
        tokens[row] = (tokens[row] + 1) % vocabulary
        yield replace(texts, tokens=tokens), [other for other in range(len(texts)) if other != row]
    for group in range(len(texts.prompts)):
        prompts = texts.prompts.clone()
        prompts[group] = (prompts[group] + 1) % vocabulary
        yield replace(texts, prompts=prompts), (texts.group != group).nonzero().squeeze(1).tolist()
