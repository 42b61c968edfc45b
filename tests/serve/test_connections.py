"""How the server writes, and what it keeps from waiting."""

import asyncio
import gc
import json
import math
from typing import Any

import pytest

from legato.serve.connections import MOST_BYTES, JoinedWrites
from legato.serve.logprobs import generate_own_logprobs
from legato.serve.server import COLLECT_EVERY, short_collections


class _Recorded(asyncio.Transport):
    """A transport that notes what is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[bytes] = []
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.sent.append(data)

    def close(self) -> None:
        self.closed = True

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return name


def joined() -> tuple[_Recorded, JoinedWrites]:
    recorded = _Recorded()
    return recorded, JoinedWrites(recorded, asyncio.get_running_loop())


def test_what_is_written_in_one_go_is_sent_as_one_piece() -> None:
    async def write() -> None:
        recorded, transport = joined()
        for part in (b"head", b"", b"body"):
            transport.write(part)
        assert recorded.sent == [], "later parts may follow"
        await asyncio.sleep(0)
        transport.write(b"more")
        await asyncio.sleep(0)
        assert recorded.sent == [b"headbody", b"more"]
        assert transport.get_extra_info("peername") == "peername"

    asyncio.run(write())


def test_nothing_is_lost_when_a_connection_is_closed_and_much_is_sent_at_once() -> None:
    async def write() -> None:
        recorded, transport = joined()
        transport.write(b"x" * (MOST_BYTES + 1))
        assert len(recorded.sent) == 1, "a slow reader must be able to stop the writer"
        transport.write(b"end")
        transport.close()
        assert recorded.sent[1:] == [b"end"] and recorded.closed
        await asyncio.sleep(0)
        assert len(recorded.sent) == 2

    asyncio.run(write())


def test_collections_leave_out_the_objects_that_exist_already() -> None:
    before, frozen = gc.get_threshold(), gc.get_freeze_count()
    with short_collections():
        assert gc.get_freeze_count() > frozen + 1000 and gc.get_threshold() == (COLLECT_EVERY, *before[1:])
    assert gc.get_threshold() == before and gc.get_freeze_count() == 0


@pytest.mark.parametrize("odd", [None, math.nan, -math.inf, -1e30])
def test_log_probs_are_written_whatever_they_are(odd: float | None) -> None:
    values = [-0.1, -1.0, 0.0, -1.1754943508222875e-38] + ([] if odd is None else [odd])
    written = json.loads(generate_own_logprobs(range(len(values)), values).text)["content"]
    expected = [None if math.isnan(value) else max(value, -9999.0) for value in values]
    assert [each["logprob"] for each in written] == [each["top_logprobs"][0]["logprob"] for each in written] == expected
    assert [each["token_id"] for each in written] == list(range(len(values)))
    assert json.loads(generate_own_logprobs([], []).text) == {"content": []}
