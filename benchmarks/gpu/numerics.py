"""B10: how far s is from 1 if nothing has been learnt, and what share of rows a band of 3e-4 / 4e-4 clips for it.

One policy scores the same responses twice, in two ways; every difference is numerics. Responses of 4096 tokens are sampled
once and truncated to every length.

    same path          without and with a gradient, in the same packs
    different packs    packs of the run's size, and every row alone
    engine             the engine's own log-probs, and the packs
    16-bit logits      the same hidden states in different packs, logits rounded to bfloat16 before the log-softmax
    TRL                its old log-probs (in order, without a gradient) and its new ones (shuffled, with a gradient)
"""

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu import decode as gpu_decode
from benchmarks.gpu import saved as gpu_saved
from benchmarks.gpu import trl as gpu_trl
from benchmarks.gpu import update as gpu_update
from benchmarks.gpu import work as work
from benchmarks.gpu.measure import Bench, Part, describe_error
from legato.core.texts import Texts
from legato.rollouts.engine import Limits
from legato.rollouts.sampling import Sampling

LENGTHS = (128, 256, 512, 1024, 2048, 4096)
PROMPTS, SAMPLES, PROMPT = 8, 8, 64
TOKENS_PER_PACK = 16384


def response_lengths(bench: Bench) -> tuple[int, ...]:
    return (8, 16) if bench.tiny else LENGTHS


def sample_lengths(bench: Bench, policy: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Sample responses of the largest length: prompts [G, P], tokens [B, T] and the engine's log-probs [B, T]."""
    count, samples, length = (2, 2, 4) if bench.tiny else (PROMPTS, SAMPLES, PROMPT)
    source = torch.Generator().manual_seed(1)
    prompts = torch.randint(3, policy.vocabulary, (count, length), generator=source)
    engine = gpu_decode.make_engine(bench, policy, fused=True)
    limits = Limits(max_response_tokens=max(response_lengths(bench)), end_tokens=(policy.vocabulary,))
    requests = gpu_decode.make_requests(prompts, samples, shared=True)
    rows = [response for group in engine.generate(requests, Sampling(), limits) for response in group]
    if hasattr(engine, "forget"):
        engine.forget()
    return prompts, torch.stack([row.tokens for row in rows]), torch.stack([row.logprobs for row in rows])


def make_texts(prompts: Tensor, tokens: Tensor) -> Texts:
    rows = len(tokens)
    return Texts(
        prompts=prompts,
        prompt_lengths=torch.full((len(prompts),), prompts.shape[1]),
        tokens=tokens,
        lengths=torch.full((rows,), tokens.shape[1]),
        mask=torch.ones_like(tokens, dtype=torch.bool),
        group=torch.arange(rows) // (rows // len(prompts)),
        temperature=torch.ones(rows),
    )


def ratio_gap(first: Tensor, second: Tensor) -> dict[str, float]:
    """Distance from 1 of the sequence ratio s between two sets of log-probs [B, T], and the share of rows it clips.

    A row outside the band is clipped if its advantage has the sign of that side, which is half of the time.
    """
    ratio = (first.double().cpu() - second.double().cpu()).mean(1).exp()
    outside = (ratio > 1 + work.CLIP_HIGH).double().mean() + (ratio < 1 - work.CLIP_LOW).double().mean()
    return {
        "max": float((ratio - 1).abs().max()),
        "rms": float((ratio - 1).square().mean().sqrt()),
        "clipped": float(outside) / 2,
        "rows": len(ratio),
    }


def score(policy: Any, texts: Texts, parts: Sequence[Tensor]) -> Tensor:
    """Log-probs [B, T] without a gradient, as the trainer scores the old policy."""
    table = torch.zeros(texts.tokens.shape, dtype=policy.dtype)
    for rows in parts:
        table[rows] = policy.score(texts, rows).logprobs.cpu()
    return table


def score_with_gradient(policy: Any, texts: Texts, parts: Sequence[Tensor]) -> Tensor:
    """Log-probs [B, T] as an update computes them, with autograd on. No backward runs, so nothing is learnt."""
    table = torch.zeros(texts.tokens.shape, dtype=policy.dtype)
    for rows in parts:
        with policy.accumulate_gradient(texts, rows) as forward:
            for piece in forward.pieces():
                table[piece.rows] = piece.channels.logprobs.cpu()
    return table


@contextmanager
def rounded_logits() -> Iterator[None]:
    """Inside this context, the head rounds its logits to bfloat16 before the log-softmax, like heads with 16-bit logits."""
    from legato.policy.head.head import Head
    from legato.policy.head.logprobs import token_logprobs

    original = Head.score

    def score_rounded(
        self: Any, hidden: Tensor, targets: Tensor, temperature: Tensor, _: int | None = None
    ) -> tuple[Tensor, Tensor]:
        chunks = []
        for start in range(0, len(hidden), 2048):
            here = slice(start, start + 2048)
            logits = self(hidden[here]).to(torch.bfloat16)
            chunks.append(token_logprobs(logits, targets[here], temperature[here], with_entropy=False))
        return torch.cat([a for a, _ in chunks]), torch.cat([b for _, b in chunks])

    Head.score = score_rounded  # type: ignore[method-assign]
    try:
        yield
    finally:
        Head.score = original  # type: ignore[method-assign]


def numerics_part(bench: Bench) -> dict[str, Any]:
    gpu_update.drop(bench)
    policy = work.make_policy(bench, "0.6B")
    prompts, tokens, engine = sample_lengths(bench, policy)
    table: dict[str, Any] = {}
    for length in response_lengths(bench):
        texts = make_texts(prompts, tokens[:, :length])
        together = gpu_saved.cut_micro_batches(texts, 64 if bench.tiny else TOKENS_PER_PACK)
        alone = [torch.tensor([row]) for row in range(len(tokens))]
        base = score(policy, texts, together)
        with rounded_logits():
            rounded = [score(policy, texts, parts) for parts in (together, alone)]
        table[str(length)] = {
            "same path": ratio_gap(score_with_gradient(policy, texts, together), base),
            "different packs": ratio_gap(score(policy, texts, alone), base),
            "engine": ratio_gap(base, engine[:, :length]),
            "16-bit logits, different packs": ratio_gap(rounded[1], rounded[0]),
            "16-bit logits, engine": ratio_gap(rounded[0], engine[:, :length]),
        }
        bench.free()
    return {"rows": len(tokens), "lengths": table}


def trl_part(bench: Bench) -> dict[str, Any]:
    """TRL's scoring of the same texts. Its weights equal those of our policy: both come from the same seed."""
    gpu_update.drop(bench)
    policy = work.make_policy(bench, "0.6B")
    prompts, tokens, _ = sample_lengths(bench, policy)
    del policy
    bench.free()
    workload, table = work.fixed_work(bench.tiny), dict[str, Any]()
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer = gpu_trl.make_trainer(bench, "0.6B", workload, folder, strong=True, micro=4, steps=1, liger=False)
        for length in response_lengths(bench):
            try:
                result: dict[str, Any] = trl_gap(bench, trainer, prompts, tokens[:, :length])
            except Exception as error:
                result = {"error": describe_error(error)}
            table[str(length)] = {"TRL": result}
            bench.free()
    return {"rows": len(tokens), "lengths": table}


def trl_gap(bench: Bench, trainer: Any, prompts: Tensor, tokens: Tensor) -> dict[str, float]:
    """The gap between TRL's old log-probs (as its scoring computes them) and its new ones (as its loss does).

    For the new ones the rows are shuffled and autograd is on.
    """
    rows = len(tokens)
    micro = min(rows, 16, max(1, TOKENS_PER_PACK // (tokens.shape[1] + prompts.shape[1])))
    model = trainer.model.to(bench.device).train()
    ids = torch.cat([prompts.repeat_interleave(rows // len(prompts), 0), tokens], 1).to(bench.device)
    order = torch.randperm(rows, generator=torch.Generator().manual_seed(0)).to(bench.device)
    call, keep = trainer._get_per_token_logps_and_entropies, tokens.shape[1]
    with torch.no_grad():
        old = call(model, ids, torch.ones_like(ids), keep, batch_size=micro)[0]
    new = torch.empty_like(old)
    for part in order.split(micro):
        new[part] = call(model, ids[part], torch.ones_like(ids[part]), keep)[0].detach()
    return ratio_gap(new, old)


B10: dict[str, Part] = {"Legato": numerics_part, "TRL": trl_part}
