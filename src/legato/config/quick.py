"""Checks recipes and words without importing torch: a mistake is refused in a moment, with the message of the whole check.

It finds names that do not exist, values of the wrong type or out of range, kinds and algorithms that do not exist, and files
that are missing. `load.py` then checks everything, also what options mean together.
"""

from collections.abc import Sequence
from pathlib import Path as File

from legato.config.quick_algorithm import faults_of_algorithm
from legato.config.sections import Section, stored_kind, stored_section
from legato.config.sources import SETS, Layer, from_file, from_words, split_words
from legato.config.unknown import verl_options
from legato.config.validate import family_of, merge, reward_of_environment, tables_with_kind, validate
from legato.core.importing import check_file, is_import_path
from legato.errors import InputError
from legato.policy.model.folder import check_folder, means_a_folder
from legato.tasks.rows import JSON_LINES, PARQUET, check_path

_FILES = {"jsonl": JSON_LINES, "parquet": PARQUET}
"""Kinds of data that are one file -> the endings of its name."""


def check_arguments(arguments: Sequence[str], *, whole: bool = True) -> None:
    """InputError, a line for each fault, if recipes or `path=value` words cannot be used.

    Not `whole`: they change a run, or stand beside a model or a configuration of TRL. A kind that they do not name may be
    named there, and with it other options.
    """
    files, words = split_words(arguments)
    layers = [*(from_file(File(file)) for file in files), from_words(words)]
    root, merged = stored_section(), Layer()
    faults = [line for layer in layers for line in verl_options(layer)]
    faults += faults_of_algorithm(layers, whole=whole)
    for layer in layers:
        merge(merged, layer, root)
    reward_of_environment(merged)
    if not whole:
        _drop_options_of_kinds_named_elsewhere(merged, root)
    validate(merged, faults, root, stored_kind)
    if faults:
        raise InputError("\n".join(dict.fromkeys(faults)))
    _check_files(merged)


def _drop_options_of_kinds_named_elsewhere(merged: Layer, root: Section) -> None:
    for path, section in list(tables_with_kind(root, merged.tree)):
        table = merged.at(path)
        if not isinstance(table, dict) or "kind" in table:
            continue
        if section.fields["kind"].needed:
            merged.drop(path)
        else:
            for name in [name for name in table if name not in section.names]:
                merged.drop((*path, name))
    sets = merged.at(SETS)
    for name, table in dict(sets).items() if isinstance(sets, dict) else ():
        if isinstance(table, dict) and "task" not in table:
            merged.drop((*SETS, name))


def _check_files(merged: Layer) -> None:
    """InputError if a file with problems, a file with the user's code, or the folder of the model is missing."""
    for path, section in tables_with_kind(stored_section(), merged.tree):
        table = merged.at(path)
        if not isinstance(table, dict):
            continue
        kind = table.get("kind", section.fields["kind"].default)
        if kind in _FILES:
            check_path(File(table["path"]), _FILES[kind])
        elif isinstance(kind, str) and is_import_path(kind):
            check_file(family_of(path), kind)
    for path, what in ((("task", "environment"), "environment"), (("rollouts", "engine"), "engine")):
        reference = merged.at(path)
        if isinstance(reference, str) and is_import_path(reference):
            check_file(what, reference)
    model = merged.at(("policy", "model"))
    if isinstance(model, str) and means_a_folder(model):
        check_folder(File(model).expanduser())
