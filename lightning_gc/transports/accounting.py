"""A transport that keeps account of another one: bytes and seconds."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from lightning_gc.flow import Flow, Reply, Request
from lightning_gc.transports.base import Transport
from lightning_gc.transports.timer import COMMUNICATE, COMPRESS, DECODE, Stopwatch


@dataclass(frozen=True)
class Sent:
    """One request that was fulfilled: its kind and the bytes that this worker sent for it."""

    kind: str
    nbytes: int


@dataclass
class Account:
    """Totals of one worker since the last ``take``.

    Attributes:
        wire_bytes: what it sent.
        message_bytes: what it had to say, each byte once; counted in simulations only.
        messages: requests fulfilled.
        seconds: by phase; empty where nothing was timed.
    """

    wire_bytes: int = 0
    message_bytes: int = 0
    messages: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


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
        self._account = Account()
        self._watch = Stopwatch()
        self._taken_bytes = inner.sent_bytes

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        """The inner transport's counter."""
        return self.inner.sent_bytes

    @property
    def timing(self) -> bool:
        """Whether CUDA is timed."""
        return self._watch.timing

    @timing.setter
    def timing(self, on: bool) -> None:
        self._watch.timing = on

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
        self._watch.start(device)
        phase = COMPRESS
        try:
            request = next(flow)
            while True:
                self._watch.lap(phase)
                reply = self.fulfil(request)
                self._watch.lap(COMMUNICATE)
                phase = DECODE
                request = flow.send(reply)
        except StopIteration:
            self._watch.lap(phase)

    def take(self) -> Account:
        """Return the totals since the last call and start anew. Waits for CUDA where timed."""
        account, self._account = self._account, Account()
        account.wire_bytes = self.inner.sent_bytes - self._taken_bytes
        self._taken_bytes = self.inner.sent_bytes
        account.seconds = self._watch.take()
        return account
