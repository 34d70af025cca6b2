"""ControlLoop: between epochs, worker 0's controller decides and all workers set its levels."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import json
import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from lightning_gc.control.probes import (
    StepClock,
    WorkerStatistics,
    clock_figures,
    error_curves,
    gradient_moments,
)
from lightning_gc.controllers import Controller, Curve, Decision, Observation
from lightning_gc.controllers.trace import append
from lightning_gc.core.state_structure import (
    ANYTHING,
    COUNT,
    FINITE,
    FLAG,
    INTEGER,
    LEVEL,
    NUMBER,
    TEXT,
    WHOLE,
    Each,
    Listed,
    Optional,
    Pair,
    Record,
)
from lightning_gc.exchange.peers import Peers
from lightning_gc.exchange.validation import decision_of
from lightning_gc.exchange.workers import Workers
from lightning_gc.transports.distributed import broadcast_text


@dataclass(frozen=True)
class Moment:
    """Metrics and progress of a run when a controller decides.

    Attributes:
        metrics: the latest value of each logged metric.
        max_epochs: epochs of the whole run; None if unknown or without end.
        total_steps: steps of the whole run; likewise.
        progress: finished share of the run; likewise.
        step_metrics: names of metrics that are of the last batch only.
        rates_to_come: returns the learning rate of every step from the next to the last; None if it
            is not known.
    """

    metrics: Mapping[str, float]
    max_epochs: int | None = None
    total_steps: int | None = None
    progress: float | None = None
    step_metrics: tuple[str, ...] = ()
    rates_to_come: Callable[[], Sequence[float]] | None = None


class ControlLoop:
    """Runs a controller before the first step of every epoch, and within epochs if it asks for it.

    At the beginning of an epoch validation is over and the learning rate is that of the next step,
    so the observation is complete. All workers take part in one all-reduce of plain numbers; worker
    0 decides; one broadcast carries its decision, its new state and the number of steps until the
    next decision (workers may differ about an epoch's length), or the error on which all stop.

    Args:
        controller: the policy.
        workers: whose levels it sets.

    Attributes:
        statistics: of each of these workers since the last decision.
        state: the controller's state, equal on all workers.
        decision: the last decision.
        ended: whether it was made between two epochs.
    """

    def __init__(self, controller: Controller, workers: Workers) -> None:
        self.controller = controller
        self._workers = workers
        self.statistics = [WorkerStatistics(engine, controller) for engine in workers.engines]
        self._begin()
        self._forecast = Forecast()
        self._steps = StepClock()

    @property
    def _step(self) -> int:
        return self._workers.first.step

    def attach(self) -> None:
        """Use the byte accounts of a new fit, one per worker, and its rounds."""
        for each, account in zip(self.statistics, self._workers.accounts, strict=True):
            each.attach(account)
        self._set_every(self._every)

    def begin_anew(self) -> None:
        """Forget all decisions, and observe from the step on to which the engines have been set."""
        self._begin()
        self._workers.forget_levels()
        self._set_every(None)
        for each in self.statistics:
            each.begin()
            each.epoch.end_epoch()

    def _begin(self) -> None:
        self.state = self.controller.init()
        self.decision: Decision | None = None
        self.ended = True
        self._every: int | None = None  # H in force; None: the plan's
        self._epoch: int | None = None  # of the last decision
        self._pause = 0  # steps between decisions within an epoch; 0: none
        self._rate = 0.0
        self._metrics: dict[str, float] = {}  # from a checkpoint
        self._to_come: set[str] = set()  # those of them that were to change before the epoch's end
        self._resumed = False  # within the epoch, or at its end
        # Of the last decision; the epoch's first; that of the controller that now decides.
        self._seen_step = self._epoch_step = self._first_step = self._step

    def pause(self) -> None:
        """Note that validation begins, which is no part of a step."""
        self._steps.pause(self._step)

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
            optimizers: the controller sees their largest learning rate, that of the next step.
            moment: returns metrics and progress; called only if a decision is due.
            peers: the other workers.
        """
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        rate = float(max(group["lr"] for group in groups))
        begins = self._epoch != epoch
        if self.controller.needs.seconds:
            self._steps.see(self._step, epoch)
        if begins and self.controller.deciding(epoch)[1] == epoch:
            self._first_step = self._step
        if begins or self._due(epoch):
            now = moment()
            observation = self._observe(epoch, rate, now, peers, begins)
            said = self._call_policy(observation, epoch, now.total_steps) if peers.decides else None
            self.ended, self._epoch = begins, epoch
            self._apply_decision(peers, said)
            self._steps.resume()
        self._rate = rate

    def _due(self, epoch: int) -> bool:
        """Whether the epoch's first batch is due, or steps have reached the pause, or doubled."""
        done = self._step - self._seen_step
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
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state_dict``, after ``begin_anew``; the engine's step has been restored."""
        self.state, self.ended, self._epoch = state["state"], state["ended"], state["epoch"]
        self._pause, self._rate = state["pause"], state["rate"]
        self._seen_step = self._step - state["steps"]
        self._epoch_step = self._step - state["epoch_steps"]
        self._first_step = self._step - state.get("first_steps", self._step)
        self._metrics, self._to_come = state["metrics"], set(state.get("due", ()))
        self._resumed = True
        if state["decision"] is not None:
            self.decision = Decision(**state["decision"])
        if "levels" in state:
            if state["levels"] is not None:
                self._workers.set_levels(*state["levels"])
            self._set_every(state["every"])
        elif self.decision is not None:  # all that a state of before tells
            self._carry_out(self.decision)

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
        said = json.loads(broadcast_text(text, peers.device, peers.group))
        if "error" in said:
            raise RuntimeError(
                f"The controller failed on worker 0, so all workers stop. {said['error']}"
            )
        self.state, self._pause = said["state"], said["pause"]
        decision = Decision(**said["decision"])
        if decision.warning and peers.decides:
            warnings.warn(decision.warning, stacklevel=2)
        self._carry_out(decision)

    def _carry_out(self, decision: Decision) -> None:
        self.decision = decision
        if not decision.keeps_levels:
            self._workers.set_levels(decision.level, decision.levels)
        if decision.every is not None:
            self._set_every(decision.every)

    def _set_every(self, every: int | None) -> None:
        self._every = every
        for rounds in self._workers.rounds:
            rounds.set_every(every)

    def _observe(
        self, epoch: int, rate: float, now: Moment, peers: Peers, ended: bool
    ) -> Observation:
        steps, self._seen_step = self._step - self._seen_step, self._step
        figures = [each.figures() for each in self.statistics]
        wire, dense, sent, total_error, total_error_update, squares = peers.whole_of(figures)
        numel = sum(param.numel() for param in self._workers.names)
        scale = math.sqrt(squares / max(steps * numel, 1))
        ahead: tuple[float, ...] = ()
        if self.controller.needs.scale and now.rates_to_come is not None:
            ahead = self._forecast.ahead(self._step, rate, now.rates_to_come)
        sizes = {name: param.numel() for param, name in self._workers.compressed().items()}
        levels = self._workers.levels() if steps else {}
        measured = clock_figures(self.controller.needs, self.statistics, self._steps, peers.mean_of)
        for each in self.statistics:
            each.begin()
        if ended:  # what is due by now and has not come is of an epoch before
            self._metrics = {n: v for n, v in self._metrics.items() if n not in self._to_come}
            self._to_come = set()
        # Lightning does not restore a checkpoint's metrics.
        metrics = self._metrics | {name: float(value) for name, value in now.metrics.items()}
        resumed, self._resumed = self._resumed, self._resumed and not ended
        return Observation(
            epoch=epoch - 1,
            learning_rate=self._rate if steps else rate,
            next_learning_rate=rate,
            metrics=metrics if steps else {},
            step_metrics=now.step_metrics,
            total_error=total_error,
            total_error_update=total_error_update,
            wire_bytes=wire,
            dense_bytes=dense,
            steps=steps,
            num_elements=numel,
            gradient_scale=float(f"{scale:.9g}"),  # the last digits depend on the order of buckets
            rates_ahead=ahead,
            sizes=sizes,
            num_compressed=sum(sizes.values()),
            sent_elements=sent,
            max_epochs=now.max_epochs,
            progress=now.progress,
            ended=ended,
            resumed=resumed,
            levels=levels,
            **measured,
            **(self._close_epoch(peers) if ended else self._first_batch(peers)),
        )

    def _first_batch(self, peers: Peers) -> dict[str, Any]:
        """Return the norms of the epoch's first batch if the controller needs them."""
        wanted = self.controller.needs.gradients == "first batch"
        norms = self.statistics[0].epoch.norms() if wanted else {}
        return {"gradient_norms": self._compressed(norms, peers)}

    def _close_epoch(self, peers: Peers) -> dict[str, Any]:
        """Return the observation's fields that are of whole epochs; start the next epoch."""
        steps, self._epoch_step = self._step - self._epoch_step, self._step
        epochs = [each.epoch for each in self.statistics]
        moments = gradient_moments(epochs, steps, self._workers.first.workers, peers)
        watched = self.controller.needs.gradients != "none" and steps
        norms = self.statistics[0].epoch.norms() if watched else {}
        curves: dict[str, Curve] = {}
        if self.controller.needs.curves and steps and peers.decides:
            summed = self.statistics[0].epoch.summed()
            curves = error_curves(self._workers.first, summed, self.controller.needs.curves)
        for epoch in epochs:
            epoch.end_epoch()
        return {
            "gradient_norms": self._compressed(norms, peers),
            "error_curves": curves,
            "error_norms": self._compressed(_norms(self._workers.first.errors()), peers),
            **moments,
        }

    def _compressed(self, norms: dict[str, float], peers: Peers) -> dict[str, float]:
        """Return the norms of whole parameters, of those that are compressed."""
        compressed = set(self._workers.compressed().values())
        whole = peers.parts.norms_of(norms, self._workers.names.values())
        return {name: norm for name, norm in whole.items() if name in compressed}


def _norms(named: Mapping[str, Tensor]) -> dict[str, float]:
    if not named:
        return {}
    norms = torch.stack([torch.linalg.vector_norm(tensor) for tensor in named.values()])
    return dict(zip(named, norms.tolist(), strict=True))


CONTROL_STATE = Record(
    {
        "state": Record(others=ANYTHING),  # the controller's own
        "decision": Optional(
            Record(
                {"level": LEVEL, "levels": Each(LEVEL)},
                {
                    "reason": TEXT,
                    "figures": Each(NUMBER),
                    "warning": TEXT,
                    "keeps_levels": FLAG,
                    "every": Optional(COUNT),
                },
            )
        ),
        "ended": FLAG,
        "epoch": Optional(WHOLE),
        "pause": WHOLE,
        "rate": FINITE,
        "steps": INTEGER,
        "epoch_steps": INTEGER,
        "metrics": Each(NUMBER),
    },
    {  # not in states of before
        "levels": Optional(Pair(LEVEL, Each(LEVEL))),  # in force; a decision may keep what was
        "every": Optional(COUNT),
        "due": Listed(TEXT),
        "first_steps": INTEGER,
    },
)
"""What ``ControlLoop.state_dict`` returns."""


PARTS = 100
"""Of the rest of a run, for which a controller gets learning rates."""


class Forecast:
    """Keeps the learning rates to come, for as long as the run keeps to them."""

    def __init__(self) -> None:
        self._rates: Sequence[float] = ()
        self._first = 0  # step of the first

    def ahead(
        self, step: int, rate: float, rates_to_come: Callable[[], Sequence[float]]
    ) -> tuple[float, ...]:
        """Return the mean rate of each of up to ``PARTS`` equal parts of the rest of the run.

        Args:
            step: the next one.
            rate: its learning rate.
            rates_to_come: returns that of every step from this one on; asked if it is not known, or
                has turned out otherwise.
        """
        left = self._rates[step - self._first :]
        if not left or not math.isclose(left[0], rate, rel_tol=1e-6):
            self._rates, self._first = rates_to_come(), step
            left = self._rates
        size = max(-(-len(left) // PARTS), 1)
        parts = [left[i : i + size] for i in range(0, len(left), size)]
        return tuple(sum(part) / len(part) for part in parts)


class Scheduled(NamedTuple):
    """A scheduler, and how many optimizer steps there are between two of its own."""

    scheduler: LRScheduler
    every: int


def forecast(
    optimizers: Iterable[Optimizer], scheduled: Sequence[Scheduled], done: int, total: int
) -> list[float]:
    """Return the largest learning rate of each step from ``done`` to ``total - 1``.

    Schedulers and optimizers are not changed: copies are stepped whose parameters are empty. What
    depends on the training, such as ``ReduceLROnPlateau``, is taken to stay as it is.

    Args:
        optimizers: of the run.
        scheduled: its schedulers.
        done: finished steps.
        total: steps of the whole run.
    """
    copies = {optimizer: _without_state(optimizer) for optimizer in optimizers}
    memo: dict[int, object] = {id(optimizer): copied for optimizer, copied in copies.items()}
    memo |= {id(owner): owner for each in scheduled for owner in _owners(each.scheduler)}
    stepped = [
        Scheduled(copy.deepcopy(scheduler, dict(memo)), every)
        for scheduler, every in scheduled
        if every and not isinstance(scheduler, ReduceLROnPlateau)
    ]
    groups = [group for stand_in in copies.values() for group in stand_in.param_groups]
    rates = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the optimizer has made no step
        for step in range(done, total):
            rates.append(float(max(group["lr"] for group in groups)))
            for scheduler, every in stepped:
                if (step + 1) % every == 0:
                    scheduler.step()
    return rates


def _owners(scheduler: Any) -> Iterator[object]:
    """Yield the objects whose methods are schedules, such as the module: they are not copied."""
    for inner in getattr(scheduler, "_schedulers", ()):
        yield from _owners(inner)
    for schedule in getattr(scheduler, "lr_lambdas", ()):
        if inspect.ismethod(schedule):
            yield schedule.__self__


def _without_state(optimizer: Optimizer) -> Optimizer:
    """Return an optimizer with the same settings of its groups, and an empty parameter in each."""
    groups = [
        {name: _number(value) for name, value in group.items() if name != "params"}
        | {"params": [torch.zeros(0, dtype=torch.float32, device="cpu")]}
        for group in optimizer.param_groups
    ]
    return torch.optim.SGD(groups, lr=0.0) if groups else optimizer


def _number(value: object) -> object:
    return float(value) if isinstance(value, torch.Tensor) and value.numel() == 1 else value
