"""Measures what `legato plan` calculates: peak memory, step time and tokens/s of real shapes with random weights.

    python -m benchmarks.gpu.plan                        # on one H200: under 8 minutes; writes benchmarks/results/plan.json
    python -m benchmarks.gpu.plan --shapes 8b-offload    # some shapes; the stored results of the others stay
    python -m benchmarks.gpu.plan --tiny --device cpu --output tiny-plan.json    # toy shapes, for tests

Every shape trains a few whole steps (sampling, old log-probs, updates) in a process of its own, so that one that runs out of
memory or time ends alone. Results are written after each shape. Shapes that were never measured come first. "8b-offload" is
measured only if it is named: it takes 105 GB of host memory, and a machine that runs out of it may take all results along.
"8b-8bit" needs bitsandbytes (`carry.sh` gathers it into .carry/site-packages, which PYTHONPATH must name).
"""

import argparse
import contextlib
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "results" / "plan.json"
PROMPT, NEW, SAMPLES = 256, 512, 8
OF_A_PROCESS = 6_000_000_000
"""Host memory that Python, torch and CUDA take beside an offloaded optimizer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A shape to train and its settings."""

    title: str
    model: str
    """A shipped configuration."""
    layers: int | None = None
    """Only so many of its layers."""
    lora_rank: int = 0
    eight_bit: bool = False
    offload: bool = False
    checkpointing: bool = False
    tokens_per_pack: int = 16384
    prompts: int = 16
    updates: int = 2
    steps: int = 2
    """Measured steps, after one to warm up."""
    warm_up_updates: int | None = None
    """Updates of the step that warms up; None: as many as the others have."""
    seconds: float = 120.0
    """The most time of its process."""


SHAPES: dict[str, Case] = {
    "8b-8bit": Case(
        title="Qwen3-8B, full training, 8-bit optimizer", model="qwen3-8b", eight_bit=True, tokens_per_pack=8192, steps=1
    ),
    "8b-lora": Case(title="Qwen3-8B, LoRA of rank 16", model="qwen3-8b", lora_rank=16, checkpointing=True, steps=1),
    "4b": Case(title="Qwen3-4B, full training", model="qwen3-4b", steps=1),
    "mixture": Case(title="Qwen3-30B-A3B cut to 6 of 48 layers, full training", model="qwen3-30b-a3b", layers=6, steps=1),
    "1.7b": Case(title="Qwen3-1.7B, full training", model="qwen3-1.7b", seconds=80.0),
    "0.6b": Case(title="Qwen3-0.6B, full training", model="qwen3-0.6b", seconds=80.0),
    "8b-offload": Case(
        title="Qwen3-8B, full training, offloaded optimizer",
        model="qwen3-8b",
        offload=True,
        steps=1,
        # An update passes over 100 GB of host memory, whose pages the first one makes.
        warm_up_updates=1,
        seconds=280.0,
    ),
}
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 160}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
TINY_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}


def load_results(path: Path) -> dict[str, Any]:
    """The stored results; without a file, none."""
    if not path.is_file():
        return {"machine": {}, "date": "", "shapes": {}}
    results: dict[str, Any] = json.loads(path.read_text())
    return results


def config_of(case: Case, *, tiny: bool) -> dict[str, Any]:
    """The configuration of a case under the names of transformers."""
    from legato.capacity.model import shipped_record

    config: dict[str, Any] = dict(shipped_record(case.model)["config"])
    if case.layers is not None:
        config["num_hidden_layers"] = case.layers
    if tiny:
        config |= {**TINY, **(TINY_EXPERTS if "num_experts" in config else {})}
    return config


def demand_of_result(name: str, result: dict[str, Any]) -> Any:
    """The memory demand of a measured case, with the pack and the KV cache that the run had."""
    from legato.capacity.memory import LOGITS_AT_ONCE
    from legato.capacity.model import build_model
    from legato.training.memory.model import Demand

    case = SHAPES[name]
    shape = build_model(case.model, case.model, config_of(case, tiny=result["tiny"])).shape
    tokens, mixture = result["pack_tokens"], shape.sparse_layers > 0
    step = case.prompts * SAMPLES * NEW
    return Demand(
        shape=shape,
        size=2,
        tokens_per_pack=tokens,
        parameters=result["parameters"],
        trained=result["trained"],
        adapter_rank=case.lora_rank,
        eight_bit=case.eight_bit,
        offload=case.offload,
        head_tokens=min(tokens, LOGITS_AT_ONCE // shape.vocabulary),
        logit_bytes=2,
        cached_tokens=result["cached_tokens"],
        fused=result["fused"],
        several_packs=result["several_packs"],
        step_cells=step,
        routed=step if mixture else 0,
        routed_per_update=step // case.updates if mixture else 0,
    )


def measure(name: str, *, device: str, tiny: bool) -> dict[str, Any]:
    """Train a few steps of a case in this process; returns its peak, its times and what the peak depends on."""
    import torch

    from benchmarks.gpu import update as gpu_update
    from benchmarks.gpu import work
    from benchmarks.gpu.measure import Bench
    from legato.policy.model.adapters import Lora
    from legato.policy.model.load import Loading, load_policy
    from legato.rollouts.engine import Limits
    from legato.rollouts.local.select import local_engine
    from legato.training.memory.training_bytes import training_bytes
    from legato.training.optimizer import OptimizerSettings

    case, began = SHAPES[name], time.monotonic()
    if tiny:
        case = replace(case, prompts=4, tokens_per_pack=128, eight_bit=False, steps=1)
    bench = Bench(device=torch.device(device), tiny=tiny, deadline=time.monotonic() + case.seconds)
    before = bench.held_bytes()
    loading = Loading(
        device=device,
        dtype="bfloat16" if bench.cuda else "float32",
        lora=Lora(rank=case.lora_rank) if case.lora_rank else None,
        gradient_checkpointing=case.checkpointing,
    )
    policy = load_policy(random_model(config_of(case, tiny=tiny), bench), loading, tokenizer=work.tokenizer())
    settings = OptimizerSettings(
        lr=1e-6, optimizer="adamw-8bit" if case.eight_bit else "adamw", offload_optimizer=case.offload
    )
    workload = _workload(case, tiny=tiny)
    new = 8 if tiny else NEW
    # As in a run, the engine is built before the optimizer and leaves room for it.
    reserved = training_bytes(policy.parameters(), eight_bit=case.eight_bit, offload=case.offload)
    engine = local_engine(policy, case.prompts * SAMPLES, training_bytes=reserved if bench.cuda else 0)
    free = free_host_bytes()
    trainer = gpu_update.fixed_trainer(policy, workload, [], optimizer=settings)
    trainer.settings = replace(
        trainer.settings, updates_per_step=case.updates, tokens_per_pack=case.tokens_per_pack, update_passes="one"
    )
    trainer.source.runner.engine = engine
    trainer.source.runner.limits = Limits(max_response_tokens=new, end_tokens=(policy.vocabulary,))
    samples, memory, packs = [], dict[str, Any](), work.Packs()
    print(f"built after {time.monotonic() - began:.0f} s", flush=True)
    with bench.peak(memory, before), host_peak(memory, free), work.count_packs(packs):
        for number in range(1 + case.steps):
            updates = case.updates if number or case.warm_up_updates is None else case.warm_up_updates
            trainer.settings = replace(trainer.settings, updates_per_step=updates)
            bench.wait()
            started = time.perf_counter()
            report = trainer.step()
            bench.wait()
            step = {"step": time.perf_counter() - started}
            step |= {phase: report.metrics[f"time/{phase}_seconds"] for phase in ("rollouts", "anchor", "update")}
            print(f"step {number}: {', '.join(f'{key} {value:.1f} s' for key, value in step.items())}", flush=True)
            if number:
                samples.append(step)
            else:
                # The first step also probes the noise of the ratio, in packs of its own.
                packs.records.clear()
    seconds = {phase: statistics.median(sample[phase] for sample in samples) for phase in samples[0]}
    learning = [record for record in packs.records if record[-1]]
    room = getattr(getattr(engine, "store", None), "room", None)
    return {
        **memory,
        "seconds": seconds,
        "samples": samples,
        "tokens_per_second": case.prompts * SAMPLES * new / seconds["step"],
        "pack_tokens": max(_tokens(record, shared=policy.shared_prompts) for record in learning),
        "several_packs": len(learning) > case.steps * case.updates,
        "cached_tokens": 0 if room is None else room.tokens,
        "slots": None if room is None else room.slots,
        "checkpointing": case.checkpointing,
        "parameters": sum(weight.numel() for weight in policy.body.parameters())
        - (sum(weight.numel() for weight in policy.parameters().values()) if case.lora_rank else 0),
        "trained": sum(weight.numel() for weight in policy.parameters().values()),
        "fused": policy.trains_fused,
        "tiny": tiny,
        "host_cores": len(os.sched_getaffinity(0)),
        "notes": list(policy.notes),
    }


def free_host_bytes() -> int | None:
    """Host memory that is free or can be freed, pinned memory excluded; None if the system does not tell."""
    try:
        line = next(line for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemAvailable:"))
    except (OSError, StopIteration):
        return None
    return 1024 * int(line.split()[1])


@contextlib.contextmanager
def host_peak(into: dict[str, Any], before: int | None, every: float = 0.05) -> Iterator[None]:
    """Store the most host memory in use beyond the time when `before` was free in `into["host_gib"]`, in GiB.

    That of other processes on the machine counts too. A moment at which the system does not tell is left out; nothing is
    stored if `before` is None.
    """
    if before is None:
        yield
        return
    ended, lowest = threading.Event(), before

    def sample() -> None:
        nonlocal lowest
        free = free_host_bytes()
        if free is not None:
            lowest = min(lowest, free)

    def watch() -> None:
        while not ended.wait(every):
            sample()

    thread = threading.Thread(target=watch, daemon=True)
    sample()
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        into["host_gib"] = (before - lowest) / 2**30


def random_model(config: dict[str, Any], bench: Any) -> Any:
    """A model with random weights, made on the device. The last norm is scaled up, so that texts differ."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in config.items() if key != "model_type"}
    special = {"eos_token_id": 1, "pad_token_id": 0, "bos_token_id": None, "max_position_embeddings": 8192}
    described = AutoConfig.for_model(config["model_type"], **{**values, **special})
    torch.manual_seed(0)
    automatic: Any = AutoModelForCausalLM
    with bench.device:
        model = automatic.from_config(described, dtype=bench.dtype)
    with torch.no_grad():
        model.get_decoder().norm.weight.fill_(4.0)
    return model.eval()


def _workload(case: Case, *, tiny: bool) -> Any:
    """Prompts of one length and a table of rewards; responses come from the engine."""
    from benchmarks.gpu import work

    source, length = random.Random("plan"), 6 if tiny else PROMPT
    ids = tuple(tuple(source.randrange(3, 60) for _ in range(length)) for _ in range(case.prompts))
    return work.Work(
        prompts=ids,
        responses=tuple(((3,),) * SAMPLES for _ in ids),
        rewards=work.reward_table(case.prompts, SAMPLES, 0.0),
    )


def _tokens(record: Any, *, shared: bool) -> int:
    from benchmarks.gpu import work

    _, (prompts, responses, owner), *_ = record
    return work.pack_size(prompts.tolist(), responses.tolist(), owner.tolist(), shared=shared)[0]


def why_not(name: str, *, device: str) -> str | None:
    """Why a case cannot run on this machine; None if it can."""
    case = SHAPES[name]
    if case.eight_bit and device == "cuda" and find_spec("bitsandbytes") is None:
        return "bitsandbytes is not installed"
    if case.offload and device == "cuda":
        import torch

        from legato.capacity.model import build_model
        from legato.training.memory.available import available
        from legato.training.memory.model import Demand

        model = build_model(case.model, case.model, config_of(case, tiny=False))
        demand = Demand(shape=model.shape, size=2, tokens_per_pack=1, parameters=model.parameters, offload=True)
        needed, room = demand.memory(checkpointing=False).host + OF_A_PROCESS, available(torch.device("cpu"))
        if room is not None and needed > room:
            return f"the host has {room / 1e9:.0f} GB, {needed / 1e9:.0f} GB are needed"
    return None


def run_child(name: str, limit: float, options: argparse.Namespace) -> dict[str, Any]:
    """The result of a case, measured in a process of its own that ends after `limit` seconds."""
    with tempfile.TemporaryDirectory() as folder:
        target = Path(folder) / "result.json"
        command = [sys.executable, "-m", "benchmarks.gpu.plan", "--child", name, "--output", str(target)]
        command += ["--device", options.device, *(["--tiny"] if options.tiny else [])]
        with tempfile.TemporaryFile(mode="w+") as log:
            try:
                done = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=limit, check=False)
            except subprocess.TimeoutExpired:
                print("\n".join(_last_lines(log)), flush=True)
                return {"error": f"it took more than {limit:.0f} s"}
            lines = _last_lines(log)
            print("\n".join(lines), flush=True)
            if done.returncode == 0 and target.is_file():
                result: dict[str, Any] = json.loads(target.read_text())
                return result
            last = lines[-1:]
    return {"error": f"exit code {done.returncode}: {' '.join(last)}"[:400]}


def _last_lines(log: Any) -> list[str]:
    log.seek(0)
    return [line for line in log.read().splitlines() if line.strip()][-30:]


def run_all(options: argparse.Namespace) -> None:
    """Measure the wanted shapes and store each result at once."""
    import torch
    import transformers

    deadline = time.monotonic() + options.seconds
    results = load_results(options.output)
    results["date"] = time.strftime("%Y-%m-%d", time.gmtime())
    results["machine"] = {
        "device": torch.cuda.get_device_name() if options.device == "cuda" else "CPU",
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    results["load"] = {"samples": SAMPLES, "prompt_tokens": PROMPT, "new_tokens": NEW}
    for name in options.shapes:
        started, left = time.monotonic(), deadline - time.monotonic()
        reason = "the time of the command is up" if left < 10 else why_not(name, device=options.device)
        result = {"skipped": reason} if reason else run_child(name, min(left, SHAPES[name].seconds), options)
        if "peak_gib" in result or "peak_gib" not in results["shapes"].get(name, {}):
            when = {"date": results["date"], "commit": options.commit}
            results["shapes"][name] = {**result, "title": SHAPES[name].title, **when}
        options.output.parent.mkdir(parents=True, exist_ok=True)
        beside = options.output.with_suffix(".part")
        beside.write_text(json.dumps(results, indent=1) + "\n")
        beside.replace(options.output)
        said = result.get("error") or result.get("skipped") or f"{result['peak_gib']:.1f} GiB"
        print(f"{name}: {said} ({time.monotonic() - started:.0f} s)", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=[name for name in SHAPES if not SHAPES[name].offload])
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--seconds", type=float, default=470.0, help="no shape starts after this many seconds")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", default="", help="stored with the results; the GPU's machine has no history")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--child", choices=SHAPES, help="measure this shape in this process")
    options = parser.parse_args()
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        os.environ.setdefault(name, "1")
    if options.child:
        result = measure(options.child, device=options.device, tiny=options.tiny)
        options.output.write_text(json.dumps(result) + "\n")
        return
    run_all(options)


if __name__ == "__main__":
    main()
