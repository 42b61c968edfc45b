"""Fixtures for the tests of whole runs."""

from collections.abc import Iterator

import pytest

from tests.proof.runs import light


@pytest.fixture(scope="module")
def lightly() -> Iterator[None]:
    """Make runs faster in all tests of a file: no reports, no flushes to the disk."""
    with light():
        yield
