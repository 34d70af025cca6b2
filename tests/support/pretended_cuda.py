"""Streams, events and futures that log who does what on which stream, without a GPU."""

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch

CUDA = torch.device("cuda", 0)


class Event:
    """Recorded on a stream by a thread; ends when the device has come to it.

    Attributes:
        at: seconds of the device's work that was queued before it.
    """

    cuda: "PretendedCuda"
    at: float

    def __init__(self, enable_timing: bool = False) -> None:
        self.timing = enable_timing
        self.cuda.made += 1
        self.cuda.events.add(self)

    def record(self) -> None:
        self.cuda.queued += self.cuda.pace
        self.at = self.cuda.queued

    def query(self) -> bool:
        return self.at <= self.cuda.reached

    def synchronize(self) -> None:
        self.cuda.note(self.cuda.current(), "makes the host wait", self)
        self.cuda.reached = max(self.cuda.reached, self.at)

    def elapsed_time(self, later: "Event") -> float:
        assert self.timing
        assert later.timing
        assert self.query()
        assert later.query(), "not yet known"
        return 1e3 * (later.at - self.at)


class Stream:
    """Logs what is called on it; raises where the device has failed."""

    def __init__(self, device: Any, cuda: "PretendedCuda") -> None:
        self.cuda = cuda

    def record_event(self) -> Event:
        self.cuda.raise_if("record_event")
        event = self.cuda.kind()
        event.record()
        self.cuda.note(self, "records", event)
        return event

    def wait_event(self, event: Event) -> None:
        self.cuda.raise_if("wait_event")
        self.cuda.note(self, "waits", event)


class Future:
    """Completes as torch's with devices: it counts as completed before it records its event."""

    def __init__(self, cuda: "PretendedCuda", devices: Any) -> None:
        assert devices == [CUDA]
        self.cuda, self.value = cuda, None
        self.completed, self.notified = False, threading.Event()

    def done(self) -> bool:
        return self.completed

    def set_result(self, value: Any) -> None:
        assert not self.completed, "a future can only be completed once"
        self.value, self.completed = value, True
        if isinstance(value, torch.Tensor):
            self.cuda.raise_if("record_event")
        self.cuda.note(self.cuda.current(), "completes", value)
        self.notified.set()

    def set_exception(self, error: Exception) -> None:
        self.set_result(error)

    def wait(self) -> Any:
        """Return the result; where torch would wait for ever, fail."""
        assert self.notified.wait(20), "this future never ends"
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class PretendedCuda:
    """A device whose streams do their work in the order in which it is queued.

    Attributes:
        log: of (thread, stream, verb, what).
        broken: the calls that raise.
        queued: seconds of work that it has been given.
        reached: seconds of that work that it has done.
        pace: seconds of work before each event.
        made: number of events so far.
        events: the events that have not been freed.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any, str, Any]] = []
        self.broken: set[str] = set()
        self.queued = self.reached = self.pace = 0.0
        self.made = 0
        self.events: weakref.WeakSet[Event] = weakref.WeakSet()
        self._local = threading.local()
        self.kind = type("OwnEvent", (Event,), {"cuda": self})
        patch.setattr(torch.cuda, "Event", self.kind)
        patch.setattr(torch.cuda, "Stream", lambda device: Stream(device, self))
        patch.setattr(torch.cuda, "current_stream", lambda device: self.current())
        patch.setattr(torch.cuda, "stream", self._on)
        patch.setattr(torch.cuda, "set_device", lambda device: self.raise_if("set_device"))
        patch.setattr(torch.futures, "Future", lambda devices: Future(self, devices))

    def current(self) -> Stream:
        """The stream that this thread uses; each begins with one of its own."""
        if not hasattr(self._local, "stream"):
            self._local.stream = Stream(CUDA, self)
        found: Stream = self._local.stream
        return found

    def note(self, stream: Any, verb: str, what: Any) -> None:
        self.log.append((threading.current_thread().name, stream, verb, what))

    def raise_if(self, call: str) -> None:
        if call in self.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before, self._local.stream = self.current(), stream
        try:
            yield
        finally:
            self._local.stream = before
