"""ControlLoop: between epochs, worker 0's controller decides and all workers set its levels."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from lightning_gc.compressors.wrappers.menu import Menu
from lightning_gc.control.probes import Probes, RatesToCome
from lightning_gc.control.weighing import UNCOMPRESSED
from lightning_gc.controllers import Controller, Decision, Observation
from lightning_gc.controllers.base import State
from lightning_gc.controllers.trace import append
from lightning_gc.core import (
    ANYTHING,
    COUNT,
    NUMBER,
    TEXT,
    WHOLE,
    Each,
    Listed,
    Optional,
    Pair,
    Record,
)
from lightning_gc.core.notices import say
from lightning_gc.core.registry import did_you_mean
from lightning_gc.core.saved_state import FINITE, FLAG, INTEGER, LEVEL
from lightning_gc.core.settings import short
from lightning_gc.engine.levels import Requested
from lightning_gc.exchange.peers import Peers
from lightning_gc.exchange.workers import Workers


@dataclass(frozen=True)
class Moment:
    """Metrics and progress of a run when a controller decides.

    Attributes:
        metrics: the latest value of each logged metric.
        max_epochs: epochs of the whole run; None if unknown or without end.
        total_steps: steps of the whole run; None if unknown or without end.
        progress: finished share of the run; None if unknown or without end.
        step_metrics: names of metrics of the last batch only.
        rates_to_come: None if learning rates are not known in advance.
    """

    metrics: Mapping[str, float]
    max_epochs: int | None = None
    total_steps: int | None = None
    progress: float | None = None
    step_metrics: tuple[str, ...] = ()
    rates_to_come: RatesToCome | None = None


class HasRounds(Protocol):
    """A worker that exchanges every H steps."""

    def set_every(self, every: int | None) -> None:
        """Set H from the next round on; None: the plan's."""

    def restart(self) -> None:
        """Forget all that is kept from step to step."""


class ControlLoop:
    """Runs a controller before the first step of every epoch, and within epochs if it asks for it.

    At the beginning of an epoch validation is over and the next step's learning rate is set, so the
    observation is complete. All workers take part in one all-reduce of plain numbers; worker
    0 decides; one broadcast carries its decision, its new state and the number of steps until the
    next decision (workers may differ about an epoch's length), or the error on which all stop.

    Args:
        controller: the policy.
        workers: it sets their levels.

    Attributes:
        statistics: of each of these workers since the last decision.
        state: the controller's state, equal on all workers.
        decision: the last decision.
        ended: whether it was made between two epochs.
    """

    def __init__(self, controller: Controller, workers: Workers) -> None:
        self.controller = controller
        self._workers = workers
        self._rounds: Sequence[HasRounds] = ()
        self._probes = Probes(controller, workers)
        self.statistics = self._probes.statistics
        self._begin(controller.init())

    @property
    def _step(self) -> int:
        return self._workers.first.step

    def attach(self, rounds: Sequence[HasRounds] = ()) -> None:
        """Use the byte accounts of a new fit, one per worker, and its rounds of local steps."""
        self._rounds = rounds
        for each, account in zip(self.statistics, self._workers.accounts, strict=True):
            each.attach(account)
        self._set_every(self._every)
        self._set_weights(self._weights)

    def begin_anew(self) -> None:
        """Forget all decisions, and observe from the engines' current step on."""
        self._start_over(self.controller.init())

    def _start_over(self, state: State) -> None:
        self._begin(state)
        self._workers.forget_levels()
        self._set_every(None)
        self._set_weights(None)
        for each in self.statistics:
            each.begin()
            each.epoch.end_epoch()

    def _begin(self, state: State) -> None:
        self.state = state
        self.decision: Decision | None = None
        self.ended = True
        self._every: int | None = None  # H in force; None: the plan's
        self._weights: Requested | None = None  # levels in force; None: their compressor's own
        self._epoch: int | None = None  # of the last decision
        self._pause = 0  # steps between decisions within an epoch; 0: none
        self._rate = 0.0
        self._metrics: dict[str, float] = {}  # from a checkpoint
        self._to_come: set[str] = set()  # those of them that were to change before the epoch's end
        self._resumed = False  # within the epoch, or at its end
        self._resuming = False  # from the checkpoint to the next step
        self._among: list[str] = []  # workers and optimizers for which choices were weighed
        # Steps of the last decision, of the epoch's first, and of this controller's first.
        self._seen_step = self._epoch_step = self._first_step = self._step

    @property
    def method(self) -> str:
        """What works now of a menu, or "uncompressed"; empty for other compressors."""
        menu = self._workers.configuration.compressor
        if not isinstance(menu, Menu):
            return ""
        level, others = self._workers.first.levels.requested() or (menu.level, {})
        if others:
            return "several"
        return UNCOMPRESSED if level is None else menu.names[menu.at(level).level - 1]

    def pause(self) -> None:
        """Note that validation begins, which does not count as part of a step."""
        self._probes.clock.pause(self._step)

    def decide(
        self,
        epoch: int,
        optimizers: Iterable[torch.optim.Optimizer],
        moment: Callable[[], Moment],
        peers: Peers,
    ) -> None:
        """Decide if a decision is due. Called before every training batch, by all workers.

        Args:
            epoch: the batch's epoch.
            optimizers: the controller sees their largest learning rate, for the next step.
            moment: returns metrics and progress; called only if a decision is due.
            peers: the other workers.
        """
        known = list(optimizers)
        groups = (group for optimizer in known for group in optimizer.param_groups)
        rate = float(max((group["lr"] for group in groups), default=0.0))
        if self._resuming:
            self._resume(self._among, self._setting(known), peers)
        begins = self._epoch != epoch
        if self.controller.needs.seconds:
            self._probes.clock.see(self._step, epoch)
        if begins and self.controller.deciding(epoch)[1] == epoch:
            self._first_step = self._step
        if begins or self._due(epoch):
            # Within an epoch each step may have a decision, and no step is to start a thread.
            until = f"begin epoch {epoch}"
            with peers.awaiting(until) if begins else contextlib.nullcontext():
                now = moment()
                self._among = self._setting(known) if self.controller.needs.weighed else []
                observation = self._observe(epoch, rate, now, peers, begins, names_of(known))
                steps = now.total_steps
                said = self._call_policy(observation, epoch, steps) if peers.decides else None
                self.ended, self._epoch = begins, epoch
                self._apply_decision(peers, said)
            self._probes.clock.resume()
        self._rate = rate

    def _setting(self, optimizers: list[torch.optim.Optimizer]) -> list[str]:
        return [f"{self._workers.first.workers} workers", *names_of(optimizers)]

    def _resume(self, before: list[str], now: list[str], peers: Peers) -> None:
        """Let the controller look at the state of a checkpoint; all workers do the same."""
        self._resuming, changed = False, ""
        if before and before[0] != now[0]:
            changed = f"there were {before[0]}, and now {now[0]}"
        elif before and before != now:
            changed = f"optimizers were {', '.join(before[1:])}, and now {', '.join(now[1:])}"
        state, line = self.controller.resuming(self.state, changed)
        if state is not self.state:
            self._start_over(state)
        if line and peers.decides:
            say("%s", line)

    def _due(self, epoch: int) -> bool:
        """Whether the epoch's first batch is due, or steps have reached the pause, or doubled."""
        done = self._step - self._seen_step
        if self.decision is not None and self.decision.after:
            return done >= self.decision.after
        deciding, _ = self.controller.deciding(epoch)
        if deciding.needs.gradients == "first batch" and self._seen_step == self._epoch_step:
            return done > 0
        before = self._seen_step - self._first_step
        return self._pause > 0 and done >= max(min(before, self._pause), 1)

    def state_dict(self, metrics: Mapping[str, Any], due: Iterable[str] = ()) -> dict[str, Any]:
        """Return the state, plain values that are equal on all workers.

        It has the current ``metrics``, since a checkpoint precedes the decision that reads them,
        and names those that are ``due``: their values of the epoch under way are yet to come.
        """
        current = {name: float(value) for name, value in metrics.items()}
        return {
            "state": self.state,
            "decision": None if self.decision is None else dataclasses.asdict(self.decision),
            "ended": self.ended,
            "epoch": self._epoch,
            "pause": self._pause,
            "rate": self._rate,
            "steps": self._step - self._seen_step,
            "epoch_steps": self._step - self._epoch_step,
            "first_steps": self._step - self._first_step,
            "metrics": self._metrics | current,
            "due": sorted({*due, *(self._to_come - current.keys())}),
            "levels": self._workers.first.levels.requested(),
            "every": self._every,
            "weights": self._weights,
            **({"among": self._among} if self._among else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state_dict``; the engines' step has been restored."""
        self._start_over(state["state"])
        self.ended, self._epoch = state["ended"], state["epoch"]
        self._pause, self._rate = state["pause"], state["rate"]
        self._seen_step = self._step - state["steps"]
        self._epoch_step = self._step - state["epoch_steps"]
        self._first_step = self._step - state["first_steps"]
        self._metrics, self._to_come = state["metrics"], set(state["due"])
        self._resumed = True
        self._resuming, self._among = True, state.get("among", [])
        if state["decision"] is not None:
            self.decision = Decision(**state["decision"])
        if state["levels"] is not None:
            self._workers.set_levels(*state["levels"])
        self._set_every(state["every"])
        self._set_weights(state["weights"])

    def _call_policy(self, observation: Observation, epoch: int, steps: int | None) -> str:
        """Let the controller decide; return the text to broadcast."""
        try:
            decision, state = decision_of(self.controller, observation, self.state)
            deciding, first = self.controller.deciding(epoch)
            turns, every = deciding.turns(epoch - first), deciding.every_steps(epoch - first)
            pause = 0 if steps is None or turns < 1 else max(steps // turns, 1)
            pause = every if every > 0 else pause
            if self.controller.needs.trace:
                append(self.controller.needs.trace, observation, self.state, decision)
            said = {"decision": dataclasses.asdict(decision), "state": state, "pause": pause}
            return json.dumps(said)
        except Exception as error:  # the other workers must not wait for ever
            return json.dumps({"error": f"{type(error).__name__}: {error}"})

    def _apply_decision(self, peers: Peers, text: str | None) -> None:
        said = json.loads(peers.told_by_decider(text))
        if "error" in said:
            raise RuntimeError(
                f"The controller {type(self.controller).__name__} failed on worker 0, so all "
                f"workers stop. {said['error']}"
            )
        self.state, self._pause = said["state"], said["pause"]
        decision = Decision(**said["decision"])
        if decision.warning and peers.decides:
            warnings.warn(decision.warning, stacklevel=2)
        if decision.says and peers.decides:
            say("%s", decision.says)
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        self.decision = decision
        if not decision.keeps_levels:
            self._workers.set_levels(decision.level, decision.levels)
        if decision.every is not None:
            self._set_every(decision.every)
        if decision.weights is not None:
            self._set_weights(decision.weights)

    def _set_weights(self, levels: Requested | None) -> None:
        if self._workers.gathers is not None:
            self._weights = self._workers.gathers.set_levels(levels)

    def _set_every(self, every: int | None) -> None:
        self._every = every
        for rounds in self._rounds:
            rounds.set_every(every)

    def _observe(
        self,
        epoch: int,
        rate: float,
        now: Moment,
        peers: Peers,
        ended: bool,
        optimizers: tuple[str, ...],
    ) -> Observation:
        probes = self._probes
        steps, self._seen_step = self._step - self._seen_step, self._step
        found = probes.traffic(steps, peers) | probes.rates(self._step, rate, now.rates_to_come)
        if peers.device.type == "cuda" and not ended:
            probes.clock.catch_up()  # the host has just waited for these steps
        found |= probes.seconds(peers) | probes.link(peers)
        if self.decision is not None and self.decision.weigh:
            found |= probes.weighed(peers)
        probes.begin()
        if ended:
            in_epoch, self._epoch_step = self._step - self._epoch_step, self._step
            found |= probes.epoch(in_epoch, peers)
            # Metrics that were due and have not come are of an epoch before.
            self._metrics = {n: v for n, v in self._metrics.items() if n not in self._to_come}
            self._to_come = set()
        else:
            found |= probes.first_batch(peers)
        # Lightning does not restore a checkpoint's metrics.
        metrics = self._metrics | {name: float(value) for name, value in now.metrics.items()}
        resumed, self._resumed = self._resumed, self._resumed and not ended
        return Observation(
            epoch=epoch - 1,
            learning_rate=self._rate if steps else rate,
            next_learning_rate=rate,
            metrics=metrics if steps else {},
            step_metrics=now.step_metrics,
            max_epochs=now.max_epochs,
            progress=now.progress,
            ended=ended,
            resumed=resumed,
            optimizers=optimizers,
            total_steps=now.total_steps,
            **found,
        )


def names_of(optimizers: Iterable[torch.optim.Optimizer]) -> tuple[str, ...]:
    """Return the names of the optimizers' classes, and of those that they join."""
    every = [part for each in optimizers for part in (each, *getattr(each, "optimizers", ()))]
    return tuple(dict.fromkeys(type(each).__name__ for each in every))


def decision_of(
    controller: Controller, observation: Observation, state: dict[str, Any]
) -> tuple[Decision, dict[str, Any]]:
    """Let a controller decide; ValueError if it returns anything but a decision and a state."""
    name = type(controller).__name__
    try:
        answer: Any = controller.decide(observation, state)
    except KeyError as error:
        (key,) = error.args[:1] or ("",)
        if key in observation.metrics or key in state:
            raise
        raise ValueError(
            f"{name}.decide asks for {key!r}, which does not exist"
            f"{did_you_mean(key, {*observation.metrics, *state})}. observation.metrics has "
            f"{_listed(observation.metrics)}; its state has {_listed(state)}."
        ) from error
    pair = isinstance(answer, tuple) and len(answer) == 2
    if pair and isinstance(answer[0], Decision):
        every, known = answer[0].every, controller.needs.rounds
        if every is not None and every not in known:
            raise ValueError(
                f"{name} sets H = {every!r}, which is not in its needs: "
                f"`return Needs(rounds={(*known, every)!r})`."
            )
        return answer[0], answer[1]
    level = answer[0] if pair else answer
    level = getattr(level, "level", level)
    level = level if isinstance(level, int | float) else 0.01
    raise ValueError(
        f"{name}.decide returned {short(answer)}; it returns a pair, the decision and its new "
        f"state: `return Decision({level!r}), state`."
    )


def _listed(names: Iterable[str]) -> str:
    return ", ".join(map(str, names)) or "nothing yet"


CONTROL_STATE = Record(
    {
        "state": Record(others=ANYTHING),  # the controller's own
        "decision": Optional(
            Record(
                {
                    "level": LEVEL,
                    "levels": Each(LEVEL),
                    "reason": TEXT,
                    "figures": Each(NUMBER),
                    "warning": TEXT,
                    "keeps_levels": FLAG,
                    "every": Optional(COUNT),
                    "weights": Optional(Pair(LEVEL, Each(LEVEL))),
                    "after": WHOLE,
                    "weigh": FLAG,
                    "says": TEXT,
                }
            )
        ),
        "ended": FLAG,
        "epoch": Optional(WHOLE),
        "pause": WHOLE,
        "rate": FINITE,
        "steps": INTEGER,
        "epoch_steps": INTEGER,
        "metrics": Each(NUMBER),
        "levels": Optional(Pair(LEVEL, Each(LEVEL))),  # in force; a decision may keep earlier ones
        "every": Optional(COUNT),
        "weights": Optional(Pair(LEVEL, Each(LEVEL))),
        "due": Listed(TEXT),
        "first_steps": INTEGER,
    },
    maybe={"among": Listed(TEXT)},
)
"""What ``ControlLoop.state_dict`` returns."""
