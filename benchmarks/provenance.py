"""When the stored results came in: `python -m benchmarks.provenance` writes benchmarks/provenance.json from the history.

The commit that last changed a file of results came right after its runs. The pages name it, so that a reader can check out
the code that made a figure. Run it after results were committed; a test compares the file with the history.
"""

import json
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
FILE = FOLDER / "provenance.json"
STUDIES = "studies/"
"""Before the name of a stored study, since studies/results and benchmarks/results both have a `mismatch`."""


def stored_by(name: str) -> str:
    """A sentence with date and commit of a file of results; `studies/NAME` is a stored study."""
    path = _path_of(name)
    entry = json.loads(FILE.read_text()).get(name)
    if entry is None:
        return f"The runs are stored in `{path}`; its commit is not recorded yet."
    return f"The runs were last stored on {entry['date']} by commit {entry['commit']} (`{path}`)."


def stored_names() -> list[str]:
    """The names of all files of results: benchmarks first, then studies."""
    studies = FOLDER.parent / "studies" / "results"
    names = [path.stem for path in sorted((FOLDER / "results").glob("*.json"))]
    return names + [f"{STUDIES}{path.stem}" for path in sorted(studies.glob("*.json"))]


def _path_of(name: str) -> str:
    """The path of a file of results from the root of the repository."""
    if name.startswith(STUDIES):
        return f"studies/results/{name.removeprefix(STUDIES)}.json"
    return f"benchmarks/results/{name}.json"


def table() -> list[str]:
    """A row with date and commit for each file of results."""
    recorded = json.loads(FILE.read_text())
    missing = {"date": "", "commit": "not recorded yet"}
    rows = [(_path_of(name), recorded.get(name, missing)) for name in stored_names()]
    return [
        "| file | date | commit |",
        "|---|---|---|",
        *(f"| `{path}` | {entry['date']} | {entry['commit']} |" for path, entry in rows),
    ]


def last_commits() -> dict[str, dict[str, str]]:
    """Commit and date of every file of results, from git."""
    commits = {}
    for name in stored_names():
        words = ["git", "log", "-1", "--format=%h %cs", "--", _path_of(name)]
        answer = subprocess.run(words, capture_output=True, text=True, check=True, cwd=FOLDER.parent).stdout.split()
        if answer:
            commits[name] = {"commit": answer[0], "date": answer[1]}
    return commits


if __name__ == "__main__":
    FILE.write_text(json.dumps(last_commits(), indent=1) + "\n")
