"""SimulatedClock: predicted time of simulated workers with steps of different seconds."""

from __future__ import annotations

import math
from collections.abc import Sequence


class SimulatedClock:
    """Predicts when each of W workers has made its steps, and when exchanges begin and end.

    A step of worker i takes ``1/speeds[i]`` seconds. An exchange begins when the last worker is
    ready, or ``grace`` seconds after the first of those that were in time for the one before.
    Without a delay workers wait for its end.

    Args:
        speeds: of each worker, in steps per second.
        grace: seconds; None: wait for all.

    Attributes:
        now: by worker, seconds since the beginning.
        ended: when the last exchange ended, in seconds.
        late: by worker, whether the last exchange began without it.
    """

    def __init__(self, speeds: Sequence[float], grace: float | None) -> None:
        self.speeds, self._grace = tuple(speeds), grace
        self.now = [0.0] * len(self.speeds)
        self.late = [False] * len(self.speeds)
        self.ended = 0.0
        self._closed, self._lasted = 0.0, math.inf
        self._closes: float | None = None  # when the exchange under way begins

    @property
    def seconds(self) -> float:
        """Predicted seconds until the last worker's last step or exchange."""
        return max(self.now)

    def step(self, worker: int) -> None:
        """Let a worker make a step."""
        self.now[worker] += 1 / self.speeds[worker]

    def depart(self, worker: int, *, wait: bool) -> bool:
        """Let a worker come to an exchange; return whether it has begun without it.

        All have made their steps before the first one comes.
        """
        if self._closes is None:
            grace = math.inf if self._grace is None or wait else self._grace
            pairs = zip(self.now, self.late, strict=True)
            first = min(ready for ready, late in pairs if not late)
            self._closes = min(max(self.now), first + grace)
            self._lasted, self._closed = self._closes - self._closed, self._closes
            self.late = [now > self._closes for now in self.now]
        return self.late[worker]

    def arrive(self, seconds: float) -> None:
        """End the exchange; its messages take so many seconds."""
        if self._closes is not None:
            self.ended = self._closes + seconds
            self._closes = None

    def land(self, worker: int) -> None:
        """Let a worker wait for the exchange's end."""
        self.now[worker] = max(self.now[worker], self.ended)

    def of(self, worker: int) -> WorkersTime:
        """Return one worker's clock."""
        return WorkersTime(self, worker)


class WorkersTime:
    """A simulated worker's clock: a ``Clock``."""

    def __init__(self, clock: SimulatedClock, worker: int) -> None:
        self._clock, self._worker = clock, worker

    def now(self) -> float:
        return self._clock.now[self._worker]

    def step(self) -> None:
        self._clock.step(self._worker)

    def depart(self, *, wait: bool) -> bool:
        return self._clock.depart(self._worker, wait=wait)

    def land(self) -> None:
        self._clock.land(self._worker)

    def spare(self) -> float:
        clock = self._clock
        return clock._lasted - max(0.0, self.now() - clock.ended)

    def times(self) -> list[float]:
        clock = self._clock
        late = map(float, clock.late)
        return [*clock.now, *late, clock.ended, clock._closed, min(clock._lasted, 1e30)]

    def resume(self, times: Sequence[float]) -> None:
        clock, workers = self._clock, len(self._clock.now)
        if len(times) == 2 * workers + 3:
            clock.now = list(times[:workers])
            clock.late = [bool(each) for each in times[workers:-3]]
            clock.ended, clock._closed, clock._lasted = times[-3:]
