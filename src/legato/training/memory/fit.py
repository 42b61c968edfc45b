"""Whether training fits into the available memory: as configured, with gradient checkpointing, or in smaller packs."""

from dataclasses import dataclass, replace

from legato.errors import InputError
from legato.training.memory.model import Demand, Memory, gigabytes
from legato.training.memory.sharding import KEPT


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


def most_kept(demand: Demand, available: int, *, checkpointing: bool) -> str:
    """The most of `KEPT` with which a demand of divided layers fits into `available` bytes; the least if none fits."""
    for kept in reversed(KEPT):
        whole = replace(demand, sharding=replace(demand.sharding, kept=kept))
        if whole.memory(checkpointing=checkpointing).total <= available:
            return kept
    return KEPT[0]


def cache_budget(demand: Demand, available: int, share: float) -> int:
    """Bytes that the KV cache of a local engine takes at most: a share of what training leaves free at any time."""
    # Between steps layers are divided again, whatever is kept during updates.
    divided = replace(demand.sharding, kept=KEPT[0])
    idle = replace(demand, cached_tokens=0, several_packs=True, sharding=divided).memory(checkpointing=True)
    held = idle.weights + idle.resident + idle.reference
    reserved = idle.gradients + idle.masters + idle.moments
    return max(0, int((available - held - reserved) * share))


def limit_cache(demand: Demand, available: int, share: float, row: int) -> Demand:
    """The demand with no more cached tokens than the engine makes room for; it makes room for one row of `row` tokens."""
    per_token = 2 * demand.shape.layers * demand.shape.key * demand.size
    most = max(row, cache_budget(demand, available, share) // per_token)
    return replace(demand, cached_tokens=min(demand.cached_tokens, most))


def refuse_if_too_large(demand: Demand, room: int, longest: int, model: str, *, on_gpu: bool) -> None:
    """InputError if not even the smallest run fits: packs of one text, gradient checkpointing, no slack.

    Above that the estimate may be wrong, so the run starts with a note.
    """
    least = least_bytes(demand, longest)
    if least <= room:
        return
    alternatives = {}
    if not 0 < demand.adapter_rank <= 16:
        alternatives["policy.lora.rank=16"] = replace(demand, adapter_rank=16, trained=None)
    if on_gpu:
        eight_bit, offload = "training.optimizer=adamw-8bit", "training.offload_optimizer=true"
        alternatives[eight_bit] = replace(demand, eight_bit=True)
        alternatives[offload] = replace(demand, offload=True)
        alternatives[f"{offload} {eight_bit}"] = replace(demand, offload=True, eight_bit=True)
    helpful = [
        f"{setting} ({gigabytes(least_bytes(other, longest))})"
        for setting, other in alternatives.items()
        if least_bytes(other, longest) <= room
    ]
    if shorter := _longest_that_fits(demand, room, longest):
        helpful.append(f"texts of {shorter} tokens (policy.max_prompt_tokens + rollouts.max_response_tokens is {longest})")
    raise InputError(
        f"expected a training that fits in {gigabytes(room)}, got one that needs {gigabytes(least)} for one text of"
        f" {longest} tokens with gradient checkpointing (policy.model = {model}); what would fit:"
        f" {', '.join([*helpful, 'a smaller model'])}"
    )


def _longest_that_fits(demand: Demand, room: int, longest: int) -> int:
    """The tokens of the longest text that fits, rounded down to two digits; 0 if none does."""
    low, high = 0, longest
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if least_bytes(demand, middle) <= room else (low, middle)
    unit = int(10 ** max(0, len(str(low)) - 2))
    return low // unit * unit


def least_bytes(demand: Demand, longest: int) -> int:
    """Bytes of the smallest possible update: packs of one text, one response at a time in the engine."""
    tokens = min(longest, demand.tokens_per_pack)
    smallest = replace(
        demand,
        tokens_per_pack=tokens,
        head_tokens=min(demand.head_tokens, tokens),
        cached_tokens=min(demand.cached_tokens, 2 * longest),
    )
    memory = smallest.memory(checkpointing=True)
    return memory.total - memory.slack
