"""Reasoning Gym as it runs in a worker (`workers/pool.py`) that scores answers.

Several of its data sets hand the answer, which a model wrote, to Python's `eval` or to sympy's `parse_expr`, which evaluates
too. Here both are replaced: by one that knows literals and arithmetic, and by one that knows formulas.
"""

import ast
import json
import re
import sys
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from legato.errors import InputError

_LITERALS = (
    ast.Expression, ast.Constant, ast.List, ast.Tuple, ast.Set, ast.Dict, ast.Load,
    ast.UnaryOp, ast.unaryop, ast.BinOp, ast.operator,
)  # fmt: skip
_FORMULA = re.compile(r"[\w\s+\-*/^().,]*", re.ASCII)
_WORD = re.compile(r"[^\W\d]\w*")
_FUNCTIONS = re.compile(r"a?(?:sin|cos|tan)h?|sec|csc|cot|exp|log|ln|sqrt|[aA]bs|pi")


def prepare() -> None:
    """Import Reasoning Gym and replace the functions with which it runs text as code."""
    import reasoning_gym  # type: ignore[import-untyped, unused-ignore]  # noqa: F401
    import sympy  # type: ignore[import-untyped, unused-ignore]
    from sympy.parsing import sympy_parser  # type: ignore[import-untyped, unused-ignore]

    original = sympy_parser.parse_expr

    def parse_formula(text: str, *arguments: Any, **options: Any) -> Any:
        check_formula(text)
        return original(text, *arguments, **options)

    for name, module in list(sys.modules.items()):
        if name.startswith("reasoning_gym"):
            module.eval = evaluate_literal  # type: ignore[attr-defined]
            if getattr(module, "parse_expr", None) is original:
                module.parse_expr = parse_formula  # type: ignore[attr-defined]
    sympy.parse_expr = sympy_parser.parse_expr = parse_formula


def evaluate_literal(text: str, *_: Any) -> Any:
    """The value that Python's `eval` gives for literals and their arithmetic; any name in the text is refused."""
    tree = ast.parse(text.strip(), mode="eval")
    for node in ast.walk(tree):
        if not isinstance(node, _LITERALS):
            raise InputError(f"{type(node).__name__} is not allowed")
    return eval(compile(tree, "answer", "eval"), {"__builtins__": {}})


def check_formula(text: str) -> None:
    """InputError unless the text has only numbers, operators, one-letter variables and known functions.

    sympy's parser would call any function by its name.
    """
    words = _WORD.findall(text)
    if not _FORMULA.fullmatch(text) or re.search(r"\.\s*[^\W\d]", text) or "__" in text:
        raise InputError("is no formula")
    for word in words:
        if len(word) > 1 and not _FUNCTIONS.fullmatch(word):
            raise InputError(f"{word!r} is no function of formulas")


@lru_cache(maxsize=64)
def _dataset(name: str, settings: str) -> Any:
    import reasoning_gym

    return reasoning_gym.create_dataset(name, seed=0, size=1, **json.loads(settings))


def score(dataset: str, settings: Mapping[str, Any], whole: str, answer: str) -> float:
    """The score that the data set itself gives for an answer to one of its problems."""
    return float(_dataset(dataset, json.dumps(settings)).score_answer(answer, _untag_types(json.loads(whole))))


def _untag_types(value: Any) -> Any:
    """Inverse of `_tag_types` in `tasks.gym_worker`: restores tuples and mappings."""
    if isinstance(value, list):
        return [_untag_types(item) for item in value]
    if isinstance(value, dict):
        if "tuple" in value:
            return tuple(_untag_types(item) for item in value["tuple"])
        return {_untag_types(key): _untag_types(item) for key, item in value["mapping"]}
    return value
