"""Decoding of mixtures: experts by grouped kernels beside the model's own layers, in one process.

    PYTHONPATH=src python -m benchmarks.gpu.experts --output experts.json

First the outputs of one mixture are compared on the GPU, then one mixture is timed by graph replay with several tile sizes,
then the whole engine decodes with both. Weights are random, so routers use experts evenly. Stops after --seconds.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from legato.policy.experts.grouped import Grouped, find_grouped, run_grouped
from legato.policy.kernels import experts as kernels
from legato.policy.policy import Policy
from legato.rollouts.engine import Limits, Request
from legato.rollouts.gpu.capture import capture, graph_pool
from legato.rollouts.gpu.engine import GraphedEngine
from legato.rollouts.sampling import Sampling

_COMMON = {"max_position_embeddings": 4096, "eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None}
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "OLMoE-1B-7B": (
        "OlmoeConfig",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_hidden_layers": 16,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
    ),
    "Qwen3-30B-A3B, 6 of 48 layers": (
        "Qwen3MoeConfig",
        {
            "vocab_size": 151936,
            "hidden_size": 2048,
            "moe_intermediate_size": 768,
            "num_hidden_layers": 6,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "norm_topk_prob": True,
        },
    ),
    "gpt-oss-20b, 4 of 24 layers": (
        "GptOssConfig",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_hidden_layers": 4,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
    ),
}
TILES = ((16, 128, 64, 4, 4), (32, 128, 64, 4, 4), (64, 128, 64, 4, 4), (64, 128, 64, 4, 3), (64, 128, 128, 4, 3))
"""Pairs, outputs, step, warps, stages that are tried beside the chosen ones, on the first shape."""


class Words:
    """The part of a tokenizer that an engine needs; no text is read."""

    eos_token_id, pad_token_id, unk_token_id, chat_template = 1, 0, None, None

    def decode(self, tokens: Any, skip_special_tokens: bool = True) -> str:
        return ""

    def batch_decode(self, rows: Any, skip_special_tokens: bool = True) -> list[str]:
        return [""] * len(rows)


def make_model(kind: str, sizes: dict[str, Any]) -> Any:
    import transformers

    config = getattr(transformers, kind)(**_COMMON, **sizes)
    torch.manual_seed(0)
    automatic: Any = transformers.AutoModelForCausalLM
    with torch.device("cuda"):
        model = automatic.from_config(config, dtype=torch.bfloat16).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("bias", "sinks")):
                weight.normal_(std=0.02)
    return model.requires_grad_(False)


def only_output(output: Any) -> Tensor:
    tensor: Tensor = output[0] if isinstance(output, tuple) else output
    return tensor


def compare(block: Any, grouped: Grouped, rows: int, width: int) -> dict[str, float]:
    """Largest difference of a mixture's outputs, over the largest output, and how many rows chose other experts."""
    x = torch.randn(1, rows, width, device="cuda", dtype=torch.bfloat16)
    routes: list[Tensor] = []
    hooks = [
        router.register_forward_hook(lambda module, inputs, output: routes.append(output[2].sort(-1).values))
        for router, _ in grouped.routers
    ]
    with torch.no_grad():
        own = only_output(block(x)).float()
        with run_grouped(grouped):
            new, again = (only_output(block(x)).float() for _ in range(2))
    for hook in hooks:
        hook.remove()
    return {
        "rows": rows,
        "largest_difference": float((new - own).abs().max()),
        "largest_output": float(own.abs().max()),
        "rows_with_other_experts": int((routes[0] != routes[1]).any(-1).sum()),
        "repeats_to_the_bit": bool(torch.equal(new, again)),
    }


def time_graph(call: Callable[[], Any], repeats: int = 30) -> float:
    """Microseconds of a call by graph replay."""
    graph = capture(call, graph_pool())
    graph.replay()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(repeats):
        graph.replay()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / repeats * 1e6


def time_blocks(blocks: list[tuple[Any, Grouped]], rows: int, width: int, *, with_own: bool = True) -> dict[str, Any]:
    """Microseconds of one mixture, own layers and grouped. All layers run in turn, so that no weight is in the L2 cache."""
    x = torch.randn(1, rows, width, device="cuda", dtype=torch.bfloat16)

    def own() -> None:
        for block, _ in blocks:
            block(x)

    def replaced() -> None:
        for block, grouped in blocks:
            with run_grouped(grouped):
                block(x)

    measured: dict[str, Any] = {"rows": rows}
    with torch.no_grad():
        measured["grouped"] = time_graph(replaced) / len(blocks)
        if with_own:
            measured["own"] = time_graph(own) / len(blocks)
    experts: Any = blocks[0][1].experts[0]
    size = sum(weight.numel() * weight.element_size() for weight in (experts.gate_up_proj, experts.down_proj))
    return measured | {"weight_bytes": size, "terabytes_per_second": size / measured["grouped"] / 1e6}


def try_tiles(blocks: list[tuple[Any, Grouped]], rows: int, width: int, until: float) -> dict[str, float]:
    """Microseconds of one mixture by tile sizes."""
    chosen, measured = kernels.Tiles.choose, {}
    try:
        for sizes in TILES:
            if time.perf_counter() > until:
                break
            pairs, outputs, step, warps, stages = sizes
            tiles = kernels.Tiles(pairs=pairs, outputs=outputs, step=step, warps=warps, stages=stages)
            kernels.Tiles.choose = classmethod(lambda cls, *_, tiles=tiles: tiles)  # type: ignore
            measured[" ".join(map(str, sizes))] = time_blocks(blocks, rows, width, with_own=False)["grouped"]
    finally:
        kernels.Tiles.choose = chosen  # type: ignore[method-assign]
    return measured


def decode(policy: Policy, rows: int, prompt: int, new: int, *, grouped: bool, fused: bool = True) -> dict[str, Any]:
    """Tokens a second of the engine: 8 responses to a prompt. The first call captures, the second counts."""
    engine = GraphedEngine(policy, rows, grouped=grouped, fused=fused)
    vocabulary, seconds = policy.vocabulary, []
    limits = Limits(max_response_tokens=new, end_tokens=(vocabulary,))
    for repeat in range(2):
        source = torch.Generator().manual_seed(repeat)
        prompts = torch.randint(3, vocabulary, (rows // 8, prompt), generator=source)
        requests = [Request(prompt=text, seeds=tuple(range(8 * n, 8 * n + 8))) for n, text in enumerate(prompts)]
        torch.cuda.synchronize()
        start = time.perf_counter()
        responses = engine.generate(requests, Sampling(), limits)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
        assert sum(len(one.tokens) for row in responses for one in row) == rows * new
    engine.forget()
    return {"grouped": grouped, "fused": engine.fused, "seconds": seconds[1], "tokens_per_second": rows * new / seconds[1]}


def measure(name: str, options: argparse.Namespace, start: float, result: dict[str, Any]) -> None:
    """Fill `result`, so that what was measured before an error stays."""
    kind, sizes = SHAPES[name]
    model = make_model(kind, sizes)
    layers, width = model.get_decoder().layers, sizes["hidden_size"]
    blocks = []
    for layer in layers:
        grouped = find_grouped(layer.mlp)
        assert isinstance(grouped, Grouped), grouped
        blocks.append((layer.mlp, grouped))
    result["checks"] = [compare(*blocks[0], rows, width) for rows in (1, 7, options.rows)]
    print(name, json.dumps(result["checks"]), flush=True)
    result["mixture_microseconds"] = [time_blocks(blocks, rows, width) for rows in (8, options.rows)]
    print("  one mixture:", json.dumps(result["mixture_microseconds"]), flush=True)
    if name == next(iter(SHAPES)):
        result["tiles"] = try_tiles(blocks, options.rows, width, start + options.seconds / 3)
        print("  tiles:", json.dumps(result["tiles"]), flush=True)
    policy = Policy(model=model, tokenizer=Words(), name=name)  # type: ignore[arg-type]
    result["decode"] = []
    sides = [(False, True), (True, True)]
    if find_plain(policy):
        sides.insert(0, (False, False))
    for grouped_side, fused in sides:
        if time.perf_counter() - start > options.seconds:
            print("  time is up", flush=True)
            break
        measured = decode(policy, options.rows, options.prompt, options.new, grouped=grouped_side, fused=fused)
        result["decode"].append(measured)
        print("  decode:", json.dumps(measured), flush=True)


def find_plain(policy: Policy) -> bool:
    """Whether the body also runs through fused parts, so that its own layers are a side of their own."""
    from legato.policy.layers.fused import why_not

    return why_not(policy.body.get_decoder()) is None


def table(results: dict[str, Any]) -> str:
    lines = ["| shape | layers | experts | tok/s | beside the first |", "|---|---|---|---|---|"]
    for name, result in results.items():
        for side in result.get("decode", []):
            rate, first = side["tokens_per_second"], result["decode"][0]["tokens_per_second"]
            body, experts = ("fused" if side["fused"] else "own"), ("grouped" if side["grouped"] else "own")
            lines.append(f"| {name} | {body} | {experts} | {rate:,.0f} | {rate / first:.2f}x |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--prompt", type=int, default=256)
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--seconds", type=float, default=55.0, help="no new part starts after this")
    options = parser.parse_args()
    start, results = time.perf_counter(), dict[str, Any]()
    machine = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "time": time.strftime("%Y-%m-%d %H:%M")}
    for name in SHAPES:
        if time.perf_counter() - start > options.seconds:
            break
        results[name] = {}
        try:
            measure(name, options, start, results[name])
        except Exception as error:  # the other shapes are measured all the same
            import traceback

            traceback.print_exc()
            results[name]["error"] = f"{type(error).__name__}: {str(error)[:300]}"
        torch.cuda.empty_cache()
        shape = {key: getattr(options, key) for key in ("rows", "prompt", "new")}
        options.output.write_text(json.dumps({"machine": machine, **shape, "shapes": results}, indent=1) + "\n")
    print(table(results), f"\n{time.perf_counter() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
