"""Reads rows of data with their location, from JSON Lines, Parquet and named data sets.

No code from a file is executed: pickled files are refused by name, loading scripts are not run. Faults raise one InputError
with file and line.
"""

import gzip
import io
import json
import re
import sys
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from legato.core.place import advice_from_above
from legato.errors import InputError

Row = tuple[str, Mapping[str, Any]]
"""("train.jsonl line 3", {"question": ...})"""

LONGEST_LINE = 10 * 2**20
"""In bytes. A longer line means another kind of file, or an attempt to exhaust memory."""
JSON_LINES, PARQUET = (".jsonl", ".jsonl.gz"), (".parquet",)
_PICKLED = (".pkl", ".pickle", ".pt", ".pth", ".bin", ".ckpt", ".joblib", ".dill", ".npy", ".npz")
_DATASET_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")


def read_rows(path: Path, endings: tuple[str, ...] = JSON_LINES + PARQUET) -> Iterator[Row]:
    """The rows of a file, by the ending of its name."""
    check_path(path, endings)
    try:
        yield from _parquet_rows(path) if path.name.endswith(PARQUET) else _json_rows(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be read: {error}") from None


def check_path(path: Path, endings: tuple[str, ...]) -> None:
    allowed = " or ".join(endings)
    if not path.exists():
        place = "" if path.is_absolute() else f" in {Path.cwd()}, where legato was started"
        raise InputError(f"{path}: there is no such file{place}; expected a {allowed} file{advice_from_above(path)}")
    if path.is_dir():
        raise InputError(f"{path}: expected a {allowed} file, got a folder")
    if path.name.endswith(_PICKLED):
        raise InputError(
            f"{path}: {path.suffix} files can run code when they are read and are refused; expected a {allowed} file"
        )
    if not path.name.endswith(endings):
        raise InputError(f"{path}: expected a name that ends in {allowed}")
    # Reading a pipe or a device might never end.
    if not path.is_file():
        raise InputError(f"{path}: expected a {allowed} file, got no regular file")


def _json_rows(path: Path) -> Iterator[Row]:
    compressed = path.name.endswith(".gz")
    try:
        with gzip.open(path, "rb") if compressed else path.open("rb") as file:
            yield from _json_lines(path, file)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise InputError(f"{path}: is not a complete gzip file: {error}") from None


def _json_lines(path: Path, file: io.BufferedIOBase) -> Iterator[Row]:
    number = 0
    while line := file.readline(LONGEST_LINE + 1):
        number += 1
        where = f"{path} line {number}"
        if len(line) > LONGEST_LINE:
            raise InputError(f"{where}: expected at most {LONGEST_LINE} bytes, got more")
        if b"\0" in line:
            raise InputError(f"{where}: holds a NUL byte; JSON Lines is text")
        try:
            text = line.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise InputError(f"{where}: is not UTF-8 at byte {error.start}") from None
        if not text:
            continue
        try:
            row = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{where}: is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise InputError(f"{where}: expected an object with a value for each column, got a {type(row).__name__}")
        yield where, row


def _parquet_rows(path: Path) -> Iterator[Row]:
    try:
        import pyarrow  # type: ignore[import-untyped, unused-ignore]
        import pyarrow.parquet  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise InputError(f"{path}: reading Parquet needs the package pyarrow; pip install 'legato[data]'") from None
    number = 0
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=256):
                for row in batch.to_pylist():
                    number += 1
                    yield f"{path} row {number}", row
    # A damaged file may raise any of these, for example for invalid text or an impossible date.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        raise InputError(f"{path}: cannot be read as Parquet after row {number}: {_first_line(error)}") from None


def dataset_rows(name: str, config: str | None, split: str) -> Iterator[Row]:
    """The rows of a data set on the Hugging Face hub, from the local cache if present."""
    described = f"data set {name!r}" + (f" config {config!r}" if config else "") + f" split {split!r}"
    if not _DATASET_NAME.fullmatch(name):
        raise InputError(f"{described}: expected a name such as 'openai/gsm8k'")
    # The library would prefer a file in the working directory to the data set of that name.
    if Path(name).exists():
        raise InputError(f"{described}: there is a file or folder of this name; give it as path, or run from another folder")
    try:
        import datasets  # type: ignore[import-untyped, unused-ignore]
    except ImportError:
        raise InputError(f"{described}: needs the package datasets; pip install 'legato[data]'") from None
    if not sys.stderr.isatty():
        getattr(datasets, "disable_progress_bars", lambda: None)()  # they would fill a log
    # Before version 4.0 the library could run a script of the data set's author.
    older = {"trust_remote_code": False} if int(datasets.__version__.split(".")[0]) < 4 else {}
    try:
        rows = datasets.load_dataset(name, config, split=split, **older)
    except Exception as error:  # its layers raise many types; the user needs one sentence
        raise InputError(f"{described}: could not be loaded: {type(error).__name__}: {_first_line(error)}") from None
    for number, row in enumerate(rows, start=1):
        yield f"{described} row {number}", row


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def split_files(path: Path, split: str) -> list[Path]:
    """The files of one split: the path itself, or in a folder train.jsonl, train.parquet or train-00000-of-00002.parquet."""
    if not path.is_dir():
        return [path]
    for ending in JSON_LINES + PARQUET:
        if (path / f"{split}{ending}").is_file():
            return [path / f"{split}{ending}"]
    shards = sorted(path.glob(f"{split}-*.parquet"))
    if not shards:
        expected = ", ".join(f"{split}{ending}" for ending in JSON_LINES + PARQUET)
        raise InputError(f"{path}: the folder has none of {expected}")
    return shards
