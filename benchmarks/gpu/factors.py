"""Derives the factors of `legato plan` from the stored results: python -m benchmarks.gpu.factors

They are written to `src/legato/capacity/measured.json`, which is part of the package; a test compares it with the results.
Every entry names its file, the part of it, the date and the machine.
"""

import json
from collections.abc import Iterator
from datetime import datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu import work
from benchmarks.gpu.plan import NEW, PROMPT, SAMPLES, SHAPES, config_of, load_results
from benchmarks.gpu.plan import RESULTS as PLANNED
from legato.capacity.hardware import find_hardware
from legato.capacity.model import build_model
from legato.capacity.times import offloaded_bytes
from legato.capacity.work import Pass, active_in_layers, decode_floor, head_weights, pass_over_groups
from legato.core.texts import Texts
from legato.training.memory.shape import Shape
from legato.training.plan import plan

RESULTS = Path(__file__).parents[1] / "results"
STORED = Path(__file__).parents[2] / "src" / "legato" / "capacity" / "measured.json"
NAMES = {"0.6B": "qwen3-0.6b", "1.7B": "qwen3-1.7b"}
DECODED = ("0.6B fixed Legato, shared prompts", "0.6B ragged Legato, shared prompts")
"""The runs of B7 from which decoding is derived: responses of one length, and of the lengths of real ones."""
HOST_CORES = 16
"""Of the machine of "8b-offload" as stored at 833ff49, before results held their cores: the machine that was lent then."""
MIXTURE = "Qwen3-MoE of 1.3 billion weights (24 layers, 32 experts, 4 active)"


def load(name: str) -> dict[str, Any]:
    """The stored results of one file."""
    results: dict[str, Any] = json.loads((RESULTS / name).read_text())
    return results


def dense_shape(name: str) -> Shape:
    """The shape of the benchmarks of this size."""
    sizes = {**work.SHAPES[name], **work.HEADS}
    return Shape.from_config(_Namespace({**sizes, "tie_word_embeddings": True, "model_type": "qwen3"}))


def large_shape() -> Shape:
    return Shape.from_config(
        _Namespace({**load("large.json")["shape"], "tie_word_embeddings": False, "model_type": "qwen3"})
    )


def mixture_shape() -> Shape:
    """The mixture of `benchmarks/routing.py`; its vocabulary is that of the character tokenizer."""
    sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "head_dim": 64}
    sizes |= {"num_key_value_heads": 8, "num_experts": 32, "num_experts_per_tok": 4, "moe_intermediate_size": 512}
    vocabulary = len(work.tokenizer())
    return Shape.from_config(
        _Namespace({**sizes, "vocab_size": vocabulary, "tie_word_embeddings": True, "model_type": "qwen3_moe"})
    )


class _Namespace:
    def __init__(self, values: dict[str, Any]) -> None:
        self.__dict__.update(values)


def stored_texts() -> Texts:
    """The lengths of B4 as texts without content."""
    lengths = work.stored_lengths(tiny=False)
    prompts = torch.tensor(lengths["prompts"])
    responses = torch.tensor(lengths["responses"]).flatten()
    width, each = int(responses.max()), len(lengths["responses"][0])
    return Texts(
        prompts=torch.zeros(len(prompts), int(prompts.max()), dtype=torch.int64),
        prompt_lengths=prompts,
        tokens=torch.zeros(len(responses), width, dtype=torch.int64),
        lengths=responses,
        mask=torch.arange(width) < responses[:, None],
        group=torch.arange(len(prompts)).repeat_interleave(each),
        temperature=torch.ones(len(responses)),
    )


@cache
def pack_sizes(tokens_per_pack: int, seed: int, *, repeated: bool = False) -> list[list[int]]:
    """Tokens of each pack of each update of B4, as the trainer plans them with this seed.

    `repeated`: every row has its own prompt. The trainer plans its packs as if prompts were shared.
    """
    texts = stored_texts()
    updates = plan(texts, updates=work.UPDATES, epochs=1, tokens_per_pack=tokens_per_pack, seed=seed, packing=True)

    def size(rows: torch.Tensor) -> int:
        groups = texts.group[rows] if repeated else texts.group[rows].unique()
        return int(texts.prompt_lengths[groups].sum() + (texts.lengths[rows] - 1).sum())

    return [[size(rows) for rows in update.micro_batches] for update in updates]


def factors() -> dict[str, Any]:
    """Everything that `measured.json` holds."""
    gpu, routed, large = load("gpu.json"), load("routing-gpu.json"), load("large.json")
    parts = gpu["sections"]["B4"]["parts"]
    machine = f"{gpu['machine']['device']}, torch {gpu['machine']['torch']}"

    def entry(value: float, part: str, date: str, file: str = "gpu.json", **more: Any) -> dict[str, Any]:
        # Six digits: enough, and the same on every machine that computes them.
        return {
            "value": float(f"{value:.6g}"),
            "source": f"benchmarks/results/{file}: {part}",
            "date": date[:10],
            "machine": machine,
            **more,
        }

    def scoring(part: dict[str, Any]) -> float:
        return float(part["tflop"]["anchor"] / part["seconds"]["anchor"] / part["ceilings"]["tflops"])

    training, scored = [], []
    for shape in NAMES:
        part = parts[f"{shape} Legato, one pass"]
        where = f"B4, {shape} Legato, one pass"
        weights = _matrix_weights(dense_shape(shape))
        training.append(entry(part["mfu_updates"], where, part["run"], weights=weights))
        scored.append(entry(scoring(part), where, part["run"], weights=weights))
    whole, own = (parts[f"0.6B Legato{name}"] for name in ("", ", fused parts off"))
    small = parts["0.6B Legato, 8k tokens a pack"]
    packs = sum(map(len, pack_sizes(8192, 0)[1:]))
    fixed, ragged = decoding_runs(gpu["sections"]["B7"])
    efficiency, per_layer = _solve_decoding(fixed, ragged, dense_shape("0.6B").layers)
    older, newer = sorted(run["run"][:10] for run in (fixed, ragged))
    both = "B7, 0.6B fixed and ragged Legato, shared prompts" + (f" (runs of {older} and {newer})" if newer > older else "")
    hardware = find_hardware("h200")
    large_floor, large_seconds, large_steps = _decoding_of_large(large, hardware)
    large_share = large_floor / (large_seconds - per_layer * large_shape().layers * large_steps)
    planned = load_results(PLANNED)
    adapted, experts, offloaded = (planned["shapes"][name] for name in ("8b-lora", "mixture", "8b-offload"))
    cores = offloaded.get("host_cores", HOST_CORES)
    adapted_flops = _step_pass("8b-lora").training(frozen=True, recomputed=adapted["checkpointing"])
    adapted_share = adapted_flops / adapted["seconds"]["update"] / hardware.matmul / training[-1]["value"]
    adapted_layers = shape_of("8b-lora").layers
    adapted_decode = adapted["seconds"]["rollouts"] - _decode_seconds(
        "8b-lora", large_share, per_layer * adapted_layers, scored[-1]["value"]
    )
    mixture, mixture_row = mixture_shape(), next(row for row in routed["rows"] if row["bed"] == MIXTURE)
    load_of_mixture = mixture_row["work"]
    mixture_decode = mixture_row["engine"]["without"]["milliseconds"] / 1e3
    mixture_floor = decode_floor(
        mixture,
        2,
        rows=load_of_mixture["prompts"] * load_of_mixture["samples"],
        samples=load_of_mixture["samples"],
        prompt=load_of_mixture["prompt_tokens"],
        response=load_of_mixture["tokens"],
        matmul=hardware.matmul,
        bandwidth=hardware.bandwidth,
    )
    sparse_layer = (mixture_decode - mixture_floor / efficiency) / (mixture.layers * load_of_mixture["tokens"])
    # That file holds no date: the day on which it was committed.
    routed_date = "2026-11-15"
    return {
        "factors": {
            "training_efficiency": training,
            "scoring_efficiency": scored,
            "mixture_efficiency": entry(
                _share_of_experts(experts, hardware, training[-1]["value"]),
                "mixture, updates without optimizer and head",
                _date(planned, experts),
                "plan.json",
            ),
            "adapters": entry(
                adapted_share, "8b-lora, updates, over B4 of gpu.json at 1.7B", _date(planned, adapted), "plan.json"
            ),
            "own_layers": entry(
                own["mfu_updates"] / whole["mfu_updates"], "B4, 0.6B Legato, fused parts off, over 0.6B Legato", own["run"]
            ),
            "host_seconds_per_layer": entry(
                small["seconds"]["anchor"] / packs / dense_shape("0.6B").layers,
                f"B4, 0.6B Legato, 8k tokens a pack, old log-probs of {packs} packs",
                small["run"],
            ),
            "decode_efficiency": [
                entry(
                    efficiency,
                    both,
                    older,
                    weights=_matrix_weights(dense_shape("0.6B")),
                ),
                entry(large_share, "sampling only", large["date"], "large.json", weights=_matrix_weights(large_shape())),
            ],
            "decode_seconds_per_layer": entry(per_layer, both, older),
            "decode_seconds_per_sparse_layer": entry(
                sparse_layer, f"{MIXTURE}, engine, without", routed_date, "routing-gpu.json"
            ),
            "decode_seconds_per_adapted_layer": entry(
                adapted_decode / (adapted_layers * NEW),
                "8b-lora, sampling, less the time of the same layers without adapters",
                _date(planned, adapted),
                "plan.json",
            ),
            "host_bytes_per_second": entry(
                _host_speed(offloaded, hardware, training[-1]["value"]),
                f"8b-offload, updates without products and PCIe, {cores} cores",
                _date(planned, offloaded),
                "plan.json",
                cores=cores,
            ),
        },
        "results": [*_results(gpu, large, machine), *planned_results(planned)],
    }


def _matrix_weights(shape: Shape) -> int:
    return active_in_layers(shape) + head_weights(shape)


def shape_of(name: str) -> Shape:
    """The shape of a case of `benchmarks/gpu/plan.py`."""
    case = SHAPES[name]
    return build_model(case.model, case.model, config_of(case, tiny=False)).shape


def _step_pass(name: str) -> Pass:
    """A forward over all rows of a step of a case."""
    return pass_over_groups(shape_of(name), SHAPES[name].prompts, PROMPT, SAMPLES, NEW)


def _date(stored: dict[str, Any], result: dict[str, Any]) -> str:
    return str(result.get("date", stored["date"]))


def _decode_seconds(name: str, efficiency: float, per_step: float, scoring: float) -> float:
    """Seconds in which a case would be sampled without adapters."""
    shape, hardware, prompts = shape_of(name), find_hardware("h200"), SHAPES[name].prompts
    floor = decode_floor(
        shape,
        2,
        rows=prompts * SAMPLES,
        samples=SAMPLES,
        prompt=PROMPT,
        response=NEW,
        matmul=hardware.matmul,
        bandwidth=hardware.bandwidth,
    )
    prefill = pass_over_groups(shape, prompts, PROMPT, 0, NEW).forward / (scoring * hardware.matmul)
    return prefill + floor / efficiency + NEW * per_step


def _share_of_experts(result: dict[str, Any], hardware: Any, dense: float) -> float:
    """The share of the speed of large products that the layers of the measured mixture reach in an update."""
    step = _step_pass("mixture")
    # Gradient twice, masters and moments read and written, and the copy into 16-bit weights: `capacity/times.py`.
    optimizer = SHAPES["mixture"].updates * 38 * result["parameters"] / hardware.bandwidth
    head = 3 * step.head / (dense * hardware.matmul)
    layers = step.training(frozen=False, recomputed=False) - 3 * step.head
    return float(layers / (result["seconds"]["update"] - optimizer - head) / hardware.matmul)


def _host_speed(result: dict[str, Any], hardware: Any, dense: float) -> float:
    """Bytes of host memory a second that the offloaded optimizer reads and writes in an update."""
    products = _step_pass("8b-offload").training(frozen=False, recomputed=result["checkpointing"]) / (
        dense * hardware.matmul
    )
    each = (result["seconds"]["update"] - products) / SHAPES["8b-offload"].updates
    link, on_host = (result["trained"] * size for size in offloaded_bytes(2))
    return float(on_host / (each - link / hardware.pcie))


def decoding_runs(section: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The newest runs of equal and of ragged lengths that were measured within a day of each other.

    Two unknowns are solved from their times, so that both must be of the same code: decoding changes from day to day.
    """
    stored = [section["parts"], section.get("earlier", {})]
    fixed, ragged = ([each[name] for each in stored if name in each] for name in DECODED)
    pairs = [(one, other) for one in fixed for other in ragged if abs(_time(one) - _time(other)) <= timedelta(days=1)]
    if not pairs:
        runs = ", ".join(run["run"] for run in fixed + ragged)
        raise ValueError(
            f"expected equal and ragged lengths measured within a day, got runs of {runs} (B7); measure both again"
        )
    return max(pairs, key=lambda pair: min(map(_time, pair)))


def _time(run: dict[str, Any]) -> datetime:
    return datetime.strptime(run["run"], "%Y-%m-%d %H:%M")


def _solve_decoding(fixed: dict[str, Any], ragged: dict[str, Any], layers: int) -> tuple[float, float]:
    """(efficiency, seconds per layer and step) with which roofline / efficiency + steps x layers x seconds is both times.

    Rows of equal length fill every step; of ragged lengths few rows are left in the last steps, so that the two runs have
    about the same roofline in different numbers of steps.
    """
    first, second = (float(run["floor_seconds"]) for run in (fixed, ragged))
    steps = [run["steps"] * layers for run in (fixed, ragged)]
    # first x + steps[0] c = seconds of fixed; second x + steps[1] c = seconds of ragged
    determinant = first * steps[1] - second * steps[0]
    x = (fixed["seconds"] * steps[1] - ragged["seconds"] * steps[0]) / determinant
    c = (first * ragged["seconds"] - second * fixed["seconds"]) / determinant
    if x < 1 or c < 0:
        raise ValueError(
            f"expected times that the roofline and a time per layer explain, got {1 / x:.0%} of the roofline and {c:.2g} s"
            f" (B7, runs of {fixed['run']} and {ragged['run']}); measure both again in one command"
        )
    return 1 / x, c


def _decoding_of_large(large: dict[str, Any], hardware: Any) -> tuple[float, float, int]:
    """(roofline seconds, measured seconds, steps) of the 8B shape that only samples."""
    each = large["load"]
    rows = each["prompts"] * each["samples"]
    floor = decode_floor(
        large_shape(),
        2,
        rows=rows,
        samples=each["samples"],
        prompt=each["prompt_tokens"],
        response=each["new_tokens"],
        matmul=hardware.matmul,
        bandwidth=hardware.bandwidth,
    )
    return floor, rows * each["new_tokens"] / large["sampling only"]["tokens_per_second"], each["new_tokens"]


def _results(gpu: dict[str, Any], large: dict[str, Any], machine: str) -> Iterator[dict[str, Any]]:
    """Yield stored results of shipped shapes, each with its load in words."""
    step = gpu["sections"]["B8"]["parts"]["Legato"]
    common = {"machine": machine, "source": "benchmarks/results/gpu.json: B8, Legato", "date": step["run"][:10]}
    load_words = "32 prompts x 8, prompts of 256 tokens, 512 new tokens, 4 updates, packs of 16k tokens"
    phases = {"rollouts": "sampling", "anchor": "old log-probs", "update": "updates", "step": "whole step"}
    for key, what in phases.items():
        yield {
            "model": "qwen3-0.6b",
            "what": what,
            "value": round(step["seconds"][key], 3),
            "unit": "s",
            "load": load_words,
            **common,
        }
    yield {
        "model": "qwen3-0.6b",
        "what": "peak memory",
        "value": round(step["peak_gib"], 2),
        "unit": "GiB",
        "load": load_words,
        **common,
    }
    for shape, name in NAMES.items():
        part = gpu["sections"]["B4"]["parts"][f"{shape} Legato, one pass"]
        where = {
            "machine": machine,
            "source": f"benchmarks/results/gpu.json: B4, {shape} Legato, one pass",
            "date": part["run"][:10],
            "load": "32 prompts x 8 fixed responses of 405 tokens on average, 4 updates, packs of 16k tokens, no rollouts",
        }
        yield {"model": name, "what": "old log-probs", "value": round(part["seconds"]["anchor"], 3), "unit": "s", **where}
        yield {"model": name, "what": "updates", "value": round(part["seconds"]["update"], 3), "unit": "s", **where}
        yield {"model": name, "what": "peak memory", "value": round(part["peak_gib"], 2), "unit": "GiB", **where}
    yield {
        "model": "qwen3-8b",
        "what": "decoding",
        "value": round(large["sampling only"]["tokens_per_second"]),
        "unit": "tokens/s",
        "load": "32 prompts x 8, prompts of 256 tokens, 512 new tokens, nothing trained",
        "machine": f"{large['machine']}, torch {large['torch']}",
        "source": "benchmarks/results/large.json: sampling only",
        "date": large["date"],
    }


def planned_results(stored: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yield what `benchmarks/gpu/plan.py` has measured of shipped shapes: peak, step and tokens a second."""
    for name, result in stored["shapes"].items():
        case = SHAPES[name]
        if "peak_gib" not in result or case.layers is not None:
            continue
        common = {
            "load": f"{case.title}: {case.prompts} prompts x {SAMPLES}, prompts of {PROMPT} tokens, {NEW} new tokens,"
            f" {case.updates} updates, packs of {case.tokens_per_pack // 1024}k tokens",
            "machine": f"{stored['machine']['device']}, torch {stored['machine']['torch']}",
            "source": f"benchmarks/results/plan.json: {name}",
            "date": result.get("date", stored["date"]),
        }
        for what, value, unit in (
            ("peak memory", round(result["peak_gib"], 2), "GiB"),
            ("whole step", round(result["seconds"]["step"], 3), "s"),
            ("whole step", round(result["tokens_per_second"]), "tokens/s"),
        ):
            yield {"model": case.model, "what": what, "value": value, "unit": unit, **common}


def main() -> None:
    STORED.write_text(json.dumps(factors(), indent=1) + "\n")
    print(f"wrote {STORED}")


if __name__ == "__main__":
    main()
