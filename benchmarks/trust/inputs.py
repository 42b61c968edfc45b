"""Bad input: options generated from the schema, data files, model folders. Each is refused in one message, never a fault."""

import json
import random
import shutil
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.trust.damage import finished_run
from benchmarks.trust.trial import Case, legato_here, refusal, train_words

WRONG: tuple[Any, ...] = (
    -1,
    0,
    -1e-30,
    1e400,
    10**400,
    float("nan"),
    "",
    "\x00",
    "no such thing",
    "../../etc/passwd",
    "a" * 100_000,
    [],
    [[[]]],
    {},
    {"a": 1},
    True,
    "nan",
    "💥",
    "file.py:Name",
    "json:dumps",
)


def bad_options(source: random.Random) -> Iterator[Case]:
    """Every option of the schema with wrong values, and wrong names: refused in one message, or the run works."""
    from legato.config.document import options

    paths = [option.path for option in options() if "NAME" not in option.path and not option.path.startswith("output.")]
    while True:
        path = source.choice(paths)
        if source.random() < 0.15:
            place = source.randrange(len(path))
            path = path[:place] + source.choice(string.ascii_lowercase) + path[place + 1 :]
        value = source.choice(WRONG)
        shown = repr(value) if len(repr(value)) < 40 else f"{repr(value)[:20]}..."
        yield Case(name=f"{path} = {shown}", check=_option(path, value))


def _option(path: str, value: Any) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        text = value if isinstance(value, str) else json.dumps(value) if value == value else "nan"
        ended = legato_here(*train_words(folder, {"training.steps": 1, "evaluation.every_steps": 0}), f"{path}={text}")
        # Some values are allowed for some options (a seed of 0, true for a switch): then the run must simply work.
        return None if ended.code == 0 else refusal(ended)

    return check


def bad_data(source: random.Random) -> Iterator[Case]:
    """JSONL files with lines cut, doubled, binary, of other types, huge or empty: the same."""
    good = [json.dumps({"prompt": f"{a}+{b}=", "answer": str(a + b)}) for a in range(5) for b in range(5)]
    while True:
        lines: list[Any] = list(good)
        names = []
        for _ in range(source.randint(1, 3)):
            name, spoil = source.choice(list(SPOILS.items()))
            names.append(name)
            lines = spoil(lines, source)
        yield Case(name=", ".join(names), check=_data(lines))


def _at(lines: list[Any], source: random.Random, new: Any) -> list[Any]:
    place = source.randrange(len(lines) + 1)
    return [*lines[:place], new, *lines[place:]]


SPOILS: dict[str, Callable[[list[Any], random.Random], list[Any]]] = {
    "a cut line": lambda lines, source: _at(lines, source, '{"prompt": "1+1='),
    "a number": lambda lines, source: _at(lines, source, "3"),
    "a list": lambda lines, source: _at(lines, source, "[1, 2]"),
    "null": lambda lines, source: _at(lines, source, "null"),
    "no prompt": lambda lines, source: _at(lines, source, '{"answer": "2"}'),
    "an empty prompt": lambda lines, source: _at(lines, source, '{"prompt": "", "answer": "2"}'),
    "a prompt that is a number": lambda lines, source: _at(lines, source, '{"prompt": 3, "answer": "2"}'),
    "binary": lambda lines, source: _at(lines, source, b"\xff\xfe\x00\x80"),
    "deeply nested": lambda lines, source: _at(lines, source, "[" * 100_000),
    "a megabyte": lambda lines, source: _at(lines, source, json.dumps({"prompt": "1" * 10**6, "answer": "2"})),
    "a lone surrogate": lambda lines, source: _at(lines, source, '{"prompt": "\\ud800", "answer": "2"}'),
    "twice the same": lambda lines, source: lines + lines,
    "nothing": lambda lines, source: [],
    "a key twice": lambda lines, source: _at(lines, source, '{"prompt": "1=", "prompt": "2=", "answer": "2"}'),
}


def _data(lines: list[Any]) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        path = folder / "data.jsonl"
        path.write_bytes(b"\n".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        options = {
            "task.kind": "jsonl",
            "task.path": str(path),
            "task.left_digits": None,
            "task.held_out": 1,
            "policy.max_prompt_tokens": 64,
            "training.steps": 1,
            "evaluation.every_steps": 0,
        }
        ended = legato_here(*train_words(folder, options))
        return None if ended.code == 0 else refusal(ended)

    return check


def bad_model_folders(source: random.Random) -> Iterator[Case]:
    """Model folders with a file cut, flipped, emptied, deleted or replaced by other JSON: the same."""
    from benchmarks.trust.damage import ACTIONS

    while True:
        action, seed = source.choice(ACTIONS), source.random()
        yield Case(name=f"model folder, {action.__name__.strip('_')}", check=_model(action, seed))


def _model(action: Callable[[Path, random.Random], None], seed: float) -> Callable[[Path], str | None]:
    def check(folder: Path) -> str | None:
        source, copy = random.Random(seed), folder / "model"
        run = finished_run("plain", folder)
        newest = max((run / "checkpoints").glob("step-*"), key=lambda path: path.name)
        shutil.copytree(newest / "model", copy)
        target = source.choice(sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size))
        action(target, source)
        options = {"policy.model": str(copy), "training.steps": 1, "evaluation.every_steps": 0}
        for name in ("hidden", "layers", "heads"):
            options[f"policy.tiny.{name}"] = None  # type: ignore[assignment]
        ended = legato_here(*train_words(folder, options))
        # A flipped bit in a weight is another weight, and in a file that is not read it changes nothing.
        return None if ended.code == 0 else refusal(ended)

    return check
