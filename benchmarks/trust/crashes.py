"""Crash states of a save: every prefix of its operations, with and without what was not yet flushed to the disk.

The operations of one save are recorded: of a new checkpoint, and of one whose step already has a checkpoint, as `resume
--allow-changes` and a recovery write it. A crash after operation n leaves the first n of them; a file whose last write was
not followed by an fsync may be whole, empty or cut. In every such state the newest sound checkpoint must be found, be one of
the two that there may be, and hold exactly what was written.
"""

import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.trust.damage import finished_run
from benchmarks.trust.trial import Case


@dataclass(frozen=True, slots=True)
class Operation:
    """One change of the disk: what, where, where to, and the content of a file after it."""

    what: str
    path: str
    target: str = ""
    content: bytes = b""


def crash_states(source: random.Random) -> Iterator[Case]:
    """Every prefix of the operations of a save, unflushed data kept, cut or lost: the newest sound checkpoint is found.

    It holds exactly what was written. Saves of a new checkpoint and saves over one of the same step; cases repeat.
    """
    while True:
        order = [(number, again) for number in range(200) for again in (False, True)]
        source.shuffle(order)
        for number, again in order:
            loss, counts = source.choice(["kept", "empty", "cut"]), dict[str, int]()
            kind = "rewrite" if again else "new checkpoint"
            yield Case(
                name=f"{kind}, after operation {number}, unflushed data {loss}",
                check=_checker(number, again, loss, source.random(), counts),
                counts=counts,
            )


_RECORDED: dict[bool, list[Operation]] = {}
"""The operations of a save, by whether the step already had a checkpoint."""


def _checker(number: int, again: bool, loss: str, seed: float, counts: dict[str, int]) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        from legato.training import checkpoint

        run = finished_run("plain", folder)
        if again not in _RECORDED:
            _RECORDED[again] = _record(run, folder / "recorded", again)
        recorded = _RECORDED[again]
        count = number % (len(recorded) + 1)
        counts["rewrites" if again else "new checkpoints"] = 1
        place = folder / "state"
        _start(run, place, again)
        _replay(recorded[:count], place, loss, random.Random(seed))
        older, newest = _names(run)
        try:
            checkpoint.put_back(place)
            found, _ = checkpoint.latest(place)
        except Exception as error:
            return f"after {count} of {len(recorded)} operations: {type(error).__name__}: {error}"
        if found.name not in (older, newest):
            return f"after {count} operations {found.name} was taken"
        if again and found.name != newest:
            return f"after {count} operations of a rewrite the checkpoint itself is gone"
        # Before a rewrite the step has the content of the older checkpoint, which is as right until the new one is there.
        right = [older, newest] if again else [found.name]
        if not any(_is_equal(found, run / "checkpoints" / name) for name in right):
            return f"{found.name} differs from what was written"
        return None

    return check


def _names(run: Path) -> tuple[str, str]:
    older, newest = sorted(path.name for path in (run / "checkpoints").glob("step-*"))[-2:]
    return older, newest


def _is_equal(found: Path, expected: Path) -> bool:
    """Whether a checkpoint holds exactly the files of another."""
    files = [path.relative_to(expected) for path in expected.rglob("*") if path.is_file()]
    return all((found / file).is_file() and (found / file).read_bytes() == (expected / file).read_bytes() for file in files)


def _start(run: Path, place: Path, again: bool) -> None:
    """The checkpoints before the save: the older one, and its content once more under the newest name for a rewrite."""
    place.mkdir()
    older, newest = _names(run)
    for name in (older, newest) if again else (older,):
        shutil.copytree(run / "checkpoints" / older, place / name)


def _record(run: Path, place: Path, again: bool) -> list[Operation]:
    """Write the newest checkpoint once more with the product's own function; the operations of the save."""
    from legato.training import checkpoint

    _start(run, place, again)
    _, newest = _names(run)
    written: list[Operation] = []
    with _Recording(place, written):
        checkpoint.write_folder(place / newest, lambda folder: _copy_files(run / "checkpoints" / newest, folder))
    shutil.rmtree(place)
    return written


def _copy_files(source: Path, folder: Path) -> None:
    for path in sorted(source.rglob("*")):
        if path.name == "manifest.json":
            continue  # the save makes its own
        target = folder / path.relative_to(source)
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(path.read_bytes())


class _Recording:
    """Inside, operations of this process below a folder are recorded."""

    def __init__(self, place: Path, written: list[Operation]) -> None:
        self.place, self.written = place, written
        self.originals: dict[str, Any] = {}

    def _inside(self, path: Any) -> str | None:
        absolute = (
            Path(os.fsdecode(path)).absolute() if not isinstance(path, int) else Path(os.readlink(f"/proc/self/fd/{path}"))
        )
        return str(absolute.relative_to(self.place)) if absolute.is_relative_to(self.place) else None

    def __enter__(self) -> None:
        for name in ("replace", "rename", "mkdir", "unlink", "rmdir", "fsync"):
            original = self.originals[name] = getattr(os, name)

            def patched(path: Any, *rest: Any, _name: str = name, _original: Any = original, **more: Any) -> Any:
                below = more.get("dir_fd")
                inside = self._inside(path if below is None else Path(os.readlink(f"/proc/self/fd/{below}"), path))
                result = _original(path, *rest, **more)
                if inside is not None:
                    target = self._inside(rest[0]) or "" if _name in ("replace", "rename") else ""
                    self.written.append(Operation(_name, inside, target))
                return result

            setattr(os, name, patched)
        self.writers = Path.write_bytes, Path.write_text

        def record_write(path: Path, data: bytes) -> None:
            inside = self._inside(path)
            if inside is not None:
                self.written.append(Operation("write", inside, content=data))

        def write_bytes(path: Path, data: Any) -> int:
            count = self.writers[0](path, data)
            record_write(path, bytes(data))
            return count

        def write_text(path: Path, data: str, *arguments: Any, **keywords: Any) -> int:
            count = self.writers[1](path, data, *arguments, **keywords)
            record_write(path, data.encode())
            return count

        Path.write_bytes, Path.write_text = write_bytes, write_text  # type: ignore[method-assign, assignment]

    def __exit__(self, *_: object) -> None:
        Path.write_bytes, Path.write_text = self.writers  # type: ignore[method-assign]
        for name, original in self.originals.items():
            setattr(os, name, original)


def _replay(operations: list[Operation], place: Path, loss: str, source: random.Random) -> None:
    """Do the operations again, then lose what was not flushed."""
    unflushed: set[str] = set()
    for operation in operations:
        path = place / operation.path
        if operation.what == "mkdir":
            path.mkdir(parents=True, exist_ok=True)
        elif operation.what == "write":
            path.write_bytes(operation.content)
            unflushed.add(operation.path)
        elif operation.what in ("replace", "rename"):
            path.rename(place / operation.target)
            unflushed = {
                operation.target + name.removeprefix(operation.path) if name.startswith(operation.path) else name
                for name in unflushed
            }
        elif operation.what == "fsync":
            unflushed.discard(operation.path)
        elif operation.what == "unlink":
            path.unlink(missing_ok=True)
        elif operation.what == "rmdir":
            shutil.rmtree(path, ignore_errors=True)
    for name in sorted(unflushed):
        path = place / name
        if loss != "kept" and path.is_file():
            content = path.read_bytes()
            path.write_bytes(b"" if loss == "empty" else content[: source.randrange(len(content) + 1)])
