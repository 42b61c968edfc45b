"""Compare two checkouts on one GPU, alternately: speed, memory and bitwise equality of our side.

    python benchmarks/gpu/same_speed.py --old OLD --new . --repeats 3 --output same-speed.json

Each repeat runs every part once per checkout, each checkout in its own process: B4 (update phase), B7 (decoding), B8
(whole step), B10 (numerics on one path), B11 (peak memory), how often the host waits for the device in one update, and
digests of log-probs and gradients of fixed packs (dense, LoRA, mixture of experts, checkpointed).
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

PARTS = ("packs", "B4", "B7", "B8", "B10", "B11", "waits")


def import_benchmark(old: str, new: str) -> Any:
    """A benchmark module, in its folder or under its old flat name."""
    from importlib import import_module

    try:
        return import_module(f"benchmarks.gpu.{new}")
    except ModuleNotFoundError:
        return import_module(f"benchmarks.{old}")


def measure(parts: list[str], tiny: bool) -> dict[str, Any]:
    """Measure the parts in this process, with the checkout on PYTHONPATH."""
    import torch

    measuring = import_benchmark("gpu_measure", "measure")
    update, decode, step = (import_benchmark(f"gpu_{name}", name) for name in ("update", "decode", "step"))
    numerics, memory = (import_benchmark(f"gpu_{name}", name) for name in ("numerics", "memory"))
    device = torch.device("cpu" if tiny else "cuda")
    bench = measuring.Bench(device=device, tiny=tiny, deadline=time.monotonic() + 3600)
    bench.measure_ceilings()
    results: dict[str, Any] = {}
    for part in parts:
        if part == "packs":
            results[part] = {kind: packs_digest(bench, kind) for kind in ("dense", "lora", "moe", "checkpointed")}
        elif part == "B4":
            seconds = update.our_part("0.6B", "defaults", steps=5)(bench)["seconds"]
            results[part] = {"seconds": seconds["phase"]}
        elif part == "waits":
            results[part] = {"waits": count_waits(bench, update)}
        elif part == "B7":
            results[part] = {"seconds": decode.our_part("0.6B", shared=True, fused=True, uneven=not tiny)(bench)["seconds"]}
        elif part == "B8":
            results[part] = {"seconds": step.our_part(bench)["seconds"]["step"]}
        elif part == "B10":
            same = numerics.numerics_part(bench)
            results[part] = {"same_path": largest_gap(same)}
        elif part == "B11":
            results[part] = {"gib": memory.our_part(bench)["points"][-1][1]}
        print(part, results[part], file=sys.stderr, flush=True)
        getattr(update, "drop", lambda _: None)(bench)
        bench.free()
    return results


def largest_gap(figures: dict[str, Any]) -> float:
    """The largest |s - 1| over all lengths, on the same path."""
    rows = figures.get("lengths", figures)
    rows = rows.values() if isinstance(rows, dict) else rows
    return max(float(row["same path"]["max"]) for row in rows if isinstance(row, dict) and "same path" in row)


def count_waits(bench: Any, update: Any) -> float:
    """How often the host waits for the device in one trainer step, counted by torch's warnings."""
    import torch

    if not bench.cuda:
        return 0.0
    setup = update.ours(bench, "0.6B", 0.0)
    setup.renew()
    setup.trainer.step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            setup.trainer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return float(sum("called a synchronizing" in str(each.message) for each in caught))


def packs_digest(bench: Any, kind: str) -> str:
    """A hash over the log-probs and all gradients of one fixed pack."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    try:
        from legato.policy.model.adapters import Lora
        from legato.policy.model.load import Loading, load_policy, recompute_layers
        from legato.policy.model.tiny import character_tokenizer
    except ModuleNotFoundError:
        from legato.policy.adapters import Lora
        from legato.policy.load import Loading, load_policy, recompute_layers
        from legato.policy.tiny import character_tokenizer
    try:
        from legato.core.texts import Texts
    except ModuleNotFoundError:
        from legato.policy.packs import Texts

    options = {"lora": Lora(rank=8)} if kind == "lora" else {}
    loading = Loading(device=bench.device.type, dtype="bfloat16" if bench.cuda else "float32", **options)
    torch.manual_seed(0)
    policy = load_policy(small_model(bench, moe=kind == "moe"), loading, tokenizer=character_tokenizer())
    if kind == "checkpointed":
        recompute_layers(policy)
    if kind == "lora":
        source = torch.Generator().manual_seed(1)
        for _, weight in sorted(policy.parameters().items()):
            values = torch.randn(weight.shape, generator=source) * 0.02
            weight.data.copy_(values.to(weight))
    for weight in policy.parameters().values():
        weight.grad_dtype = torch.float32
    source = torch.Generator().manual_seed(2)
    lengths = torch.tensor([40, 7, 64, 33, 1, 50])
    rows = [torch.randint(3, policy.vocabulary, (int(length),), generator=source) for length in lengths]
    tokens = pad_sequence(rows, batch_first=True)
    texts = Texts(
        prompts=torch.randint(3, policy.vocabulary, (2, 20), generator=source),
        prompt_lengths=torch.tensor([20, 13]),
        tokens=tokens,
        lengths=lengths,
        mask=torch.arange(tokens.shape[1]) < lengths[:, None],
        group=torch.tensor([0, 0, 0, 1, 1, 1]),
        temperature=torch.ones(6),
    )
    every = torch.arange(6)
    digest = hashlib.sha256(raw(policy.score(texts, every).logprobs))
    accumulate(policy, texts, every)
    for name, weight in sorted(policy.parameters().items()):
        digest.update(name.encode())
        digest.update(b"" if weight.grad is None else raw(weight.grad))
    return digest.hexdigest()[:16]


def raw(tensor: Any) -> bytes:
    import torch

    return bytes(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())


def accumulate(policy: Any, texts: Any, rows: Any) -> None:
    """Accumulate a gradient from coefficients of alternating sign, with the method that this checkout has."""
    import torch

    from legato.core.outcome import Coefficients

    def coefficients(channels: Any) -> Coefficients:
        signs = torch.where(torch.arange(channels.logprobs.shape[1], device=channels.logprobs.device) % 2 == 0, 1e-2, -2e-2)
        return Coefficients(logprobs=signs.to(channels.logprobs.dtype).expand_as(channels.logprobs).contiguous())

    if hasattr(policy, "learn"):
        policy.learn(policy.pack(texts, rows), lambda part, channels: coefficients(channels))
        return
    with policy.accumulate_gradient(texts, rows) as forward:
        for piece in forward.pieces():
            piece.backward(coefficients(piece.channels))


def small_model(bench: Any, *, moe: bool) -> Any:
    """A Qwen3 of four layers with random weights, dense or with experts."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

    common: dict[str, Any] = {
        "vocab_size": 4096,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
        "attn_implementation": "sdpa",
    }
    more = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    config = Qwen3MoeConfig(**common, **more) if moe else Qwen3Config(**common)
    torch.manual_seed(0)
    automatic: Any = AutoModelForCausalLM
    return automatic.from_config(config, dtype=torch.bfloat16 if bench.cuda else torch.float32).to(bench.device).eval()


def run_alternately(
    old: Path, new: Path, repeats: int, parts: list[str], tiny: bool, after: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Run every repeat of both checkouts; the order alternates. `after` receives all results after each repeat."""
    runs: dict[str, list[dict[str, Any]]] = {"old": [], "new": []}
    for repeat in range(repeats):
        sides = [("old", old), ("new", new)]
        for side, folder in sides if repeat % 2 == 0 else sides[::-1]:
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join([str(folder), str(folder / "src"), os.environ.get("PYTHONPATH", "")]),
            }
            command = [sys.executable, str(Path(__file__).resolve()), "--measure", *parts, *(["--tiny"] if tiny else [])]
            done = subprocess.run(command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True)
            if done.returncode:
                raise SystemExit(f"{side}: exit {done.returncode}\n{done.stdout[-2000:]}")
            runs[side].append(json.loads(done.stdout.splitlines()[-1]))
            print(f"repeat {repeat} {side} done", file=sys.stderr, flush=True)
        after(runs)
    return runs


def table(runs: dict[str, list[dict[str, Any]]], parts: list[str]) -> list[dict[str, Any]]:
    """Medians of both sides and their ratio, part by part."""
    rows: list[dict[str, Any]] = []
    for part in parts:
        for key in runs["old"][0][part]:
            old, new = ([run[part][key] for run in runs[side]] for side in ("old", "new"))
            row: dict[str, Any] = {"part": part, "key": key, "old": old, "new": new}
            if part == "packs":
                row["equal"] = len({*old, *new}) == 1
            else:
                first, second = statistics.median(old), statistics.median(new)
                row |= {"old_median": first, "new_median": second, "ratio": second / first if first else None}
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--old", type=Path)
    parser.add_argument("--new", type=Path, default=Path("."))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", nargs="+", default=list(PARTS))
    parser.add_argument("--output", type=Path)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--measure", nargs="+", metavar="PART")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps(measure(options.measure, options.tiny)))
        return

    def save(runs: dict[str, Any]) -> None:
        import torch

        rows = table(runs, options.parts)
        for row in rows:
            print({name: value for name, value in row.items() if name not in ("old", "new")}, flush=True)
        if options.output is not None:
            name = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
            record = {"machine": name, "date": time.strftime("%Y-%m-%d"), "repeats": len(runs["old"]), "rows": rows}
            options.output.write_text(json.dumps(record, indent=1) + "\n")

    run_alternately(options.old.resolve(), options.new.resolve(), options.repeats, options.parts, options.tiny, save)


if __name__ == "__main__":
    main()
