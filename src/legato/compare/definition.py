"""What is compared: arms, seeds and sweeps over one recipe, from the command line or from a TOML file.

recipe = "recipes/tiny.toml"         # or a list of files
seeds = [0, 1, 2]
[options]                            # of every arm
training.steps = 200
[arms.grpo]
algorithm = "grpo"
[arms.gspo]
algorithm = "gspo"
[sweep]
training.lr = [1e-4, 3e-4, 1e-3]
"""

import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legato.config.messages import show_value
from legato.config.names import ALGORITHMS
from legato.config.read import read_file
from legato.config.sources import check_tree, read_word, split_words
from legato.errors import InputError, nearest

Options = Mapping[str, Any]
"""Values by their dotted paths."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,60}")
KEYS = ("recipe", "seeds", "options", "arms", "sweep", "unequal")
OURS = ("training.seed", "output.directory", "output.name", "evaluation.target", "evaluation.target_greedy")
"""What the comparison itself decides: every run has its seed and its folder, and does all of its steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bed:
    """A test bed of a study: the recipe that its arms change."""

    recipes: tuple[Path, ...]
    options: Options = field(default_factory=dict)
    arms: tuple[str, ...] | None = None
    """The arms that run here; None: all. Routing Replay, for one, needs a mixture."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """A comparison, as it was asked for."""

    recipes: tuple[Path, ...] = ()
    arms: Mapping[str, Options]
    """The first is what the others are compared with."""
    seeds: tuple[int, ...]
    options: Options = field(default_factory=dict)
    """Of every arm."""
    sweep: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Paths and the values they take; every arm is trained at every combination."""
    unequal: bool = False
    """Whether arms may differ in problems, model or budget."""
    beds: Mapping[str, Bed] = field(default_factory=dict)
    """The test beds of a study; without any, `recipes` are the only one and it has no name."""

    @property
    def all_beds(self) -> Mapping[str, Bed]:
        return self.beds or {"": Bed(recipes=self.recipes)}

    def __post_init__(self) -> None:
        for fault in self._faults():
            raise InputError(fault)

    def _faults(self) -> Iterator[str]:
        if len(self.arms) < 2 and not self.sweep:
            arms = f"one arm ({next(iter(self.arms))})" if self.arms else "no arm"
            yield f"{arms} and no sweep is nothing to compare; --arm gspo --arm grpo gives two"
        for what, names in (("an arm", self.arms), ("a bed", self.beds)):
            for name in names:
                if not _NAME.fullmatch(name):
                    yield f"{what} is called {show_value(name)}; letters, digits and ._+- are allowed, at most 61 of them"
        for name, bed in self.beds.items():
            for arm in bed.arms or ():
                if arm not in self.arms:
                    known = nearest(arm, list(self.arms))
                    yield f"expected arms of the study, got {show_value(arm)} (beds.{name}.arms); {known}"
        if not self.seeds:
            yield "no seed is given; at least one is needed, several for intervals"
        for seed in self.seeds:
            if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
                yield f"the seed {show_value(seed)} is given; whole numbers from 0 are allowed"
        if len(set(self.seeds)) < len(self.seeds):
            yield f"the seeds {list(self.seeds)} name one twice: it would be the same run again"
        for path, values in self.sweep.items():
            if not values or len({repr(value) for value in values}) < len(values):
                yield f"the sweep {path} = {show_value(list(values))} is given; different values, at least one, are needed"
            for name in (name for name, options in self.arms.items() if path in options):
                yield f"{path} is swept and set by the arm {name}; one of them has to go"
        given = {"the sweep sets": self.sweep, "the options set": self.options}
        given |= {f"the arm {name} sets": options for name, options in self.arms.items()}
        for who, paths in given.items():
            for path in (path for path in OURS if path in paths):
                yield f"{who} {path}, which the comparison decides: --seeds, --out, and all steps for every run"


def from_arguments(
    arguments: Sequence[str], *, arms: Sequence[str], seeds: str | None, sweep: Sequence[str], unequal: bool
) -> Definition:
    """Files and `path=value` words, and what the options of the command said."""
    names, words = split_words(arguments)
    files, options = [Path(name) for name in names], dict(read_word(word) for word in words)
    if len(files) == 1 and files[0].suffix == ".toml" and "arms" in read_file(files[0])[1]:
        if arms or seeds is not None or sweep:
            raise InputError(f"{files[0]} names its arms, seeds and sweeps; --arm, --seeds and --sweep are for recipes")
        return from_file(files[0], options, unequal)
    pairs = [_arm(text) for text in arms]
    if len({name for name, _ in pairs}) < len(pairs):
        raise InputError(f"--arm names one of {', '.join(name for name, _ in pairs)} twice; every arm needs its own name")
    return Definition(
        recipes=tuple(files),
        arms=dict(pairs),
        seeds=read_seeds("0,1,2" if seeds is None else seeds),
        options=options,
        sweep=dict(map(_axis, sweep)),
        unequal=unequal,
    )


def from_file(path: Path, options: Options, unequal: bool = False) -> Definition:
    """A comparison file; `options` are words of the command line and win over its own."""
    return read_definition(path, read_file(path)[1], options, unequal)


def read_definition(
    path: Path, tree: Mapping[str, Any], options: Options, unequal: bool = False, *, beds: Mapping[str, Bed] | None = None
) -> Definition:
    """The definition of a file's content."""
    check_tree(dict(tree), str(path))
    unknown = [key for key in tree if key not in KEYS]
    if unknown:
        raise InputError(f"expected a key of a comparison, got {unknown[0]!r} ({path}); {nearest(unknown[0], KEYS)}")
    tables = {key: tree.get(key, {}) for key in ("options", "arms", "sweep")}
    tables |= {f"arms.{name}": arm for name, arm in tables["arms"].items()} if isinstance(tables["arms"], dict) else {}
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise InputError(f"{key}: expected a table, as in [{key}], got {show_value(table)} ({path})")
    recipe, seeds = tree.get("recipe", []), tree.get("seeds", [0, 1, 2])
    recipes = [recipe] if isinstance(recipe, str) else recipe
    if not isinstance(recipes, list) or not all(isinstance(each, str) for each in recipes):
        raise InputError(f"recipe: expected the name of a TOML file or a list of them, got {show_value(recipe)} ({path})")
    if not isinstance(tree.get("unequal", False), bool):
        raise InputError(f"unequal: expected true or false, got {show_value(tree['unequal'])} ({path})")
    sweep = flatten(tables["sweep"])
    for key, values in (("seeds", seeds), *((f"sweep.{axis}", values) for axis, values in sweep.items())):
        if not isinstance(values, list):
            raise InputError(f"{key}: expected a list, got {show_value(values)} ({path})")
    return Definition(
        recipes=tuple(map(Path, recipes)),
        arms={name: flatten(arm) for name, arm in tables["arms"].items()},
        seeds=tuple(seeds),
        options={**flatten(tables["options"]), **options},
        sweep={axis: tuple(values) for axis, values in sweep.items()},
        unequal=unequal or tree.get("unequal", False),
        beds=beds or {},
    )


def flatten(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    """Tables as dotted paths; an empty table stays one, since it switches something on."""
    paths: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{before}{key}"
        paths |= flatten(value, f"{path}.") if isinstance(value, dict) and value else {path: value}
    return paths


def _arm(text: str) -> tuple[str, Options]:
    """`gspo`, or a name and what it changes: `wide algorithm=gspo algorithm.objective.trust.clip.low=2e-3`."""
    try:
        name, *words = shlex.split(text)
    except ValueError:
        raise InputError(f"expected a name and path=value words in one pair of quotes, got {text!r} (--arm)") from None
    if words:
        return name, dict(read_word(word) for word in words)
    if name not in ALGORITHMS:
        raise InputError(
            f"expected an algorithm, or 'NAME path=value ...', got {text!r} (--arm); {nearest(name, ALGORITHMS)}"
        )
    return name, {"algorithm": name}


def read_seeds(text: str) -> tuple[int, ...]:
    """`0,1,5` or `0-4`."""
    seeds: list[int] = []
    for piece in text.split(","):
        match = re.fullmatch(r"\s*(\d{1,18})(?:\s*-\s*(\d{1,18}))?\s*", piece)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        if not first <= last < first + 10_000:
            raise InputError(f"expected numbers and ranges, as in 0,1,2 or 0-4, got {text!r} (--seeds)")
        seeds += range(first, last + 1)
    return tuple(seeds)


def _axis(text: str) -> tuple[str, tuple[Any, ...]]:
    """`training.lr=1e-4,3e-4`: values as TOML has them, or bare words."""
    path, equals, values = text.partition("=")
    if not equals or not path.strip() or not values.strip():
        raise InputError(f"expected path=value,value, as in training.lr=1e-4,3e-4,1e-3, got {text!r} (--sweep)")
    try:
        return path.strip(), tuple(tomllib.loads(f"values = [{values}]")["values"])
    except ValueError:
        return path.strip(), tuple(word.strip() for word in values.split(","))
