"""A compressor around a compressor: what the wrappers share."""

from __future__ import annotations

import dataclasses
from typing import Self

from lightning_gc.compressors.base import Bound, Compressor

_DECLARED = (
    *("kind", "linear", "averages", "unbiased", "ragged"),
    *("elementwise", "exact", "selects", "knob", "conserves", "default_memory"),
)


class Wrapper(Compressor):
    """Changes where or when the inner compressor works, never what it is.

    A wrapper takes over everything that its inner compressor declares.
    """

    inner: Compressor

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise ValueError(
                f"{type(self).__name__} wraps a compressor, such as TopK(0.01), but was given "
                f"{self.inner!r}."
            )
        for declared in _DECLARED:
            object.__setattr__(self, declared, getattr(self.inner, declared))

    def bound(self, numel: int) -> Bound:
        """Return the inner bound: what goes dense only does better."""
        return self.inner.bound(numel)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """As the inner one."""
        return self.inner.compresses(shape)

    @property
    def level(self) -> float | None:
        """The inner level."""
        return self.inner.level

    def at(self, level: float) -> Self:
        """Return the same wrapper around the inner compressor at ``level``."""
        return dataclasses.replace(self, inner=self.inner.at(level))  # type: ignore[type-var]
