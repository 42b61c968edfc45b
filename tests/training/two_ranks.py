"""One of the two processes of test_ranks.py: counts and measures its half of an update. Rank 0 writes the results."""

import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist

import legato
from legato.algorithms.algorithm import Algorithm
from legato.core.counts import Counts
from legato.core.mask import Mask
from legato.core.signals import Signals
from legato.diagnostics.metrics.measure import measure
from legato.training.ranks.process_group import ProcessGroup

MEMBERS = ("gspo", "dapo", "gepo", "grpo")


def signals(rows: slice) -> Signals:
    """Some rows of one fixed update of eight responses in four groups, of ragged lengths."""
    generator = torch.Generator().manual_seed(0)
    lengths = torch.tensor([5, 2, 7, 1, 4, 4, 6, 3])
    new = -torch.rand(8, 7, generator=generator, dtype=torch.float64)
    old = new + 0.01 * torch.randn(8, 7, generator=generator, dtype=torch.float64)
    advantages = torch.randn(8, 1, generator=generator, dtype=torch.float64)
    return Signals(
        mask=Mask((torch.arange(7) < lengths[:, None])[rows], torch.float64),
        logprobs=new[rows],
        old_logprobs=old[rows],
        sampler_logprobs=old[rows],
        advantages=advantages[rows],
        group=torch.tensor([0, 0, 1, 1, 2, 2, 3, 3])[rows],
    )


def numbers(algorithm: Algorithm, counts: Counts, rows: slice) -> legato.Outcome:
    return algorithm.evaluate(signals(rows), counts, algorithm.initial())


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    world, half = ProcessGroup(torch.device("cpu")), slice(4 * rank, 4 * rank + 4)
    results = {}
    for name in MEMBERS:
        algorithm = legato.algorithm(name)
        counts = world.sum_counts(algorithm.count(signals(half), 4))
        sums = measure(signals(half), numbers(algorithm, counts, half))
        if rank == 1:
            sums = type(sums)({key: piece for key, piece in sums.items() if key != "ratio/sequence_max"})
        total = world.sum_metrics(sums)
        results[name] = {"tokens": counts.all.tokens.item(), "metrics": total.report()}
    table = torch.zeros(8, 3)
    table[half] = torch.arange(12.0).reshape(4, 3) / 7 + rank
    results["table"] = world.sum_table(table).tolist()
    results["gathered"] = world.gather({"rank": rank, "words": "ü" * rank})
    results["agreed"] = world.agree(7 if rank == 1 else 3)
    if rank == 0:
        (folder / "results.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
