"""Guard: keep non-finite and unused gradients out of the error state, on all workers alike."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lightning_gc.compressors.base import dense
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Exchange, Flow, Gather, Mean, Reply, Request, resume
from lightning_gc.engine.error_buffers import Layouts
from lightning_gc.engine.levels import Levels
from lightning_gc.engine.statistics import Statistics
from lightning_gc.schemes import Scheme


class Guard:
    """Guards one bucket in one round, on the device, without making the host wait.

    - A non-finite gradient on any worker makes the result non-finite on all: a flag is appended to
      the round's first message that all workers receive alike (which an ``Exchange`` is not; where
      each has its own shard nothing need be alike, and the flag goes into every payload). The local
      gradient is replaced by zeros before a memory sees it, so no error absorbs it.
    - A parameter with an exactly zero local gradient was most likely unused. DDP discards the
      result if no worker used it, so its error is not spent but set aside, and zeros are sent.

    Args:
        bucket: with the raw gradient.
        layouts: kept from round to round.
        scatters: of each parameter this worker gets its own shard, one of W equal parts.
    """

    def __init__(self, bucket: Bucket, layouts: Layouts, *, scatters: bool = False) -> None:
        grad = bucket.grad
        self._bucket, self._layouts, self._scatters = bucket, layouts, scatters
        self._spans = [(start, stop) for _, start, stop in bucket.spans() if stop > start]
        peaks = _peaks([grad[start:stop] for start, stop in self._spans])  # (parameters,)
        self.idle = peaks == 0
        self.finite = peaks.isfinite().all()
        self.verdict: Tensor | None = None  # (1,): NaN if any worker's gradient is not finite
        self._on_host = grad.device.type == "cpu"  # flags can be read without waiting
        self._of_elements: Tensor | None = None

    def silence(self, grad: Tensor) -> None:
        """Replace a non-finite gradient by zeros."""
        if not self._on_host:
            grad.masked_fill_(~self.finite, 0)
        elif not self.finite:
            grad.zero_()

    def set_aside(self, buffer: Tensor) -> Tensor | None:
        """Move the errors of idle parameters out of ``buffer`` and return them, or None."""
        if self._on_host and not self.idle.any():
            return None
        aside = self.of_idle(buffer)
        buffer.masked_fill_(self._mask(buffer), 0)
        return aside

    def of_idle(self, flat: Tensor) -> Tensor:
        """Return a copy with zeros where parameters are not idle."""
        return flat.masked_fill(~self._mask(flat), 0)  # not a product: infinity times zero is NaN

    def _mask(self, like: Tensor) -> Tensor:
        """Return a mask of the elements of idle parameters, made once."""
        if self._of_elements is None:
            _, lengths = self._layouts.of(self._bucket)
            numel = like.numel()
            self._of_elements = self.idle.repeat_interleave(lengths, output_size=numel)
        return self._of_elements

    def hold(self, flats: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return idle parameters' parts of ``flats`` with copies, for ``release``."""
        if not self._on_host:
            return [(flat, flat.clone()) for flat in flats]
        idle = [slice(*s) for s, i in zip(self._spans, self.idle.tolist(), strict=True) if i]
        return [(flat[part], flat[part].clone()) for flat in flats for part in idle]

    def release(self, held: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Restore the copies made by ``hold``."""
        for live, copy in held:
            live.copy_(copy if self._on_host else torch.where(self._mask(live), copy, live))

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
