"""One process of a world: runs the calls of `calls.json` in order and writes what they return."""

import datetime
import json
import sys
import traceback
from pathlib import Path

import torch
import torch.distributed as dist

from legato.training.ranks.process_group import ProcessGroup
from tests.ranks import cases


def main(size: int, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60))
    world, results = ProcessGroup(), {}
    for name, (function, arguments) in json.loads((folder / "calls.json").read_text()).items():
        try:
            results[name] = getattr(cases, function)(world, **arguments)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"}
            traceback.print_exc()
        (folder / f"results-{rank}.json").write_text(json.dumps(results))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
