"""The generated parts of docs/plan.md and docs/scaling.md: measured and calculated figures, and how far apart they are."""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.gpu import plan as gpu_plan
from benchmarks.gpu import ranks as gpu_ranks
from benchmarks.gpu.peaks import ALLOWED, GIB, Row, check_rows, missing_shapes
from legato.capacity.hardware import find_hardware, hardware_names
from legato.capacity.measured import measured
from legato.capacity.memory import demand_of
from legato.capacity.model import build_model, find_model, shipped_names, shipped_record
from legato.capacity.planning import Plan, plan_setup
from legato.capacity.remedies import fit_without_other_results, remedies
from legato.capacity.setup import Setup, setup_of
from legato.capacity.table import GPUS, table_of
from legato.cli.plan import DEFAULT_RECIPE, cell_lines, plan_lines
from legato.config.load import load
from legato.training.memory.model import Memory
from legato.training.memory.sharding import Sharding

ROOT = Path(__file__).parents[2]
SCALED = ("qwen3-0.6b", "qwen3-1.7b", "qwen3-8b", "qwen3-14b", "qwen3-30b-a3b")
"""The models of the memory table in docs/scaling.md."""
LARGE_STEP = 512
"""Prompts of the step that docs/scaling.md spreads over more and more GPUs."""


def markdown(heading: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = ["| " + " | ".join(heading) + " |", "|" + "---|" * len(heading)]
    return "\n".join([*lines, *("| " + " | ".join(row) + " |" for row in rows)])


@cache
def setup_for(model: str, gpus: int = 1) -> Setup:
    """A shipped model with the default recipe on H200s."""
    resolved = load([ROOT / DEFAULT_RECIPE], [])
    return setup_of(resolved, find_model(model), find_hardware("h200"), gpus)


@cache
def plan_blocks() -> dict[str, str]:
    """The generated parts of docs/plan.md by name."""
    return {
        "example": _example(),
        "table": _table(),
        "peaks": _peaks(),
        "times": _times(),
        "steps": steps(gpu_plan.load_results(gpu_plan.RESULTS)),
        "factors": _factors(),
        "models": _models(),
        "hardware": _hardware(),
    }


@cache
def scaling_blocks() -> dict[str, str]:
    """The generated parts of docs/scaling.md by name."""
    return {
        "memory": _sharded_memory(),
        "same load": _same_load(),
        "same step": _same_step(),
        "links": _links(),
        "one gpu": one_gpu(gpu_ranks.load_results(gpu_ranks.RESULTS)),
    }


_UNKNOWN = "not measured yet"
_RATIOS = (
    (
        "a plain run, 0.6B, over another in a process of its own",
        "",
        math.inf,
        "plain again over plain, 0.6B",
        "plain 0.6B again",
        "",
    ),
    (
        "one rank under torchrun, 0.6B, over a plain run",
        "within 2 %",
        0.02,
        "torchrun over plain, 0.6B",
        "torchrun 0.6B",
        "one",
    ),
    *(
        (
            f"FSDP2 on one rank, {shape}, {words}, over the same run without",
            "within 5 %",
            0.05,
            f"{way} over one process, {shape}",
            f"torchrun {shape}",
            way,
        )
        for way, words in (
            (gpu_ranks.KEPT, "layers and gradients kept during updates"),
            ("layers", "a layer gathered in each pass"),
        )
        for shape in ("0.6B", "1.7B")
    ),
)
"""What is compared, what is wanted in words and as a share, the name of the ratio, its part and the side of the part."""


def one_gpu(stored: dict[str, Any]) -> str:
    """What was measured of ranks on one GPU, beside what is promised. What failed says so."""
    parts, comparisons, rows = stored["parts"], gpu_ranks.compare(stored), list[list[str]]()
    for what, wanted, allowed, name, part, side in _RATIOS:
        told = [each for each in comparisons if each.name == name]
        why = _why_not(parts.get(part, {}), side)
        if not told or why != _UNKNOWN:
            rows.append([what, wanted, why, "", "", "" if why == _UNKNOWN else _when(stored, part)])
        for each in told:
            cells = [f"{100 * (each.ratio - 1):+.1f} %{_verdict(each, allowed)}"]
            cells.append(f"{100 * (each.low - 1):+.1f} to {100 * (each.high - 1):+.1f} % ({each.steps} steps)")
            cells.append(f"up to {100 * each.norms_apart:.2g} % apart" if each.norms_apart else "equal")
            rows.append([what, wanted, *cells, _moment(stored, each.date, each.commit)])
    nccl, two = parts.get("nccl", {}), parts.get("two", {})
    takes = nccl.get("takes_two")
    words = _why_not(nccl, "") if takes is None else "takes them" if takes else "refuses them"
    rows.append(["NCCL with two processes on one GPU", "stated", words, "", "", _when(stored, "nccl")])
    for way in gpu_ranks.WAYS:
        shard, _, kept = way.partition(", ")
        update, name = two.get(f"float32, {way}", {}), f'two processes on one GPU (gloo), `"{shard}"`'
        name += " kept during updates" if kept else " gathered in each pass" if shard == "layers" else ""
        apart = _why_not(two, f"float32, {way}")
        if "weights" in update:
            apart = f"{update['weights']:.1e}{', more than wanted' if update['weights'] > 1e-6 else ''}"
        what = f"{name}: weights after one float32 update, apart from those of one"
        rows.append([what, "1e-6", apart, "", "", _when(stored, "two")])
        engine, equal = two.get(f"engine, {way}", {}), _why_not(two, f"engine, {way}")
        if "equal_on_ranks" in engine:
            equal = "equal" if engine["equal_on_ranks"] else "different"
        what = f"{name}: weights of the two after whole steps with the engine"
        rows.append([what, "equal", equal, "", "", _when(stored, "two")])
    return markdown(["", "wanted", "measured", "interval", "gradient norms", "when"], rows)


def _verdict(comparison: gpu_ranks.Comparison, allowed: float) -> str:
    """Whether a ratio is further from 1 than `allowed`, as far as its interval tells."""
    low, high = comparison.low - 1, comparison.high - 1
    if low > allowed:
        return ", slower than that"
    if high < -allowed:
        return ", faster than that"
    return "" if -allowed <= low and high <= allowed else ", not resolved"


def _why_not(part: dict[str, Any], side: str) -> str:
    """Why a part or a side of it has no figure."""
    own = part.get(side, part.get("sides", {}).get(side, {}))
    if "skipped" in part:
        return f"not measured: {part['skipped']}"
    why = own.get("error") or part.get("errors", {}).get(side) or part.get("why")
    if why is None and "exit" in part:
        why = f"exit code {part['exit']}" if isinstance(part["exit"], int) else f"it took {part['exit']}"
    return f"failed: {' '.join(str(why).split()):.160}" if why else _UNKNOWN


def _when(stored: dict[str, Any], part: str) -> str:
    if part not in stored["parts"]:
        return ""
    own = stored["parts"][part]
    return _moment(stored, own.get("date", stored["date"]), own.get("commit", ""))


def _moment(stored: dict[str, Any], date: str, commit: str) -> str:
    return f"{date}, {stored['machine'].get('device', '')}{f', {commit}' if commit else ''}"


def _example() -> str:
    plan = plan_setup(setup_for("qwen3-8b"))
    return "\n".join(["```", *plan_lines(plan, remedies(plan), DEFAULT_RECIPE), "```"])


def _table() -> str:
    rows = table_of([setup_for(name) for name in shipped_names()])
    heading = ["model", *(f"{count} GPU{'s' if count > 1 else ''}" for count in GPUS)]
    return markdown(heading, [[row[0].model, *("<br>".join(cell_lines(cell)) for cell in row)] for row in rows])


def _peaks() -> str:
    rows = [
        [row.what, f"{row.measured:.2f}", f"{row.calculated:.2f}", _off_by(row), row.source, row.date]
        for row in check_rows()
    ]
    rows += [[title, reason, "", "", "", ""] for title, reason in missing_shapes().items()]
    return markdown(["", "measured, GiB", "calculated, GiB", "off by", "file", "date"], rows)


def _off_by(row: Row) -> str:
    beyond = row.training and abs(row.error) > ALLOWED
    return f"{100 * row.error:+.1f} %{f', beyond {ALLOWED:.0%}' if beyond else ''}"


def _times() -> str:
    """Measured and calculated times of the loads that were measured."""
    results = json.loads((ROOT / "benchmarks" / "results" / "gpu.json").read_text())["sections"]
    step, plan = results["B8"]["parts"]["Legato"]["seconds"], plan_setup(measured_step())
    rows = [
        ["0.6B, whole step", name, step[key], plan.times.seconds(name)]
        for key, name in (("rollouts", "sampling"), ("anchor", "old log-probs"))
    ]
    rows.append(
        ["0.6B, whole step", "updates", step["update"], plan.times.seconds("updates") + plan.times.seconds("optimizer")]
    )
    rows.append(["0.6B, whole step", "step", step["step"], plan.times.step])
    return markdown(
        ["", "phase", "measured, s", "calculated, s", "off by"],
        [[what, name, f"{a:.2f}", f"{b:.2f}", f"{100 * (b / a - 1):+.0f} %"] for what, name, a, b in rows],
    )


@cache
def measured_step() -> Setup:
    """The setup of B8: 32 prompts x 8, prompts of 256 tokens, 512 new tokens, 4 updates, packs of 16k tokens."""
    return replace(
        setup_for("qwen3-0.6b"),
        prompts=32,
        prompt_tokens=256,
        response_tokens=512,
        mean_prompt=256,
        mean_response=512,
        tokens_per_pack=16384,
        rows_at_once=256,
        evaluated=0,
    )


def planned_setup(name: str) -> Setup:
    """The setup of a shape of `benchmarks/gpu/plan.py`, as `legato plan` sees it."""
    case = gpu_plan.SHAPES[name]
    base = setup_for(case.model)
    return replace(
        base,
        model=build_model(case.model, case.model, gpu_plan.config_of(case, tiny=False)),
        prompts=case.prompts,
        samples=gpu_plan.SAMPLES,
        prompt_tokens=gpu_plan.PROMPT,
        response_tokens=gpu_plan.NEW,
        mean_prompt=gpu_plan.PROMPT,
        mean_response=gpu_plan.NEW,
        updates=case.updates,
        # Every update but the first needs old log-probs.
        scored_share=(case.updates - 1) / case.updates,
        tokens_per_pack=case.tokens_per_pack,
        rows_at_once=case.prompts * gpu_plan.SAMPLES,
        evaluated=0,
        checkpointing=case.checkpointing,
        lora_rank=case.lora_rank,
        eight_bit=case.eight_bit,
        offload=case.offload,
    )


_PHASES = {
    "step": None,
    "rollouts": ("sampling",),
    "anchor": ("old log-probs",),
    "update": ("updates", "optimizer"),
}
"""Phases of a measured step, and the calculated ones that they hold."""


def steps(stored: dict[str, Any]) -> str:
    """The whole steps that `benchmarks/gpu/plan.py` has measured, beside the calculated ones."""
    rows = []
    for name, case in gpu_plan.SHAPES.items():
        result = stored["shapes"].get(name, {})
        if "peak_gib" not in result:
            continue
        times = plan_setup(planned_setup(name)).times
        cells = []
        for phase, parts in _PHASES.items():
            seconds = times.step if parts is None else sum(times.seconds(part) for part in parts)
            cells.append(f"{result['seconds'][phase]:.2f} ({seconds:.2f})")
        peak, each = f"{result['peak_gib']:.1f}", f"{result['tokens_per_second']:,.0f}"
        rows.append([case.title, *cells, each, peak, result.get("date", stored["date"])])
    heading = ["", "step, s", "sampling, s", "old log-probs, s", "updates, s", "tokens/s", "peak, GiB", "date"]
    return markdown(heading, rows) if rows else "None was measured yet."


_MEANINGS = {
    "training_efficiency": "forward and backward, share of the speed of large products",
    "scoring_efficiency": "a forward without gradient, share of the speed of large products",
    "mixture_efficiency": "the layers of a mixture, forward and backward, share of the speed of large products",
    "adapters": "speed of layers with adapters, share of fused layers",
    "own_layers": "speed of the model's own layers, share of fused layers",
    "host_seconds_per_layer": "s, the least time of a layer's forward over a pack",
    "decode_efficiency": "decoding, share of the roofline beside the time per layer",
    "decode_seconds_per_layer": "s, per layer and decode step",
    "decode_seconds_per_sparse_layer": "s, per layer with experts and decode step",
    "decode_seconds_per_adapted_layer": "s, per layer with adapters and decode step, in addition",
    "host_bytes_per_second": "bytes/s, an offloaded optimizer in host memory",
}


def _factors() -> str:
    stored, rows = measured(), list[list[str]]()
    for name, meaning in _MEANINGS.items():
        value = getattr(stored, name)
        for factor in value if isinstance(value, tuple) else (value,):
            size = f" ({factor.weights / 1e9:.1f} billion matrix weights)" if factor.weights else ""
            rows.append(
                [meaning + size, f"{factor.value:.3g}", factor.source.replace("benchmarks/results/", ""), factor.date]
            )
    return markdown(["factor", "measured", "file and part", "date"], rows)


def _models() -> str:
    rows = []
    for name in shipped_names():
        model, record = find_model(name), shipped_record(name)
        rows.append(
            [
                f"`{name}`",
                f"{model.parameters:,}",
                record["published"]["parameters"],
                f"{model.shape.layers}",
                record["source"],
            ]
        )
    return markdown(["name", "weights, counted", "published", "layers", "source of the configuration"], rows)


def _hardware() -> str:
    rows = []
    for name in hardware_names():
        gpu = find_hardware(name)
        rows.append(
            [
                f"`{name}`",
                gpu.name,
                f"{gpu.memory / GIB:.0f} GiB",
                f"{gpu.matmul / 1e12:,.0f}",
                f"{gpu.bandwidth / 1e12:.2f}",
                gpu.source if gpu.figures == "measured" else f"{gpu.source}, times the shares that the H200 reached",
            ]
        )
    return markdown(["name", "GPU", "memory", "TFLOP/s", "TB/s", "where from"], rows)


def _links() -> str:
    rows = [
        [
            f"`{name}`",
            f"{gpu.nvlink / 1e9:.0f}",
            f"{gpu.network / 1e9:.0f}",
            f"{gpu.bus(8) / 1e9:.0f}",
            f"{gpu.bus(64) / 1e9:.0f}",
            gpu.links,
        ]
        for name, gpu in ((name, find_hardware(name)) for name in hardware_names())
    ]
    return markdown(["GPU", "NVLink", "network", "bus, 8 GPUs", "bus, 64 GPUs", "where from"], rows)


def _sharded_memory() -> str:
    """Weights, gradients, masters and moments of 8 GPUs, and what a pack of 16k tokens adds."""

    def held(model: str, sharding: Sharding, *, gradients: bool = True) -> float:
        demand = replace(demand_of(setup_for(model), 0), several_packs=True, fused=True, by_parts=False, sharding=sharding)
        memory = demand.memory(checkpointing=False)
        parts = memory.weights + memory.masters + memory.moments + memory.resident
        # Without the 16-bit gradient that autograd makes beside the sum.
        whole = replace(demand, size=4).memory(checkpointing=False).gradients
        return parts + (whole if gradients else 0)

    def pack(model: str) -> str:
        demand = replace(demand_of(setup_for(model), 0), tokens_per_pack=16384)
        memory = demand.memory(checkpointing=False)
        return f"{memory.activations / 1e9:.0f} / {memory.activations_checkpointed / 1e9:.0f}"

    one, state = Sharding(), Sharding(way="optimizer", ranks=8)
    layers, resident = Sharding(way="layers", ranks=8), Sharding(way="layers", ranks=8, resident=True)
    lines: dict[str, Any] = {
        "one GPU": lambda name: _gb(held(name, one)),
        '`"optimizer"`': lambda name: _gb(held(name, state)),
        "the same while sampling (no gradients)": lambda name: _gb(held(name, state, gradients=False)),
        '`"layers"`, sampling on servers': lambda name: _gb(held(name, layers)),
        '`"layers"` with a copy for the local engine': lambda name: _gb(held(name, resident)),
        "plus whole layers that are gathered": lambda name: _gb(_whole_bytes(name, "nothing")),
        "or, kept during updates, all layers": lambda name: _gb(_whole_bytes(name, "weights")),
        "or all layers and their gradients": lambda name: _gb(_whole_bytes(name, "gradients")),
        "plus a pack of 16k tokens, kept / recomputed": pack,
    }
    rows = [[title, *(line(name) for name in SCALED)] for title, line in lines.items()]
    return markdown(["GB per GPU", *SCALED], rows)


def _whole_bytes(model: str, kept: str) -> float:
    """Bytes that a rank holds beside its shards while layers are divided among 8."""
    demand = replace(demand_of(setup_for(model), 0), several_packs=True, fused=True, by_parts=False)

    def held(sharding: Sharding) -> Memory:
        return replace(demand, sharding=sharding).memory(checkpointing=False)

    least, whole = (held(Sharding(way="layers", ranks=8, kept=each)) for each in ("nothing", kept))
    return whole.gathered + whole.gradients - least.gradients


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f}" if size < 9.95e9 else f"{size / 1e9:.0f}"


def _same_load() -> str:
    """Step time and tokens/s if every GPU has the load of the recipe."""
    rows = []
    for row in table_of([setup_for(name) for name in shipped_names()]):
        base = next((cell.plan for cell in row if cell.plan is not None and not cell.plan.setup.servers), None)
        rows.append([row[0].model, *(_throughput(cell.plan, base) for cell in row)])
    return markdown(["tokens/s", *map(str, GPUS)], rows)


def _throughput(plan: Plan | None, base: Plan | None) -> str:
    if plan is None:
        return "does not fit"
    if plan.tokens_per_second is None or base is None or base.tokens_per_second is None:
        return "servers"
    share = plan.tokens_per_second / plan.setup.gpus / (base.tokens_per_second / base.setup.gpus)
    return f"{plan.tokens_per_second:,.0f} ({share:.0%})"


def _same_step() -> str:
    """Step time of one large step on more and more GPUs."""
    rows = []
    for name in ("qwen3-0.6b", "qwen3-8b", "qwen3-32b", "llama-3.1-70b"):
        plans = [
            fit_without_other_results(replace(setup_for(name).on(gpus), prompts=LARGE_STEP))
            for gpus in (8, 16, 32, 64, 128, 512)
        ]
        rows.append([name, *("does not fit" if plan is None else _step(plan) for plan in plans)])
    return markdown(["seconds a step (exposed communication)", "8", "16", "32", "64", "128", "512"], rows)


def _step(plan: Plan) -> str:
    elsewhere = ", servers" if plan.setup.servers else ""
    return f"{plan.times.step:.1f} ({plan.times.seconds('communication'):.1f}{elsewhere})"
