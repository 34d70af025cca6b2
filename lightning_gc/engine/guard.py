"""Guard: keep non-finite and unused gradients out of the error state, on all workers alike."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.flow import Exchange, Flow, Gather, Mean, Reply, Request


class Guard:
    """Watches over one bucket in one round, on the device, without the host waiting for it.

    - A non-finite gradient on any worker makes the result non-finite on all: one number rides on
      the first message of the round that all workers read alike. (In an ``Exchange`` each reads
      another one; if they differed, so would the workers' results.) Locally the gradient is
      replaced by zeros before it reaches a memory, so no error absorbs it.
    - A parameter whose local gradient is exactly zero was most likely not used. DDP throws the
      result away where no worker used it, so its error must not be spent: it is set aside, and
      zeros are sent.

    Args:
        bucket: with the raw gradient.
    """

    def __init__(self, bucket: Bucket) -> None:
        grad = bucket.grad
        spans = [(start, stop) for _, start, stop in bucket.spans() if stop > start]
        slices = [grad[start:stop] for start, stop in spans]
        peaks = _peaks(slices)  # (parameters,)
        self.idle = peaks == 0
        self.finite = peaks.isfinite().all()
        self.verdict: Tensor | None = None  # (1,): NaN where any worker's gradient is bad
        self._spans = spans
        self._on_host = grad.device.type == "cpu"  # reading a flag costs nothing there

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
        mask = self._mask(buffer)
        aside = buffer * mask
        buffer.masked_fill_(mask, 0)
        return aside

    def _mask(self, like: Tensor) -> Tensor:
        """Return True for every element of an idle parameter."""
        lengths = torch.tensor([stop - start for start, stop in self._spans])
        return self.idle.repeat_interleave(lengths.to(like.device), output_size=like.numel())

    def hold(self, flats: Iterable[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Return what ``flats`` have for idle parameters, and copies of it, for ``release``."""
        if not self._on_host:
            return [(flat, flat.clone()) for flat in flats]
        idle = [slice(*s) for s, i in zip(self._spans, self.idle.tolist(), strict=True) if i]
        return [(flat[part], flat[part].clone()) for flat in flats for part in idle]

    def release(self, held: Iterable[tuple[Tensor, Tensor]]) -> None:
        """Make what was held as it was."""
        for live, copy in held:
            live.copy_(copy if self._on_host else torch.where(self._mask(live), copy, live))

    def watch(self, flow: Flow) -> Flow:
        """Run ``flow`` with this worker's flag on its first request that is no exchange."""
        request = next(flow, None)
        if request is None:
            return
        while request is not None:
            if self.verdict is None and not isinstance(request, Exchange):
                reply = self._stripped(request, (yield self._flagged(request)))
            else:
                reply = yield request
            request = _send(flow, reply)
        if self.verdict is None:
            request = Gather(())
            self._stripped(request, (yield self._flagged(request)))

    def poison(self, out: Tensor) -> None:
        """Make every parameter's result non-finite where any worker's gradient was."""
        if self.verdict is None or (self._on_host and bool(self.verdict.isfinite())):
            return
        starts = torch.tensor([start for start, _ in self._spans], device=out.device)
        out.index_add_(0, starts, self.verdict.to(out.dtype).expand(len(starts)))

    def _flagged(self, request: Mean | Gather) -> Mean | Gather:
        dtype = request.tensors[0].dtype if isinstance(request, Mean) else torch.float32
        flag = torch.zeros(1, dtype=dtype, device=self.finite.device)
        flag.masked_fill_(~self.finite, float("nan"))
        if isinstance(request, Mean):
            return Mean((*request.tensors, flag))
        limits = None if request.limits is None else (*request.limits, None)
        return Gather((*request.tensors, flag), limits)

    def _stripped(self, request: Mean | Gather, reply: Reply) -> Reply:
        if isinstance(request, Mean):
            self.verdict = reply[-1] * 0  # zero or NaN: what else arrives must not be added
            return reply[:-1]
        self.verdict = torch.stack([payload[-1] for payload in reply]).mul(0).sum(0)
        return [payload[:-1] for payload in reply]


def _peaks(slices: list[Tensor]) -> Tensor:
    """Return a number per slice: zero, or not finite, exactly where the slice is.

    On CPU the largest magnitude takes ten times as long as the L2 norm, whose squares may leave
    float32's range; so the norm goes first, and the magnitude is asked only where in doubt.
    """
    if slices[0].device.type != "cpu":
        return torch.stack(torch._foreach_norm(slices, float("inf")))
    norms = torch._foreach_norm(slices)
    sure = [0 < norm < float("inf") for norm in torch.stack(norms).tolist()]
    return torch.stack(
        [norm if ok else s.abs().max() for norm, s, ok in zip(norms, slices, sure, strict=True)]
    )


def _send(flow: Flow, reply: Reply) -> Request | None:
    try:
        return flow.send(reply)
    except StopIteration:
        return None
