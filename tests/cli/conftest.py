"""Fixtures for the tests of the command line."""

from tests.run.conftest import lightly

__all__ = ["lightly"]
