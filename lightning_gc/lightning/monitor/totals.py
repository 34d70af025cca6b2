"""Totals: sums over steps of one worker's bytes, elements, seconds and errors, and their means."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from lightning_gc.controllers import ExchangeRecord
from lightning_gc.core import NUMBER, Record
from lightning_gc.engine import Engine
from lightning_gc.exchange.peers import Parts
from lightning_gc.schemes import TwoShot
from lightning_gc.transports.accounting import (
    COMMUNICATE,
    COMPRESS,
    COMPUTE,
    DECODE,
    Recorder,
    human_bytes,
)
from lightning_gc.transports.network_model import NetworkModel


@dataclass
class Totals:
    """Sums over steps of bytes, elements, seconds and errors.

    Seconds of phases are summed over ``timed_steps``, errors over ``observed_steps``, seconds of
    whole steps over ``clocked_steps``.
    """

    steps: float = 0
    wire_bytes: float = 0
    dense_bytes: float = 0
    node_bytes: float = 0
    weight_bytes: float = 0  # of wire_bytes: gathers of weights
    message_bytes: float = 0
    encoded_bytes: float = 0  # of gradients once encoded, whether or not they are sent
    gradient_bytes: float = 0  # of the same gradients before
    payload_bytes: float = 0
    elements: float = 0
    sent: float = 0
    whole: float = 0  # elements sent whole, besides those given to codecs
    compute_seconds: float = 0
    compress_seconds: float = 0
    communicate_seconds: float = 0
    decode_seconds: float = 0
    timed_steps: float = 0
    step_seconds: float = 0
    clocked_steps: float = 0
    relative_error: float = 0
    error_norm: float = 0
    observed_steps: float = 0

    @property
    def sixteen(self) -> float:
        """Share of the uncompressed bytes that torch's 16-bit hooks would send."""
        numel = self.elements + self.whole
        return min(2 * numel / self.gradient_bytes, 1.0) if numel and self.gradient_bytes else 0.5

    def add(self, other: Totals) -> None:
        """Add another sum to this one."""
        for field in fields(self):
            setattr(self, field.name, getattr(self, field.name) + getattr(other, field.name))

    def since(self, earlier: Totals) -> Totals:
        """Return what has been added since this was ``earlier``."""
        return Totals(*(getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)))

    def _traffic(self) -> dict[str, float]:
        """Return the means of bytes and elements."""
        steps = max(self.steps, 1)
        figures = {
            "wire_bytes": self.wire_bytes / steps,
            "dense_bytes": self.dense_bytes / steps,
            "ratio": ratio(self.dense_bytes, self.wire_bytes),
        }
        if self.node_bytes:
            figures["node_bytes"] = self.node_bytes / steps
        if self.weight_bytes:
            figures["weight_bytes"] = self.weight_bytes / steps
        if self.gradient_bytes:
            figures["encoded_bytes"] = self.encoded_bytes / steps
            figures["encoding_ratio"] = ratio(self.gradient_bytes, self.encoded_bytes)
        if self.elements + self.whole:
            figures["density"] = (self.sent + self.whole) / (self.elements + self.whole)
        if self.elements:
            figures["compressed_density"] = self.sent / self.elements
            figures["bits_per_element"] = 8 * self.payload_bytes / self.elements
        return figures

    def averages(self, workers: int, network: NetworkModel | None = None) -> dict[str, float]:
        """Return means per step by metric name, without those not measured.

        Args:
            workers: W.
            network: model that estimates the communication of simulated workers; its
                ``schedule`` does not matter. None: measured.
        """
        figures = self._traffic()
        if self.timed_steps:
            real, simulated = (COMPRESS, COMMUNICATE, DECODE), (COMPUTE, COMPRESS, DECODE)
            for phase in real if network is None else simulated:
                name = f"{phase}_seconds"
                figures[name] = getattr(self, name) / self.timed_steps
        if self.clocked_steps and network is None:  # simulated workers take turns
            figures["step_seconds"] = self.step_seconds / self.clocked_steps
        if network is not None:
            message = self.message_bytes / max(self.steps, 1)
            seconds = network.seconds(workers, message, figures["wire_bytes"])
            figures["communication_seconds_estimated"] = seconds
        if self.observed_steps:
            figures["relative_error"] = self.relative_error / self.observed_steps
            figures["error_norm"] = self.error_norm / self.observed_steps
        return figures | shares(figures)


START_UP = 2
"""Steps of a fit in which exchanges are not timed, and at least its first exchange.

They compile kernels and allocate buffers. DDP arranges its buckets anew after the first one.
"""


class Sums:
    """One worker's totals of the fit, from ``total`` on, and of the current epoch."""

    structure = Record(
        dict.fromkeys(("total", "epoch"), Record({each.name: NUMBER for each in fields(Totals)}))
    )
    """What ``own_state`` returns."""

    def __init__(self, total: Totals | None = None) -> None:
        self.total = total or Totals()
        self.epoch = Totals()
        self._began = False
        self._shown = Totals()  # what has been added of a step that ``take`` has not returned
        self._taken = 0.0  # steps of this fit that ``take`` has returned
        self._parts = Parts()

    def begin(self, engine: Engine, recording: Recorder, parts: Parts) -> None:
        """Start counting; ``parts`` returns norms of whole gradients."""
        self._began, self._parts = True, parts
        self._engine, self._recording = engine, recording
        self._tally, self._step = replace(engine.tally), engine.step
        self._shown, self._taken = Totals(), 0.0
        recording.take()

    @property
    def starting(self) -> bool:
        """Whether the exchange of the next ``take`` is part of the start-up."""
        return self._taken < START_UP

    def take(self) -> Totals:
        """Add the last step to both totals and return it, with what ``own_state`` has added."""
        self._add()
        step, self._shown = self._shown, Totals()
        self._taken += step.steps
        return step

    def _add(self) -> None:
        """Add what there is of the last step to both totals."""
        engine, account = self._engine, self._recording.take()
        now, before, shown = engine.tally, self._tally, self._shown
        step = Totals(
            steps=now.local_steps - before.local_steps if now.local_steps else 1 - shown.steps,
            wire_bytes=account.wire_bytes,
            dense_bytes=engine.dense_bytes(now.plain_bytes - before.plain_bytes)
            + (account.dense_weight_bytes or 0),
            weight_bytes=account.weight_bytes or 0,
            elements=now.elements - before.elements,
            sent=now.sent - before.sent,
            payload_bytes=now.payload_bytes - before.payload_bytes,
            message_bytes=account.message_bytes,
            whole=now.whole - before.whole,
            encoded_bytes=now.encoded_bytes - before.encoded_bytes,
            gradient_bytes=now.grad_bytes - before.grad_bytes,
            node_bytes=account.node_bytes,
        )
        self._tally = replace(now)
        if any(account.seconds.values()) and not self.starting:
            step.timed_steps = shown.steps + step.steps - shown.timed_steps
            for phase, spent in account.seconds.items():
                setattr(step, f"{phase}_seconds", spent)
        if engine.statistics.norms_wanted and engine.step > self._step:
            measured = engine.statistics.norms
            own = (
                torch.tensor(measured or [(0.0, 0.0)], dtype=torch.float32, device="cpu")
                .double()
                .norm(dim=0)
            )
            norm, error = self._parts.norms(own).tolist()
            if measured or norm:  # a rank with only empty shards has measured nothing itself
                step.observed_steps = 1
                step.error_norm = error
                step.relative_error = error / norm if norm else 0.0
        self._step = engine.step
        for totals in (self.epoch, self.total, shown):
            totals.add(step)

    def clock(self, seconds: float, steps: int) -> None:
        """Add seconds of whole training steps to both totals, and to the next step's figures."""
        for totals in (self.epoch, self.total, self._shown):
            totals.add(Totals(step_seconds=seconds, clocked_steps=steps))

    def packed(self) -> list[list[float]]:
        """Return the fields of both totals, the epoch's first."""
        return [[getattr(t, f.name) for f in fields(t)] for t in (self.epoch, self.total)]

    def own_state(self) -> dict[str, Any]:
        """Return both totals as plain numbers.

        With a step that has ended, but that ``take`` has not returned yet, as the callback that
        saves comes first; and with local steps if their exchange has begun.
        """
        if self._began:
            local = self._engine.tally.local_steps > self._tally.local_steps
            if local or self._engine.step > self._step:
                self._add()
        return {"total": vars(self.total).copy(), "epoch": vars(self.epoch).copy()}

    def load_own_state(self, state: dict[str, Any]) -> None:
        """Resume from ``own_state()``, or from the mean of several."""
        self.total, self.epoch = Totals(**state["total"]), Totals(**state["epoch"])


def ratio(dense_bytes: float, wire_bytes: float) -> float:
    """Return dense over wire bytes; 1 if both are 0 (one worker)."""
    if wire_bytes:
        return dense_bytes / wire_bytes
    return math.inf if dense_bytes else 1.0


def summary(
    method: str,
    total: Totals,
    averages: Mapping[str, float],
    network: NetworkModel | None = None,
    workers: int = 1,
    requests: Sequence[ExchangeRecord] = (),
) -> str:
    """Return what compression saved and what it cost, as one line.

    Args:
        method: the compressor, as tables show it.
        total: worker 0's totals of the fit.
        averages: ``total.averages()``.
        network: the assumed one of simulated workers. None: messages were timed.
        workers: W of simulated workers, with which a step is compared with plain DDP's.
        requests: the latest ones of real workers, which show the link's rate.

    Example:
        >>> total = Totals(steps=4, wire_bytes=2e6, dense_bytes=8e6)
        >>> seconds = dict(compress_seconds=0.1, decode_seconds=0.1, communicate_seconds=0.5)
        >>> summary("QSGD(8)", total, seconds | {"step_seconds": 2.0}).split(", ")[1].split(". ")[0]
        '4.0 times less (2.0 times less than in 16 bits)'
        >>> summary("QSGD(8)", total, seconds | {"step_seconds": 2.0}).split(". ")[1]
        'Compressing took 10% of a step, messages and waiting 25%.'
        >>> link = [ExchangeRecord(2, 5e5, 0.02)] * 8
        >>> summary("QSGD(8)", total, seconds, requests=link).split(". ")[1].split(", ")[0]
        'It cost about 0.18 s per step: in 16 bits'
    """
    sent, dense = total.wire_bytes, total.dense_bytes
    if not dense:
        gradients, encoded = human_bytes(total.gradient_bytes), human_bytes(total.encoded_bytes)
        text = (
            f"Compression: {method} had one worker, which sends nothing. It encoded {gradients} of "
            f"gradients as {encoded}"
        )
        sent, dense = total.encoded_bytes, total.gradient_bytes
    else:
        text = (
            f"Compression: {method} sent {human_bytes(sent)} instead of {human_bytes(dense)} per "
            f"worker in {total.steps:,.0f} step{'s' * (total.steps != 1)}"
        )
    half = _times(ratio(total.sixteen * dense, sent), "in 16 bits")
    text = f"{text}, {_times(ratio(dense, sent))} ({half}).{_cost(averages, network)}"
    if network is None and total.dense_bytes:
        text += _worth(total, averages, requests)
    if network is None or workers == 1 or "compute_seconds" not in averages:
        return text
    half, whole = (_speed(total, averages, network, workers, n) for n in (total.sixteen, 1.0))
    return f"{text} A step would be {half} one with 16 bits, and {whole} plain DDP's."


_FEWEST, _QUICK = 8, 1e-3
"""Requests, and seconds of the quickest one, from which they show the rate of the link."""


def _worth(total: Totals, averages: Mapping[str, float], requests: Sequence[ExchangeRecord]) -> str:
    """Return whether compression was worth it, or that this cannot be told.

    Compared with torch's 16-bit hooks, which are quicker than 32 bits, it saves
    ``8·(their bytes − wire bytes)/B`` seconds of messages, and costs those of compression.
    B is the rate of the quickest tenth of the larger requests: the others have waited for a worker,
    as uncompressed ones would. That it may hide behind the backward pass is not counted.
    """
    dense, sent = total.dense_bytes / total.steps, total.wire_bytes / total.steps
    half = total.sixteen * dense
    equal = any(abs(each / max(sent, 1) - 1) < 0.005 for each in (half, dense))
    if equal or "compress_seconds" not in averages:
        return ""
    largest = max((each.nbytes for each in requests), default=0.0)
    large = [each for each in requests if each.seconds > 0 and 2 * each.nbytes >= largest > 0]
    if len(large) < _FEWEST:
        few = " Whether that was worth it cannot be told from so few messages."
        return few if requests else ""
    rates = sorted(each.nbytes / each.seconds for each in large)
    rate = rates[-(len(rates) // 10 + 1)]
    if largest / rate < _QUICK:
        return " Whether that was worth it cannot be told: messages are too small for the link."
    judged = f", judged by messages of {human_bytes(largest)}" * (4 * largest < half)
    saved = (half - sent) / rate - averages["compress_seconds"] - averages["decode_seconds"]
    verb = "saved" if saved > 0 else "cost"
    return (
        f" It {verb} about {abs(saved):.2g} s per step: in 16 bits, messages of "
        f"{human_bytes(half)} would have taken about {half / rate:.2g} s{judged}."
    )


def _speed(
    total: Totals,
    averages: Mapping[str, float],
    network: NetworkModel,
    workers: int,
    share: float,
) -> str:
    """Return how fast a step of simulated workers would be, compared with an all-reduce.

    ``share``: of the uncompressed bytes that the all-reduce sends.
    """
    dense = share * total.dense_bytes / total.steps
    message = dense * workers / (2 * (workers - 1))  # on a ring, it is sent in so many parts
    ours = sum(value for name, value in averages.items() if name in _PHASES)
    plain = averages["compute_seconds"] + network.seconds(workers, message, dense)
    factor = max(plain / ours, ours / plain)
    if factor < 1.05:
        return "as fast as"
    return f"{factor:.1f} times {'as fast as' if plain > ours else 'as long as'}"


_PHASES = (
    *(f"{phase}_seconds" for phase in (COMPUTE, COMPRESS, DECODE)),
    "communication_seconds_estimated",
)
"""Of a step of simulated workers, which overlap nothing."""


def _times(saved: float, beside: str = "") -> str:
    """Return a ratio in words, with two digits, beside plain DDP or what is named."""
    if abs(saved - 1) < 0.005:
        return f"as much as {beside or 'uncompressed'}"
    than = f" than {beside}" if beside else ""
    factor = max(saved, 1 / saved) if saved else math.inf
    if factor < 1.095:  # "1.0 times more" says nothing
        return f"{abs(1 - 1 / saved):.1%} {'less' if saved > 1 else 'more'}{than}"
    word = "less" if saved > 1 else "more"
    return f"{factor:.{0 if factor >= 9.95 else 1}f} times {word}{than}"


def shares(figures: Mapping[str, float]) -> dict[str, float]:
    """Return each phase's share of a step by metric name, or nothing if steps were not timed.

    Phases of real workers overlap with computation, so their shares add up to less than 1. A
    worker's phases follow one another, so a step takes no less time than their sum.

    Args:
        figures: ``Totals.averages()``, seconds by metric name.
    """
    if "compress_seconds" not in figures:
        return {}
    phases = (COMPUTE, COMPRESS, COMMUNICATE, DECODE)
    spent = {each: figures[f"{each}_seconds"] for each in phases if f"{each}_seconds" in figures}
    step = figures.get("step_seconds")
    if "communication_seconds_estimated" in figures:  # simulated workers overlap nothing
        spent[COMMUNICATE] = figures["communication_seconds_estimated"]
        step = sum(spent.values())
    step = step and max(step, sum(spent.values()))
    return {f"{phase}_share": each / step for phase, each in spent.items()} if step else {}


def _cost(figures: Mapping[str, float], network: NetworkModel | None) -> str:
    """Return which shares of a step compression and messages took, or nothing if not timed."""
    took = shares(figures)
    if not took:
        return ""
    how = "Compressing took"
    if network is not None:
        how = f"On links of {network.link} compressing would take"
    both = took["compress_share"] + took["decode_share"], took["communicate_share"]
    compressing, waiting = (f"{each:.0%}" if each >= 0.005 else "under 1%" for each in both)
    return f" {how} {compressing} of a step, messages and waiting {waiting}."


_MARGIN = 1.01
"""Tolerance for headers and lengths, which matter in small models."""


def more_than_plain(epoch: Totals, engine: Engine, *, controlled: bool) -> str:
    """Return a sentence with the fix, or an empty one: it sends no more, or is exact anyway.

    Args:
        epoch: bytes of the first epoch.
        engine: of any worker.
        controlled: a controller moves the level, so that later epochs may well send less.
    """
    sent, plain = epoch.wire_bytes, epoch.dense_bytes
    if engine.compressor.traits.plain or not plain or sent <= _MARGIN * plain:
        return ""
    without = "FSDP" if engine.scatters else "DDP"
    fixes = [each for each in (_of_level(engine), _of_scheme(engine)) if each]
    fix = ", or ".join(fixes or ["use another compressor"])
    what = "With its controller's first levels this" if controlled else "This"
    return f"{what} sends {sent / plain:.2f} times what plain {without} would; {fix}."


def _of_level(engine: Engine) -> str:
    knob = engine.compressor.knob
    if knob is None:
        return ""
    if knob.field == "density":
        return "give a lower density, which is a share: 0.01 is 1 %"
    return f"{'lower' if knob.more == 'bytes' else 'raise'} the compressor's {knob.field}"


def _of_scheme(engine: Engine) -> str:
    if engine.scheme is None or engine.scatters:
        return ""
    with contextlib.suppress(ValueError):
        TwoShot().check(engine.compressor)
        if not isinstance(engine.scheme, TwoShot):
            return f"use another scheme, such as {TwoShot()!r}"
    return ""
