"""What to change so that a run fits, as options to paste.

The remedies come in the order of their price. Smaller packs, recomputed layers, fewer rows at once, an offloaded optimizer
and sharded layers change no result and cost only time: of their combinations that fit, the fastest is named. An 8-bit
optimizer rounds, adapters train something else, more GPUs cost money, and servers are machines of their own.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

from legato.capacity.planning import Plan, plan_setup
from legato.capacity.setup import Setup

ADAPTER_RANK = 16
MOST_GPUS = 4096
_PRICE_OF_A_CHANGE = 0.02
"""A further change must save this share of the step."""
_WORTHWHILE = 0.95


@dataclass(frozen=True, slots=True, kw_only=True)
class Remedy:
    """Changes with which a run fits."""

    price: str
    """What the remedy costs beside time, in words."""
    plan: Plan
    options: tuple[str, ...]
    """`path=value` words for the command line or a recipe."""
    gpus: int | None = None
    """The number of GPUs, if it changes."""
    servers: bool = False
    """Whether responses must be sampled on other machines."""

    def words(self) -> str:
        """The changes as one line."""
        parts = list(self.options)
        if self.gpus is not None:
            parts.insert(0, f"--gpus {self.gpus}")
        if self.servers:
            parts.append("rollouts.engine=vllm 'rollouts.servers.urls=[\"http://HOST:8000\"]'")
        return " ".join(parts)


def remedies(plan: Plan) -> list[Remedy]:
    """What would make a run fit, the cheapest first; nothing if it fits as it is or nothing helps."""
    if plan.fits:
        return []
    setup, ways = plan.setup, list[Remedy]()
    same = _fastest(setup, setup, "changes no result")
    ways += [same] if same else []
    if not setup.eight_bit and not setup.lora_rank:
        rounded = _fastest(setup, replace(setup, eight_bit=True), "moments of 8 bits, needs bitsandbytes")
        ways += [rounded] if rounded else []
    if not setup.lora_rank:
        adapted = _fastest(
            setup, replace(setup, lora_rank=ADAPTER_RANK, trained=None, eight_bit=False), "trains adapters only"
        )
        ways += [adapted] if adapted else []
    more = _more_gpus(setup)
    ways += [more] if more else []
    if not setup.servers and setup.gpus > 1 and not same:
        elsewhere = _fastest(setup, replace(setup, servers=True), "needs other machines for sampling")
        ways += [elsewhere] if elsewhere else []
    return ways


def faster(plan: Plan) -> Remedy | None:
    """Settings that change no result and shorten the step of a run that fits by 5 % or more; None if there are none."""
    best = _fastest(plan.setup, plan.setup, "changes no result") if plan.fits else None
    return best if best is not None and best.plan.times.step < _WORTHWHILE * plan.times.step else None


def fit_without_other_results(setup: Setup) -> Plan | None:
    """The fastest plan on the same GPUs that fits and changes no result, the setup itself if it fits.

    If sampling on the same GPUs does not fit, it is planned on servers. None if nothing fits.
    """
    plan = plan_setup(setup)
    if plan.fits:
        return plan
    for start in (setup, replace(setup, servers=True)):
        remedy = _fastest(setup, start, "")
        if remedy is not None:
            return remedy.plan
    return None


def _more_gpus(setup: Setup) -> Remedy | None:
    gpus = 1
    while gpus <= setup.gpus:
        gpus *= 2
    while gpus <= MOST_GPUS:
        remedy = _fastest(setup, setup.on(gpus), "more GPUs")
        if remedy is not None:
            return remedy
        gpus *= 2
    return None


def _fastest(original: Setup, start: Setup, price: str) -> Remedy | None:
    """The fastest way to make `start` fit by settings that change no result; None if there is none."""
    best: tuple[float, Plan, tuple[str, ...]] | None = None
    for setup in _variants(start):
        options = _options(original, setup)
        plan = plan_setup(setup)
        cost = plan.times.step * (1 + _PRICE_OF_A_CHANGE * len(options))
        if plan.fits and (best is None or cost < best[0]):
            best = cost, plan, options
    if best is None:
        return None
    _, plan, options = best
    return Remedy(
        price=price,
        plan=plan,
        options=options,
        gpus=plan.setup.gpus if plan.setup.gpus != original.gpus else None,
        servers=plan.setup.servers and not original.servers,
    )


def _variants(setup: Setup) -> Iterator[Setup]:
    """Yield the setup with every combination of the settings that change no result."""
    packs = _halvings(setup.tokens_per_pack, max(1, setup.longest), 4)
    rows = [setup.rows_at_once] if setup.servers else _halvings(setup.rows_at_once, setup.samples, 3)
    checkpointing = [setup.checkpointing, True] if setup.checkpointing is False else [setup.checkpointing]
    offload = [False, True] if not setup.offload and not setup.eight_bit and not setup.lora_rank else [setup.offload]
    ways = [setup.shard, "layers"] if setup.gpus > 1 and setup.shard != "layers" else [setup.shard]
    for pack, together, recomputed, away, way in product(packs, rows, checkpointing, offload, ways):
        yield replace(setup, tokens_per_pack=pack, rows_at_once=together, checkpointing=recomputed, offload=away, shard=way)


def _halvings(value: int, least: int, most: int) -> list[int]:
    """The value, its half, its quarter ... down to `least`, at most so many."""
    values = [value]
    while len(values) < most and values[-1] // 2 >= least:
        values.append(values[-1] // 2)
    return values


def _options(before: Setup, after: Setup) -> tuple[str, ...]:
    """The differences of two setups as `path=value` words."""
    words = {
        "tokens_per_pack": f"training.tokens_per_pack={after.tokens_per_pack}",
        "checkpointing": f"policy.gradient_checkpointing={str(after.checkpointing).lower()}",
        "rows_at_once": f"rollouts.rows_at_once={after.rows_at_once}",
        "offload": f"training.offload_optimizer={str(after.offload).lower()}",
        "eight_bit": f"training.optimizer={'adamw-8bit' if after.eight_bit else 'adamw'}",
        "lora_rank": f"policy.lora.rank={after.lora_rank}",
        "shard": f"training.shard={after.shard}",
    }
    changed = [name for name in words if getattr(before, name) != getattr(after, name)]
    # On several GPUs "optimizer" is what a run does anyway.
    return tuple(words[name] for name in changed if (name, after.shard) != ("shard", "optimizer"))
