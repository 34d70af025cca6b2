"""WorkerStatistics: a worker's bytes, elements and gradient sums since the last decision."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Mapping
from typing import Any

from lightning_gc.bucket import Tally
from lightning_gc.controllers import Controller, ExchangeRecord
from lightning_gc.engine import Engine
from lightning_gc.engine.epoch_statistics import EpochStatistics
from lightning_gc.state_structure import FINITE, Record
from lightning_gc.transports.accounting import KEPT, Recorder


class WorkerStatistics:
    """Collects one worker's part of a controller's observation.

    Args:
        engine: the worker's; its epoch statistics are set to those that the controller declares.
        controller: the policy.
    """

    structure = Record(
        {
            "bytes": FINITE,
            "tally": Record(
                dict.fromkeys(("grad_bytes", "elements", "sent", "payload_bytes"), FINITE),
                # Not in checkpoints of 0.1.
                dict.fromkeys(("grad_elements", "local_steps", "local_bytes"), FINITE),
            ),
            "observer": EpochStatistics.structure,
        }
    )
    """What ``own_state`` returns."""

    _account: Recorder

    def __init__(self, engine: Engine, controller: Controller) -> None:
        self.engine = engine
        needs = controller.needs
        self.epoch = EpochStatistics(needs.sums, needs.moments, needs.errors, needs.scale)
        self._keeps_exchanges = needs.link
        engine.statistics.epoch = self.epoch
        self._seen_tally = dataclasses.replace(engine.statistics.tally)
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
        now, seen = self.engine.statistics.tally, self._seen_tally
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
        """Steps that ``phases`` has the seconds of: those before a resume are not known."""
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
        if self._account.exchanges is not None:
            self._account.exchanges.clear()
        self._seen_bytes = self._account.sent_bytes
        self._seen_tally = dataclasses.replace(self.engine.statistics.tally)
        self.epoch.forget_gradients()

    def own_state(self) -> dict[str, Any]:
        """Return this worker's counts and sums since the last decision."""
        seen, now = vars(self._seen_tally), vars(self.engine.statistics.tally)
        return {
            "bytes": self._bytes(),
            "tally": {name: now[name] - seen[name] for name in now},
            "observer": self.epoch.own_state(),
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Resume from ``own_state()``, or from the mean of several."""
        self._time_from_here()
        self._seen_bytes = self._account.sent_bytes - round(state["bytes"])
        now = vars(self.engine.statistics.tally)
        # A checkpoint of 0.1 has no grad_elements: what was sent whole before it is not counted.
        counts = {"grad_elements": state["tally"]["elements"]} | state["tally"]
        self._seen_tally = Tally(**{n: now[n] - round(v) for n, v in counts.items()})
        self.epoch.load_own_state(state["observer"])

    def _time_from_here(self) -> None:
        self._seen_seconds, self._timed_from = self._account.seconds(), self.engine.step

    def _bytes(self) -> int:
        return self._account.sent_bytes - self._seen_bytes


def _minus(some: Mapping[str, float], less: Mapping[str, float]) -> dict[str, float]:
    return {name: some.get(name, 0.0) - less.get(name, 0.0) for name in {**some, **less}}
