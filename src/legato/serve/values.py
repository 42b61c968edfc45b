"""Reads the fields of a JSON body one by one, checking type and bounds. What no one reads is refused at the end.

body = Body(parsed)
n = body.integer("n", 1, minimum=1, maximum=128)
body.only("best_of", 1, advice="...")
body.refuse_unknown()
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from legato.serve.errors import ApiError, bad_value, unsupported

INT64 = 2**63


def parse_json(data: bytes, most_levels: int) -> dict[str, Any]:
    """The JSON object in the body of a request; ApiError (400) for anything else."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"expected a JSON body in UTF-8, got other bytes: {error.reason} at {error.start}") from None
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise _too_deep(most_levels) from None
    except ValueError as error:
        raise ApiError(400, f"We could not parse the JSON body of your request: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise ApiError(400, f"expected a JSON object as body, got {_json_type(value)}")
    _check_tree(value, most_levels)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _too_deep(most: int) -> ApiError:
    return ApiError(400, f"expected a JSON body of at most {most} levels, got a deeper one")


def _check_tree(value: Any, most_levels: int) -> None:
    """Refuse bodies that are too deep, numbers that are not finite and texts that are not Unicode, in one walk."""
    level, depth = [value], 0
    while level:
        if depth > most_levels:
            raise _too_deep(most_levels)
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below += each.keys()
                below += each.values()
            elif isinstance(each, list):
                # Lists of token ids are long, and nothing in them needs a look.
                if set(map(type, each)) != {int}:
                    below += each
            elif isinstance(each, str):
                _check_text(each)
            elif isinstance(each, float) and not math.isfinite(each):
                raise ApiError(400, "expected finite numbers in the JSON body, got one that overflows")
        level, depth = below, depth + 1


def _check_text(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise ApiError(400, "expected Unicode text, got half of a surrogate pair (\\ud800 to \\udfff)") from None


def _json_type(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", str: "a string", list: "a list", type(None): "null"}
    return names.get(type(value), "an object")


class Body:
    """The fields of a JSON object. null is the same as an absent field, as in OpenAI's API."""

    def __init__(self, values: Mapping[str, Any], where: str = "") -> None:
        self._values, self._where = values, where
        self._read: set[str] = set()

    def raw(self, name: str) -> Any:
        """The value of a field, unchecked; None if it is absent."""
        self._read.add(name)
        return self._values.get(name)

    def path(self, name: str) -> str:
        """The name of a field in error messages."""
        return f"{self._where}{name}"

    def flag(self, name: str, default: bool = False) -> bool:
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise bad_value(self.path(name), "true or false", value)
        return value

    def integer(self, name: str, default: Any = None, *, minimum: int = -INT64, maximum: int = INT64 - 1) -> Any:
        """A whole number within bounds, or `default`."""
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # JSON has one kind of number
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= maximum:
            raise bad_value(self.path(name), f"a whole number {_between(minimum, maximum)}", value)
        return value

    def number(self, name: str, default: float, *, minimum: float, maximum: float) -> float:
        value = self.raw(name)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not minimum <= value <= maximum:
            raise bad_value(self.path(name), f"a number from {minimum:g} to {maximum:g}", value)
        return float(value)

    def text(self, name: str, default: Any = None, *, longest: int = 1000) -> Any:
        """A text of at most `longest` characters, or `default`."""
        value = self.raw(name)
        if value is None:
            return default
        if not isinstance(value, str) or len(value) > longest:
            raise bad_value(self.path(name), f"a text of at most {longest} characters", value)
        return value

    def items(self, name: str, *, most: int) -> list[Any]:
        """A list of at most `most` values, unchecked; [] if it is absent."""
        value = self.raw(name)
        if value is None:
            return []
        if not isinstance(value, list):
            raise bad_value(self.path(name), "a list", value)
        if len(value) > most:
            where = self.path(name)
            raise ApiError(400, f"expected at most {most} values, got {len(value)} ({where})", param=where)
        return value

    def table(self, name: str) -> dict[str, Any]:
        """A JSON object; {} if it is absent."""
        value = self.raw(name)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise bad_value(self.path(name), "an object", value)
        return value

    def only(self, name: str, *allowed: Any, advice: str) -> None:
        """Refuse a field unless it is absent or has a value that asks for nothing."""
        if name not in self._values:
            return  # so it is with nearly all of the twenty fields of a request that are read here
        value = self.raw(name)
        if value is not None and not any(type(value) is type(each) and value == each for each in allowed):
            if isinstance(value, int | float) and not isinstance(value, bool) and value in allowed:
                return
            raise unsupported(self.path(name), advice)

    def ignore(self, *names: str) -> None:
        """Accept fields that change no response."""
        self._read.update(names)

    def refuse_unknown(self) -> None:
        """ApiError if the client sent a field that nothing has read."""
        for name in self._values:
            if name not in self._read:
                shown = name if len(name) <= 100 else f"{name[:100]}..."
                raise ApiError(400, f"Unrecognized request argument supplied: {self.path(shown)}", param=self.path(shown))


def token_ids(values: Sequence[Any], vocabulary: int, param: str) -> list[int]:
    """The values as token ids; ApiError if one is not an id of the vocabulary."""
    # Three passes in C; the loop only names the value that is wrong.
    if values and not (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < vocabulary):
        for value in values:
            if type(value) is not int or not 0 <= value < vocabulary:
                raise bad_value(param, f"token ids from 0 to {vocabulary - 1}", value)
    return list(values)


def _between(minimum: int, maximum: int) -> str:
    if minimum == -INT64 and maximum == INT64 - 1:
        return "of 64 bits"
    return f"of at least {minimum}" if maximum == INT64 - 1 else f"from {minimum} to {maximum}"
