"""What one worker has done since the controller's last turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

from lightning_gc.bucket import Tally
from lightning_gc.controllers import Controller
from lightning_gc.engine import Engine
from lightning_gc.engine.statistics import Observer
from lightning_gc.transports.base import all_reduce_bytes


class Counts(Protocol):
    """An account of bytes."""

    @property
    def sent_bytes(self) -> int:
        """What the worker has sent so far."""


class Watch:
    """Collects what a controller is told of one worker.

    Args:
        engine: the worker's; it gets an observer of what the controller has asked for.
        controller: the policy.
    """

    def __init__(self, engine: Engine, controller: Controller) -> None:
        self.engine = engine
        self.observer = Observer(controller.gradients, controller.moments, controller.errors)
        engine.observer = self.observer
        self._account: Counts | None = None
        self._seen_bytes = 0
        self._seen_tally = dataclasses.replace(engine.tally)

    def attach(self, account: Counts) -> None:
        """Read bytes from the account of a new fit."""
        self._account = account
        self._seen_bytes = account.sent_bytes

    def figures(self) -> list[float]:
        """Return wire bytes, dense bytes and density since the last turn, and the total error."""
        now, seen = self.engine.tally, self._seen_tally
        return [
            self._bytes(),
            all_reduce_bytes(now.grad_bytes - seen.grad_bytes, self.engine.workers),
            (now.sent - seen.sent) / max(now.elements - seen.elements, 1),
            self.observer.total_error,
        ]

    def begin(self) -> None:
        """Count from here: a turn has been taken."""
        assert self._account is not None
        self._seen_bytes = self._account.sent_bytes
        self._seen_tally = dataclasses.replace(self.engine.tally)

    def own_state(self) -> dict[str, Any]:
        """Return what this worker has seen since the last turn."""
        seen, now = dataclasses.asdict(self._seen_tally), dataclasses.asdict(self.engine.tally)
        return {
            "bytes": self._bytes(),
            "tally": {name: now[name] - seen[name] for name in now},
            "observer": self.observer.own_state(),
        }

    def load_own_state(self, state: Mapping[str, Any]) -> None:
        """Go on from ``own_state()``, or from the mean of several."""
        assert self._account is not None
        self._seen_bytes = self._account.sent_bytes - round(state["bytes"])
        now = dataclasses.asdict(self.engine.tally)
        self._seen_tally = Tally(**{n: now[n] - round(v) for n, v in state["tally"].items()})
        self.observer.load_own_state(state["observer"])

    def _bytes(self) -> int:
        assert self._account is not None
        return self._account.sent_bytes - self._seen_bytes
