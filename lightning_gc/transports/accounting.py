"""Accounts of one worker: the bytes that a transport sends, and seconds by phase."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

import torch

from lightning_gc.flow import Flow, Reply, Request
from lightning_gc.transports.base import Transport
from lightning_gc.transports.timer import COMMUNICATE, COMPRESS, DECODE, Stopwatch


@dataclass
class Account:
    """Totals of one worker since the last ``take``.

    Attributes:
        wire_bytes: what it sent.
        message_bytes: what it had to say, each byte once; counted in simulations only.
        seconds: by phase; empty where nothing was timed.
    """

    wire_bytes: int = 0
    message_bytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


class Recorder(Protocol):
    """Keeps the account of one worker, real or simulated."""

    @property
    def worker(self) -> int:
        """The worker's index."""

    @property
    def workers(self) -> int:
        """How many workers there are."""

    @property
    def sent_bytes(self) -> int:
        """What the worker has sent so far."""

    timing: bool

    def take(self) -> Account:
        """Return the totals since the last call and start anew."""


class Recording(Transport):
    """Delegates to ``inner`` and records what it sends and how long that takes.

    Time before the first request is compression, time inside requests is communication, and the
    rest (decoding, and encoding again in two-shot schemes) is decoding. On CUDA the times are
    those of the stream, taken by events and only while ``timing`` is on.

    Args:
        inner: the transport that does the work.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.worker = inner.worker
        self.workers = inner.workers
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
        return self.inner.fulfil(request)

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
        before, self._taken_bytes = self._taken_bytes, self.inner.sent_bytes
        return Account(self._taken_bytes - before, seconds=self._watch.take())
