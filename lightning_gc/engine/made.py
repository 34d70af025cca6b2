"""Made: a mapping whose values are made when they are asked for, one at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

V = TypeVar("V")


class Made(Mapping[str, V]):
    """Makes a value from another mapping's, each time that it is asked for.

    Example:
        >>> dict(Made({"a": 1}, lambda kept: kept + 1))
        {'a': 2}
    """

    def __init__(self, kept: Mapping[str, Any], make: Callable[[Any], V]) -> None:
        self._kept, self._make = kept, make

    def __getitem__(self, name: str) -> V:
        return self._make(self._kept[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)
