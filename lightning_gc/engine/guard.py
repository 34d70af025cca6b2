"""Guard: keep non-finite and unused gradients out of the error state, equally on all workers."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from lightning_gc.compressors.base import dense
from lightning_gc.core import Bucket, Exchange, Flow, Gather, Mean, MeanShard, Reply, Request
from lightning_gc.core.flow import resume
from lightning_gc.core.message import Packed
from lightning_gc.core.segments import Pending, Workspace
from lightning_gc.engine.error_buffers import Layouts
from lightning_gc.engine.levels import Levels
from lightning_gc.engine.statistics import Statistics
from lightning_gc.kernels.segments import Idle, peaks, silence
from lightning_gc.memories.base import Unused


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
        self._on_host = bucket.grad.device.type == "cpu"  # flags can be read without waiting
        self._work = None if self._on_host else Workspace(self._segments)
        self._peaks = peaks(bucket.grad, self._segments, self._work)  # (parameters,)
        self.idle = Idle(self._peaks, self._segments)
        self._flags: list[Tensor] = []  # (1,) each, as they arrive: of each worker, or the mean
        self._held: list[tuple[Tensor, Tensor]] = []
        self._error: Tensor | None = None  # of the held buffers
        self._booked: Tensor | None = None  # by the scheme to idle parameters' errors
        # (1,): NaN if the gradient is not finite
        self.flag = silence(bucket.grad, self._peaks, self._segments)

    @property
    def verdict(self) -> Tensor | None:
        """Return ``(1,)``, NaN if any worker's gradient is not finite; None before it is known."""
        if not self._flags:
            return None
        flags = self._flags
        return (flags[0] if len(flags) == 1 else torch.stack(flags)).mul(0).view(-1, 1).sum(0)

    def pending(self, grad: Tensor | None, decay: float, gain: float) -> Pending:
        """Return what a codec of the whole bucket may do in its own kernels."""
        work = self._work or Workspace(self._segments)
        return Pending(
            self._segments, self._peaks, self.flag, work, grad, decay, gain, flags=self._flags
        )

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
            if not self._flags and (self._scatters or not isinstance(request, Exchange)):
                reply = self._without_flag(request, (yield self._with_flag(request)))
            else:
                reply = yield request
            request = resume(flow, reply)
        if not self._flags:
            last = Gather(())
            self._without_flag(last, (yield self._with_flag(last)))

    def poison(self, out: Tensor) -> None:
        """Make every parameter's result NaN if any worker's gradient was not finite."""
        verdict = self.verdict
        if verdict is None or (self._on_host and bool(verdict.isfinite())):
            return
        starts = self._segments.starts
        if self._scatters:
            starts = starts + self._segments.lengths * self._bucket.worker // self._bucket.workers
        out.index_add_(0, starts, verdict.to(out.dtype).expand(len(starts)))

    def _with_flag(self, request: Request) -> Request:
        own = () if isinstance(request, Exchange) else request.tensors
        if isinstance(own, Packed) and own.room:  # the codec has written the flag
            return Mean(own.more()) if isinstance(request, Mean) else Gather(own.more())
        if isinstance(request, Mean):
            return Mean((*request.tensors, self.flag.to(request.tensors[0].dtype, copy=True)))
        if isinstance(request, MeanShard):
            flag = self.flag.to(request.tensors[0].dtype)
            return MeanShard((*request.tensors, flag.repeat(self._bucket.workers)))
        flag = self.flag.float()
        limits = None if request.limits is None else (*request.limits, None)
        if isinstance(request, Exchange):
            return Exchange(tuple((*payload, flag) for payload in request.payloads), limits)
        known = request.lengths
        lengths = None if known is None else [[*each, flag.numel()] for each in known]
        return Gather((*request.tensors, flag), limits, lengths)

    def _without_flag(self, request: Request, reply: Reply) -> Reply:
        if isinstance(request, Mean | MeanShard):
            self._flags.append(reply[-1])
            return reply[:-1]
        self._flags += [payload[-1] for payload in reply]
        return [payload[:-1] for payload in reply]


class Onlooker(Guard):
    """Guards a bucket of a worker that has no errors and sends its gradient as it is.

    It need not look at the gradient: what is not finite, is not finite in the mean. It hears the
    flags of workers that have errors, which expect one of this worker.
    """

    def __init__(self, bucket: Bucket, layouts: Layouts, *, scatters: bool = False) -> None:
        self._bucket, self._scatters, self._unused = bucket, scatters, "send"
        self._segments = layouts.of(bucket)
        self._on_host = bucket.grad.device.type == "cpu"
        self._flags, self._held, self._error = [], [], None
        self.flag = torch.zeros(1, dtype=torch.float32, device=bucket.grad.device)


@dataclass
class BucketExchange:
    """Implements ``GradientExchange`` for one bucket in one round."""

    bucket: Bucket
    levels: Levels
    guard: Guard | None
    statistics: Statistics

    absorbed: bool = field(init=False, default=False)  # the codec has done the guard's work
    error: Tensor = field(init=False)  # after the exchange, (numel,)
    mean: Tensor = field(init=False)  # over workers, (numel,)
    norm_before: Tensor | None = field(init=False, default=None)  # compression, if measured

    def __call__(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Compress ``buffer`` at the current levels and exchange it."""
        if self.levels.uncompressed:
            return self.dense(buffer)
        if buffer is self.bucket.grad and self._absorbs(buffer):
            return self._absorbed(buffer, None, 1.0, 1.0)
        own, mean = self._tensors(buffer)
        flow = self.levels.compressor.flow(self.bucket, own, mean, self.levels.scheme)
        return self._run(flow, buffer, own, mean)

    def feedback(
        self, error: Tensor, decay: float = 1.0, gain: float = 1.0
    ) -> Generator[Request, Reply, Tensor]:
        """Compress ``decay·error + gain·gradient`` and exchange it."""
        grad = self.bucket.grad
        if not self.levels.uncompressed and self._absorbs(error):
            return self._absorbed(error, grad, decay, gain)
        if decay != 1:
            error.mul_(decay)
        return self(error.add_(grad, alpha=gain))

    def _absorbs(self, buffer: Tensor) -> bool:
        """Whether the codec's own kernels add the gradient and do the guard's work."""
        plain = self.guard is not None and not self.statistics.norms_wanted
        if not plain or not self._in_place(buffer) or not self._in_place(self.bucket.grad):
            return False
        return self.levels.compressor.whole.absorbs(self.bucket, buffer, self.levels.scheme)

    def _absorbed(
        self, buffer: Tensor, grad: Tensor | None, decay: float, gain: float
    ) -> Generator[Request, Reply, Tensor]:
        assert self.guard is not None
        self.absorbed, self.error, self.mean = True, buffer, self.bucket.grad
        bucket = replace(self.bucket, pending=self.guard.pending(grad, decay, gain))
        flow = self.levels.compressor.flow(bucket, buffer, self.mean, self.levels.scheme)
        yield from self.guard.watch(flow)
        return self.mean

    def dense(self, buffer: Tensor) -> Generator[Request, Reply, Tensor]:
        """Exchange ``buffer`` uncompressed."""
        own, mean = self._tensors(buffer)
        scheme = self.levels.scheme
        whole = dense(own, mean) if scheme is None else scheme.dense(self.bucket, own, mean)
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
        averaged = self.levels.scheme is not None and self.levels.scheme.averages
        return flat.dtype.itemsize >= 4 or (averaged and self.levels.exact)

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
