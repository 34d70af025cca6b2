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
        grad = bucket.grad
        self._bucket, self._layouts, self._scatters = bucket, layouts, scatters
        self._unused = unused
        self._spans = [(start, stop) for _, start, stop in bucket.spans() if stop > start]
        peaks = _peaks([grad[start:stop] for start, stop in self._spans])  # (parameters,)
        self.idle = peaks == 0
        self.finite = peaks.isfinite().all()
        self.verdict: Tensor | None = None  # (1,): NaN if any worker's gradient is not finite
        self._on_host = grad.device.type == "cpu"  # flags can be read without waiting
        self._of_elements: Tensor | None = None
        self._held: list[tuple[Tensor, Tensor]] = []
        self._error: Tensor | None = None  # of the held buffers
        self._booked: Tensor | None = None  # by the scheme to idle parameters' errors
        if not self._on_host:
            grad.masked_fill_(~self.finite, 0)
        elif not self.finite:
            grad.zero_()

    def set_aside(self, buffer: Tensor) -> Tensor | None:
        """Move the errors of idle parameters out of ``buffer`` and return them, or None."""
        if self._on_host and not self.idle.any():
            return None
        aside = self._of_idle(buffer)
        buffer.masked_fill_(self._mask(buffer), 0)
        return aside

    def _of_idle(self, flat: Tensor) -> Tensor:
        """Return a copy with zeros where parameters are not idle."""
        return flat.masked_fill(~self._mask(flat), 0)  # not a product: infinity times zero is NaN

    def _mask(self, like: Tensor) -> Tensor:
        """Return a mask of the elements of idle parameters, made once."""
        if self._of_elements is None:
            _, lengths = self._layouts.of(self._bucket)
            numel = like.numel()
            self._of_elements = self.idle.repeat_interleave(lengths, output_size=numel)
        return self._of_elements

    def hold(self, flats: Sequence[Tensor]) -> None:
        """Copy idle parameters' parts of ``flats``, the error first, for ``release``."""
        if self._unused != "restore":
            return
        parts = list(flats)
        if self._on_host:
            idle = [slice(*s) for s, i in zip(self._spans, self.idle.tolist(), strict=True) if i]
            parts = [flat[part] for flat in flats for part in idle]
        self._error, self._held = flats[0], [(part, part.clone()) for part in parts]

    def release(self) -> None:
        """Restore the held parts; keep what the scheme has added to their errors."""
        for live, copy in self._held:
            live.copy_(copy if self._on_host else torch.where(self._mask(live), copy, live))
        if self._error is not None and self._booked is not None:
            self._error.add_(self._booked.nan_to_num_(0.0, 0.0, 0.0))

    def around(self, flow: Flow, own: Tensor, mean: Tensor, *, keeps: bool) -> Flow:
        """Run the exchange of ``own``, which leaves the mean over workers in ``mean``.

        ``keeps``: a memory keeps what is left in ``own``.
        """
        aside = self.set_aside(own) if keeps and self._unused != "send" else None
        yield from self.watch(flow)
        if aside is not None:
            self._booked = None if self._error is None else self._of_idle(own)
            own.add_(aside)
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
        starts, lengths = self._layouts.of(self._bucket)
        if self._scatters:
            starts = starts + lengths * self._bucket.worker // self._bucket.workers
        out.index_add_(0, starts, self.verdict.to(out.dtype).expand(len(starts)))

    def _with_flag(self, request: Request) -> Request:
        dtype = request.tensors[0].dtype if isinstance(request, Mean) else torch.float32
        flag = torch.zeros(1, dtype=dtype, device=self.finite.device)
        flag.masked_fill_(~self.finite, float("nan"))
        if isinstance(request, Mean):
            return Mean((*request.tensors, flag))
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


def _peaks(slices: list[Tensor]) -> Tensor:
    """Return a number per slice that is zero, or not finite, exactly if the slice is.

    On CPU the largest magnitude takes ten times as long as the L2 norm, so it is only computed if
    the norm, whose squares may leave float32's range, is 0 or not finite.
    """
    if slices[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(slices, float("inf")))
    norms = torch._foreach_norm(slices)
    sure = [0 < norm < float("inf") for norm in torch.stack(norms).tolist()]
    return torch.stack(
        [norm if ok else s.abs().max() for norm, s, ok in zip(norms, slices, sure, strict=True)]
    )


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
