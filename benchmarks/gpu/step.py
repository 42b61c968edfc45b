"""B8: the whole step of the 0.6B shape, beside TRL: 32 prompts x 8, prompts of 256 tokens, 512 new tokens, 4 updates.

TRL decodes with `generate` of transformers. vLLM was not installed on the machine and is not measured.
"""

import random
import statistics
import time
from typing import Any

from benchmarks.gpu import decode as gpu_decode
from benchmarks.gpu import trl as gpu_trl
from benchmarks.gpu import update as gpu_update
from benchmarks.gpu import work as work
from benchmarks.gpu.measure import Bench, Part
from legato.policy.model.tiny import ALPHABET
from legato.rollouts.engine import Limits
from legato.rollouts.local.select import local_engine


def draw_prompts(bench: Bench) -> list[str]:
    """Random prompts of one length, one character per token."""
    count, _, length, _ = gpu_decode.sizes(bench)
    source = random.Random("step")
    return ["".join(source.choice(ALPHABET) for _ in range(length)) for _ in range(max(count, work.UPDATES))]


def step_work(bench: Bench) -> work.Work:
    ids = work.tokenizer()(draw_prompts(bench))["input_ids"]
    samples = gpu_decode.sizes(bench)[1]
    return work.Work(
        prompts=tuple(map(tuple, ids)),
        responses=tuple(((3,),) * samples for _ in ids),
        rewards=work.reward_table(len(ids), samples, 0.0),
    )


def our_part(exact: str) -> Part:
    """Our trainer on its defaults, with the engine that it chooses on this machine; `exact` as in `rollouts.exact`."""

    def part(bench: Bench) -> dict[str, Any]:
        gpu_update.drop(bench)
        workload, new = step_work(bench), gpu_decode.sizes(bench)[3]
        before, memory = bench.held_bytes(), dict[str, Any]()
        with bench.peak(memory, before):
            policy = work.make_policy(bench, "0.6B")
            trainer = gpu_update.fixed_trainer(policy, workload, [])
            trainer.settings = gpu_update.replace(trainer.settings, anchor="auto")
            trainer.anchor_choice = None
            rows = len(workload.prompts) * len(workload.rewards[0])
            trainer.source.runner.engine = local_engine(policy, rows, exact=exact)
            trainer.source.runner.limits = Limits(max_response_tokens=new, end_tokens=(policy.vocabulary,))
            samples, floor = [], None
            for number in range(2 if bench.tiny else 4):
                bench.wait()
                started = time.perf_counter()
                report = trainer.step()
                bench.wait()
                whole = time.perf_counter() - started
                floor = report.floor or floor
                if number:
                    times = {name: report.metrics[f"time/{name}_seconds"] for name in ("rollouts", "anchor", "update")}
                    samples.append({"step": whole, **times, "clipped": report.metrics.get("clip/sequences", 0.0)})
        return {
            "side": "Legato" if exact == "off" else "Legato, exact engine",
            **memory,
            **summary(samples, rows * new),
            "anchor": trainer.anchor_choice,
            "noise": None if floor is None else floor.metrics(),
            "engine": type(trainer.source.runner.engine).__name__,
            "notes": list(policy.notes),
            "weight_sync_seconds": _sync_seconds(trainer),
        }

    return part


def _sync_seconds(trainer: Any) -> float | None:
    """0.0 if the engine samples from the trained tensors themselves, so that there is no copy to time; otherwise None."""
    trained = {weight.data_ptr() for weight in trainer.policy.parameters().values()}
    sampled = {weight.data_ptr() for weight in trainer.source.runner.engine.policy.model.parameters()}
    return 0.0 if trained <= sampled else None


def summary(samples: list[dict[str, float]], tokens: int) -> dict[str, Any]:
    seconds = {name: statistics.median(sample[name] for sample in samples) for name in samples[0]}
    return {"samples": samples, "seconds": seconds, "tokens": tokens, "tokens_per_second": tokens / seconds["step"]}


def trl_part(*, strong: bool) -> Part:
    def part(bench: Bench) -> dict[str, Any]:
        gpu_update.drop(bench)
        workload, new = step_work(bench), gpu_decode.sizes(bench)[3]
        steps = 1 if bench.tiny else 2
        result = gpu_trl.train_largest_fitting(
            bench, "0.6B", workload, strong=strong, steps=steps, prompts=draw_prompts(bench), tokens=new, micro=64
        )
        rows = len(workload.prompts) * len(workload.rewards[0])
        side = f"TRL {'strong' if strong else 'defaults'}, `generate`"
        return {"side": side, **result, **summary(result["samples"], rows * new)}

    return part


B8: dict[str, Part] = {
    "Legato": our_part("off"),
    "Legato exact": our_part("on"),
    "TRL strong": trl_part(strong=True),
    "TRL defaults": trl_part(strong=False),
}
