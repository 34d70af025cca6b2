"""Seconds by phase, on the host or on a CUDA stream."""

from __future__ import annotations

import time

import torch

COMPUTE, COMPRESS, COMMUNICATE, DECODE = "compute", "compress", "communicate", "decode"


class Stopwatch:
    """Adds up the seconds of phases that follow one another.

    On CUDA they are those of the stream, taken by events, and only while ``timing`` is on.

    Attributes:
        timing: whether CUDA is timed.
    """

    def __init__(self) -> None:
        self.timing = True
        self._seconds: dict[str, float] = {}
        self._events: list[tuple[str, torch.cuda.Event, torch.cuda.Event]] = []
        self._mark: float | torch.cuda.Event | None = None
        self._device = torch.device("cpu")

    def start(self, device: torch.device) -> None:
        """Begin a first phase on ``device``."""
        self._device = device
        self._mark = self._now()

    def lap(self, phase: str) -> None:
        """End a phase, and begin the next one."""
        now = self._now()
        if isinstance(self._mark, torch.cuda.Event) and isinstance(now, torch.cuda.Event):
            self._events.append((phase, self._mark, now))
        elif isinstance(self._mark, float) and isinstance(now, float):
            self._seconds[phase] = self._seconds.get(phase, 0.0) + now - self._mark
        self._mark = now

    def take(self) -> dict[str, float]:
        """Return the seconds since the last call, and start anew. Waits for CUDA where timed."""
        seconds, self._seconds = self._seconds, {}
        for phase, start, stop in self._events:
            stop.synchronize()
            seconds[phase] = seconds.get(phase, 0.0) + start.elapsed_time(stop) / 1e3
        self._events.clear()
        return seconds

    def _now(self) -> float | torch.cuda.Event | None:
        if self._device.type != "cuda":
            return time.perf_counter()
        if not self.timing:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
