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
print(os.environ["OMP_WAIT_POLICY"])
"""


@pytest.mark.parametrize("given", [None, "active"])
def test_commands_wait_without_spinning_unless_told(given: str | None) -> None:
    clean = {name: value for name, value in os.environ.items() if name != "OMP_WAIT_POLICY"}
    environment = clean if given is None else {**clean, "OMP_WAIT_POLICY": given}
    ran = subprocess.run([sys.executable, "-c", SAID], env=environment, capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == (given or "passive")
