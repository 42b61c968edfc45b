"""What a body can do is found out, not assumed: a few tokens through every path, beside the model's own forward.

A family whose attention does not go through transformers' interface, or whose state runs along the row, would be scored
wrongly in packs without any error. Such a model gets padded rows and an engine that recomputes; a head that is more than a
matrix and the known extras is refused.
"""

from typing import Any

import torch

from legato.core.texts import Texts
from legato.errors import InputError

_TOKENS = 6


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
    """How far two right ways to the same log-probs may lie apart. Wrong ones are off by tenths and more.

    In 16 bits it holds for the root mean square: random tokens through a model with outliers (SmolLM2) come out 0.4 apart
    here and there by rounding alone, while a row that sees another is wrong at every token.
    """
    return {torch.float64: 1e-6, torch.float32: 1e-3}.get(dtype, 0.25)


def check(policy: Any) -> None:
    """Set `policy.packing` and `policy.views` to what holds for this body; ValueError where no path is right."""
    texts, rows = sample_texts(policy.vocabulary), torch.arange(4)
    dtype = policy.model.get_input_embeddings().weight.dtype
    right = _plainly(policy, texts)
    if not bool(torch.isfinite(right).all()):
        raise InputError(f"policy.model {policy.name}: its log-probs are not finite; the weights hold NaN or infinity")
    wanted, policy.packing = policy.packing, False
    if not _close(policy.score(texts, rows).logprobs.cpu(), right, dtype):
        raise InputError(
            f"policy.model {policy.name}: the head of {type(policy.body).__name__} is not a linear layer with the extras"
            " that are known (scale, soft cap); its log-probs would be wrong"
        )
    policy.packing = True
    reason = "its log-probs come out otherwise"
    try:
        policy.views = _close(policy.score(texts, rows).logprobs.cpu(), right, dtype)
    except torch.OutOfMemoryError:
        raise
    except (AttributeError, TypeError, KeyError, IndexError, RuntimeError, ValueError) as error:
        policy.views, reason = False, f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
    policy.packing = wanted and policy.views
    if not policy.views:
        policy.notes.append(
            f"{type(policy.body).__name__} cannot be laid out in packs ({reason}): rows are padded instead, and the engine"
            " recomputes every token (slow)"
        )


def _close(found: torch.Tensor, right: torch.Tensor, dtype: torch.dtype) -> bool:
    apart = (found - right).abs()
    exact = dtype in (torch.float32, torch.float64)
    return bool((apart.max() if exact else apart.square().mean().sqrt()) <= tolerance(dtype))


def _plainly(policy: Any, texts: Texts) -> torch.Tensor:
    """Log-probs by the model's own forward, a row at a time."""
    found = torch.zeros(texts.tokens.shape, dtype=policy.dtype)
    with torch.no_grad():
        for row, length in enumerate(texts.lengths.tolist()):
            prompt = texts.prompts[texts.group[row], : texts.prompt_lengths[texts.group[row]]]
            whole = torch.cat([prompt, texts.tokens[row, :length]]).to(policy.device)
            logits = policy.model(input_ids=whole.unsqueeze(0), use_cache=False).logits[0].to(policy.dtype)
            logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
            found[row, :length] = logprobs.gather(1, whole[len(prompt) :].unsqueeze(1)).squeeze(1).cpu()
    return found
