"""Preset: a published method that is another compressor together with a memory."""

from __future__ import annotations

import abc
import dataclasses
import functools

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding.wire import Wire
from lightning_gc.compressors.base import CodecScheme, Compressor
from lightning_gc.compressors.bounds import Bound
from lightning_gc.compressors.traits import Traits, Waits
from lightning_gc.flow import Flow
from lightning_gc.state_structure import Structure


class Preset(Compressor):
    """A compressor, with its fields, and the default memory that goes with it.

    Attributes:
        memory_name: the registry's name of the memory.
    """

    memory_name: str

    @property
    @abc.abstractmethod
    def inner(self) -> Compressor:
        """The compressor that this is."""

    @functools.cached_property
    def traits(self) -> Traits:
        return dataclasses.replace(self.inner.traits, default_memory=self.memory_name)

    @property
    def waits(self) -> Waits:
        return self.inner.waits

    @property
    def method(self) -> Compressor:
        return self.inner.method

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        yield from self.inner.flow(bucket, buffer, out, scheme)

    def for_shape(self, shape: tuple[int, ...]) -> Compressor | None:
        return self.inner.for_shape(shape)

    def bound(self, numel: int) -> Bound:
        return self.inner.bound(numel)

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        return self.inner.keeps(shape)

    def wire(self, numel: int) -> Wire:
        return self.inner.wire(numel)

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return self.inner.compresses(shape)
