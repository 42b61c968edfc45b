"""Joins the processes that torchrun has started into one world. A process that it has not started is a world of its own."""

import os
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta

import torch

from legato.core.world import OneProcess, World
from legato.errors import InputError, LostRankError

DEADLINE_SECONDS = 1800.0
_START_SECONDS = 600.0
"""How long ranks may take to start: machines read their models at different speeds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """What torchrun tells a process."""

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int
    restarts: int
    """How often torchrun has started all processes again."""
    key: str
    """The same after a restart, and another for every other launch."""


def read_launch() -> Launch | None:
    """How this process was launched; None if torchrun has not started it."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if any(name not in os.environ for name in names):
        return None
    try:
        return Launch(
            rank=int(os.environ["RANK"]),
            size=int(os.environ["WORLD_SIZE"]),
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            local_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            address=os.environ["MASTER_ADDR"],
            port=int(os.environ["MASTER_PORT"]),
            restarts=int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
            key=f"{os.environ.get('TORCHELASTIC_RUN_ID', 'none')} {socket.gethostname()} {os.getppid()}",
        )
    except ValueError as error:
        raise InputError(
            f"expected whole numbers in the environment variables {', '.join(names)} as torchrun sets them, got {error};"
            " unset them to train on one process"
        ) from None


_ECHO_SECONDS = 3.0


def is_echo(seconds: float) -> bool:
    """Whether a signal so soon after the first is torchrun's own: at Ctrl-C the terminal and torchrun send one each."""
    return "TORCHELASTIC_RUN_ID" in os.environ and seconds < _ECHO_SECONDS


_joined: list[World] = []
"""The world of this process while it is joined."""


@contextmanager
def joined(
    *, deadline: float = DEADLINE_SECONDS, say: Callable[[str], None] = print, alone: bool = False
) -> Iterator[World]:
    """The world of this process. An error inside is told to the other ranks, so that none of them waits.

    `alone`: a process group is made even for one rank, as FSDP2 needs it.
    """
    launch = read_launch()
    if _joined:
        yield _joined[0]
        return
    if launch is None or (launch.size == 1 and not alone):
        yield OneProcess()
        return
    import torch.distributed as dist
    from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
    from torch.distributed.rendezvous import rendezvous

    from legato.training.ranks.process_group import ProcessGroup
    from legato.training.ranks.watch import Watch

    if not dist.is_available():
        raise InputError("expected a torch with torch.distributed for several processes, got one without; install another")
    device, backend = _device_and_backend(launch)
    limit = timedelta(seconds=max(deadline, _START_SECONDS) + 120)
    # torchrun may hand the store of the attempt that failed to the next one. Without a prefix of their own, ranks would read
    # there at which addresses the ranks before them listened.
    shared, rank, size = next(rendezvous("env://", timeout=limit))
    attempt = PrefixStore(f"legato-group/{launch.restarts}", shared)
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=size, timeout=limit)
    try:
        # A connection of its own: the watch must not wait for what the process group asks of the store.
        patience = timedelta(seconds=10)
        client = TCPStore(launch.address, launch.port, is_master=False, wait_for_workers=False, timeout=patience)
        store = PrefixStore(f"legato/{launch.restarts}", client)
        with Watch(store, launch.rank, launch.size, deadline=deadline, say=say) as watch:
            world = ProcessGroup(device, watch)
            world.agree(0)  # every rank has written its first beat
            _joined.append(world)
            try:
                yield world
                world.agree(0)  # no rank leaves while another still needs it
            except BaseException as error:
                if isinstance(error, LostRankError):
                    # torchrun sends SIGTERM to what is left of such a run: this rank ends by itself, and must say why first.
                    with suppress(ValueError):  # not the main thread
                        signal.signal(signal.SIGTERM, signal.SIG_IGN)
                with suppress(LostRankError):
                    world.fail(error)
                    # Rank 0 shows it: one message, not one per rank.
                    error.told_to_rank_0 = world.rank > 0  # type: ignore[attr-defined]
                raise
            finally:
                _joined.clear()
    finally:
        # Where a rank is gone, waiting for the group to close would be waiting for that rank.
        with suppress(Exception):
            dist.destroy_process_group()


def _device_and_backend(launch: Launch) -> tuple[torch.device, str]:
    """Where this rank computes, and what carries its tensors."""
    if not torch.cuda.is_available():
        return torch.device("cpu"), "gloo"
    count = torch.cuda.device_count()
    device = torch.device("cuda", launch.local_rank % count)
    torch.cuda.set_device(device)
    # NCCL refuses two ranks on one GPU.
    return device, "cpu:gloo,cuda:nccl" if launch.local_size <= count else "cpu:gloo,cuda:gloo"
