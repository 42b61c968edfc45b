"""vLLM's side of B12: python vllm_side.py WORK.json RESULT.json, in an environment that has vLLM and not Legato.

WORK.json holds the sizes of a Qwen3 shape, the folder its weights go to, and works: lists of prompts with the number of
samples, the length of the response and the temperature, one list for the warm-up and one for each repeat. Every work runs
without log-probs and with the sampled token's. RESULT.json is written after every measurement.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")  # the engine in this process: vLLM's faster way here
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
os.environ.setdefault("VLLM_USE_DEEP_GEMM", "0")
os.environ.setdefault("VLLM_CACHE_ROOT", str(Path(tempfile.gettempdir()) / "vllm_cache"))
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
WAYS: dict[str, dict[str, Any]] = {"with log-probs": {"logprobs": 0}, "without log-probs": {}}
ROWS = 256
MOST_TOKENS = 2304
SHARE = 0.6


def save_model(sizes: dict[str, int], folder: Path) -> None:
    """The folder that vLLM loads: random weights, the last norm scaled as in `work.make_model`."""
    import torch
    from transformers import AutoModelForCausalLM, Qwen3Config

    config = Qwen3Config(
        **sizes, max_position_embeddings=8192, tie_word_embeddings=True, eos_token_id=1, pad_token_id=0, bos_token_id=None
    )
    torch.manual_seed(0)
    automatic: Any = AutoModelForCausalLM
    with torch.device("cuda"):
        model = automatic.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(4.0)
    model.to("cpu").save_pretrained(folder)
    del model
    torch.cuda.empty_cache()


def load_engine(folder: Path) -> Any:
    from vllm import LLM  # type: ignore[import-not-found,unused-ignore]

    return LLM(
        model=str(folder),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        generation_config="vllm",
        max_model_len=MOST_TOKENS,
        max_num_seqs=ROWS,
        gpu_memory_utilization=SHARE,
        enable_prefix_caching=True,
        attention_backend="FLASH_ATTN",
        seed=0,
        disable_log_stats=True,
    )


def run(engine: Any, requests: list[dict[str, Any]], options: dict[str, Any]) -> tuple[int, float]:
    """Tokens sampled and seconds of one call."""
    from vllm import SamplingParams  # type: ignore[import-not-found,unused-ignore]

    prompts = [{"prompt_token_ids": request["prompt"]} for request in requests]
    parameters = [
        SamplingParams(
            n=request["samples"],
            max_tokens=request["tokens"],
            temperature=request["temperature"],
            ignore_eos=True,
            detokenize=False,
            **options,
        )
        for request in requests
    ]
    started = time.perf_counter()
    answers = engine.generate(prompts, parameters, use_tqdm=False)
    seconds = time.perf_counter() - started
    samples = [sample for answer in answers for sample in answer.outputs]
    wanted = sum(request["samples"] * request["tokens"] for request in requests)
    tokens = sum(len(sample.token_ids) for sample in samples)
    if tokens != wanted:
        raise RuntimeError(f"expected {wanted} tokens, got {tokens}")
    if options and len(samples[0].logprobs) != len(samples[0].token_ids):
        raise RuntimeError(f"expected a log-prob for every token, got {len(samples[0].logprobs)}")
    return tokens, seconds


def main() -> None:
    work, result_path = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    folder = Path(work["folder"])
    begun = time.perf_counter()
    save_model(work["sizes"], folder)
    saved = time.perf_counter()
    engine = load_engine(folder)
    import vllm  # type: ignore[import-not-found,unused-ignore]

    result: dict[str, Any] = {
        "version": vllm.__version__,
        "start_seconds": time.perf_counter() - saved,
        "save_seconds": saved - begun,
        "settings": f"FlashAttention, CUDA graphs and compilation as by default, prefix caching, {ROWS} sequences at once,"
        f" {SHARE} of the memory, the engine in the caller's process",
        "works": {},
    }
    for name, repeats in work["works"].items():
        for way, options in WAYS.items():
            times, tokens = [], 0
            for requests in repeats:
                tokens, seconds = run(engine, requests, options)
                times.append(seconds)
            result["works"][f"{name} {way}"] = {"tokens": tokens, "first_seconds": times[0], "samples": times[1:]}
            result_path.write_text(json.dumps(result))
            print(f"{name} {way}: {tokens / min(times[1:]):,.0f} tokens/s", flush=True)


if __name__ == "__main__":
    main()
