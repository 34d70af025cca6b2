"""A transport that keeps account of another one: bytes and seconds."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch

from lightning_gc.flow import Flow, Reply, Request
from lightning_gc.transports.transport import Transport

COMPRESS, COMMUNICATE, DECODE = "compress", "communicate", "decode"


@dataclass(frozen=True)
class Sent:
    """One request that was fulfilled: its kind and the bytes that this worker sent for it."""

    kind: str
    nbytes: int


@dataclass
class Account:
    """Totals since the last ``take``."""

    wire_bytes: int = 0
    messages: int = 0
    seconds: dict[str, float] = field(
        default_factory=lambda: {COMPRESS: 0.0, COMMUNICATE: 0.0, DECODE: 0.0}
    )


class Recording(Transport):
    """Delegates to ``inner`` and records what it sends and how long that takes.

    Time before the first request is compression, time inside requests is communication, and the
    rest (decoding, and encoding again in two-shot schemes) is decoding. On CUDA the times are
    those of the stream, taken by events and only while ``timing`` is on.

    Args:
        inner: the transport that does the work.
        history: how many requests to keep in ``log``; 0 keeps none.
    """

    def __init__(self, inner: Transport, history: int = 0) -> None:
        self.inner = inner
        self.worker = inner.worker
        self.workers = inner.workers
        self.history = history
        self.log: list[Sent] = []
        self.timing = True
        self._account = Account()
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._taken_bytes = inner.sent_bytes

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """The inner transport's counter."""
        return self.inner.sent_bytes

    def fulfil(self, request: Request) -> Reply:
        """Let the inner transport fulfil the request."""
        before = self.inner.sent_bytes
        reply = self.inner.fulfil(request)
        self._account.messages += 1
        if len(self.log) < self.history:
            self.log.append(Sent(type(request).__name__, self.inner.sent_bytes - before))
        return reply

    def run(self, flow: Flow, device: torch.device) -> None:
        """Drive a flow to its end, timing its phases."""
        mark = self._now(device)
        phase = COMPRESS
        try:
            request = next(flow)
            while True:
                mark = self._lap(phase, mark, device)
                reply = self.fulfil(request)
                mark = self._lap(COMMUNICATE, mark, device)
                phase = DECODE
                request = flow.send(reply)
        except StopIteration:
            self._lap(phase, mark, device)

    def take(self) -> Account:
        """Return the totals since the last call and start anew. Waits for CUDA where timed."""
        account, self._account = self._account, Account()
        account.wire_bytes = self.inner.sent_bytes - self._taken_bytes
        self._taken_bytes = self.inner.sent_bytes
        for phase, start, stop in self._events:
            stop.synchronize()
            account.seconds[phase] += start.elapsed_time(stop) / 1e3
        self._events.clear()
        return account

    def _now(self, device: torch.device) -> float | torch.cuda.Event | None:
        if device.type != "cuda":
            return time.perf_counter()
        if not self.timing:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _lap(
        self, phase: str, mark: float | torch.cuda.Event | None, device: torch.device
    ) -> float | torch.cuda.Event | None:
        now = self._now(device)
        if isinstance(mark, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self._events.append((phase, mark, now))
        elif isinstance(mark, float) and isinstance(now, float):
            self._account.seconds[phase] += now - mark
        return now
