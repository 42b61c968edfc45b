"""Whether training fits into the available memory: as configured, with gradient checkpointing, or in smaller packs."""

from dataclasses import dataclass, replace

from legato.training.memory.model import Demand, Memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """How a demand fits into memory."""

    fits: bool
    """False if even the smallest pack with checkpointing does not fit; `memory` is then of that pack."""
    checkpointing: bool
    tokens_per_pack: int
    """The configured number of tokens, or fewer."""
    memory: Memory


def fit(demand: Demand, available: int, *, smallest: int = 1) -> Fit:
    """How a demand fits into `available` bytes: unchanged, else with gradient checkpointing, else in smaller packs.

    `smallest` is the longest text: a pack holds at least one.
    """
    for checkpointing in (False, True):
        memory = demand.memory(checkpointing=checkpointing)
        if memory.total <= available:
            return Fit(fits=True, checkpointing=checkpointing, tokens_per_pack=demand.tokens_per_pack, memory=memory)

    def memory_of(tokens: int) -> Memory:
        return replace(demand, tokens_per_pack=tokens, head_tokens=min(demand.head_tokens, tokens)).memory(
            checkpointing=True
        )

    low, high = min(smallest, demand.tokens_per_pack), demand.tokens_per_pack
    if memory_of(low).total > available:
        return Fit(fits=False, checkpointing=True, tokens_per_pack=low, memory=memory_of(low))
    # memory_of(low) fits and memory_of(high) does not.
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if memory_of(middle).total <= available else (low, middle)
    return Fit(fits=True, checkpointing=True, tokens_per_pack=low, memory=memory_of(low))
