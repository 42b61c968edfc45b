"""A plan as JSON. Calculated and measured figures are under keys of their own."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from legato.capacity.hardware import Hardware
from legato.capacity.measured import measured
from legato.capacity.planning import Plan
from legato.capacity.remedies import Remedy
from legato.capacity.table import Cell


def plan_record(plan: Plan, remedies: Sequence[Remedy]) -> dict[str, Any]:
    """A plan with its remedies."""
    setup, shape = plan.setup, plan.setup.model.shape
    return {
        "model": {
            "name": setup.model.name,
            "source": setup.model.source,
            "parameters": setup.model.parameters,
            "layers": shape.layers,
            "mixture": setup.model.is_mixture,
        },
        "hardware": hardware_record(setup.hardware, setup.gpus),
        "settings": settings_record(plan),
        "calculated": calculated_record(plan),
        "remedies": [
            {
                "options": list(remedy.options),
                "gpus": remedy.plan.setup.gpus,
                "servers": remedy.servers,
                "price": remedy.price,
                "calculated": calculated_record(remedy.plan),
            }
            for remedy in remedies
        ],
        "measured": {
            "results": [asdict(result) for result in plan.results()],
            "factors": {
                name: [asdict(each) for each in factor] if isinstance(factor, tuple) else asdict(factor)
                for name, factor in _factors().items()
            },
        },
        "remarks": plan.remarks(),
    }


def _factors() -> dict[str, Any]:
    stored = measured()
    return {name: getattr(stored, name) for name in stored.__dataclass_fields__ if name != "results"}


def hardware_record(hardware: Hardware, gpus: int) -> dict[str, Any]:
    return {"gpus": gpus, **asdict(hardware)}


def settings_record(plan: Plan) -> dict[str, Any]:
    """The settings that memory and time depend on."""
    setup, names = plan.setup, list[str]()
    names += ("prompts", "samples", "prompt_tokens", "response_tokens", "mean_prompt", "mean_response", "updates", "epochs")
    names += ("tokens_per_pack", "rows_at_once", "size", "lora_rank", "eight_bit", "offload", "shard", "servers")
    return {**{name: getattr(setup, name) for name in names}, "checkpointing": plan.need.checkpointing}


def calculated_record(plan: Plan) -> dict[str, Any]:
    """Bytes per GPU by item, seconds of a step by phase."""
    need, times = plan.need, plan.times
    return {
        "fits": plan.fits,
        "memory_bytes": {name: size for name, size in need.memory.items() if size},
        "total_bytes": need.memory.total,
        "available_bytes": need.available,
        "host_bytes": need.memory.host,
        "rows_at_once": need.slots,
        "checkpointing": need.checkpointing,
        **({"keep_layers": need.kept} if plan.setup.shard == "layers" else {}),
        "phases": [asdict(phase) for phase in times.phases],
        "step_seconds": times.step,
        "tokens_per_second": plan.tokens_per_second,
    }


def table_record(rows: Sequence[Sequence[Cell]]) -> list[dict[str, Any]]:
    """Every cell of a table; `calculated` is None where nothing fits."""
    return [
        {
            "model": cell.model,
            "gpus": cell.gpus,
            "settings": None if cell.plan is None else settings_record(cell.plan),
            "calculated": None if cell.plan is None else calculated_record(cell.plan),
        }
        for row in rows
        for cell in row
    ]
