"""Guard: keep non-finite and unused gradients out of the error state, equally on all workers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gc.compressors.base import dense
from lightning_gc.core import Bucket, Exchange, Flow, Gather, Mean, Reply, Request
from lightning_gc.core.flow import resume
from lightning_gc.engine.error_buffers import Layouts
from lightning_gc.engine.levels import Levels
from lightning_gc.engine.statistics import Statistics
from lightning_gc.kernels.segments import Idle, peaks, silence
from lightning_gc.memories.base import Unused
from lightning_gc.schemes import Scheme


class Guard:
    """Guards one bucket in one round, on the device, without making the host wait.

    - A non-finite gradient on any worker makes the result non-finite on all: a flag is appended to
      the round's first message that all workers receive in equal form. An ``Exchange`` is not such
      a message; with ``scatters`` it need not be, and the flag goes into every payload. The local
      gradient is replaced by zeros before a memory sees it, so no error absorbs it.
    - A parameter with an exactly zero local gradient, an idle one, was most likely unused. DDP
      discards the result if no worker used it. ``Memory.unused`` says what happens to its error.

    Args:
        bucket: with the raw gradient; zeroed here if it is not finite.
        layouts: kept from round to round.
        unused: as ``Memory.unused``.
        scatters: this worker gets one of W equal shards of each parameter's mean.
    """

    def __init__(
        self,
        bucket: Bucket,
        layouts: Layouts,
        unused: Unused = "restore",
        *,
        scatters: bool = False,
    ) -> None:
        self._bucket, self._scatters, self._unused = bucket, scatters, unused
        self._segments = layouts.of(bucket)
        found = peaks(bucket.grad, self._segments)  # (parameters,)
        self.idle = Idle(found, self._segments)
        self.flag = found.mul(0).sum(0, keepdim=True)  # (1,): NaN if the gradient is not finite
        self.verdict: Tensor | None = None  # (1,): NaN if any worker's gradient is not finite
        self._on_host = bucket.grad.device.type == "cpu"  # flags can be read without waiting
        self._held: list[tuple[Tensor, Tensor]] = []
        self._error: Tensor | None = None  # of the held buffers
        self._booked: Tensor | None = None  # by the scheme to idle parameters' errors
        silence(bucket.grad, self.flag)

    def hold(self, flats: Sequence[Tensor]) -> None:
        """Copy idle parameters' parts of ``flats``, the error first, for ``release``."""
        if self._unused != "restore" or self.idle.none:
            return
        self._error, self._held = flats[0], [(flat, torch.empty_like(flat)) for flat in flats]
        for live, copy in self._held:
            self.idle.move("copy", copy, live)

    def release(self) -> None:
        """Restore the held parts; keep what the scheme has added to their errors."""
        for live, copy in self._held:
            self.idle.move("copy", live, copy)
        if self._error is not None and self._booked is not None:
            self.idle.move("add", self._error, self._booked)

    def around(self, flow: Flow, own: Tensor, mean: Tensor, *, keeps: bool) -> Flow:
        """Run the exchange of ``own``, which leaves the mean over workers in ``mean``.

        ``keeps``: a memory keeps what is left in ``own``. Idle parameters' parts are then set
        aside, and zeros are sent.
        """
        aside = None
        if keeps and self._unused != "send" and not self.idle.none:
            aside = torch.empty_like(own)
            self.idle.move("take", aside, own)
        yield from self.watch(flow)
        if aside is not None:
            if self._error is not None:
                self._booked = torch.empty_like(own)
                self.idle.move("copy", self._booked, own)
            self.idle.move("add", own, aside)
        self.poison(mean)

    def watch(self, flow: Flow) -> Flow:
        """Run ``flow`` with this worker's flag in its first message that all receive."""
        request = next(flow, None)
        if request is None:
            return
        while request is not None:
            if self.verdict is None and (self._scatters or not isinstance(request, Exchange)):
                reply = self._without_flag(request, (yield self._with_flag(request)))
            else:
                reply = yield request
            request = resume(flow, reply)
        if self.verdict is None:
            last = Gather(())
            self._without_flag(last, (yield self._with_flag(last)))

    def poison(self, out: Tensor) -> None:
        """Make every parameter's result NaN if any worker's gradient was not finite."""
        if self.verdict is None or (self._on_host and bool(self.verdict.isfinite())):
            return
        starts = self._segments.starts
        if self._scatters:
            starts = starts + self._segments.lengths * self._bucket.worker // self._bucket.workers
        out.index_add_(0, starts, self.verdict.to(out.dtype).expand(len(starts)))

    def _with_flag(self, request: Request) -> Request:
        if isinstance(request, Mean):
            return Mean((*request.tensors, self.flag.to(request.tensors[0].dtype, copy=True)))
        flag = self.flag.float()
        limits = None if request.limits is None else (*request.limits, None)
        if isinstance(request, Exchange):
            return Exchange(tuple((*payload, flag) for payload in request.payloads), limits)
        return Gather((*request.tensors, flag), limits)

    def _without_flag(self, request: Request, reply: Reply) -> Reply:
        if isinstance(request, Mean):
            self.verdict = reply[-1] * 0  # 0 or NaN, whatever bytes arrive
            return reply[:-1]
        self.verdict = torch.stack([payload[-1] for payload in reply]).mul(0).sum(0)
        return [payload[:-1] for payload in reply]


@dataclass
class BucketExchange:
    """Implements ``GradientExchange`` for one bucket in one round."""

    bucket: Bucket
    levels: Levels
    scheme: Scheme | None  # None: the compressor is a Collective
    guard: Guard | None
    statistics: Statistics

    error: Tensor = field(init=False)  # after the exchange, (numel,)
    mean: Tensor = field(init=False)  # over workers, (numel,)
    norm_before: Tensor | None = field(init=False, default=None)  # compression, if measured

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
        if self.statistics.norms_wanted:
            self.norm_before = torch.linalg.vector_norm(own)
        if self.guard is not None:
            flow = self.guard.around(flow, own, mean, keeps=buffer is not self.bucket.grad)
        yield from flow
        self.error, self.mean = own, mean
        return mean
