"""An option is declared in one place: the settings of the code that uses it. Nothing repeats it and nothing copies it."""

import ast
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from typing import Any

from legato.config.document import options
from legato.config.schema import Config
from legato.core.parts import Part
from legato.core.settings import Table
from legato.run import wire

NAMES = {option.path.rpartition(".")[2] for option in options() if not option.path.endswith(("PATH", "OPTION"))}

NARROWED = {("Rollouts", "temperature")}
"""A section takes fewer values than the settings it inherits; sentence and default are theirs."""

NO_REPETITION = {
    ("legato.policy.policy", "Policy", "packing"): "a policy can be made without loading it",
    ("legato.rollouts.mismatch", "_RoundedPolicy", "packing"): "a policy",
}
"""Fields that have the name and the default of an option by right."""


SEED = "seed"
"""The one name that may be repeated: many parts of a run draw from its one seed, each given it as an argument."""


def sections(section: type = Config) -> Iterator[type]:
    """Every settings class that a configuration holds."""
    yield section
    for field in dataclasses.fields(section):
        rule = field.metadata["rule"]
        if isinstance(rule, Table) and rule.section is not None:
            yield from sections(rule.section)


def defaults(section: type = Config) -> Iterator[tuple[str, Any]]:
    for each in sections(section):
        yield from ((field.name, field.default) for field in dataclasses.fields(each))


def test_a_section_and_its_settings_declare_each_option_once() -> None:
    for section in set(sections()):
        for field in dataclasses.fields(section):
            declaring = [base.__name__ for base in section.__mro__ if field.name in vars(base).get("__annotations__", {})]
            assert len(declaring) == 1 or (declaring[0], field.name) in NARROWED, (section, field.name, declaring)


def test_no_other_dataclass_repeats_an_option_with_its_default() -> None:
    declared, repeated = set(defaults()), set()
    for module in [name for name in sys.modules if name.startswith("legato.")]:
        for name, cls in vars(sys.modules[module]).items():
            own = isinstance(cls, type) and cls.__module__ == module and dataclasses.is_dataclass(cls)
            if not own or issubclass(cls, Part):
                continue
            for field in dataclasses.fields(cls):
                plain = "rule" not in field.metadata and field.default not in (dataclasses.MISSING, None)
                plain = plain and field.name != SEED
                if plain and _hashable(field.default) and (field.name, field.default) in declared:
                    repeated.add((module, name, field.name))
    assert repeated == set(NO_REPETITION)


def _hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def test_the_wiring_copies_no_option() -> None:
    """`name=section.name` would be a copy: a section is handed over, or `select` takes what a class shares with it."""
    copied = [
        keyword.arg
        for call in ast.walk(ast.parse(inspect.getsource(wire)))
        if isinstance(call, ast.Call)
        for keyword in call.keywords
        if isinstance(keyword.value, ast.Attribute) and keyword.arg == keyword.value.attr and keyword.arg in NAMES
    ]
    assert set(copied) <= {SEED}
