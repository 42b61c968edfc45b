"""Measure how fast the dashboard paints and how much memory it needs for a folder of many long runs.

    python -m benchmarks.dashboard --runs 200 --steps 10000

Writes a folder of runs of the given length (lines as a trainer writes them, with histograms every ten steps), starts
`legato dashboard` on it, opens it in headless Chromium, and writes benchmarks/results/dashboard.json. All times start with
the request for the page. First paint ends with the browser's first contentful paint, `list` when all runs are listed,
`sketches` when the curves of the newest runs are drawn as lines, `figures` when plotly has drawn them. Memory is the peak
resident set of the server, also after all runs were selected and read to the end.
"""

import argparse
import json
import math
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tests.dashboard.browser import CHROMIUM, MISSING, Browser, browser, dashboard

RESULTS = Path(__file__).parent / "results" / "dashboard.json"
_KEYS = 90
"""Metrics per step, besides those per update."""
_VARIANTS = 4
"""Number of different files. The others are copies, because writing two hundred would take an hour."""


def step_line(step: int, steps: int, chance: random.Random) -> str:
    share = step / steps
    record: dict[str, Any] = {"kind": "step", "step": step, "updates": 4, "reward/mean": share + chance.gauss(0, 0.05)}
    names = ("accuracy/mean", "length/mean", "entropy/mean", "clip/sequences", "ratio/sequence_std", "gradient/norm")
    record |= {name: abs(math.sin(9 * share) + chance.gauss(0, 0.1)) for name in names}
    record |= {f"topic/quantity_{number}": chance.random() for number in range(_KEYS - len(names))}
    record |= {f"clip/sequences@{update}": chance.random() for update in range(4)}
    if step % 10 == 0:
        edges = [index * 1e-4 for index in range(400)]
        bars = {"edges": edges, "counts": [chance.randrange(99) for _ in range(399)]}
        record["histograms"] = {f"ratio/kind_{number}": bars for number in range(8)}
    return json.dumps(record, separators=(",", ":"))


def write_runs(folder: Path, runs: int, steps: int) -> None:
    """Write a folder of runs."""
    originals = []
    for number in range(runs):
        run = folder / f"run-{number:03d}"
        run.mkdir(parents=True)
        config = f'[algorithm]\nname = "gspo"\n\n[training]\nseed = {number}\nsteps = {steps}\n'
        (run / "config.toml").write_text(config)
        (run / "environment.json").write_text('{"format": 1}')
        metrics = run / "metrics.jsonl"
        if number < _VARIANTS:
            chance = random.Random(number)
            with metrics.open("w") as file:
                file.write('{"kind":"start","name":"run","model":"tiny","algorithm":"gspo"}\n')
                for step in range(1, steps + 1):
                    file.write(step_line(step, steps, chance) + "\n")
            originals.append(metrics)
        else:
            shutil.copyfile(originals[number % len(originals)], metrics)
        os.utime(metrics, (1_700_000_000 + number, 1_700_000_000 + number))


def memory_megabytes(process: int, kind: str) -> float:
    """Memory of a process in megabytes: `VmRSS` is the current size, `VmHWM` the peak."""
    for line in Path(f"/proc/{process}/status").read_text().splitlines():
        if line.startswith(kind):
            return int(line.split()[1]) / 1024
    return math.nan


def time_opening(folder: Path, page: Browser) -> dict[str, float]:
    """Seconds until a new page on a new server shows each of its parts, and the server's peak memory."""
    with dashboard(folder) as (process, address):
        page.open(address)
        page.wait("document.querySelector('.figures')?.dataset.ready", 60)
        paint = "performance.getEntriesByName('first-contentful-paint')[0].startTime"
        rows = page.run("document.querySelectorAll('#runs li').length")
        assert rows == len(list(folder.iterdir())), rows
        timings = {"first_paint_seconds": page.run(paint) / 1000}
        for name in ("list", "sketches", "figures"):
            timings[f"{name}_seconds"] = page.run(f"performance.getEntriesByName('{name}')[0].startTime") / 1000
        return timings | {"server_megabytes": memory_megabytes(process.pid, "VmHWM")}


def time_reading_all(folder: Path, page: Browser) -> dict[str, float]:
    """Seconds until all runs are selected and read to the end, bytes read while idle, and the server's peak memory."""
    with dashboard(folder) as (process, address):
        page.open(address)
        page.wait("document.querySelector('.figures')?.dataset.ready", 60)
        started = time.monotonic()
        page.press("a")
        lines = "(document.querySelector('figure[data-key=\"reward/mean\"] .plot')?.data || []).length"
        page.wait(f"{lines} >= {len(list(folder.iterdir()))}", 120)
        overlaid = time.monotonic() - started
        page.wait("document.getElementById('note').textContent === ''", 3600)
        timings = {"overlay_seconds": overlaid, "all_read_seconds": time.monotonic() - started}
        before = Path(f"/proc/{process.pid}/io").read_text()
        time.sleep(5)
        after = Path(f"/proc/{process.pid}/io").read_text()
        bytes_read = [int(text.split("rchar:")[1].split()[0]) for text in (before, after)]
        timings["read_while_idle_megabytes_a_second"] = (bytes_read[1] - bytes_read[0]) / 5 / 1e6
        return timings | {"server_megabytes": memory_megabytes(process.pid, "VmHWM")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=200)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where the runs are written or already are; default: a temporary folder")
    parser.add_argument("--not-all", action="store_true", help="leave out reading all runs to the end")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    if CHROMIUM is None:
        raise SystemExit(MISSING)
    with tempfile.TemporaryDirectory() as place:
        folder = options.folder or Path(place) / "runs"
        if not folder.exists():
            write_runs(folder, options.runs, options.steps)
        size = sum(path.stat().st_size for path in folder.glob("*/metrics.jsonl"))
        with browser(Path(place) / "home") as page:
            opened = [time_opening(folder, page) for _ in range(options.repeats)]
            whole = {} if options.not_all else time_reading_all(folder, page)
    result = {
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {page.version}",
        "runs": options.runs,
        "steps": options.steps,
        "load_of_the_machine": os.getloadavg()[0],
        "metrics_gigabytes": round(size / 1e9, 2),
        "opened": opened,
        "all_chosen": whole,
    }
    options.output.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
