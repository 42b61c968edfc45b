"""One server for the tests that only ask."""

from collections.abc import Iterator

import pytest

from tests.serve.running import RunningServer, chat_policy, make_served, running


@pytest.fixture(scope="package")
def server() -> Iterator[RunningServer]:
    with running(make_served(chat_policy())) as server:
        yield server
