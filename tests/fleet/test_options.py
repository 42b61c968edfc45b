"""Options of servers that contradict each other are refused before anything starts."""

from typing import Any

import pytest

from legato.config.load import load
from legato.errors import InputError


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rollouts.engine": "vllm"}, r"rollouts\.servers: expected urls or start with .*, got neither"),
        (
            {"rollouts.engine": "vllm", "rollouts.servers.start": 1, "rollouts.servers.urls": ["http://h:1"]},
            r"rollouts\.servers: expected urls or start with .*, got both",
        ),
        ({"rollouts.servers.start": 2}, r"rollouts\.servers\.start: expected none with rollouts\.engine = \"?'?local"),
        (
            {"rollouts.engine": "legato", "rollouts.servers.start": 2, "rollouts.servers.quorum": 3},
            r"rollouts\.servers\.quorum: expected at most 2, the number of servers",
        ),
        ({"rollouts.engine": "sglang", "rollouts.servers.urls": ["h:1"]}, "expected the address of a server"),
        ({"rollouts.engine": "vllm", "rollouts.servers.urls": ["http://h", "http://h"]}, "expected different addresses"),
    ],
)
def test_contradictions_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        load([], (), options)


def test_servers_by_address_are_accepted() -> None:
    config = load([], (), {"rollouts.engine": "vllm", "rollouts.servers.urls": ["http://127.0.0.1:8000/v1"]}).config
    assert config.rollouts.servers.urls == ("http://127.0.0.1:8000/v1",)
