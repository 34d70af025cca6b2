"""StepClock: seconds of training steps; and what clocks tell a controller."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lightning_gc.controllers import Needs
from lightning_gc.controllers.exchange_record import fit_link
from lightning_gc.synchronizer.worker_statistics import WorkerStatistics
from lightning_gc.transports.accounting import COMMUNICATE, COMPRESS, COMPUTE, DECODE

PHASES = (COMPUTE, COMPRESS, COMMUNICATE, DECODE)


class StepClock:
    """Adds up the time from one batch to the next of the same epoch.

    So what is done between epochs is left out, and so is the last step of an epoch if no validation
    follows. Validation is left out wherever it is. On CUDA a host that runs ahead of its device is
    told by the clock on average only.
    """

    def __init__(self) -> None:
        self._last: tuple[float, int, int] | None = None  # time, step, epoch
        self._spent, self._steps = 0.0, 0

    def see(self, step: int, epoch: int) -> None:
        """Note that a batch begins, after so many steps."""
        now = time.perf_counter()
        if self._last is not None and self._last[2] == epoch:
            self._spent += now - self._last[0]
            self._steps += step - self._last[1]
        self._last = now, step, epoch

    def take(self) -> tuple[float, int]:
        """Return and reset seconds and number of steps."""
        found = self._spent, self._steps
        self._spent, self._steps = 0.0, 0
        return found

    def pause(self, step: int) -> None:
        """Note that validation begins after so many steps, within an epoch or after it."""
        if self._last is not None:
            self.see(step, self._last[2])
        self._last = None

    def resume(self) -> None:
        """Go on after a decision, which is made between two batches and is no part of a step."""
        if self._last is not None:
            self._last = time.perf_counter(), *self._last[1:]


def clock_figures(
    needs: Needs,
    statistics: Sequence[WorkerStatistics],
    clock: StepClock,
    mean: Callable[[list[list[float]]], list[float]],
) -> dict[str, Any]:
    """Return the fields of an observation that come from clocks, as far as they are declared.

    Args:
        needs: the controller's.
        statistics: of each worker of this process.
        clock: of steps.
        mean: rows, one per worker of this process -> their mean over all workers.

    Communication pattern:
        One all-reduce of a few numbers if seconds are declared.
    """
    found: dict[str, Any] = {}
    if needs.seconds:
        spent, timed = clock.take()
        phases = [each.phases() for each in statistics]
        rows = [[spent, timed, *(p.get(name, 0.0) for name in PHASES)] for p in phases]
        seconds, stepped, *means = mean(rows)
        steps = max(statistics[0].timed_steps, 1)
        per_step = {n: s / steps for n, s in zip(PHASES, means, strict=True) if s}
        step = seconds / stepped if stepped else 0.0
        if statistics[0].modelled:  # simulated workers take turns
            step = sum(per_step.values())
        found |= {"step_seconds": step, "phase_seconds": per_step}
    if needs.link:
        exchanges = statistics[0].exchanges()
        latency, bandwidth, r2 = fit_link(exchanges)
        found |= {"exchanges": exchanges, "latency_us": latency}
        found |= {"bandwidth_gbps": bandwidth, "link_r2": r2}
    return found
