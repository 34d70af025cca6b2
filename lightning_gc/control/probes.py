"""Probes: observe traffic, gradients, error curves, clock, link and rates for a controller."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.control.weighing import prepare, weigh
from lightning_gc.controllers import Controller, Curve, ExchangeRecord, Point, Weighed
from lightning_gc.core import Bucket, Record, Tally
from lightning_gc.core.notices import waiting
from lightning_gc.core.saved_state import FINITE
from lightning_gc.engine import Engine
from lightning_gc.engine.statistics import EpochStatistics
from lightning_gc.exchange.peers import Peers
from lightning_gc.exchange.workers import Workers
from lightning_gc.kernels.dispatch import host
from lightning_gc.transports.accounting import (
    COMMUNICATE,
    COMPRESS,
    COMPUTE,
    DECODE,
    KEPT,
    Mark,
    Recorder,
    mark,
    seconds_between,
)
from lightning_gc.transports.link import fit
from lightning_gc.transports.simulated import Simulated


class WorkerStatistics:
    """Collects one worker's part of a controller's observation.

    Args:
        engine: the worker's; its epoch statistics are set to those that the controller declares.
        controller: the policy.
    """

    structure = Record(
        {
            "bytes": FINITE,
            "tally": Record({field.name: FINITE for field in dataclasses.fields(Tally)}),
            "observer": EpochStatistics.structure,
        }
    )
    """What ``own_state`` returns."""

    _account: Recorder

    def __init__(self, engine: Engine, controller: Controller) -> None:
        self.engine = engine
        needs = controller.needs
        self.epoch = EpochStatistics(needs.sums, needs.moments, needs.errors, needs.scale)
        self._keeps_exchanges, self._timed = needs.link, needs.seconds
        engine.statistics.epoch = self.epoch
        self._seen_tally = dataclasses.replace(engine.tally)
        self._timed_from = engine.step

    def attach(self, account: Recorder) -> None:
        """Use the byte account of a new fit, before all else; of the last one, add what is new."""
        nbytes, seconds, exchanges = 0, dict[str, float](), tuple[ExchangeRecord, ...]()
        if hasattr(self, "_account"):
            nbytes, seconds, exchanges = self._bytes(), self.phases(), self.exchanges()
        self._account = account
        if self._keeps_exchanges:
            account.exchanges = deque(exchanges, maxlen=KEPT)
        self._seen_seconds = _minus(account.seconds(), seconds)
        self._seen_bytes = account.sent_bytes - nbytes

    def figures(self) -> list[float]:
        """Return bytes, dense bytes and elements sent since then, total errors, ‖g‖² since then."""
        now, seen = self.engine.tally, self._seen_tally
        return [
            self._bytes(),
            self.engine.dense_bytes(now.plain_bytes - seen.plain_bytes),
            (now.sent + now.whole) - (seen.sent + seen.whole),
            self.epoch.total_error,
            self.epoch.total_error_update,
            self.epoch.squared_gradients,
        ]

    def phases(self) -> dict[str, float]:
        """Return phase -> seconds since then."""
        return _minus(self._account.seconds(), self._seen_seconds)

    @property
    def timed_steps(self) -> int:
        """Steps since ``phases`` counts; seconds before a resume are not known."""
        return self.engine.step - self._timed_from

    @property
    def modelled(self) -> bool:
        """Whether seconds of requests are computed, not measured."""
        return self._account.modelled

    def exchanges(self) -> tuple[ExchangeRecord, ...]:
        """Return the latest requests since then."""
        return tuple(self._account.exchanges or ())

    def begin(self) -> None:
        """Count from here: a decision has been made."""
        self._time_from_here()
        if self._keeps_exchanges:
            # A new one: on CUDA the old one may gain a request that the controller has not seen.
            self._account.exchanges = deque(maxlen=KEPT)
        self._seen_bytes = self._account.sent_bytes
        self._seen_tally = dataclasses.replace(self.engine.tally)
        self.epoch.forget_gradients()

    def own_state(self) -> dict[str, Any]:
        """Return this worker's counts and sums since the last decision."""
        seen, now = vars(self._seen_tally), vars(self.engine.tally)
        return {
            "bytes": self._bytes(),
            "tally": {name: now[name] - seen[name] for name in now},
            "observer": self.epoch.own_state(),
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Resume from ``own_state()``, or from the mean of several."""
        self._time_from_here()
        self._seen_bytes = self._account.sent_bytes - round(state["bytes"])
        now = vars(self.engine.tally)
        self._seen_tally = Tally(**{n: now[n] - round(v) for n, v in state["tally"].items()})
        self.epoch.load_own_state(state["observer"])

    def _time_from_here(self) -> None:
        self._timed_from = self.engine.step
        if self._timed:
            self._seen_seconds = self._account.seconds()

    def _bytes(self) -> int:
        return self._account.sent_bytes - self._seen_bytes


def _minus(some: Mapping[str, float], less: Mapping[str, float]) -> dict[str, float]:
    return {name: some.get(name, 0.0) - less.get(name, 0.0) for name in {**some, **less}}


TRIES = 2
"""Times that a method with a state, such as PowerSGD's factors, compresses the same tensor."""


def error_curves(
    engine: Engine, gradients: Mapping[str, Tensor], levels: Sequence[float]
) -> dict[str, Curve]:
    """Return the curve of each parameter with a finite gradient that some level compresses.

    One simulated worker compresses each gradient separately, from fresh state. The engine and the
    random numbers of training do not change.

    Args:
        engine: with compressor, scheme and step.
        gradients: parameter name -> gradient, left alone.
        levels: that are tried, within the knob's range.

    Communication pattern:
        None.
    """
    compressors = [engine.levels.sample(level) for level in levels]
    found = {}
    for name, gradient in gradients.items():
        shape = tuple(gradient.shape)
        if not engine.levels.takes(shape):
            continue
        norm = float(torch.linalg.vector_norm(gradient, dtype=torch.float64))
        if not math.isfinite(norm):
            continue
        points = tuple(
            Point(float(level), *_point(engine, compressor, name, gradient))
            for level, compressor in zip(levels, compressors, strict=True)
        )
        found[name] = Curve(norm, points)
    return found


def _point(
    engine: Engine, compressor: Compressor, name: str, gradient: Tensor
) -> tuple[float, float]:
    """Return ``‖x − C(x)‖`` and the bytes of one worker's messages."""
    state: dict[str, dict[str, Any]] = {name: {}}
    flat = gradient.detach().reshape(-1).float()
    error = nbytes = 0.0
    for number in range(TRIES):
        buffer, out = flat.clone(), torch.zeros_like(flat)
        shapes = {name: tuple(gradient.shape)}
        step = compressor.compressing_step(engine.step + number)
        bucket = Bucket(buffer, shapes, step=step, seed=engine.seed, state=state)
        transport = Simulated(1)
        with torch.no_grad():
            scheme = engine.levels.scheme_of(compressor)
            transport.run([compressor.flow(bucket, buffer, out, scheme)])
        error = float(torch.linalg.vector_norm(buffer, dtype=torch.float64))
        nbytes = float(transport.message_bytes[0])
        if not state[name]:
            break
    return error, nbytes


def gradient_moments(
    epochs: Sequence[EpochStatistics], steps: int, workers: int, peers: Peers
) -> dict[str, float]:
    """Estimate E‖g−∇fᵢ‖², ‖∇fᵢ‖² and meanᵢ‖∇fᵢ−∇f‖², with the bias of 1/steps removed.

    Args:
        epochs: sums of this process's workers.
        steps: of the epoch.
        workers: W, of all processes.
        peers: the other processes.

    Returns:
        Fields of an ``Observation``; none if the moments were not summed, as after a resume without
        a worker's file, or of one step.
    """
    if not epochs[0].summed() or not epochs[0].moments or steps < 2:
        return {}
    means = [epoch.sum() / steps for epoch in epochs]
    owns = [float(mean.double().square().sum()) for mean in means]
    spread = [
        (epoch.squares() / steps - own) * steps / (steps - 1)
        for epoch, own in zip(epochs, owns, strict=True)
    ]
    mean = peers.mean(sum(means[1:], means[0]) / len(means))
    together = float(peers.parts.total(mean.double().square().sum()))
    noise, own = peers.whole_of(zip(spread, owns, strict=True))
    apart = own - together - noise / steps * (1 - 1 / workers)
    return {
        "gradient_noise": max(noise, 0.0),
        "gradient_squared": own - noise / steps,
        "gradient_dissimilarity": apart,
    }


PHASES = (COMPUTE, COMPRESS, COMMUNICATE, DECODE)
WAIT = "wait"
"""Phase of an observation: what messages take longer since other workers come later."""


class StepClock:
    """Adds up the time from one batch to the next of the same epoch, and keeps each step's.

    Validation and work between epochs are left out, and so is the last step of an epoch without
    validation. On CUDA the host runs ahead of its device, so only the mean between two decisions is
    meaningful of what it adds up; each step is timed by events. Within an epoch each decision waits
    for the device.

    Args:
        device: on which steps are timed one by one; None: they are not.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._last: tuple[float, int, int] | None = None  # time, step, epoch
        self._spent, self._steps = 0.0, 0
        self._mark: Mark | None = None  # the latest, if this step's batches are timed from there
        self._parts: list[tuple[Mark, Mark]] = []  # of this step
        self._each: deque[list[tuple[Mark, Mark]]] = deque(maxlen=KEPT)

    def see(self, step: int, epoch: int) -> None:
        """Note that a batch begins, after so many steps."""
        now = time.perf_counter()
        goes_on = self._last is not None and self._last[2] == epoch
        done = 0
        if goes_on and self._last is not None:
            self._spent += now - self._last[0]
            done = step - self._last[1]
            self._steps += done
        self._last = now, step, epoch
        if self._device is not None:
            self._see_mark(mark(self._device), done, goes_on=goes_on)

    def _see_mark(self, now: Mark, done: int, *, goes_on: bool) -> None:
        """Add the time since the last mark to the step, and keep the step if it is done."""
        if self._mark is not None and goes_on:
            self._parts.append((self._mark, now))
        if done == 1 and self._parts:
            self._each.append(self._parts)
        if done or not goes_on:
            self._parts = []
        self._mark = now

    def each(self) -> tuple[float, ...]:
        """Return and reset the seconds of the latest steps; on CUDA the device has passed them."""
        found, self._each = self._each, deque(maxlen=KEPT)
        return tuple(sum(seconds_between(*part) for part in parts) for parts in found)

    def catch_up(self) -> None:
        """Count the time that the host has waited, since the batch began, for earlier steps."""
        if self._last is not None:
            self.see(*self._last[1:])

    def take(self) -> tuple[float, int]:
        """Return and reset seconds and number of steps."""
        found = self._spent, self._steps
        self._spent, self._steps = 0.0, 0
        return found

    def forget(self) -> None:
        """Forget what has been seen, as of a step that is not to count."""
        self._last, self._spent, self._steps = None, 0.0, 0
        self._mark, self._parts = None, []
        self._each.clear()

    def pause(self, step: int) -> None:
        """Note that validation begins after so many steps, within an epoch or after it."""
        if self._last is not None:
            self.see(step, self._last[2])
        self._last = None

    def resume(self) -> None:
        """Continue after a decision, which is not part of a step."""
        if self._last is not None:
            self._last = time.perf_counter(), *self._last[1:]
            self._mark = None if self._device is None else mark(self._device)


PARTS = 100
"""Parts of the rest of a run for which a controller gets learning rates."""
RatesToCome = Callable[[], Sequence[float]]
"""Returns the learning rate of every step from the next to the last."""


class Forecast:
    """Keeps the learning rates to come, for as long as the run keeps to them."""

    def __init__(self) -> None:
        self._rates: Sequence[float] = ()
        self._first = 0  # step of the first

    def ahead(self, step: int, rate: float, rates_to_come: RatesToCome) -> tuple[float, ...]:
        """Return the mean rate of each of up to ``PARTS`` equal parts of the rest of the run.

        Args:
            step: the next one.
            rate: its learning rate.
            rates_to_come: called if the rates are not known, or have changed.
        """
        left = self._rates[step - self._first :]
        if not left or not math.isclose(left[0], rate, rel_tol=1e-6):
            self._rates, self._first = rates_to_come(), step
            left = self._rates
        size = max(-(-len(left) // PARTS), 1)
        parts = [left[i : i + size] for i in range(0, len(left), size)]
        return tuple(sum(part) / len(part) for part in parts)


class Probes:
    """Observes a run for a controller, as far as its ``needs`` declare.

    Each probe returns fields of an ``Observation``, of the steps since the last decision.

    Args:
        controller: the policy.
        workers: of this process.

    Attributes:
        statistics: counts and sums of each worker.
        clock: of steps.
    """

    def __init__(self, controller: Controller, workers: Workers) -> None:
        self._needs, self._workers = controller.needs, workers
        self.statistics = [WorkerStatistics(engine, controller) for engine in workers.engines]
        first = next(iter(workers.names), None)
        self.clock = StepClock(first.device if self._needs.seconds and first is not None else None)
        if self._needs.weighed:
            workers.ready = []
        self._forecast = Forecast()
        self._prepared = False  # whether each choice has begun to compile its kernels

    def traffic(self, steps: int, peers: Peers) -> dict[str, Any]:
        """Return bytes, elements, errors, gradient scale and levels: one all-reduce of numbers."""
        workers, figures = self._workers, [each.figures() for each in self.statistics]
        wire, dense, sent, error, update, squares = peers.whole_of(figures)
        numel = sum(param.numel() for param in workers.names)
        sizes = {name: param.numel() for param, name in workers.compressed().items()}
        scale = math.sqrt(squares / max(steps * numel, 1))
        return {
            "total_error": error,
            "total_error_update": update,
            "wire_bytes": wire,
            "dense_bytes": dense,
            "steps": steps,
            "num_elements": numel,
            "gradient_scale": float(f"{scale:.9g}"),  # more digits depend on the buckets' order
            "sizes": sizes,
            "num_compressed": sum(sizes.values()),
            "sent_elements": sent,
            "levels": workers.levels() if steps else {},
            "weight_sizes": {} if workers.gathers is None else workers.gathers.sizes(),
            "weight_levels": workers.weight_levels() if steps else {},
        }

    def rates(self, step: int, rate: float, to_come: RatesToCome | None) -> dict[str, Any]:
        """Return the learning rates of the rest of the run."""
        if not self._needs.scale or to_come is None:
            return {}
        return {"rates_ahead": self._forecast.ahead(step, rate, to_come)}

    def seconds(self, peers: Peers) -> dict[str, Any]:
        """Return the seconds of a step and its phases: one all-reduce of numbers, if declared."""
        if not self._needs.seconds:
            return {}
        spent, timed = self.clock.take()
        phases = [each.phases() for each in self.statistics]
        rows = [[spent, timed, *(p.get(name, 0.0) for name in PHASES)] for p in phases]
        (seconds, stepped, *means), each_worker = self._of_each(
            rows, [p.get(COMMUNICATE, 0.0) for p in phases], peers
        )
        steps = max(self.statistics[0].timed_steps, 1)
        took = dict(zip(PHASES, means, strict=True))
        # The last to come waits for nobody. The others' messages last longer by their waiting.
        took[COMMUNICATE], mean = min(each_worker.values()), took[COMMUNICATE]
        took[WAIT] = max(mean - took[COMMUNICATE], 0.0)
        per_step = {n: s / steps for n, s in took.items() if s}
        step = seconds / stepped if stepped else 0.0
        each = self.clock.each()
        if self.statistics[0].modelled:  # simulated workers run in turn
            step = sum(per_step.values())
            each = (step,) * min(self.statistics[0].timed_steps, KEPT)
        return {"step_seconds": step, "phase_seconds": per_step, "each_step": each}

    def _of_each(
        self, rows: Sequence[Sequence[float]], own: Sequence[float], peers: Peers
    ) -> tuple[list[float], dict[int, float]]:
        """Return the mean over workers of rows, and each worker's own number, in one message."""
        workers = self._workers.first.workers
        several = []
        for statistics, row, number in zip(self.statistics, rows, own, strict=True):
            mine = [float(worker == statistics.engine.worker) for worker in range(workers)]
            several.append([*row, *mine, *(number * is_mine for is_mine in mine)])
        found = peers.mean_of(several)
        means, shares, sums = (
            found[: -2 * workers],
            found[-2 * workers : -workers],
            found[-workers:],
        )
        pairs = enumerate(zip(sums, shares, strict=True))
        return means, {worker: total / share for worker, (total, share) in pairs if share}

    def _requests(self, peers: Peers) -> tuple[ExchangeRecord, ...]:
        """Return the requests of the worker that waited least for others: two messages."""
        kept = [each.exchanges() for each in self.statistics]
        took = [sum(each.seconds for each in known) / max(len(known), 1) for known in kept]
        _, seconds = self._of_each([()] * len(kept), took, peers)
        least = min(seconds, key=lambda worker: (seconds[worker], worker))
        rows = []
        for statistics, known in zip(self.statistics, kept, strict=True):
            flat = [1.0, *(number for each in known for number in each)]
            told = flat if statistics.engine.worker == least else []
            rows.append([*told, *[0.0] * (1 + 3 * KEPT - len(told))])
        share, *flat = peers.mean_of(rows)
        numbers = [number / share for number in flat]
        found = (numbers[i : i + 3] for i in range(0, len(numbers), 3))
        return tuple(ExchangeRecord(round(m), n, s) for m, n, s in found if m)

    def link(self, peers: Peers) -> dict[str, Any]:
        """Return requests of the worker that waits least, and the link fitted to them."""
        if not self._needs.link:
            return {}
        exchanges = self._requests(peers)
        link, r2 = fit(exchanges)
        found = {"latency_us": link.latency_us, "bandwidth_gbps": link.gbps, "link_r2": r2}
        return {"exchanges": exchanges, **found}

    def weighed(self, peers: Peers) -> dict[str, Any]:
        """Return what a step takes with each choice of the menu: several exchanges."""
        if not self._workers.layout:
            return {"weighed": None}
        what = "Measuring what a step takes with each choice of the menu"
        with waiting(what) if peers.decides else contextlib.nullcontext():
            began = time.perf_counter()
            if not self._prepared:
                prepare(self._workers, peers)
                self._prepared = True
            (compiling,) = peers.mean_of([[float(host.compiling)]])  # equal on all workers
            # While one compiles, training goes on, and the controller asks again.
            if not compiling:
                host.take_over()  # no exchange is under way, and all workers do
            found = Weighed(0.0, ()) if compiling else weigh(self._workers, peers)
            return {"weighed": found._replace(seconds=time.perf_counter() - began)}

    def first_batch(self, peers: Peers) -> dict[str, Any]:
        """Return the gradient norms of the epoch's first batch, if declared."""
        wanted = self._needs.gradients == "first batch"
        norms = self.statistics[0].epoch.norms() if wanted else {}
        return {"gradient_norms": self._compressed(norms, peers)}

    def epoch(self, steps: int, peers: Peers) -> dict[str, Any]:
        """Return gradients, moments, errors and curves of an epoch, and begin the next one."""
        needs, first = self._needs, self._workers.first
        epochs = [each.epoch for each in self.statistics]
        found: dict[str, Any] = {**gradient_moments(epochs, steps, first.workers, peers)}
        norms = epochs[0].norms() if needs.gradients != "none" and steps else {}
        if needs.curves and steps and peers.decides:
            found["error_curves"] = error_curves(first, epochs[0].summed(), needs.curves)
        for epoch in epochs:
            epoch.end_epoch()
        found["gradient_norms"] = self._compressed(norms, peers)
        if not needs.errors:
            return found
        errors = {n: torch.linalg.vector_norm(error) for n, error in first.errors().items()}
        values = torch.stack(list(errors.values())).tolist() if errors else []
        norms = dict(zip(errors, values, strict=True))
        return found | {"error_norms": self._compressed(norms, peers)}

    def begin(self) -> None:
        """Count from here: a decision has been made."""
        for each in self.statistics:
            each.begin()

    def _compressed(self, norms: dict[str, float], peers: Peers) -> dict[str, float]:
        """Return the norms of full parameters, of those that are compressed."""
        compressed = set(self._workers.compressed().values())
        whole = peers.parts.norms_of(norms, self._workers.names.values())
        return {name: norm for name, norm in whole.items() if name in compressed}
