"""B5 and B6, the computation we save: a group's prompt is computed once; rows without a gradient are skipped."""

import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import update as gpu_update
from benchmarks.gpu import work as work
from benchmarks.gpu.measure import Bench, Part
from legato.core.outcome import Coefficients
from legato.core.texts import Texts
from legato.training.plan import micro_batches

RESPONSE, ROWS, TOKENS_PER_PACK = 256, 64, 32768
CLIPPED, SILENT = (0.0, 0.15, 0.3, 0.45), (0.0, 0.3, 0.6)
FAR = 0.05
"""The forced distance of log s from 0: many times the band, so that rounding decides no row."""


def make_texts(prompt: int, response: int, group: int, rows: int, vocabulary: int, *, shared: bool) -> Texts:
    """Random texts of one length. If not `shared`, every row is its own group with its own copy of the prompt."""
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(3, vocabulary, (rows // group, prompt), generator=source)
    tokens = torch.randint(3, vocabulary, (rows, response), generator=source)
    owner = torch.arange(rows) // group
    return Texts(
        prompts=prompts if shared else prompts[owner],
        prompt_lengths=torch.full((len(prompts) if shared else rows,), prompt),
        tokens=tokens,
        lengths=torch.full((rows,), response),
        mask=torch.ones_like(tokens, dtype=torch.bool),
        group=owner if shared else torch.arange(rows),
        temperature=torch.ones(rows),
    )


def cut_micro_batches(texts: Texts, most: int) -> tuple[Tensor, ...]:
    """The rows of each micro-batch, as the trainer cuts an update: whole groups, at most `most` tokens, evenly filled."""
    return micro_batches(texts, texts.group.unique().tolist(), most)


def accumulate_all(policy: Any, texts: Texts, parts: Sequence[Tensor]) -> None:
    """Run forward and backward of every micro-batch with coefficients of alternating sign, then drop the gradient."""
    for rows in parts:
        with policy.accumulate_gradient(texts, rows) as forward:
            for piece in forward.pieces():
                logprobs = piece.channels.logprobs
                signs = torch.where(torch.arange(len(logprobs), device=logprobs.device) % 2 == 0, 1e-3, -1e-3)
                field = signs.unsqueeze(1).to(logprobs.dtype).expand_as(logprobs).contiguous()
                piece.backward(Coefficients(logprobs=field))
    for parameter in policy.parameters().values():
        parameter.grad = None


def shared_part(prompt: int, group: int) -> Part:
    """B5 at one prompt length and group size."""

    def part(bench: Bench) -> dict[str, Any]:
        gpu_update.drop(bench)
        policy = work.make_policy(bench, "0.6B")
        sizes = (prompt // 16, RESPONSE // 16, group, 2 * group) if bench.tiny else (prompt, RESPONSE, group, ROWS)
        on, off = (make_texts(*sizes, policy.vocabulary, shared=shared) for shared in (True, False))
        rows = torch.arange(min(4, sizes[3]))
        gap = float((policy.score(on, rows).logprobs - policy.score(off, rows).logprobs).abs().max())
        most = 256 if bench.tiny else TOKENS_PER_PACK
        sides = {"shared": (on, cut_micro_batches(on, most)), "apart": (off, cut_micro_batches(off, most))}
        rounds = {"warm": 1, "samples": 1, "seconds": 5.0} if bench.tiny else {"warm": 2, "samples": 7, "seconds": 25.0}
        timings = bench.time_interleaved(
            {name: lambda side=side: accumulate_all(policy, *side) for name, side in sides.items()}, **rounds
        )
        length, answer = sizes[0], sizes[1]
        return {
            "prompt": length,
            "response": answer,
            "group": group,
            "ideal": group * (length + answer) / (length + group * answer),
            "logprob_gap": gap,
            **timings,
        }

    return part


def force_clipping(workload: work.Work, exact: gpu_update.Logprobs, share: float) -> tuple[gpu_update.Logprobs, float]:
    """Old log-probs that clip this share of the rows, and the resulting share of tokens.

    The other rows lie outside the band on the side that never clips, so that every pass decides the same despite rounding.
    """
    shifted_groups, row, clipped_tokens = list[list[list[float]]](), 0, 0
    for rewards, group in zip(workload.rewards, exact, strict=True):
        mean = statistics.mean(rewards)
        shifted = []
        for reward, logprobs in zip(rewards, group, strict=True):
            clipped = round((row + 1) * share) > round(row * share)
            clipped_tokens += len(logprobs) if clipped else 0
            # s = exp(new - old): above 1 it clips a row with a positive advantage, below 1 one with a negative.
            sign = 1.0 if (reward > mean) == clipped else -1.0
            shifted.append([value - sign * FAR for value in logprobs])
            row += 1
        shifted_groups.append(shifted)
    return shifted_groups, clipped_tokens / workload.useful


def clipped_part(share: float, name: str) -> Part:
    """B6: updates with this share of rows clipped, in one pass or two."""

    def part(bench: Bench) -> dict[str, Any]:
        setup, workload, exact = still_trainer(bench)
        old, tokens = force_clipping(workload, exact, share)
        trainer = setup.trainer
        engine, trainer.source.runner.engine = trainer.source.runner.engine, gpu_update.script_rollouts(workload, old)
        try:
            with gpu_update.factor(trainer, name):
                trainer.anchor_choice = "sampler"
                result = gpu_update.measure(bench, trainer, setup.useful, steps=1 if bench.tiny else 3, before=setup.before)
        finally:
            trainer.source.runner.engine = engine
        return {"share": share, "token_share": tokens, "passes": name, **result}

    return part


def silent_part(share: float, name: str) -> Part:
    """B6: updates with this share of groups without an advantage."""

    def part(bench: Bench) -> dict[str, Any]:
        setup, workload, exact = still_trainer(bench)
        trainer = setup.trainer
        table = work.reward_table(len(workload.prompts), len(workload.rewards[0]), share)
        old, _ = force_clipping(workload, exact, 0.0)
        tokens = sum(
            sum(map(len, group)) for row, group in zip(table, workload.responses, strict=True) if min(row) == max(row)
        )
        replaced = trainer.source.runner.engine, trainer.source.judge
        trainer.source.runner.engine, trainer.source.judge = (
            gpu_update.script_rollouts(workload, old),
            gpu_update.table_reward(table),
        )
        try:
            with gpu_update.factor(trainer, name):
                trainer.anchor_choice = "sampler"
                result = gpu_update.measure(bench, trainer, setup.useful, steps=1 if bench.tiny else 3, before=setup.before)
        finally:
            trainer.source.runner.engine, trainer.source.judge = replaced
        return {"share": share, "token_share": tokens / workload.useful, "passes": name, **result}

    return part


_exact: dict[int, gpu_update.Logprobs] = {}


def still_trainer(bench: Bench) -> tuple[Any, work.Work, gpu_update.Logprobs]:
    """The trainer of B4, its workload and the policy's exact log-probs of it.

    The learning rate is too small to move a weight, so that forced shares stay as they are. Packs have the size of B5.
    """
    setup, workload = gpu_update.ours(bench, "0.6B", 0.0, lr=1e-30), work.fixed_work(bench.tiny)
    setup.trainer.settings = replace(setup.trainer.settings, tokens_per_pack=TOKENS_PER_PACK)
    if id(setup) not in _exact:
        _exact.clear()
        _exact[id(setup)] = gpu_update.score_workload(setup.trainer.policy, workload)
    return setup, workload, _exact[id(setup)]


B5: dict[str, Part] = {f"prompt {p}, group {g}": shared_part(p, g) for p in (128, 512, 2048) for g in (8, 16)}
B6: dict[str, Part] = {
    **{f"clipped {share:g}, {name}": clipped_part(share, name) for share in CLIPPED for name in ("one pass", "two passes")},
    "clipped 0, gradient checkpointing": clipped_part(0.0, "gradient checkpointing"),
    **{f"silent {share:g}, {name}": silent_part(share, name) for share in SILENT for name in ("one pass", "skipping off")},
}
