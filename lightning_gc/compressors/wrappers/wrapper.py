"""Wrap a compressor in another one with the same kind, level and wire format."""

from __future__ import annotations

import abc
import dataclasses
import functools
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_gc.compressors.base import Bound, Compressor, Traits, Waits
from lightning_gc.compressors.joint import CodecScheme
from lightning_gc.core import Bucket, Flow, Structure, Wire


class _Around(Compressor):
    """Forward to the inner compressor."""

    if TYPE_CHECKING:

        @property
        def inner(self) -> Compressor:
            """The inner compressor: a field of wrappers, a property of presets."""

    @property
    def method(self) -> Compressor:
        return self.inner.method

    @property
    def waits(self) -> Waits:
        return self.inner.waits

    def bound(self, numel: int) -> Bound:
        """Return the inner compressor's bound."""
        return self.inner.bound(numel)

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        return self.inner.keeps(shape)

    def wire(self, numel: int) -> Wire:
        return self.inner.wire(numel)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return self.inner.compresses(shape)

    def compressing_step(self, step: int) -> int:
        return self.inner.compressing_step(step)


class Wrapper(_Around):
    """Change where or when the inner compressor is applied, but not its properties."""

    inner: Compressor

    _turns = "inner"

    def __post_init__(self) -> None:
        if not isinstance(self.inner, Compressor):
            raise ValueError(
                f"{type(self).__name__} wraps a compressor, such as TopK(0.01), not {self.inner!r}."
            )

    @functools.cached_property
    def traits(self) -> Traits:
        inner = self.inner.traits
        return dataclasses.replace(inner, space=inner.level_space)


class Preset(_Around):
    """A named combination of another compressor with a default memory.

    Attributes:
        memory_name: the memory's name in the registry.
    """

    memory_name: str

    @property
    @abc.abstractmethod
    def inner(self) -> Compressor:
        """The compressor that does the work."""

    @functools.cached_property
    def traits(self) -> Traits:
        return dataclasses.replace(self.inner.traits, default_memory=self.memory_name)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        yield from self.inner.flow(bucket, buffer, out, scheme)

    def for_shape(self, shape: tuple[int, ...]) -> Compressor | None:
        return self.inner.for_shape(shape)
