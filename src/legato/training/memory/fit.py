"""Whether what training asks for fits into the memory there is: as it is, with gradient checkpointing, in smaller packs."""

from dataclasses import dataclass, replace

from legato.training.memory.model import Demand, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a demand can be met."""

    fits: bool
    """Whether anything does; if not, `memory` is of the smallest pack, with checkpointing."""
    checkpointing: bool
    tokens_per_pack: int
    """As asked for, or fewer."""
    memory: Memory


def fit(demand: Demand, available: int, *, smallest: int = 1) -> Fit:
    """Whether a pack fits in so many bytes as it is, else with gradient checkpointing, else how small it must be.

    `smallest` is the longest text: a pack holds at least one.
    """
    for checkpointing in (False, True):
        memory = demand.memory(checkpointing=checkpointing)
        if memory.total <= available:
            return Fit(fits=True, checkpointing=checkpointing, tokens_per_pack=demand.tokens_per_pack, memory=memory)

    def of(tokens: int) -> Memory:
        return replace(demand, tokens_per_pack=tokens, head_tokens=min(demand.head_tokens, tokens)).memory(
            checkpointing=True
        )

    low, high = min(smallest, demand.tokens_per_pack), demand.tokens_per_pack
    if of(low).total > available:
        return Fit(fits=False, checkpointing=True, tokens_per_pack=low, memory=of(low))
    # of(low) fits and of(high) does not.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if of(middle).total <= available else (low, middle)
    return Fit(fits=True, checkpointing=True, tokens_per_pack=low, memory=of(low))
