"""The GPU benchmarks B1 to B12: python -m benchmarks.gpu --only B2 B4 --output benchmarks/results/gpu.json --seconds 300

Each section consists of parts, and each part is stored as soon as it is measured. A command replaces only the sections named
by `--only` (with `--parts`, only those parts). `--tiny --device cpu` runs everything at toy shapes, for tests.
`benchmarks/gpu/carry.sh` collects the peers' packages in `.carry/site-packages`, which goes onto PYTHONPATH.
"""

import argparse
import os
import time
from pathlib import Path

RESULTS = Path(__file__).parents[1] / "results" / "gpu.json"
SECTIONS = ("B1", "B2", "B3", "B4", "B5", "B6", "B7", "B8", "B10", "B11", "B12")
"""B9, the CPU benchmark, is `make bench`."""


def parts_of(section: str) -> dict[str, object]:
    """The parts of a section by name. Imports are local, so that a section's peers cannot break another section."""
    if section in ("B1", "B2", "B3"):
        from benchmarks.gpu import head as gpu_head

        return {"B1": gpu_head.B1, "B2": gpu_head.B2, "B3": gpu_head.B3}[section]
    if section in ("B4", "B11"):
        from benchmarks.gpu import memory as gpu_memory
        from benchmarks.gpu import update as gpu_update

        return {"B4": gpu_update.B4, "B11": gpu_memory.B11}[section]
    if section in ("B5", "B6"):
        from benchmarks.gpu import saved as gpu_saved

        return {"B5": gpu_saved.B5, "B6": gpu_saved.B6}[section]
    if section == "B7":
        from benchmarks.gpu import decode as gpu_decode

        return gpu_decode.B7
    if section == "B12":
        from benchmarks.gpu import beside_vllm

        return beside_vllm.B12
    if section == "B8":
        from benchmarks.gpu import step as gpu_step

        return gpu_step.B8
    from benchmarks.gpu import numerics as gpu_numerics

    return gpu_numerics.B10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=SECTIONS)
    parser.add_argument("--parts", nargs="+", default=(), help="only the parts whose names begin with one of these")
    parser.add_argument("--output", type=Path, help=f"default {RESULTS.name} under benchmarks/results; none with --tiny")
    parser.add_argument("--seconds", type=float, default=540.0, help="no part starts after this many seconds")
    parser.add_argument("--without", nargs="+", default=(), help="names of heads that B1 and B2 do not call")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--list", action="store_true", help="print sections and parts")
    options = parser.parse_args()
    if options.list:
        for section in options.only:
            print(section, *(f"\n    {name}" for name in parts_of(section)), sep="")
        return
    # Without these variables, libraries try to reach a hub; the machine has no network.
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_DATASETS_OFFLINE", "TRL_EXPERIMENTAL_SILENCE"):
        os.environ.setdefault(name, "1")
    import torch

    from benchmarks.gpu.measure import Bench, Document, run_parts
    from benchmarks.gpu.page import section_table

    if options.device == "cpu":
        torch.set_num_threads(2)
    bench = Bench(
        device=torch.device(options.device),
        tiny=options.tiny,
        deadline=time.monotonic() + options.seconds,
        without=tuple(options.without),
    )
    bench.measure_ceilings()
    print(f"ceilings: {bench.ceilings}", flush=True)
    document = Document(options.output or (Path("tiny-gpu.json") if options.tiny else RESULTS))
    for section in options.only:
        run_parts(bench, document, section, parts_of(section), tuple(options.parts))
    for section in options.only:
        print("\n" + section_table(section, document.content["sections"][section]), flush=True)
    print(f"wrote {document.path}")


if __name__ == "__main__":
    main()
