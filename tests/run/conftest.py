"""What the tests of whole runs share."""

from collections.abc import Iterator

import pytest

from tests.proof.runs import light


@pytest.fixture(scope="module")
def lightly() -> Iterator[None]:
    """Whole runs without reports and flushes to the disk, for the tests of a file."""
    with light():
        yield
