"""Count the Python calls of one training step inside the package, and how often consecutive calls change the file.

    python -m benchmarks.walk --source src            counts one step of recipes/tiny.toml
    python -m benchmarks.walk --source OLD/src        the same for another checkout

One step is half the difference between runs of 4 and of 2 steps, each in its own process. A change of file is counted
whenever a called function is in another file than the function called before it.
"""

import argparse
import contextlib
import io
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[1]


def count_calls(source: Path, steps: int) -> dict[str, Any]:
    """Calls, changes of file and calls by file of a whole run of `steps` steps, in this process."""
    sys.path.insert(0, str(source))
    from legato.cli.main import main

    package = str(source / "legato")
    calls, changes, last = Counter[str](), 0, ""

    def record_call(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal changes, last
        if event == "call":
            file = frame.f_code.co_filename
            if file.startswith(package):
                calls[file.removeprefix(package + "/")] += 1
                if file != last:
                    changes += 1
                    last = file

    with tempfile.TemporaryDirectory() as folder:
        sys.argv = ["legato", "train", str(ROOT / "recipes" / "tiny.toml"), f"training.steps={steps}"]
        sys.argv += [f"output.directory={folder}", "training.warm_up_updates=0", "output.rollouts_every_steps=0"]
        with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
            threading.setprofile(record_call)
            sys.setprofile(record_call)
            try:
                main()
            finally:
                sys.setprofile(None)
    return {"calls": calls.total(), "changes": changes, "files": dict(calls)}


def measure_one_step(source: Path) -> dict[str, Any]:
    """The counts of one step: half the difference between runs of 4 and of 2 steps."""
    runs = []
    for steps in (4, 2):
        command = [sys.executable, "-m", "benchmarks.walk", "--source", str(source), "--steps", str(steps)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
        if done.returncode:
            raise SystemExit(done.stderr)
        runs.append(json.loads(done.stdout.splitlines()[-1]))
    files = Counter(runs[0]["files"])
    files.subtract(runs[1]["files"])
    return {
        "calls": (runs[0]["calls"] - runs[1]["calls"]) / 2,
        "changes": (runs[0]["changes"] - runs[1]["changes"]) / 2,
        "files": {file: number / 2 for file, number in files.most_common() if number},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--source", type=Path, default=ROOT / "src")
    parser.add_argument("--steps", type=int, help="count a whole run of this many steps and print the counts as JSON")
    options = parser.parse_args()
    source = options.source.resolve()
    if options.steps is not None:
        print(json.dumps(count_calls(source, options.steps)))
        return
    step = measure_one_step(source)
    print(f"one step: {step['changes']:.0f} changes of file, {step['calls']:.0f} calls, {len(step['files'])} files")
    for file, number in list(step["files"].items())[:25]:
        print(f"{number:8.0f}  {file}")


if __name__ == "__main__":
    main()
