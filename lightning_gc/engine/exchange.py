"""BucketExchange: what a memory calls to compress one bucket's buffer, send it, decode the mean."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import dense
from lightning_gc.engine.guard import Guard
from lightning_gc.engine.levels import Levels
from lightning_gc.engine.statistics import Statistics
from lightning_gc.flow import Flow, Reply, Request
from lightning_gc.schemes import Scheme


@dataclass
class BucketExchange:
    """Implements ``GradientExchange`` for one bucket in one round."""

    bucket: Bucket
    levels: Levels
    scheme: Scheme | None  # None: the compressor is a Collective
    guard: Guard | None
    statistics: Statistics
    sets_aside: bool  # what idle parameters would send
    books: bool  # what the scheme adds to their errors

    booked: Tensor | None = field(init=False, default=None)  # to idle parameters, else 0; (numel,)
    error: Tensor = field(init=False)  # after the exchange, (numel,)
    mean: Tensor = field(init=False)  # over workers, (numel,)
    norm_before: Tensor | None = field(init=False)  # compression; None if not measured

    def __call__(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Compress ``buffer`` at the current levels and exchange it."""
        if self.levels.uncompressed:
            return self.dense(buffer)
        own, mean = self._tensors(buffer)
        flow = self.levels.compressor.flow(self.bucket, own, mean, self.scheme)
        return self._run(flow, buffer, own, mean)

    def dense(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Exchange ``buffer`` uncompressed."""
        own, mean = self._tensors(buffer)
        whole = (
            dense(own, mean) if self.scheme is None else self.scheme.dense(self.bucket, own, mean)
        )
        return self._run(whole, buffer, own, mean)

    def _tensors(self, buffer: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tensor to compress and the one for the mean, without copies if possible."""
        grad = self.bucket.grad
        if not self._in_place(buffer):
            own = buffer.float()
        elif self.statistics.norms_wanted and buffer is grad:
            own = buffer.clone()  # else the mean would overwrite the error
        else:
            own = buffer
        mean = grad if self._in_place(grad) else torch.zeros_like(grad, dtype=torch.float32)
        return own, mean

    def _in_place(self, flat: Tensor) -> bool:
        """Whether ``flat`` is precise enough: 32 bits or more, or no arithmetic is done on it."""
        averaged = self.scheme is not None and self.scheme.averages
        return flat.dtype.itemsize >= 4 or (averaged and self.levels.traits.exact)

    def _run(
        self, flow: Flow, buffer: Tensor, own: Tensor, mean: Tensor
    ) -> Generator[Request, Reply, Tensor]:
        wanted = self.statistics.norms_wanted
        self.norm_before = torch.linalg.vector_norm(own) if wanted else None
        if self.guard is None:
            yield from flow
        else:
            kept = self.sets_aside and buffer is not self.bucket.grad
            aside = self.guard.set_aside(own) if kept else None
            yield from self.guard.watch(flow)
            if aside is not None:
                self.booked = self.guard.of_idle(own) if self.books else None
                own.add_(aside)
            self.guard.poison(mean)
        self.error, self.mean = own, mean
        return mean
