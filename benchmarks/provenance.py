"""When the stored results came in: `python -m benchmarks.provenance` writes benchmarks/provenance.json from the history.

The commit that last changed a file of results came right after its runs. The pages name it, so that a reader can check out
the code that made a figure. Run it after results were committed; a test compares the file with the history.
"""

import json
import subprocess
from pathlib import Path

FOLDER = Path(__file__).parent
FILE = FOLDER / "provenance.json"


def stored_by(name: str) -> str:
    """A sentence with date and commit of a file of results."""
    entry = json.loads(FILE.read_text()).get(name)
    if entry is None:
        return f"The runs are stored in `benchmarks/results/{name}.json`; its commit is not recorded yet."
    return f"The runs were stored on {entry['date']} by commit {entry['commit']} (`benchmarks/results/{name}.json`)."


def last_commits() -> dict[str, dict[str, str]]:
    """Commit and date of every file of results, from git."""
    commits = {}
    for file in sorted((FOLDER / "results").glob("*.json")):
        words = ["git", "log", "-1", "--format=%h %cs", "--", str(file)]
        answer = subprocess.run(words, capture_output=True, text=True, check=True, cwd=FOLDER).stdout.split()
        if answer:
            commits[file.stem] = {"commit": answer[0], "date": answer[1]}
    return commits


if __name__ == "__main__":
    FILE.write_text(json.dumps(last_commits(), indent=1) + "\n")
