"""Streams, events and futures that log who does what on which stream, without a GPU."""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

CUDA = torch.device("cuda", 0)


class Event:
    """Recorded on a stream by a thread."""


class Stream:
    """Logs what is called on it; raises where the device has failed."""

    def __init__(self, device: Any, cuda: "PretendedCuda") -> None:
        self.cuda = cuda

    def record_event(self) -> Event:
        self.cuda.raise_if("record_event")
        event = Event()
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
    """Attributes: ``log`` of (thread, stream, verb, what), and ``broken``, the calls that raise."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.log: list[tuple[str, Any, str, Any]] = []
        self.broken: set[str] = set()
        self._local = threading.local()
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
