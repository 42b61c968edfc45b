"""Threads that wait for one another must not burn the cores that others need, and torch reads that when it is loaded."""

import os
import subprocess
import sys

import pytest

SAID = """
import sys
from legato.cli.main import app
assert "torch" not in sys.modules
app(["explain", "gspo"], standalone_mode=False)
import os
print(os.environ.get("GOMP_SPINCOUNT"))
"""


@pytest.mark.parametrize(
    ("given", "found"),
    [({}, "2000"), ({"OMP_WAIT_POLICY": "active"}, "None"), ({"GOMP_SPINCOUNT": "7"}, "7")],
    ids=["nothing said", "a policy", "a count"],
)
def test_threads_spin_a_little_and_then_sleep_unless_told(given: dict[str, str], found: str) -> None:
    clean = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    ran = subprocess.run([sys.executable, "-c", SAID], env={**clean, **given}, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == found
