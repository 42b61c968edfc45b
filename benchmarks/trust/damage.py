"""Damage: random changes to the files of a finished run. Nothing may be used that is not what was written."""

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from benchmarks.trust.trial import KINDS, Case, Ended, digest, legato_here, train_words, unequal

_RUNS: dict[str, Path] = {}
_CONTINUED: dict[str, dict[str, str]] = {}
MORE = "training.steps=8"


def _flip_bits(path: Path, source: random.Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(source.randint(1, 4)):
        content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    path.write_bytes(bytes(content))


def _truncate(path: Path, source: random.Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: source.randrange(len(content))])


def _empty(path: Path, source: random.Random) -> None:
    path.write_bytes(b"")


def _delete(path: Path, source: random.Random) -> None:
    path.unlink()


def _append(path: Path, source: random.Random) -> None:
    path.write_bytes(path.read_bytes() + bytes(source.randrange(256) for _ in range(source.randint(1, 50))))


def _replace_by_folder(path: Path, source: random.Random) -> None:
    path.unlink()
    path.mkdir()


def _forge(path: Path, source: random.Random) -> None:
    """Valid JSON that is not what the file holds."""
    path.write_text(json.dumps(source.choice([{}, [], None, 3, {"format": 99}, {"files": {}}, {"format": 1, "files": []}])))


ACTIONS: tuple[Callable[[Path, random.Random], None], ...] = (
    _flip_bits,
    _truncate,
    _empty,
    _delete,
    _append,
    _replace_by_folder,
    _forge,
)


def damaged_checkpoints(source: random.Random) -> Iterator[Case]:
    """Damage to the newest checkpoint: `resume` uses the older one, says so and goes on as from there; `export` refuses."""
    while True:
        kind = source.choice(list(KINDS))
        action, seed = source.choice(ACTIONS), source.random()
        yield Case(name=f"{kind}, {action.__name__.strip('_')}", check=_checker(kind, action, seed))


def finished_run(kind: str, folder: Path) -> Path:
    """A finished run of a kind, made once, and how an undisturbed resume from its last checkpoint but one goes on."""
    if kind not in _RUNS:
        place = folder / "made"
        place.mkdir()
        ended = legato_here(*train_words(place, KINDS[kind]))
        if ended.code:
            raise RuntimeError(f"the run of kind {kind!r} failed: {ended.describe()}")
        _RUNS[kind] = place / "run"
        older = folder / "older"
        shutil.copytree(place / "run", older)
        newest = max((older / "checkpoints").glob("step-*"), key=lambda path: path.name)
        shutil.rmtree(newest)
        legato_here("resume", str(older), MORE)
        _CONTINUED[kind] = digest(older)
    return _RUNS[kind]


def _checker(kind: str, action: Callable[[Path, random.Random], None], seed: float) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        source, copy = random.Random(seed), folder / "run"
        shutil.copytree(finished_run(kind, folder), copy)
        newest = max((copy / "checkpoints").glob("step-*"), key=lambda path: path.name)
        files = sorted(path for path in newest.rglob("*") if path.is_file() and path.stat().st_size > 0)
        target = source.choice(files)
        action(target, source)
        exported = legato_here("export", str(copy), str(folder / "exported"))
        if exported.code != 2 or (folder / "exported").exists():
            return f"export of {target.relative_to(copy)}: expected exit 2 and no folder, got {exported.describe()}"
        resumed = legato_here("resume", str(copy), MORE)
        if resumed.code:
            return f"{target.relative_to(copy)}: {resumed.describe()}"
        if not _warns(resumed, newest.name):
            return f"{target.relative_to(copy)}: an older checkpoint was used without a word"
        return unequal(_CONTINUED[kind], digest(copy))

    return check


def _warns(ended: Ended, name: str) -> bool:
    return name in ended.output + ended.error


def damaged_records(source: random.Random) -> Iterator[Case]:
    """Damage to metrics.jsonl: sound checkpoints are not blocked. Damage to config.toml: refused or harmless."""
    while True:
        name = source.choice(["metrics.jsonl", "config.toml"])
        action, seed = source.choice([_flip_bits, _truncate, _empty, _delete, _append]), source.random()
        yield Case(name=f"{name}, {action.__name__.strip('_')}", check=_records_checker(name, action, seed))


def _records_checker(name: str, action: Callable[[Path, random.Random], None], seed: float) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        copy = folder / "run"
        shutil.copytree(finished_run("plain", folder), copy)
        action(copy / name, random.Random(seed))
        resumed = legato_here("resume", str(copy), MORE)
        if resumed.is_fault:
            return resumed.describe()
        if name == "metrics.jsonl":
            return resumed.describe() if resumed.code else None
        # A config that still says the same (a changed comment) may go on; one that cannot be read or differs is refused.
        return None if resumed.code in (0, 2) else resumed.describe()

    return check
