"""`legato plan`: what a model needs on which GPUs, printed or as JSON."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from legato.capacity.hardware import GIB, find_hardware
from legato.capacity.model import find_model, shipped_names
from legato.capacity.planning import Plan, plan_setup
from legato.capacity.record import plan_record, table_record
from legato.capacity.remedies import Remedy, faster, remedies
from legato.capacity.setup import Setup, setup_of
from legato.capacity.table import GPUS, Cell, table_of
from legato.config.load import load
from legato.config.resolved import Resolved
from legato.config.schema import Training
from legato.errors import InputError
from legato.training.memory.model import gigabytes

DEFAULT_RECIPE = "recipes/qwen3-0.6b-gsm8k.toml"
_SHARD = "training.shard="


def plan_command(
    arguments: Sequence[str],
    *,
    gpus: int,
    hardware: str,
    memory: float | None,
    prompt_tokens: int | None,
    response_tokens: int | None,
    table: bool,
    as_json: bool,
) -> None:
    options = [word for word in arguments if "=" in word and not word.endswith(".toml")]
    recipes = [word for word in arguments if word.endswith(".toml")]
    models = [word for word in arguments if word not in options and word not in recipes]
    if len(models) > 1 or (table and models):
        wanted = "no model beside --table" if table else "one model"
        raise InputError(f"expected {wanted}, got {' and '.join(models)}; recipes end in .toml, options are path=value")
    resolved, shard = _load(recipes or [DEFAULT_RECIPE], options)
    device = find_hardware(hardware, memory)

    def setup_for(model: str, count: int) -> Setup:
        return setup_of(
            resolved,
            find_model(model, resolved.config.policy.tiny),
            device,
            count,
            shard=shard,
            mean_prompt=prompt_tokens,
            mean_response=response_tokens,
        )

    source = ", ".join(recipes) or f"{DEFAULT_RECIPE}, since no recipe was named"
    if table:
        rows = table_of([setup_for(name, 1) for name in shipped_names()])
        if as_json:
            print(json.dumps(table_record(rows), indent=1))
        else:
            _print_table(rows, source)
        return
    plan = plan_setup(setup_for(models[0] if models else resolved.config.policy.model, gpus))
    found = remedies(plan)
    if as_json:
        print(json.dumps(plan_record(plan, found), indent=1))
    else:
        print("\n".join(plan_lines(plan, found, source)))


def _load(recipes: Sequence[str], options: Sequence[str]) -> tuple[Resolved, str | None]:
    """The configuration, and the way of sharding if the options name one that the configuration does not know."""
    # An installed version without several GPUs has no such option, but its plan may.
    known = "shard" in {field.name for field in dataclasses.fields(Training)}
    ways = [word.removeprefix(_SHARD) for word in options if word.startswith(_SHARD) and not known]
    words = [word for word in options if known or not word.startswith(_SHARD)]
    return load([Path(recipe) for recipe in recipes], words), ways[-1].strip("'\"") if ways else None


def plan_lines(plan: Plan, ways: Sequence[Remedy], source: str) -> list[str]:
    """The plan in lines to print."""
    setup, model = plan.setup, plan.setup.model
    shard = f", training.shard={setup.shard}" if setup.gpus > 1 else ""
    lines = [
        f"{model.name} on {setup.gpus} x {setup.hardware.name}{shard}",
        f"  model      {model.parameters:,} weights, {model.shape.layers} layers ({model.source})",
        f"  step       {setup.prompts} prompts x {setup.samples} responses of {setup.mean_response} tokens after prompts of"
        f" {setup.mean_prompt}, {setup.updates} updates ({source})",
        f"  GPU        {_describe_gpu(setup)}",
        "",
        "memory per GPU at the longest lengths, calculated",
        *(f"  {line}" for line in plan.need.memory.lines()),
        f"  {_verdict(plan)}",
        *_remedy_lines(plan, ways),
    ]
    if plan.fits:
        lines += ["", "time of a step, calculated", *_time_lines(plan)]
        better = faster(plan)
        if better is not None:
            step = _seconds(better.plan.times.step)
            lines += ["", "faster, calculated", f"  {better.words()}", f"      {better.price}; {step} a step"]
    elif ways:
        lines += ["", f"time of a step with {ways[0].words()}, calculated", *_time_lines(ways[0].plan)]
    results = plan.results()
    if results:
        lines += ["", "measured, with the loads named"]
        lines += [
            f"  {result.what:<28}{result.value:>10,g} {result.unit}  {result.load} ({result.machine}, {result.date})"
            for result in results
        ]
    remarks = (plan if plan.fits or not ways else ways[0].plan).remarks()
    return [*lines, *(["", "remarks", *(f"  {remark}" for remark in remarks)] if remarks else [])]


def _describe_gpu(setup: Setup) -> str:
    gpu = setup.hardware
    speeds = f"{gpu.matmul / 1e12:,.0f} TFLOP/s, {gpu.bandwidth / 1e12:.2f} TB/s"
    figures = "measured" if gpu.figures == "measured" else "data sheet times the shares that the H200 reached"
    text = f"{gpu.memory / GIB:.0f} GiB, {speeds} ({figures})"
    if setup.gpus > 1:
        text += f"; links of {gpu.nvlink / 1e9:.0f} GB/s in a machine, {gpu.network / 1e9:.0f} GB/s between (data sheets)"
    return text


def _remedy_lines(plan: Plan, ways: Sequence[Remedy]) -> list[str]:
    if plan.fits:
        return []
    if not ways:
        return ["", "nothing would fit, on any number of GPUs: take a smaller model or shorter responses"]
    lines = ["", "what would fit, calculated"]
    for remedy in ways:
        size, step = gigabytes(remedy.plan.need.memory.total), _seconds(remedy.plan.times.step)
        lines += [f"  {remedy.words()}", f"      {remedy.price}; {size}, {step} a step{_recomputation_note(remedy.plan)}"]
    return lines


def _time_lines(plan: Plan) -> list[str]:
    return [
        *(f"  {phase.name:<28}{_seconds(phase.seconds):>10}  {phase.how}" for phase in plan.times.phases),
        f"  {'step':<28}{_seconds(plan.times.step):>10}  {_rate(plan)}",
    ]


def _verdict(plan: Plan) -> str:
    need, room = plan.need, gigabytes(plan.need.available)
    if plan.fits:
        return f"fits: {room} are there{_recomputation_note(plan)}"
    if need.wanted_slots and not need.slots:
        return f"does not fit: {room} are there, and keys and values of one response have no room beside training"
    return f"does not fit: {room} are there"


def _recomputation_note(plan: Plan) -> str:
    return ", layers are recomputed" if plan.need.checkpointing else ""


def _seconds(seconds: float) -> str:
    return f"{seconds:,.1f} s" if seconds >= 10 else f"{seconds:.2f} s"


def _rate(plan: Plan) -> str:
    rate = plan.tokens_per_second
    return "without sampling" if rate is None else f"{rate:,.0f} response tokens a second"


def _print_table(rows: Sequence[Sequence[Cell]], source: str) -> None:
    table = Table(
        title=f"Calculated: GB per GPU, seconds a step, response tokens a second ({source})",
        title_justify="left",
        show_lines=True,
    )
    table.add_column("model", no_wrap=True)
    for count in GPUS:
        table.add_column(f"{count} GPU{'s' if count > 1 else ''}")
    for row in rows:
        table.add_row(row[0].model, *("\n".join(cell_lines(cell)) for cell in row))
    console = Console(highlight=False)
    console.print(table)
    for line in TABLE_REMARKS:
        console.print(line, soft_wrap=True)


TABLE_REMARKS = (
    "Each GPU has the load of the recipe: on N GPUs a step has N times its prompts.",
    "Nothing here changes a result: where the recipe does not fit as it is, the fastest of smaller packs, recomputed layers,"
    " fewer rows at once, an offloaded optimizer and sharded layers was taken.",
    "servers: sampling does not fit beside training, so it is planned on other machines and not counted.",
)


def cell_lines(cell: Cell) -> list[str]:
    """A cell of the table in lines."""
    if cell.plan is None:
        return ["does not fit"]
    plan, setup = cell.plan, cell.plan.setup
    ways = [setup.shard] if setup.gpus > 1 else []
    ways += ["recomputed"] if plan.need.checkpointing else []
    ways += ["offloaded"] if setup.offload else []
    ways += ["servers"] if setup.servers else []
    rate = plan.tokens_per_second
    return [
        f"{plan.need.memory.total / 1e9:.0f} GB" + (f", {', '.join(ways)}" if ways else ""),
        f"{_seconds(plan.times.step)}" + ("" if rate is None else f", {rate:,.0f}/s"),
    ]
