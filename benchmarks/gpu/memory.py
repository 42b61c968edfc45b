"""B11: peak memory by micro-batch tokens for the 1.7B shape, and how many tokens fit into 80 and 139 GiB.

A few sizes are measured and a straight line is fitted to them. The largest sizes are extrapolated, not tried.
"""

import tempfile
import warnings
from typing import Any

import torch

from benchmarks.gpu import saved as gpu_saved
from benchmarks.gpu import trl as gpu_trl
from benchmarks.gpu import update as gpu_update
from benchmarks.gpu import work as work
from benchmarks.gpu.measure import GIB, Bench, Part

SHAPE = "1.7B"
ROOM = (80.0, 139.0)
PROMPT, RESPONSE, GROUP = 256, 1024, 8


def fit_line(points: list[tuple[int, float]]) -> dict[str, Any]:
    """Fit GiB = base + slope x tokens by least squares; `fits_tokens` says how many tokens fit into each memory size."""
    xs, ys = [float(x) for x, _ in points], [y for _, y in points]
    centre, level = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((x - centre) ** 2 for x in xs)
    slope = sum((x - centre) * (y - level) for x, y in points) / spread if spread else 0.0
    base = level - slope * centre
    fits = {f"{room:g}": (room - base) / slope if slope > 0 else None for room in ROOM}
    return {"points": points, "base_gib": base, "gib_per_thousand_tokens": 1000 * slope, "fits_tokens": fits}


def our_part(bench: Bench) -> dict[str, Any]:
    """Peak memory of one pack of several sizes, with gradients and optimizer state in memory."""
    gpu_update.drop(bench)
    before = bench.held_bytes()
    policy = work.make_policy(bench, SHAPE)
    workload = work.fixed_work(bench.tiny)
    trainer = gpu_update.fixed_trainer(policy, workload, [])
    # A step with gradients of 0 allocates the moments and moves no weight.
    trainer.optimizer.step()
    prompt, response, group = (16, 64, 2) if bench.tiny else (PROMPT, RESPONSE, GROUP)
    points = []
    for rows in (2, 4) if bench.tiny else (8, 16, 32):
        texts = gpu_saved.make_texts(prompt, response, group, rows, policy.vocabulary, shared=True)
        parts = gpu_saved.cut_micro_batches(texts, 10**9)
        tokens = len(policy.pack(texts, *parts).tokens)
        memory: dict[str, Any] = {}
        with bench.peak(memory, before):
            gpu_saved.accumulate_all(policy, texts, parts)
        points.append((tokens, memory["peak_gib"]))
        bench.free()
    each = points[-1][0] / rows
    return {
        "side": "Legato",
        "static_gib": (bench.held_bytes() - before) / GIB,
        "tokens_per_response": each,
        **fit_line(points),
    }


def trl_part(bench: Bench) -> dict[str, Any]:
    """TRL's loss forward and backward on rows of one length, in the strong setting, with Liger's layers."""
    gpu_update.drop(bench)
    before = bench.held_bytes()
    workload = work.fixed_work(bench.tiny)
    prompt, response = (16, 64) if bench.tiny else (PROMPT, RESPONSE)
    points = []
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(), gpu_trl.restore_layers():
        warnings.simplefilter("ignore")
        trainer = gpu_trl.make_trainer(
            bench, SHAPE, workload, folder, strong=True, micro=4 if bench.tiny else 8, steps=1, liger=bench.cuda
        )
        if bench.cuda:
            from transformers.integrations.liger import apply_liger_kernel

            # TRL's training loop does this before the first step; no loop runs here.
            apply_liger_kernel(trainer.model, trainer.args.liger_kernel_config)
        model = trainer.model.to(bench.device)
        model.train()
        # TRL's training loop sets this before its first step; no loop runs here.
        trainer.current_gradient_accumulation_steps = 1
        trainer.create_optimizer()
        for rows in (1, 2) if bench.tiny else (2, 4, 8):
            memory: dict[str, Any] = {}
            for turn in range(2):
                with bench.peak(memory, before):
                    trainer._compute_loss(model, _inputs(bench, model, rows, prompt, response)).backward()
                if not turn and not points:
                    # The first step allocates the moments.
                    trainer.optimizer.step()
                model.zero_grad()
            points.append((rows * (prompt + response), memory["peak_gib"]))
            bench.free()
    each = prompt + response
    return {
        "side": "TRL strong",
        "static_gib": (bench.held_bytes() - before) / GIB,
        "tokens_per_response": each,
        **fit_line(points),
    }


def _inputs(bench: Bench, model: Any, rows: int, prompt: int, response: int) -> dict[str, Any]:
    def draw_tokens(columns: int) -> torch.Tensor:
        return torch.randint(3, model.config.vocab_size, (rows, columns), device=bench.device)

    ones = torch.ones(rows, prompt + response, dtype=torch.int64, device=bench.device)
    return {
        "prompt_ids": draw_tokens(prompt),
        "prompt_mask": ones[:, :prompt],
        "completion_ids": draw_tokens(response),
        "completion_mask": ones[:, prompt:],
        "advantages": torch.ones(rows, device=bench.device),
        "old_per_token_logps": torch.full((rows, response), -11.0, device=bench.device),
        "num_items_in_batch": torch.tensor(rows * response),
    }


B11: dict[str, Part] = {"Legato": our_part, "TRL strong": trl_part}
