"""SizeSwitch: send small and one-dimensional tensors uncompressed."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_gc.compressors.base import Compressor, dense
from lightning_gc.compressors.joint import CodecScheme
from lightning_gc.compressors.wrappers.menu import Menu
from lightning_gc.compressors.wrappers.wrapper import Wrapper
from lightning_gc.core import Bucket, Flow

MIN_NUMEL = 1024
"""Elements of the smallest tensor that is compressed by default."""


@dataclass(frozen=True)
class SizeSwitch(Wrapper):
    """Send 1-D and small tensors uncompressed (dense), and the others by the inner compressor.

    Biases and normalisation weights are few and sensitive. The code of DGC and of ACCORDION sends
    them dense; other papers compress every tensor. The difference is large at strong compression:
    with ``TopK(0.0001)`` an LSTM of 4.4 million parameters sends 1/6,704 of its gradient, but 1/815
    with its 9,600 biases dense. Strategies put a bare compressor in a ``SizeSwitch`` with their
    ``min_numel``; ``min_numel=0`` and ``PerParameter(TopK(0.0001))`` compress every tensor.

    Args:
        inner: the compressor of large tensors.
        min_numel: tensors with fewer elements are sent dense. 0 turns this off.
        min_dims: tensors with fewer dimensions are sent dense. 0 turns this off.

    Communication pattern:
        One all-reduce per bucket for the dense tensors, in addition to the inner messages.

    Example:
        >>> from lightning_gc import SizeSwitch, TopK
        >>> SizeSwitch(TopK(0.01)).min_numel
        1024
    """

    inner: Compressor
    min_numel: int = MIN_NUMEL
    min_dims: int = 2
    limits = {
        "min_numel": "[0, inf) the limit; 0, which turns a limit off",
        "min_dims": "[0, inf) the limit; 0, which turns a limit off",
    }

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        inner = self.for_shape(bucket.shape)  # the shape is the same on all workers
        if inner is None:
            yield from dense(buffer, out) if scheme is None else scheme.dense(bucket, buffer, out)
        else:
            yield from inner.flow(bucket, buffer, out, scheme)

    def for_shape(self, shape: tuple[int, ...]) -> Compressor | None:
        return self.inner.for_shape(shape) if self.compresses(shape) else None

    def compresses(self, shape: tuple[int, ...]) -> bool:
        large = math.prod(shape) >= self.min_numel and len(shape) >= self.min_dims
        return large and self.inner.compresses(shape)


def leaves_out_all(compressor: Compressor, shapes: Collection[tuple[int, ...]]) -> bool:
    """Return whether only the limits of a ``SizeSwitch`` keep all tensors from being compressed."""
    while isinstance(compressor, Menu | Wrapper):
        if isinstance(compressor, SizeSwitch):
            could = any(map(compressor.inner.compresses, shapes))
            return could and not any(map(compressor.compresses, shapes))
        compressor = compressor.chosen if isinstance(compressor, Menu) else compressor.inner
    return False


def for_shards(compressor: Compressor, shards: int) -> Compressor:
    """Return a compressor for tensors that are first cut into ``shards`` parts.

    Size limits refer to full tensors, so they are scaled for shards.
    """
    if isinstance(compressor, Menu):
        return compressor.each(lambda each: for_shards(each, shards))
    if not isinstance(compressor, Wrapper):
        return compressor
    inner = for_shards(compressor.inner, shards)
    if isinstance(compressor, SizeSwitch):
        return replace(compressor, inner=inner, min_numel=math.ceil(compressor.min_numel / shards))
    return replace(compressor, inner=inner)  # type: ignore[type-var]
