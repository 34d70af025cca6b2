"""Account for one worker's wire bytes, and its seconds by phase."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from lightning_gc.controllers.base import ExchangeRecord
from lightning_gc.core import Flow, Request
from lightning_gc.core.copies import Renewed
from lightning_gc.core.flow import resume
from lightning_gc.kernels import dispatch
from lightning_gc.transports.base import Transport, same_layout
from lightning_gc.transports.link import messages_sent

KEPT = 64
"""Number of latest requests with kept bytes and seconds."""
COMPUTE, COMPRESS, COMMUNICATE, DECODE = "compute", "compress", "communicate", "decode"


@dataclass
class Account:
    """Totals of one worker since the last ``take``.

    Attributes:
        wire_bytes: bytes sent.
        message_bytes: bytes of its messages, each counted once for any number of receivers; in
            simulations only.
        node_bytes: bytes sent within its node, by a scheme with nodes; not in ``wire_bytes``.
        weight_bytes: the part of ``wire_bytes`` for gathers of weights that are compressed, in
            FSDP. None: there are none, and gathers by FSDP2 itself are not counted.
        dense_weight_bytes: bytes of the same gathers uncompressed, or None.
        seconds: phase -> seconds; empty if nothing was timed.
    """

    wire_bytes: int = 0
    message_bytes: int = 0
    node_bytes: int = 0
    weight_bytes: int | None = None
    dense_weight_bytes: int | None = None
    seconds: dict[str, float] = field(default_factory=dict)


class Recorder(Protocol):
    """Account of one of W workers, real or simulated.

    Attributes:
        worker: its index.
        workers: W.
        timing: CUDA streams are timed.
        exchanges: its latest requests; None, the default, keeps none. On CUDA reading them adds
            the requests that the device has finished since.
        modelled: seconds of requests are computed, so a wall clock does not show a step's seconds.
    """

    worker: int
    workers: int
    timing: bool
    exchanges: deque[ExchangeRecord] | None

    @property
    def modelled(self) -> bool: ...

    @property
    def sent_bytes(self) -> int:
        """Bytes sent so far."""

    def take(self) -> Account:
        """Return and reset the totals. Waits for CUDA where it is timed."""

    def seconds(self) -> dict[str, float]:
        """Return phase -> seconds since the beginning, which ``take`` does not reset."""


class Recording:
    """Runs flows over a transport and records bytes and seconds.

    Time before the first request is compression, time inside requests is communication, and the
    rest (decoding, and the second encoding of two-shot schemes) is decoding.

    Args:
        inner: the transport that communicates.

    Attributes:
        timing: whether CUDA streams are timed, by events.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.modelled = False
        self.worker = inner.worker
        self.workers = inner.workers
        self._requests = LatestRequests()
        self._watch = Stopwatch()
        self._taken = (inner.sent_bytes, inner.node_bytes)
        self._compares: Iterable[str] | None = None  # the parameters whose requests are compared
        self._apart = (0, 0)  # bytes of comparisons, as ``_taken``

    @property
    def sent_bytes(self) -> int:
        return self.inner.sent_bytes - self._apart[0]

    @property
    def exchanges(self) -> deque[ExchangeRecord] | None:
        """The latest finished requests, if a controller needs them; else None."""
        return self._requests.finished()

    @exchanges.setter
    def exchanges(self, kept: deque[ExchangeRecord] | None) -> None:
        self._requests.kept = kept

    @property
    def timing(self) -> bool:
        return self._watch.timing

    @timing.setter
    def timing(self, on: bool) -> None:
        self._watch.timing = on

    def compared(self, flow: Flow, names: Iterable[str]) -> Flow:
        """Return ``flow`` for ``run``, with all workers' layouts compared before they are sent.

        It begins by taking over kernels. Bytes of comparisons are not counted.

        Args:
            flow: on the host; every worker compares, or none does.
            names: of the bucket's parameters.

        Raises:
            ReplicaError: on all workers; it names those that differ from worker 0, and the field.
        """
        dispatch.host.take_over()
        self._compares = names
        try:
            yield from flow
        finally:
            self._compares = None

    def _compare(self, request: Request, names: Iterable[str]) -> None:
        before = self.inner.sent_bytes, self.inner.node_bytes
        comparing = same_layout(request, names)
        asked = next(comparing, None)
        while asked is not None:
            asked = resume(comparing, self.inner.fulfil(asked))
        sent, within = self.inner.sent_bytes - before[0], self.inner.node_bytes - before[1]
        self._apart = self._apart[0] + sent, self._apart[1] + within

    def run(self, flow: Flow, device: torch.device) -> None:
        self._watch.start(device)
        try:
            phase, request = COMPRESS, next(flow, None)
            while request is not None:
                self._watch.lap(phase)
                if self._compares is not None:
                    self._compare(request, self._compares)
                before, began = self.inner.sent_bytes, self._requests.begin(device)
                reply = self.inner.fulfil(request)
                if began is not None:
                    messages = messages_sent(type(request).__name__, self.workers)
                    self._requests.end(began, messages, self.inner.sent_bytes - before)
                self._watch.lap(COMMUNICATE)
                phase, request = DECODE, resume(flow, reply)
        except BaseException:
            flow.close()  # a comparison that it has begun ends with it
            raise
        self._watch.lap(phase)

    def seconds(self) -> dict[str, float]:
        return self._watch.totals()

    def take(self) -> Account:
        now = self.inner.sent_bytes - self._apart[0], self.inner.node_bytes - self._apart[1]
        sent, within = (here - then for here, then in zip(now, self._taken, strict=True))
        self._taken = now
        return Account(sent, node_bytes=within, seconds=self._watch.take())


class WithWeights:
    """Account of gradients and of gathered weights: bytes and seconds are sums of both.

    Args:
        gradients: the account of exchanges of gradients.
        weights: the account of gathers of weights.
        dense: returns the bytes so far of the same gathers uncompressed.
    """

    def __init__(self, gradients: Recording, weights: Recording, dense: Callable[[], int]) -> None:
        self._gradients, self._weights, self._dense = gradients, weights, dense
        self._taken = dense()
        self.modelled = False
        self.worker, self.workers = gradients.worker, gradients.workers

    @property
    def exchanges(self) -> deque[ExchangeRecord] | None:
        return self._gradients.exchanges

    @exchanges.setter
    def exchanges(self, kept: deque[ExchangeRecord] | None) -> None:
        self._gradients.exchanges = kept

    @property
    def timing(self) -> bool:
        return self._gradients.timing

    @timing.setter
    def timing(self, on: bool) -> None:
        self._gradients.timing = self._weights.timing = on

    @property
    def sent_bytes(self) -> int:
        return self._gradients.sent_bytes + self._weights.sent_bytes

    def seconds(self) -> dict[str, float]:
        return _added(self._gradients.seconds(), self._weights.seconds())

    def take(self) -> Account:
        account, weights = self._gradients.take(), self._weights.take()
        before, self._taken = self._taken, self._dense()
        account.wire_bytes += weights.wire_bytes
        account.weight_bytes = weights.wire_bytes
        account.dense_weight_bytes = self._taken - before
        account.seconds = _added(account.seconds, weights.seconds)
        return account


Mark = float | torch.cuda.Event
"""A moment: the host's clock, or an event on a CUDA stream."""


def mark(device: torch.device) -> Mark:
    """Note this moment, on CUDA that of the current stream."""
    if device.type != "cuda":
        return time.perf_counter()
    event = _timing_event()
    event.record()
    return event


def seconds_between(start: Mark, stop: Mark) -> float:
    """Return the seconds between two marks of one device, which it has passed."""
    if isinstance(start, float):
        assert isinstance(stop, float)
        return stop - start
    assert not isinstance(stop, float)
    return float(start.elapsed_time(stop)) / 1e3


class LatestRequests(Renewed):
    """Keeps the bytes and seconds of the latest requests, for controllers.

    On CUDA a request lasts from when its stream reaches it until the stream has finished it. This
    includes waiting for a late peer, as on the host. Two events on the stream mark its ends. Later
    requests and ``finished`` read events that the device has passed, and never wait for others.
    Events are used again, so a step makes none. While ``KEPT`` requests are unread, further ones
    are not timed.

    Attributes:
        kept: where finished requests are added; None: nobody needs them.
    """

    _copied = ("kept",)

    def __init__(self) -> None:
        self.kept: deque[ExchangeRecord] | None = None
        self._reading = threading.Lock()  # flows run in one thread, a controller reads in another
        self._unread: deque[tuple[int, int, _Ends]] = deque()
        self._spare: list[_Ends] = []

    def begin(self, device: torch.device) -> float | _Ends | None:
        """Note that a request begins; None: it is not timed."""
        if self.kept is None:
            return None
        if device.type != "cuda":
            return time.perf_counter()
        self.finished()
        if len(self._unread) == KEPT:
            # If earlier requests were dropped instead, a device far behind would never be timed.
            return None
        ends = self._spare.pop() if self._spare else _Ends(_timing_event(), _timing_event())
        ends.start.record()
        return ends

    def end(self, began: float | _Ends, messages: int, nbytes: int) -> None:
        """Note that a request ends, which sent so many messages and bytes."""
        if isinstance(began, _Ends):
            began.stop.record()
            self._unread.append((messages, nbytes, began))
        elif self.kept is not None:
            self.kept.append(ExchangeRecord(messages, nbytes, time.perf_counter() - began))

    def finished(self) -> deque[ExchangeRecord] | None:
        """Return ``kept``, with the requests that the device has finished by now."""
        with self._reading:
            while self._unread and self._unread[0][2].stop.query():
                messages, nbytes, ends = self._unread.popleft()
                seconds = ends.start.elapsed_time(ends.stop) / 1e3
                if self.kept is not None:
                    self.kept.append(ExchangeRecord(messages, nbytes, seconds))
                self._spare.append(ends)
            return self.kept


class _Ends(NamedTuple):
    """The two ends of a request on a CUDA stream."""

    start: torch.cuda.Event
    stop: torch.cuda.Event


class Stopwatch(Renewed):
    """Adds up the seconds of consecutive phases.

    Attributes:
        timing: whether CUDA streams are timed, by events; off at first. Only events that the device
            has not reached are kept, even if nobody takes the seconds.
        device: whose time passes.
    """

    _copied = ("timing", "device", "_seconds", "_taken")

    def __init__(self) -> None:
        self.timing = False
        self._adding = threading.Lock()  # rounds run in one thread, ``take`` in another
        self._seconds: dict[str, float] = {}
        self._taken: dict[str, float] = {}
        self._events: deque[tuple[str, torch.cuda.Event, torch.cuda.Event]] = deque()
        self._mark: Mark | None = None
        self.device = torch.device("cpu")

    def start(self, device: torch.device) -> None:
        self.device = device
        with self._adding:
            while self._events and self._events[0][2].query():
                self._add_first()
        self._mark = self._now()

    def lap(self, phase: str) -> None:
        """End ``phase`` and start the next one."""
        now = self._now()
        if isinstance(self._mark, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self._events.append((phase, self._mark, now))
        elif isinstance(self._mark, float) and isinstance(now, float):
            with self._adding:
                self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now

    def take(self) -> dict[str, float]:
        """Return and reset the seconds by phase. Waits for CUDA where it is timed."""
        with self._adding:
            while self._events:
                self._events[0][2].synchronize()
                self._add_first()
            seconds, self._seconds = self._seconds, {}
            self._taken = _added(self._taken, seconds)
        return seconds

    def totals(self) -> dict[str, float]:
        """Return the seconds by phase since the beginning; on CUDA without unfinished phases."""
        with self._adding:
            return _added(self._taken, self._seconds)

    def _add_first(self) -> None:
        phase, start, stop = self._events.popleft()
        self._seconds[phase] = self._seconds.get(phase, 0.0) + start.elapsed_time(stop) / 1e3

    def _now(self) -> Mark | None:
        if self.device.type != "cuda":
            return time.perf_counter()
        return mark(self.device) if self.timing else None


def _timing_event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {phase: one.get(phase, 0.0) + other.get(phase, 0.0) for phase in {**one, **other}}


def human_bytes(nbytes: float) -> str:
    """Return a number of bytes with three digits and a decimal unit.

    Example:
        >>> human_bytes(812), human_bytes(1_327_600), human_bytes(999_900)
        ('812 B', '1.33 MB', '1 MB')
    """
    units = ["B", "kB", "MB", "GB", "TB"]
    while nbytes >= 999.5 and len(units) > 1:
        nbytes, units = nbytes / 1000, units[1:]
    return f"{nbytes:.3g} {units[0]}"
