"""A mapping that cannot change, so that an algorithm can be compared, hashed, copied and sent to another process."""

from collections.abc import Iterator, Mapping
from typing import Any


class Settings(Mapping[str, Any]):
    """Dotted paths of a run's configuration to their defaults."""

    __slots__ = ("_items",)

    def __init__(self, items: Mapping[str, Any] | None = None) -> None:
        self._items = dict(items or {})

    def __getitem__(self, path: str) -> Any:
        return self._items[path]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __hash__(self) -> int:
        return hash(frozenset(self._items.items()))

    def __repr__(self) -> str:
        return f"Settings({self._items!r})"
