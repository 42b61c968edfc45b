"""Follows a run: takes over each new checkpoint while requests go on."""

import asyncio
import sys

from legato.serve.control import follow_checkpoint
from legato.serve.errors import ApiError
from legato.serve.served import Served


async def follow(served: Served, seconds: float) -> None:
    """Look for a checkpoint with a higher step every `seconds`, for ever."""
    checkpoints = served.weights.checkpoints
    assert checkpoints is not None
    tried = None
    while True:
        await asyncio.sleep(seconds)
        newest = await served.read_files(checkpoints.newest_step)
        if newest is None or newest == tried:
            continue
        tried = newest
        try:
            if await follow_checkpoint(served):
                print(f"serving the checkpoint of step {served.weights.name}", file=sys.stderr, flush=True)
        except ApiError as error:
            # A checkpoint may be pruned while it is read, or be damaged: the next one is tried when it comes.
            print(f"the checkpoint of step {newest} is not served: {error}", file=sys.stderr, flush=True)
