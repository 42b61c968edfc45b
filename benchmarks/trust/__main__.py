"""`make trust`: run the trial for so many minutes and store what it found.

    python -m benchmarks.trust --minutes 30 --seed 1                    all parts, the time divided among them
    python -m benchmarks.trust --minutes 5 --parts torn-saves signals
    python -m benchmarks.trust --parts soak --soak-minutes 60

Results of parts that did not run this time are kept. docs/trust.md is made from the file by `make docs`.
"""

import argparse
import functools
import json
import random
import shutil
import subprocess
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from benchmarks.trust import crashes, damage, disk, inputs, kills, pages, ranks, rewards, signals, soak
from benchmarks.trust.trial import Part

RESULTS = Path(__file__).parents[1] / "results" / "trust.json"
PARTS: dict[str, Part] = {
    "kills": kills.killed_at_any_time,
    "killed-for-memory": kills.killed_for_memory,
    "torn-saves": kills.torn_saves,
    "killed-ranks": ranks.killed_ranks,
    "crash-states": crashes.crash_states,
    "damaged-checkpoints": damage.damaged_checkpoints,
    "damaged-records": damage.damaged_records,
    "full-disk": disk.full_for_a_moment,
    "unwritable-places": disk.unwritable_places,
    "signals": signals.signalled,
    "bad-options": inputs.bad_options,
    "bad-data": inputs.bad_data,
    "model-folders": inputs.bad_model_folders,
    "rewards": rewards.hostile_rewards,
    "dashboard": pages.requests,
    "soak": soak.soak,
}
SHARES = {"kills": 4.0, "torn-saves": 3.0, "damaged-checkpoints": 2.0, "signals": 2.0, "rewards": 2.0}
"""How much of the time a part gets beside the others, which get 1."""


def run_part(name: str, *, seed: int, seconds: float, most: int | None = None) -> dict[str, Any]:
    """Run the cases of a part until the time is over or `most` have run; at least one runs."""
    source, started = random.Random(f"{name} {seed}"), time.monotonic()
    held, broken = 0, []
    counts: Counter[str] = Counter()
    measured: list[dict[str, Any]] = []
    for number, case in enumerate(PARTS[name](source)):
        folder = Path(tempfile.mkdtemp(prefix="trust-"))
        try:
            problem = case.check(folder)
        except Exception as error:
            problem = f"the trial itself failed: {type(error).__name__}: {error}"
        finally:
            if not (folder / "made").exists():  # the run that later cases copy
                shutil.rmtree(folder, ignore_errors=True)
        counts.update(case.counts)
        measured += [{"case": case.name, **case.measured}] if case.measured else []
        if problem is None:
            held += 1
        else:
            broken.append({"case": case.name, "problem": problem[:500]})
            print(f"  broken: {case.name}: {problem[:300]}", flush=True)
        if time.monotonic() - started > seconds or (most is not None and number + 1 >= most):
            break
    result = {"held": held, "broken": broken, "seed": seed, "seconds": round(time.monotonic() - started)}
    return result | ({"counts": dict(counts)} if counts else {}) | ({"measured": measured} if measured else {})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--seed", type=int, default=int(time.time()) % 10**6)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--output", type=Path, default=RESULTS)
    parser.add_argument("--soak-minutes", type=float, default=1.0, help="how long one soak lasts, whatever --minutes says")
    arguments = parser.parse_args()
    PARTS["soak"] = functools.partial(soak.soak, minutes=arguments.soak_minutes)
    shares = {name: SHARES.get(name, 1.0) for name in arguments.parts}
    results: dict[str, Any] = json.loads(arguments.output.read_text()) if arguments.output.is_file() else {}
    facts = {"date": time.strftime("%Y-%m-%d"), "commit": _commit()}
    for name, share in shares.items():
        print(name, flush=True)
        seconds = 60 * arguments.minutes * share / sum(shares.values())
        results[name] = {**run_part(name, seed=arguments.seed, seconds=seconds), **facts}
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")
    print(f"\n{'part':22} {'cases':>6} {'held':>6} {'broken':>7} {'seconds':>8}")
    for name in arguments.parts:
        result = results[name]
        cases = result["held"] + len(result["broken"])
        print(f"{name:22} {cases:6} {result['held']:6} {len(result['broken']):7} {result['seconds']:8}")


def _commit() -> str:
    try:
        return subprocess.run(
            ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True, cwd=Path(__file__).parent
        ).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


if __name__ == "__main__":
    main()
