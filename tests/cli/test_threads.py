"""The command line limits how long OpenMP threads spin, before torch is imported."""

import os
import subprocess
import sys

import pytest

PROGRAM = """
import sys
from legato.cli.main import app
assert "torch" not in sys.modules
app(["explain", "gspo"], standalone_mode=False)
import os
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("variables", "spin_count"),
    [({}, "2000"), ({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
    ids=["default", "a policy", "a count"],
)
def test_threads_spin_shortly_unless_the_user_sets_a_policy(variables: dict[str, str], spin_count: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM], env={**clean, **variables}, capture_output=True, text=True, check=True
    )
    assert process.stdout.splitlines()[-1] == spin_count
