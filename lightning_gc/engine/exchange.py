"""BucketExchange: what a memory calls to compress one bucket's buffer, send it, decode the mean."""

from __future__ import annotations

from collections.abc import Generator

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import dense
from lightning_gc.engine.guard import Guard
from lightning_gc.engine.levels import Levels
from lightning_gc.engine.statistics import Statistics
from lightning_gc.flow import Flow, Reply, Request
from lightning_gc.schemes import Scheme


class BucketExchange:
    """Implements ``GradientExchange`` for one bucket in one round.

    Args:
        bucket: the bucket.
        levels: the compressor at its current levels.
        scheme: of a codec; None for a ``Collective``.
        guard: of this bucket and round, or None.
        statistics: tells whether norms are measured.

    Attributes:
        error: the error after the exchange, ``(numel,)``.
        mean: the mean over workers, ``(numel,)``.
        norm_before: norm of the buffer before compression, if measured.
    """

    error: Tensor
    mean: Tensor
    norm_before: Tensor | None

    def __init__(
        self,
        bucket: Bucket,
        levels: Levels,
        scheme: Scheme | None,
        guard: Guard | None,
        statistics: Statistics,
    ) -> None:
        self._bucket = bucket
        self._compressor = levels.compressor
        self._uncompressed = levels.uncompressed
        self._scheme = scheme
        self._guard = guard
        self._statistics = statistics
        self._exact = levels.traits.exact and scheme is not None and scheme.averages

    def __call__(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Compress ``buffer`` at the current levels and exchange it."""
        if self._uncompressed:
            return self.dense(buffer)
        own, mean = self._tensors(buffer)
        flow = self._compressor.flow(self._bucket, own, mean, self._scheme)
        return self._run(flow, buffer, own, mean)

    def dense(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Exchange ``buffer`` uncompressed."""
        own, mean = self._tensors(buffer)
        return self._run(dense(own, mean), buffer, own, mean)

    def _tensors(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to compress and the one for the mean, without copies if possible."""
        grad = self._bucket.grad
        if not self._in_place(buffer):
            own = buffer.float()
        elif self._statistics.norms_wanted and buffer is grad:
            own = buffer.clone()  # else the mean would overwrite the error
        else:
            own = buffer
        mean = grad if self._in_place(grad) else torch.zeros_like(grad, dtype=torch.float32)
        return own, mean

    def _in_place(self, flat: Tensor) -> bool:
        """Whether ``flat`` is precise enough: 32 bits or more, or no arithmetic is done on it."""
        return flat.dtype.itemsize >= 4 or self._exact

    def _run(
        self, flow: Flow, buffer: Tensor, own: Tensor, mean: Tensor
    ) -> Generator[Request, Reply, Tensor]:
        wanted = self._statistics.norms_wanted
        self.norm_before = torch.linalg.vector_norm(own) if wanted else None
        guard = self._guard
        if guard is None:
            yield from flow
        else:
            kept = buffer is not self._bucket.grad
            aside = guard.set_aside(own) if kept else None
            yield from guard.watch(flow)
            if aside is not None:
                own.add_(aside)
            guard.poison(mean)
        self.error, self.mean = own, mean
        return mean
