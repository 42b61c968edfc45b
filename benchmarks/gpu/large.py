"""A dense 8B model in bf16 through the product's own path: is it accepted by the self-check, and how fast does it decode?

    python -m benchmarks.gpu.large --output benchmarks/results/large.json

The weights are random. Nothing is trained, so that the engine keeps no memory back for an optimizer.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from legato.policy.model.load import Loading, load_policy
from legato.policy.model.tiny import character_tokenizer
from legato.rollouts.engine import Limits, Request
from legato.rollouts.local.select import local_engine
from legato.rollouts.sampling import Sampling
from legato.training.memory.training_bytes import training_bytes

SHAPE = {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "num_hidden_layers": 36,
    "vocab_size": 151936,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
}
PROMPTS, SAMPLES, PROMPT, NEW = 32, 8, 256, 512


def make_model() -> Any:
    from transformers import AutoModelForCausalLM, Qwen3Config

    config: Any = Qwen3Config(
        **SHAPE,
        max_position_embeddings=8192,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    torch.manual_seed(0)
    auto_class: Any = AutoModelForCausalLM
    with torch.device("cuda"):
        model = auto_class.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(4.0)
    return model.eval()


def measure(repeats: int) -> Iterator[dict[str, Any]]:
    """Yield the results so far after each part: the last part decodes few rows at a time and takes long."""
    start = time.perf_counter()
    policy = load_policy(make_model(), Loading(device="cuda", dtype="bfloat16"), tokenizer=character_tokenizer())
    results: dict[str, Any] = {"load_and_check_seconds": time.perf_counter() - start, "packing": policy.packing}
    for name, reserved in {
        "sampling only": 0,
        "before full training": training_bytes(policy.parameters(), eight_bit=False, offload=False),
    }.items():
        engine = local_engine(policy, PROMPTS * SAMPLES, training_bytes=reserved)
        new = 64 if reserved else NEW
        limits = Limits(max_response_tokens=new, end_tokens=(policy.vocabulary,))
        source = torch.Generator().manual_seed(0)
        rates = []
        try:
            for _ in range(repeats + 1):
                prompts = torch.randint(3, policy.vocabulary, (PROMPTS, PROMPT), generator=source)
                requests = [
                    Request(prompt=prompt, seeds=tuple(range(n * SAMPLES, (n + 1) * SAMPLES)))
                    for n, prompt in enumerate(prompts)
                ]
                torch.cuda.synchronize()
                began = time.perf_counter()
                engine.generate(requests, Sampling(), limits)
                torch.cuda.synchronize()
                rates.append(PROMPTS * SAMPLES * new / (time.perf_counter() - began))
                if reserved:
                    break  # a few rows at a time: one repeat is enough to show the order of magnitude
            results[name] = {
                "reserved_bytes": reserved,
                "rows_at_once": getattr(engine, "rows_at_once", None),
                "slots": getattr(getattr(getattr(engine, "store", None), "room", None), "slots", None),
                "tokens_per_second": sorted(rates[1:] or rates)[len(rates[1:] or rates) // 2],
                "first_call": rates[0],
            }
        except Exception as error:
            results[name] = {"reserved_bytes": reserved, "error": f"{type(error).__name__}: {error}"[:400]}
        del engine
        torch.cuda.empty_cache()
        results["notes"] = list(policy.notes)
        results["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        yield results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    facts = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
        "shape": SHAPE,
        "load": {"prompts": PROMPTS, "samples": SAMPLES, "prompt_tokens": PROMPT, "new_tokens": NEW},
    }
    for results in measure(arguments.repeats):
        print(json.dumps(results, indent=1), flush=True)
        arguments.output.write_text(json.dumps({**facts, **results}, indent=1) + "\n")


if __name__ == "__main__":
    main()
