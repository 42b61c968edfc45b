"""`legato` in this process, killed or disturbed at the n-th operation on the disk.

python -m benchmarks.trust.child --full 17 -- train ...        "No space left" for operation 17 and the two after it
python -m benchmarks.trust.child --count FILE -- train ...     writes how many operations there were
python -m benchmarks.trust.child --serve                       a command per line of JSON, each in a process of its own
"""

import argparse
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

FAILURES = 3
"""How many operations in a row find the disk full."""


class Disk:
    """Counts the operations that change the disk, and acts at one of them."""

    def __init__(self, kill: int, full: int) -> None:
        self.kill, self.full, self.count = kill, full, 0

    def touch(self, path: Any, content: bytes | None = None) -> None:
        self.count += 1
        if self.count == self.kill:
            if content is not None:
                Path(path).write_bytes(content[: len(content) // 2])  # torn in the middle
            os.kill(os.getpid(), signal.SIGKILL)
        if self.full and self.full <= self.count < self.full + FAILURES:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))


def install(disk: Disk) -> None:
    for name in ("replace", "rename", "fsync", "mkdir", "unlink", "rmdir"):
        original = getattr(os, name)

        def patched(path: Any, *arguments: Any, _original: Any = original, **keywords: Any) -> Any:
            disk.touch(path)
            return _original(path, *arguments, **keywords)

        setattr(os, name, patched)
    import safetensors.torch

    save_file = safetensors.torch.save_file

    def save(tensors: Any, path: Any, *arguments: Any, **keywords: Any) -> None:
        disk.touch(path, safetensors.torch.save(tensors))
        save_file(tensors, path, *arguments, **keywords)

    safetensors.torch.save_file = save
    write_text = Path.write_text

    def write(self: Path, data: str, *arguments: Any, **keywords: Any) -> int:
        disk.touch(self, data.encode())
        return write_text(self, data, *arguments, **keywords)

    Path.write_text = write  # type: ignore[method-assign]


def serve() -> None:
    """Read commands in JSON, and run each in a fork of this process, which has imported everything.

    A command has `words`, and `kill`: the number of the operation on the disk that kills it, or 0.

    A line with the process id answers a command, and a line with the exit status follows at its end. A process that is
    killed after a second has then trained for a second, instead of importing torch.
    """
    disk = Disk(0, 0)
    install(disk)  # before the imports, which take the functions by name
    import torch

    from legato.cli.main import main as run_command
    from legato.config.kinds import register_all
    from legato.run import execute, train  # noqa: F401

    torch.set_num_threads(1)
    register_all()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            quiet = os.open(os.devnull, os.O_RDWR)
            for number in (0, 1, 2):
                os.dup2(quiet, number)
            command, status = json.loads(line), 1
            sys.argv = ["legato", *command["words"]]
            try:
                disk.kill, disk.count = command["kill"], 0
                run_command()
                status = 0
            except SystemExit as ending:
                status = ending.code if isinstance(ending.code, int) else 0 if ending.code is None else 1
            finally:
                os._exit(status)
        print(child, flush=True)
        print(os.waitpid(child, 0)[1], flush=True)


def main() -> None:
    if sys.argv[1:] == ["--serve"]:
        serve()
        return
    parser = argparse.ArgumentParser()
    parser.add_argument("--full", type=int, default=0)
    parser.add_argument("--count", type=Path)
    split = sys.argv.index("--")
    arguments, words = parser.parse_args(sys.argv[1:split]), sys.argv[split + 1 :]
    disk = Disk(0, arguments.full)
    install(disk)
    from legato.cli.main import main as run_command

    sys.argv = ["legato", *words]
    try:
        run_command()
    finally:
        if arguments.count is not None:
            with arguments.count.open("w") as file:
                file.write(str(disk.count))


if __name__ == "__main__":
    main()
