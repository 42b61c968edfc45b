"""`legato WORDS` in this process: a fresh one takes seconds to import torch."""

import sys
from importlib.util import module_from_spec, spec_from_file_location
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

import legato

Result = tuple[int, str, str]
"""Exit code, standard output, standard error."""


def load_unchecked(name: str) -> Any:
    """Load a module of legato without the shape checks of the tests, so that its own checks must refuse wrong inputs."""
    spec = spec_from_file_location(f"unchecked_{Path(name).stem}", Path(legato.__file__).parent / name)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


class Command:
    """Runs `legato WORDS` in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capture: pytest.CaptureFixture[str]) -> None:
        self._main = load_unchecked("cli/main.py")
        self._patch, self._capture = monkeypatch, capture

    def __call__(self, *arguments: str, typed: str = "") -> Result:
        self._patch.setattr(sys, "argv", ["legato", *arguments])
        self._patch.setattr(sys, "stdin", StringIO(typed))
        self._capture.readouterr()
        code = 0
        try:
            self._main.main()
        except SystemExit as leaving:
            code = leaving.code if isinstance(leaving.code, int) else int(leaving.code is not None)
        written = self._capture.readouterr()
        return code, written.out, written.err


def assert_refused(result: Result, *wanted: str) -> str:
    """Assert exit code 2 and one line on standard error that contains all `wanted` texts; returns the line."""
    code, _, error = result
    assert code == 2, error
    lines = error.strip().splitlines()
    assert len(lines) == 1, error
    assert lines[0].startswith("legato: ")
    assert "Traceback" not in error
    for each in wanted:
        assert each in lines[0], error
    return lines[0]
