"""Settings: declared once, checked when constructed, inherited by the sections that hold them."""

import dataclasses
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import pytest

from legato.core.fields import choice, flag_or, integer, number, pair, text, texts
from legato.core.settings import free_table, narrow, optional_table, select, settings, table, tables
from legato.errors import InputError


@settings(resume="refused")
class Inner:
    size: int = integer(default=2, says="Size.", minimum=1)


@settings()
class Steps:
    rate: float = number(default=0.5, says="Rate.", minimum=0.0)
    kind: str = choice("a", "b", default="a", says="Kind.", resume="free")
    inner: Inner = table(default_factory=Inner, says="A table.")

    def check(self) -> None:
        if self.kind == "b" and self.rate == 0:
            raise InputError("rate: expected > 0 with kind = 'b', got 0")


@settings()
class Words:
    words: tuple[str, ...] = texts(default=(), says="Words.")
    switch: bool | str = flag_or("auto", default="auto", says="A switch.")
    betas: tuple[float, float] = pair(default=(0.5, 0.5), says="Two.", minimum=0.0, below=1.0)


@settings(resume="free")
class Section(Steps, Words):
    name: str | None = text(default=None, says="A name.", optional=True)
    rate: float = narrow(Steps, "rate", above=0.0)
    more: Inner | None = optional_table(Inner, default=None, says="Perhaps a table.")
    several: Mapping[str, Inner] = tables(Inner, default_factory=dict, says="By name.")
    free: Mapping[str, Any] = free_table(default_factory=dict, says="Anything.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Used(Steps, Words):
    tensor: int


def test_the_fields_of_a_class_come_before_those_of_its_bases_from_left_to_right() -> None:
    names = [field.name for field in dataclasses.fields(Section)]
    assert names == ["name", "more", "several", "free", "rate", "kind", "inner", "words", "switch", "betas"]


def test_the_resume_rule_comes_from_the_field_or_its_class() -> None:
    resume = {field.name: field.metadata["resume"] for field in dataclasses.fields(Section)}
    assert resume["kind"] == resume["name"] == "free" and resume["inner"] == resume["words"] == resume["rate"] == "flag"
    assert [field.metadata["resume"] for field in dataclasses.fields(Inner)] == ["refused"]


def test_values_are_stored_in_one_form() -> None:
    section = Section(rate=1, words=["a", "b"], betas=[0, 0.5])  # type: ignore[arg-type]
    assert (section.rate, section.words, section.betas) == (1.0, ("a", "b"), (0.0, 0.5)) and isinstance(section.rate, float)
    assert section == dataclasses.replace(section)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rate", 0),
        ("rate", "1"),
        ("rate", True),
        ("rate", float("nan")),
        ("rate", float("inf")),
        ("rate", 10**400),
        ("kind", "c"),
        ("kind", ["a"]),
        ("words", "ab"),
        ("words", [""]),
        ("words", [1]),
        ("switch", "on"),
        ("switch", 1),
        ("betas", [0.5]),
        ("betas", [0.5, 1.0]),
        ("name", ""),
        ("inner", {}),
        ("inner", None),
        ("more", {}),
        ("several", {"a": {}}),
        ("free", []),
    ],
)
def test_a_refused_value_is_reported_with_its_field(name: str, value: Any) -> None:
    with pytest.raises(InputError) as refusal:
        Section(**{name: value})
    assert f"Section.{name}: expected " in str(refusal.value) and str(refusal.value).endswith(f", got {value!r}")


def test_whole_numbers_are_of_64_bits() -> None:
    assert Inner(size=2**63 - 1).size == 2**63 - 1
    for size in (2**63, 0, True, 1.0):
        with pytest.raises(InputError):
            Inner(size=size)  # type: ignore[arg-type]


def test_a_base_class_checks_what_its_fields_agree_on() -> None:
    assert Steps(kind="b").rate == 0.5
    for kind in (Steps, Used):
        with pytest.raises(InputError, match="rate: expected > 0 with kind"):
            kind(kind="b", rate=0, **({"tensor": 1} if kind is Used else {}))


def test_a_section_gives_the_settings_that_a_class_shares_with_it() -> None:
    section = Section(rate=0.25, kind="b", words=("x",))
    assert select(Steps, [section]) == Steps(rate=0.25, kind="b")
    assert select(Used, [Words(words=("y",)), Steps(kind="b")], tensor=3) == Used(kind="b", words=("y",), tensor=3)
    with pytest.raises(TypeError, match=r"Used\.words"):
        select(Used, [Steps()], tensor=3)


def test_settings_need_nothing_but_the_standard_library() -> None:
    code = "import sys, legato.core.settings; sys.exit(any(name in sys.modules for name in ('torch', 'numpy', 'pydantic')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
