"""A server that the run starts on this machine: its process, its log file, and its end."""

import contextlib
import itertools
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from legato.errors import InputError, shorten
from legato.rollouts.servers import leash
from legato.rollouts.servers.dialects.base import Dialect, StartPlan
from legato.rollouts.servers.errors import ServerError, UnreachableError
from legato.rollouts.servers.http import HttpClient

_LOG_BYTES = 3000
"""How much of the end of a log a message quotes."""


@dataclass(slots=True)
class StartedServer:
    """The process of a server. `start` may be called again after `end`: the server then has the same port."""

    dialect: Dialect
    plan: StartPlan
    log: Path
    device: str | None = None
    """CUDA_VISIBLE_DEVICES; None: as this process."""
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self, model: Path) -> None:
        """Start the process on a model folder. It answers only after a while (`wait_until_ready`)."""
        self.end()
        self.plan = replace(self.plan, model=model)
        words, more = self.dialect.command(self.plan)
        environment = {name: value for name, value in os.environ.items() if not _is_of_torchrun(name)} | dict(more)
        if self.device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = self.device
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            log.write(f"\n{time.strftime('%Y-%m-%d %H:%M:%S')} {' '.join(words)}\n".encode())
            log.flush()
            try:
                self.process = subprocess.Popen(
                    [sys.executable, "-I", "-S", "-B", leash.__file__, *words],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    env=environment,
                    # Ctrl-C reaches the run, which ends the server once it has saved.
                    start_new_session=True,
                )
            except OSError as error:
                raise InputError(f"expected to start {words[0]}, got {error} (rollouts.servers.start)") from None

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def wait_until_ready(self, client: HttpClient, seconds: float, given_up: Callable[[], bool] = lambda: False) -> None:
        """Return once the server can sample; UnreachableError if its process ends, or does not answer in time."""
        deadline = time.monotonic() + seconds
        while True:
            if not self.alive:
                raise UnreachableError(f"the server that was started ended: {self.describe_log()}")
            try:
                self.dialect.check_ready(client, 5.0)
                return
            except ServerError as error:
                if time.monotonic() > deadline or given_up():
                    message = f"no answer {seconds:g} s after its start ({error}); {self.describe_log()}"
                    raise UnreachableError(message) from None
            time.sleep(0.2)

    def end(self) -> None:
        """End the process and everything it started."""
        if self.process is None:
            return
        with contextlib.suppress(OSError):
            assert self.process.stdin is not None
            self.process.stdin.close()
        try:
            self.process.wait(leash.GRACE_SECONDS + 10.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def describe_log(self) -> str:
        """The log file and its last lines."""
        with contextlib.suppress(OSError), self.log.open("rb") as file:
            file.seek(max(0, self.log.stat().st_size - _LOG_BYTES))
            lines = [line.strip() for line in file.read().decode("utf-8", "replace").splitlines() if line.strip()]
            telling = [line for line in lines if "Error" in line or "error" in line] or lines
            return f"{self.log} ends with: {shorten(' | '.join(telling[-3:]), 800)}"
        return f"see {self.log}"


def _is_of_torchrun(name: str) -> bool:
    """Whether a variable says which rank this process is: a server is none."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    return name in ranks or name.startswith(("TORCHELASTIC_", "GROUP_", "ROLE_"))


def unused_devices(servers: int) -> list[str]:
    """CUDA_VISIBLE_DEVICES for each server: the GPUs of this machine that no rank of the run trains on, divided evenly.

    Empty where there are none: servers then share the GPUs of the run.
    """
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    devices = chosen.split(",") if chosen else [str(number) for number in range(torch.cuda.device_count())]
    unused = devices[int(os.environ.get("LOCAL_WORLD_SIZE", "1")) :]
    if len(unused) < servers:
        return unused
    bounds = [server * len(unused) // servers for server in range(servers + 1)]
    return [",".join(unused[start:end]) for start, end in itertools.pairwise(bounds)]


def free_port() -> int:
    """A port of loopback that nobody listens on at this moment."""
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        port: int = listening.getsockname()[1]
        return port
