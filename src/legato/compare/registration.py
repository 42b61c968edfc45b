"""A study file: what is asked, how it will be measured and judged, written down before the reported runs.

question = "Does GSPO tolerate a larger learning rate than GRPO on a mixture?"
confirmed = "..."                          # in words; the comparisons below say it exactly
refuted = "..."
seeds = [200, 201, 202, 203, 204, 205]
pilot_seeds = [100, 101]

[beds.mixture]                             # recipes that the arms change
recipe = "recipes/tiny-moe-long.toml"
arms = ["grpo", "gspo"]                    # without it: all
[beds.mixture.options]
training.steps = 15

[options], [arms.NAME], [sweep]            # as in a comparison file

[endpoint]
kind = "frontier"                          # or "score", "area"
axis = "training.lr"

[[comparisons]]
name = "gspo beside grpo"
terms = [{ arm = "gspo", bed = "mixture", weight = 1 }, { arm = "grpo", bed = "mixture", weight = -1 }]
margin = 0.5                               # smaller differences do not matter
detects = 1.0                              # the difference the number of seeds is chosen for ...
spread = 0.6                               # ... at this standard deviation between seeds
at_least = 1.0                             # the least mean difference that confirms; without it: any
confirms_if = "above"                      # "above", "below" or "equivalent"
refutes_if = ["below", "equivalent"]       # one of them or a list

A study may measure in place of training (`lab/measured.py`):

measure = "gradient-noise"                 # arms and swept values are then those of the measurement; no beds, no options
[settings]                                 # of the measurement
responses = 64
[endpoint]
kind = "measured"
means = "log2 of ..."
"""

import hashlib
import json
import math
import subprocess
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legato.compare.definition import KEYS, Bed, Definition, Options, flatten, read_definition
from legato.config.messages import show_value
from legato.config.read import read_file
from legato.errors import InputError, nearest
from legato.records.lines import atomic_replace

ENDPOINTS = {
    "score": "sampled accuracy on held-out problems at the end of a run",
    "area": "mean held-out accuracy over the tokens sampled (area under the curve, divided by the tokens)",
    "frontier": "log2 of the largest value of the swept option up to which no run of the seed collapsed or failed",
    "measured": "a number that is measured without training",
}
FINDINGS = ("above", "below", "equivalent")
_STUDY_KEYS = (
    "title",
    "question",
    "confirmed",
    "refuted",
    "pilot_seeds",
    "beds",
    "endpoint",
    "comparisons",
    "measure",
    "settings",
)
_COMPARISON_KEYS = ("name", "terms", "margin", "detects", "spread", "at_least", "confirms_if", "refutes_if")
_TERM_KEYS = ("arm", "bed", "at", "weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """The number that the study compares."""

    kind: str
    axis: str | None = None
    """The swept option of a frontier."""
    means: str
    """What the number is, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One summand of a comparison: the endpoint of an arm on a bed, at values of the sweep, with a weight."""

    arm: str
    bed: str
    weight: float
    at: Options = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A weighted sum of endpoints, computed seed by seed, and what its verdict would mean."""

    name: str
    terms: tuple[Term, ...]
    margin: float
    detects: float
    spread: float
    at_least: float
    """The mean difference that `confirms_if` asks for beside the verdict. Where it equals the true difference, it is met in
    half of all studies, whatever their power."""
    confirms_if: tuple[str, ...] = ()
    """The findings that confirm; empty: this comparison confirms nothing."""
    refutes_if: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """A registered study."""

    file: Path
    sha256: str
    title: str
    question: str
    confirmed: str
    refuted: str
    pilot_seeds: tuple[int, ...]
    definition: Definition
    endpoint: Endpoint
    comparisons: tuple[Comparison, ...]
    measure: str | None = None
    """The name of a measurement; None: the study trains."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise InputError(f"{self.file}: {fault}")

    def _faults(self) -> Iterator[str]:
        definition = self.definition
        shared = sorted({*self.pilot_seeds} & {*definition.seeds})
        if shared:
            yield f"expected pilot seeds that are not reported, got {shared} in both (pilot_seeds)"
        if len(definition.seeds) < 2:
            yield f"expected at least 2 seeds, got {len(definition.seeds)} (seeds)"
        if (self.measure is not None) != (self.endpoint.kind == "measured"):
            yield f'expected kind = "measured" with `measure` and only there, got {self.endpoint.kind!r} (endpoint.kind)'
        if self.measure is not None and (definition.beds or definition.options or definition.recipes):
            yield "expected no recipe, beds and options where `measure` is given, got some; [settings] are its options"
        if self.endpoint.kind == "frontier" and self.endpoint.axis not in definition.sweep:
            yield f"expected one of {[*definition.sweep]}, got {show_value(self.endpoint.axis)} (endpoint.axis)"
        for value in definition.sweep.get(self.endpoint.axis or "", ()):
            if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
                yield f"expected numbers above 0, got {show_value(value)} (sweep.{self.endpoint.axis}, a frontier's axis)"
        if not self.comparisons:
            yield "expected at least one [[comparisons]], got none"
        for comparison in self.comparisons:
            for fault in self._comparison_faults(comparison):
                yield f"{fault} (the comparison {comparison.name!r})"

    def _comparison_faults(self, comparison: Comparison) -> Iterator[str]:
        beds, arms = self.definition.all_beds, self.definition.arms
        swept = [path for path in self.definition.sweep if path != self.endpoint.axis]
        if abs(sum(term.weight for term in comparison.terms)) > 1e-9:
            yield f"expected weights whose sum is 0, got {[term.weight for term in comparison.terms]}"
        for term in comparison.terms:
            if term.arm not in arms:
                yield f"expected an arm, got {term.arm!r}; {nearest(term.arm, list(arms))}"
            elif term.bed not in beds:
                yield f"expected a bed, got {term.bed!r}; {nearest(term.bed, list(beds))}"
            elif beds[term.bed].arms is not None and term.arm not in (beds[term.bed].arms or ()):
                yield f"expected an arm that runs on {term.bed!r}, got {term.arm!r}"
            elif sorted(term.at) != sorted(swept):
                yield f"expected at = a value for each of {swept}, got {show_value(dict(term.at))}"
            for path, value in term.at.items():
                if path in self.definition.sweep and value not in self.definition.sweep[path]:
                    yield f"expected a swept value of {path}, got {show_value(value)}"
        for name in ("margin", "detects", "spread"):
            if not getattr(comparison, name) > 0:
                yield f"expected {name} above 0, got {getattr(comparison, name)}"
        for name in ("confirms_if", "refutes_if"):
            for finding in getattr(comparison, name):
                if finding not in FINDINGS:
                    yield f"expected one of {', '.join(FINDINGS)}, or a list of them, got {show_value(finding)} ({name})"


def read_study(path: Path) -> Study:
    """The study of a file. InputError says what is wrong with it."""
    tree = read_file(path)[1]
    unknown = [key for key in tree if key not in (*_STUDY_KEYS, *KEYS)]
    if unknown:
        raise InputError(
            f"{path}: expected keys of a study, got {unknown[0]!r}; {nearest(unknown[0], [*_STUDY_KEYS, *KEYS])}"
        )
    for key in ("question", "confirmed", "refuted"):
        if not isinstance(tree.get(key), str) or not tree[key].strip():
            raise InputError(f"{path}: expected a sentence, got {show_value(tree.get(key))} ({key})")
    beds = {name: _bed(path, name, table) for name, table in _table(path, tree, "beds").items()}
    definition = read_definition(path, {key: value for key, value in tree.items() if key in KEYS}, {}, beds=beds)
    endpoint = _table(path, tree, "endpoint")
    if endpoint.get("kind") not in [*ENDPOINTS] or set(endpoint) - {"kind", "axis", "means"}:
        raise InputError(
            f"{path}: expected [endpoint] with kind = one of {', '.join(ENDPOINTS)}, got {show_value(endpoint)}"
        )
    pilot_seeds = tree.get("pilot_seeds", [])
    if not isinstance(pilot_seeds, list) or any(type(seed) is not int for seed in pilot_seeds):
        raise InputError(f"{path}: expected a list of whole numbers, got {show_value(pilot_seeds)} (pilot_seeds)")
    comparisons = tree.get("comparisons", [])
    if not isinstance(comparisons, list):
        raise InputError(f"{path}: expected [[comparisons]], got {show_value(comparisons)}")
    return Study(
        file=path,
        sha256=hashlib.sha256(path.read_bytes()).hexdigest(),
        title=_text(str(path), {"title": path.stem, **tree}, "title"),
        question=tree["question"],
        confirmed=tree["confirmed"],
        refuted=tree["refuted"],
        pilot_seeds=tuple(pilot_seeds),
        definition=definition,
        endpoint=Endpoint(
            kind=endpoint["kind"],
            axis=endpoint.get("axis"),
            means=_text(str(path), {"means": ENDPOINTS[endpoint["kind"]], **endpoint}, "means"),
        ),
        comparisons=tuple(_comparison(path, number, table) for number, table in enumerate(comparisons, 1)),
        measure=tree.get("measure"),
        settings=_table(path, tree, "settings"),
    )


def registering_commit(file: Path, sha256: str) -> dict[str, str] | None:
    """The first commit that holds the file with this content, with its date; None outside git or if there is none."""

    def git(*words: str) -> bytes | None:
        answer = subprocess.run(["git", *words], cwd=file.parent, capture_output=True, check=False)
        return answer.stdout if answer.returncode == 0 else None

    try:
        # Not with --reverse, with which --follow ends at the first copy.
        history = git("log", "--follow", "--format=%H %cI", "--", file.name) or b""
        for line in reversed(history.decode().splitlines()):
            commit, date = line.split(" ", 1)
            # git follows a file to the one it takes it to be a copy of; there is none of this name at that commit.
            content = git("show", f"{commit}:./{file.name}")
            if content is not None and hashlib.sha256(content).hexdigest() == sha256:
                return {"commit": commit, "date": date}
    except OSError:
        return None
    return None


def hold_registration(study: Study, folder: Path, *, runs_begun: bool) -> str | None:
    """When the first run of this folder began; None if the folder is older than this note. InputError if the study file has
    changed since: a margin or a condition could else be chosen after the runs that it judges."""
    note, results = folder / "registration.json", folder / "study.json"
    kept: dict[str, Any] | None = None
    held: dict[str, Any] = {"sha256": study.sha256, "begun": time.strftime("%Y-%m-%dT%H:%M:%S%z")}
    if runs_begun and note.exists():
        held = kept = json.loads(note.read_text(encoding="utf-8"))
    elif runs_begun and results.exists():
        held = {"sha256": json.loads(results.read_text(encoding="utf-8"))["registration"]["sha256"], "begun": None}
    if held["sha256"] != study.sha256:
        raise InputError(
            f"expected {study.file} as it was when the runs in {folder} began (sha256 {held['sha256'][:12]}), got"
            f" {study.sha256[:12]}; a study goes on only as it was registered: restore the file, or --out FOLDER begins anew"
        )
    if held != kept:
        with atomic_replace(note) as partial:
            partial.write_text(json.dumps(held) + "\n", encoding="utf-8")
    begun: str | None = held["begun"]
    return begun


def _table(path: Path, tree: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    table = tree.get(key, {})
    if not isinstance(table, dict):
        raise InputError(f"{path}: expected a table [{key}], got {show_value(table)}")
    return table


def _bed(path: Path, name: str, table: Any) -> Bed:
    where = f"{path}: beds.{name}"
    if not isinstance(table, dict) or set(table) - {"recipe", "options", "arms"} or "recipe" not in table:
        raise InputError(f"{where}: expected recipe, and optionally options and arms, got {show_value(table)}")
    recipes = table["recipe"] if isinstance(table["recipe"], list) else [table["recipe"]]
    arms = table.get("arms")
    if not all(isinstance(recipe, str) for recipe in recipes):
        raise InputError(f"{where}: expected a path or a list of paths, got {show_value(table['recipe'])} (recipe)")
    if arms is not None and not isinstance(arms, list):
        raise InputError(f"{where}: expected a list of arms, got {show_value(arms)} (arms)")
    return Bed(
        recipes=tuple(map(Path, recipes)),
        options=flatten(_table(path, table, "options")),
        arms=None if arms is None else tuple(arms),
    )


def _comparison(path: Path, number: int, table: Any) -> Comparison:
    where = f"{path}: comparisons {number}"
    needed = {"name", "terms", "margin", "detects", "spread"}
    if not isinstance(table, dict) or set(table) - {*_COMPARISON_KEYS} or needed - {*table}:
        raise InputError(f"{where}: expected {', '.join(_COMPARISON_KEYS)}, got {show_value(table)}")
    if not isinstance(table["terms"], list):
        raise InputError(f"{where}: expected a list of terms, got {show_value(table['terms'])} (terms)")
    for term in table["terms"]:
        if not isinstance(term, dict) or set(term) - {*_TERM_KEYS} or {"arm", "weight"} - {*term}:
            raise InputError(f"{where}: expected terms with {', '.join(_TERM_KEYS)}, got {show_value(term)}")
    terms = tuple(
        Term(
            arm=_text(where, term, "arm"),
            bed=_text(where, term, "bed") if "bed" in term else "",
            weight=_number(where, term, "weight"),
            at=flatten(_table(path, term, "at")),
        )
        for term in table["terms"]
    )
    return Comparison(
        name=_text(where, table, "name"),
        terms=terms,
        margin=_number(where, table, "margin"),
        detects=_number(where, table, "detects"),
        spread=_number(where, table, "spread"),
        at_least=_number(where, table, "at_least") if "at_least" in table else 0.0,
        confirms_if=_findings(table.get("confirms_if")),
        refutes_if=_findings(table.get("refutes_if")),
    )


def _number(where: str, table: Mapping[str, Any], key: str) -> float:
    value = table[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise InputError(f"{where}: expected a number, got {show_value(value)} ({key})")
    return float(value)


def _text(where: str, table: Mapping[str, Any], key: str) -> str:
    value = table[key]
    if not isinstance(value, str):
        raise InputError(f"{where}: expected a text, got {show_value(value)} ({key})")
    return value


def _findings(value: Any) -> tuple[str, ...]:
    """One finding or a list of findings; none without a value."""
    return () if value is None else tuple(value) if isinstance(value, list) else (value,)
