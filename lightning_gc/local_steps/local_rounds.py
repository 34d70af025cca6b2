"""LocalRounds: one worker's rounds of local steps, their exchanges, and their saved state."""

from __future__ import annotations

import copy
import dataclasses
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from lightning_gc.checkpoint.worker_state import MODULE, CheckpointParts
from lightning_gc.control.control_loop import Moment
from lightning_gc.core import (
    ANYTHING,
    COUNT,
    NUMBER,
    TEXT,
    WHOLE,
    Each,
    Flow,
    Leaf,
    Listed,
    Optional,
    Record,
    Structure,
)
from lightning_gc.core.copies import Single
from lightning_gc.core.refusal import refuse
from lightning_gc.core.saved_state import ERRORS, FLOATS, Tree, average, each_tensor, reduced
from lightning_gc.engine import Engine
from lightning_gc.exchange.peers import Parts, explaining
from lightning_gc.exchange.workers import Shapes, local_part, plain_name, reshard
from lightning_gc.local_steps.common_weights import CommonWeights, Fragment, mean_of
from lightning_gc.local_steps.round_plan import MIXED, RoundPlan
from lightning_gc.local_steps.unequal import Share, SimulatedClock, Unequal, WallClock

ROUNDS = "local_steps"
"""Name of the state of rounds in checkpoints."""
EQUAL = Unequal(pace="equal", weigh="equal")
"""All workers make all steps, and have equal weights in the mean."""
LOST_IN_A_ROW = 10
"""Exchanges that may be lost one after the other before the run stops."""


Waits = Generator[None, None, bool]
"""Yields before a worker waits for the others' messages; returns whether nothing was lost."""


class Exchanger(Protocol):
    """Carries out exchanges: a ``Synchronizer``, or one for simulated workers."""

    def submit(self, grad: Tensor, shapes: Shapes) -> torch.futures.Future[Tensor]:
        """Begin an exchange that replaces ``grad`` by the mean over workers."""

    def run(
        self, make: Callable[[], tuple[Flow, Tensor]], result: Tensor
    ) -> torch.futures.Future[Tensor]:
        """Begin any other flow; the future is complete when ``result`` is.

        ``make`` returns the flow and what it sends, each time that it is called: an exchange may
        be repeated.
        """

    def end_round(self, common: list[Tensor]) -> None:
        """Note that all of a round has begun; ``common`` is equal on all workers."""

    def check(self) -> None:
        """Raise what has gone wrong since."""

    def landed(self) -> None:
        """Note that the common weights have been taken over."""


@dataclass
class Flight(Single):
    """An exchange that has begun.

    Attributes:
        index: of its fragment.
        mean: of the distances, ``(numel,)``, once it has arrived.
        buffers: that are to be common, once they have arrived; none but with the last fragment.
        left: steps until it is taken over.
        steps: since the fragment's exchange before.
        sent: this worker's weights when it began; None if it is taken over at once.
        arriving: complete when it has arrived; empty if it has.
        drift: norm of the worker's distance, if measured.
        rate: the learning rate, ``(1,)`` float64, with the last fragment of a growing round: the
            mean over workers, once it has arrived. Else empty.
        moments: of the optimizers, if they are due; the means, once they have arrived.
        gathered: what unequal workers have agreed on before, if anything.
        astray: the exchange has left this worker out.
    """

    index: int
    mean: Tensor
    buffers: dict[str, Tensor]
    left: int
    steps: int
    sent: Tensor | None
    arriving: list[torch.futures.Future[Tensor]]
    drift: Tensor | None = None
    rate: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.float64, device="cpu"))
    moments: Moments | None = None
    gathered: Tensor | None = None
    astray: bool = False


class Moments:
    """Moments of one worker's optimizers on their way to the mean.

    Args:
        names: of the moments.
        params: parameter name -> parameter, equal on all workers.
        optimizers: this worker's.

    Attributes:
        flat: all of them, float32 or wider; to be replaced by the mean.

    Raises:
        ValueError: as for ``InnerMoments``.
    """

    def __init__(
        self,
        names: Sequence[str],
        params: Mapping[str, Tensor],
        optimizers: Iterable[torch.optim.Optimizer],
    ) -> None:
        states = [optimizer.state for optimizer in optimizers]
        self._kept: list[Tensor | None] = []
        pieces: list[Tensor] = []
        for name in names:
            found = [_moment(name, param, states) for param in params.values()]
            known = {each for state in states for own in state.values() for each in own}
            if known and all(each is None for each in found):
                kept = f"they keep {', '.join(sorted(known))}. Name one of these"
                refuse("InnerMoments", f"no optimizer keeps {name}; {kept}")
            for (param_name, param), moment in zip(params.items(), found, strict=True):
                if moment is not None and moment.shape != param.shape:
                    refuse(
                        f"InnerMoments: {name} of {param_name} has shape {tuple(moment.shape)}, "
                        f"not the parameter's {tuple(param.shape)}, so it cannot be averaged; "
                        f"leave {name} out"
                    )
                here = None if moment is None else local_part(moment)
                self._kept.append(here)
                pieces.append(torch.zeros_like(local_part(param)) if here is None else here)
        self._sizes = [piece.numel() for piece in pieces]
        wide = reduce(torch.promote_types, (p.dtype for p in pieces), torch.float32)
        self.flat = torch.cat([piece.detach().reshape(-1).to(wide) for piece in pieces])

    def take_over(self) -> None:
        """Give the optimizers the means, unless one is not finite, which all workers see."""
        if not bool(self.flat.isfinite().all()):
            return
        for moment, mean in zip(self._kept, self.flat.split(self._sizes), strict=True):
            if moment is not None:
                moment.copy_(mean.view(moment.shape))


_States: TypeAlias = Sequence[Mapping[Tensor, Mapping[str, Any]]]


def _moment(name: str, param: Tensor, states: _States) -> Tensor | None:
    """Return a parameter's moment from the optimizer that has it, or None."""
    return next((s[param].get(name) for s in states if param in s), None)


class FragmentExchange:
    """Sends how far a worker has come in a fragment, and takes the mean over all workers over.

    Args:
        engine: this worker's.
        exchanger: carries it out.
        plan: of the rounds.
        weights: the common ones, which it moves.
        share: this worker's in the rounds.
        parts: sums over the processes of this worker, if each has a part of the parameters.

    Attributes:
        optimizers: returns this worker's, when a round ends.
        flight: the exchange that has not been taken over yet, or None.
        figures: of the last exchange, for the monitor.
    """

    def __init__(
        self,
        engine: Engine,
        exchanger: Exchanger,
        plan: RoundPlan,
        weights: CommonWeights,
        share: Share,
        parts: Parts,
    ) -> None:
        self._engine, self._exchanger, self._plan = engine, exchanger, plan
        self._weights, self._share, self._parts = weights, share, parts
        self.optimizers: Callable[[], Sequence[torch.optim.Optimizer]] = tuple
        self.flight: Flight | None = None
        self.figures: dict[str, float] = {}
        self._lost = 0  # exchanges in a row

    def send(
        self, index: int, delay: int, steps: int, rate: float | None = None, *, wait: bool = False
    ) -> None:
        """Begin the exchange of a fragment; with the last one, exchange what is common too.

        Args:
            index: of the fragment.
            delay: steps until it is taken over.
            steps: since its exchange before.
            rate: the learning rate, on which the next round's length depends.
            wait: the others wait for this worker however late it is.
        """
        share, last = self._share, index == self._plan.fragments - 1
        fragment = self._weights.fragments[index]
        distance = fragment.distance()
        if self._parts.several:  # all processes of a worker lose a round, or none does
            distance.masked_fill_(self._on_any_part(~distance.isfinite().all()), torch.nan)
        norms_wanted = self._engine.statistics.norms_wanted
        drift = torch.linalg.vector_norm(distance) if norms_wanted else None
        share.depart(wait=wait)
        sent = fragment.weights() if delay else fragment.start() if share.late else None
        flight = Flight(index, distance, {}, delay, steps, sent, [], drift)
        if share.agrees:
            # Scales the distance in place, so no exchanger that repeats a round may call it again.
            own = share.contribute(index, distance, fragment.shapes)
            flight.gathered = own[1]
            flight.arriving.append(self._exchanger.run(lambda: own, own[1]))
        flight.arriving.append(self._exchanger.submit(distance, fragment.shapes))
        if last:
            self._send_common(flight, rate)
        self.flight = flight

    def _send_common(self, flight: Flight, rate: float | None) -> None:
        """Exchange buffers, and the learning rate and moments that are due."""
        late, arriving = self._share.late, flight.arriving
        first = [self._weights.buffers.exchange(flight.buffers, late)]
        moved = first[0][1]

        def again() -> tuple[Flow, Tensor]:
            return first.pop() if first else self._weights.buffers.exchange(flight.buffers, late)

        if moved.numel():
            arriving.append(self._exchanger.run(again, moved))
        if self._plan.growing is not None and rate is not None:
            device = flight.mean.device
            mean_rate = torch.tensor([rate], dtype=torch.float64, device=device)

            def of_rate() -> tuple[Flow, Tensor]:
                mean_rate.fill_(rate)
                return mean_of(mean_rate), mean_rate

            flight.rate = mean_rate
            arriving.append(self._exchanger.run(of_rate, mean_rate))
        flight.moments = moments = self._moments()
        if moments is not None:
            flat = moments.flat
            arriving.append(self._exchanger.run(lambda: (mean_of(flat), flat), flat))

    def _moments(self) -> Moments | None:
        """Return the optimizers' moments that are averaged with this round, if any."""
        if self._plan.moments is None:
            return None
        due = self._plan.moments.due(self._engine.step // self._plan.fragments + 1)
        params = {n: p for each in self._weights.fragments for n, p in each.params.items()}
        return Moments(due, params, self.optimizers()) if due else None

    def arrive(self) -> bool:
        """Wait for the exchange under way, if any; return whether one has arrived now."""
        flight, share = self.flight, self._share
        if flight is None or not flight.arriving:
            return False
        waiting = share.pause()
        self._exchanger.end_round([each.anchor for each in self._weights.fragments])
        if self.flight is None:  # the worker came too late, and has begun again elsewhere
            return False
        for future in flight.arriving:
            future.wait()
        self._exchanger.check()
        share.clock.land(share.worker)
        share.go_on(waiting)
        if flight.gathered is not None:
            share.arrived(flight.index, flight.gathered)
            flight.astray = share.astray(flight.gathered)
        flight.arriving = []
        return True

    def land(self, since: Sequence[int]) -> tuple[Flight | None, bool]:
        """Take over the exchange that has arrived; return it, and whether nothing was lost.

        ``since``: by fragment, steps since its last exchange began.
        """
        flight, self.flight = self.flight, None
        if flight is None:
            self._exchanger.landed()
            return None, True
        finite = not bool(self._on_any_part(~flight.mean.isfinite().all()))
        if finite:
            self._take_over(flight, self._weights.fragments[flight.index])
        else:
            self._weights.go_back()
        self._exchanger.landed()
        self._count_lost(0 if finite else flight.steps + since[flight.index])
        if flight.astray and finite:
            warnings.warn(
                f"The weights of worker {self._engine.worker} were not finite at round "
                f"{self._engine.step}. The others left it out, and it begins again at the common "
                f"weights. Its {flight.steps} steps are lost.",
                stacklevel=2,
            )
        return flight, finite and not flight.astray

    def _take_over(self, flight: Flight, fragment: Fragment) -> None:
        before = None if flight.drift is None else fragment.anchor.clone()
        fragment.step(flight.mean)
        if flight.buffers:
            self._weights.buffers.step(flight.buffers, rebase=self._share.late)
        if flight.moments is not None:
            flight.moments.take_over()
        if flight.sent is None or flight.astray:
            to = fragment.anchor
        elif self._plan.merge == "rebase" or self._share.late:
            to = fragment.anchor + (fragment.weights() - flight.sent)
        else:
            to = MIXED * fragment.weights() + (1 - MIXED) * fragment.anchor
        self._weights.put(fragment, to)
        if flight.drift is not None and before is not None:
            outer = torch.linalg.vector_norm(fragment.anchor - before)
            norms = self._parts.norms(torch.stack([flight.drift, outer])).tolist()
            self.figures = dict(zip(("drift", "outer_step"), norms, strict=True))
            self.figures["rounds"] = self._engine.step
            self.figures["round_steps"] = flight.steps
            self.figures |= self._share.figures

    def _on_any_part(self, flag: Tensor) -> Tensor:
        """Return whether a flag is set in any part of this worker."""
        return self._parts.total(flag) > 0 if self._parts.several else flag

    def _count_lost(self, steps: int) -> None:
        """Warn of an exchange that was lost, with its number of steps; stop after too many."""
        self._lost = self._lost + 1 if steps else 0
        if not steps:
            return
        step = self._engine.step
        sentence = (
            f"The exchange of round {step} was not finite on some worker, so its {steps} steps are "
            f"lost: all workers go on from the weights before them, with their errors as they were."
        )
        if self._lost >= LOST_IN_A_ROW:
            raise RuntimeError(
                f"{sentence} These were {self._lost} such rounds in a row. Lower the learning "
                f"rate, or clip gradients: Trainer(gradient_clip_val=1.0)."
            )
        if self._engine.worker == 0:
            warnings.warn(sentence, stacklevel=2)


class LocalRounds:
    """Counts optimizer steps, exchanges by a plan, and moves all workers to common weights.

    Args:
        module: starts with weights and buffers that are equal on all workers.
        names: parameter -> name, of all that are trained.
        engine: this worker's.
        exchanger: exchanges.
        plan: of the rounds.
        present: the module holds this worker's weights within it, and whenever a method is called.
        clock: of simulated workers; None: the real time.
        parts: sums over the processes of this worker, if each has a part of the parameters.

    Attributes:
        parts: as given.
        names: exchanged parameter -> name.
        weights: the common ones.
        share: this worker's in the rounds.
        position: steps of the round that are done.
        chosen: H as a controller has set it; None: the plan's.
        length: H of this round; of growing ones ``plan.shortest`` until it is known.
        rate: learning rate before this round, if rounds grow; None before the first one.
        since: by fragment, steps since its last exchange began.
        waited: steps since an exchange has arrived.
        exchange: sends and takes over.

    Communication pattern:
        One exchange of the compressor's per fragment every H steps; with the last one an all-reduce
        of what ``CommonBuffers`` keeps, if anything, one of the learning rate, if rounds grow, and
        one of the optimizers' moments that are due.
        Without a delay the worker waits for it.
        In a worker of several parts two all-reduces of one number: whether a distance, and whether
        a mean, is not finite in some part.

    Raises:
        RuntimeError: on all workers, after ``LOST_IN_A_ROW`` exchanges in a row whose result was
            not finite.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[Tensor, str],
        engine: Engine,
        exchanger: Exchanger,
        plan: RoundPlan,
        present: Callable[[], AbstractContextManager[None]] = nullcontext,
        clock: SimulatedClock | None = None,
        parts: Parts = Parts(),  # noqa: B008 - has no state
    ) -> None:
        self.present, self.parts = present, parts
        self._engine, self.plan = engine, plan
        self.names = names
        params = {name: param for param, name in names.items()}

        find = partial(_buffers, module), partial(_untrained, module, names)
        given = module, params, *find, plan.fragments
        self.weights = CommonWeights(*given, plan.outer, plan.own_buffers)
        self.share = Share(
            plan.unequal or EQUAL,
            plan.fragments,
            engine.worker,
            engine.workers,
            clock or WallClock(next(iter(names)).device),
        )
        self.position = 0
        self.length = plan.shortest
        self.chosen: int | None = None
        self.rate: float | None = None
        self.since = [0] * plan.fragments
        self.waited = 0
        parts_of = (self.weights, self.share, parts)
        self.exchange = FragmentExchange(engine, exchanger, plan, *parts_of)
        self._step_bytes = sum(local_part(p).nbytes for p in names)

    @property
    def is_due(self) -> bool:
        """Whether something is exchanged after the next step."""
        return bool(self.plan.due(self.position + 1, self.length))

    @property
    def rests(self) -> bool:
        """Whether this worker, being slow, skips the next step."""
        return self.share.rests(self.position, self.length)

    @property
    def apart(self) -> bool:
        """Whether this worker's weights may differ from the common ones."""
        return self.exchange.flight is not None or any(self.since)

    @property
    def every(self) -> int:
        """H of the rounds to come, unless they grow."""
        return self.plan.shortest if self.chosen is None else self.chosen

    def set_every(self, every: int | None) -> None:
        """Set H from the next round on; from this one, if it has not begun. None: the plan's.

        Raises:
            ValueError: too few steps for the plan's fragments and delay.
        """
        if every is not None:
            dataclasses.replace(self.plan, every=every)  # checks it
        self.chosen = every
        if not self.position:
            self.length = self.every

    def restart(self) -> None:
        """Forget place in the round, outer momentum and what is under way."""
        self.exchange.flight, self.rate = None, None
        self.share.restart()
        self.position, self.length, self.waited = 0, self.every, 0
        self.since = [0] * len(self.since)
        for each in self.weights.fragments:
            if each.velocity is not None:
                each.velocity.zero_()

    def begin(self, weights: Sequence[Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Go on from these, equal on all workers; the steps and exchanges before are dropped."""
        self.exchange.flight = None
        self.since = [0] * len(self.since)
        self.weights.begin(weights, buffers)

    def skip(self, position: int) -> None:
        """Begin after so many steps of a round, which others have made."""
        self.position = self.waited = position
        self.since = [position] * len(self.since)

    def begin_from(
        self,
        weights: Mapping[str, Tensor],
        buffers: Mapping[str, Tensor],
        constants: Mapping[str, Tensor],
    ) -> None:
        """Go on from another worker's common weights, buffers and integer buffers, by name."""
        flats = [each.flat(weights, each.anchor) for each in self.weights.fragments]
        self.weights.buffers.take(buffers)
        self.weights.buffers.put_constants(constants)
        self.begin(flats, buffers)

    def stepped(self, ends: bool, rate: float = 0.0) -> Waits:
        """Count an optimizer step; exchange what is due, or everything if it was the last one.

        Args:
            ends: it was the last one.
            rate: its learning rate.

        Returns:
            False if an exchange was lost, since some worker's weights were not finite: then all
            are back at the common weights.
        """
        if not self.rests:
            self.share.stepped()
        if ends or self.is_due:
            yield  # simulated workers all make the step before the first one sends
        self.position += 1
        self.waited += 1
        self.since = [steps + 1 for steps in self.since]
        finite = True
        if self.exchange.flight is not None:
            self.exchange.flight.left -= 1
            if self.exchange.flight.left == 0:
                finite = yield from self._land()
        if ends:
            return (yield from self.ending()) and finite
        due = self.plan.due(self.position, self.length)
        if self.position >= self.length:
            self.position, self.length = 0, self.every
        for index in due:
            self._send(index, self.plan.delay, rate)
            if not self.plan.delay:
                finite = (yield from self._land()) and finite
        return finite

    def ending(self) -> Waits:
        """Exchange everything now and wait for it, so that all weights are common."""
        self.position = 0  # who joins an elastic run during this exchange has these steps to make
        finite = (yield from self._land()) if self.exchange.flight is not None else True
        for index in range(self.plan.fragments):
            self._send(index, 0, wait=True)
            finite = (yield from self._land()) and finite
        self.length = self.every
        return finite

    def arrive(self) -> None:
        """Wait for the exchange under way, if there is one, without taking it over yet."""
        if self.exchange.arrive():
            self.waited = 0

    def _send(
        self, index: int, delay: int, rate: float | None = None, *, wait: bool = False
    ) -> None:
        """Begin the exchange of a fragment."""
        alone = min(self.since)  # since any exchange
        self._engine.tally.local_steps += alone
        self._engine.tally.local_bytes += alone * self._step_bytes
        self.exchange.send(index, delay, self.since[index], rate, wait=wait)
        if not self.share.late:
            self.since[index] = 0

    def _land(self) -> Waits:
        """Take over the exchange under way; return whether nothing was lost."""
        yield
        self.arrive()
        flight, kept = self.exchange.land(self.since)
        if self.plan.growing is not None and flight is not None and flight.rate.numel():
            before, self.rate = self.rate, float(flight.rate)
            self.length = self.plan.growing.length(self.rate, before)
        return kept


def finished(waits: Waits) -> bool:
    """Return what ``waits`` returns at its end."""
    while True:
        try:
            next(waits)
        except StopIteration as end:
            return bool(end.value)


def reset_poisoned(
    optimizers: Iterable[torch.optim.Optimizer],
    parts: Parts = Parts(),  # noqa: B008 - has no state
) -> None:
    """Empty the state of optimizers in which something is not finite, in any part of a worker."""
    for optimizer in optimizers:
        kept = (value for state in optimizer.state.values() for value in state.values())
        tensors = (local_part(value) for value in kept if isinstance(value, Tensor))
        odd = not all(bool(value.isfinite().all()) for value in tensors)
        if bool(parts.total(torch.tensor(odd, device="cpu", dtype=torch.bool))):
            optimizer.state.clear()


class CommonState:
    """Place in the round, outer momentum, and common weights finer than the parameters' dtype.

    And the mean of an exchange that has arrived, but has not been taken over yet, and the names of
    parameters that are exchanged though they are not trained. The common weights themselves are the
    checkpoint's ``state_dict``.
    """

    common_structure = Record(
        {
            "position": WHOLE,
            "velocity": Each(ERRORS),
            "anchor": Each(ERRORS),
            "waited": WHOLE,
            "length": COUNT,
            "rate": Optional(NUMBER),
            "since": Listed(WHOLE),
            "parameters": Listed(TEXT),
            "flight": Optional(
                Record(
                    {
                        "index": WHOLE,
                        "left": COUNT,
                        "steps": WHOLE,
                        "mean": FLOATS,
                        "buffers": Each(FLOATS),
                        "rate": FLOATS,
                    }
                )
            ),
            "share": Share.common_structure,
        }
    )

    def __init__(self, rounds: Sequence[LocalRounds]) -> None:
        self._rounds = rounds

    def common_state(self) -> Tree:
        rounds, weights = self._rounds[0], self._rounds[0].weights
        fine = any(
            p.dtype != each.dtype for each in weights.fragments for p in each.params.values()
        )
        anchors = [each.anchor for each in weights.fragments]
        velocities = [each.velocity for each in weights.fragments if each.velocity is not None]
        flight = rounds.exchange.flight
        return {
            "position": rounds.position,
            "waited": rounds.waited,
            "length": rounds.length,
            "rate": rounds.rate,
            "since": list(rounds.since),
            "velocity": weights.named(velocities) if velocities else {},
            "anchor": weights.named(anchors) if fine else {},
            "flight": None
            if flight is None or flight.arriving
            else {
                name: getattr(flight, name)
                for name in ("index", "left", "steps", "mean", "buffers", "rate")
            },
            "parameters": weights.buffers.taken,
            "share": rounds.share.common_state(),
        }

    def load_common_state(self, state: Any) -> None:
        """Resume from ``common_state()``; the module of the first worker has the common weights.

        Others, and what is kept of them, may be of steps that are taken back, as by a search for a
        learning rate.
        """
        with self._rounds[0].present():
            weights, buffers = self._rounds[0].weights.held()
        for rounds in self._rounds:
            with rounds.present():
                rounds.weights.begin(weights, buffers)
                self._load(rounds, state)

    def _load(self, rounds: LocalRounds, state: Any) -> None:
        rounds.exchange.flight = None
        rounds.weights.buffers.take(state["parameters"])
        for each in rounds.weights.fragments:
            each.anchor = each.flat(state["anchor"], each.anchor)
            if each.velocity is not None:
                each.velocity = each.flat(state["velocity"], torch.zeros_like(each.velocity))
        rounds.share.load_common_state(state["share"])
        if len(state["since"]) == len(rounds.since):  # else the fit has other fragments
            if rounds.plan.growing is not None:
                rounds.rate = state["rate"]
            if rounds.plan.growing is not None or rounds.chosen is not None:
                rounds.length = state["length"]
            rounds.position = state["position"] % rounds.length
            rounds.waited, rounds.since = state["waited"], list(state["since"])
            self._load_flight(rounds, state["flight"])

    @staticmethod
    def _load_flight(rounds: LocalRounds, state: Any) -> None:
        """Take over in so many steps what had arrived; what had been sent is in the own state."""
        if state is None:
            return
        fragment = rounds.weights.fragments[state["index"]]
        device = fragment.anchor.device
        mean, rate = state["mean"].to(device), state["rate"].to(device)
        buffers = {name: each.to(device) for name, each in state["buffers"].items()}
        if mean.shape == fragment.anchor.shape:
            sent = fragment.weights()
            rounds.exchange.flight = Flight(
                state["index"], mean, buffers, state["left"], state["steps"], sent, [], None, rate
            )


class OwnState:
    """A worker's weights and buffers within a round, its optimizers and its loss scaler.

    If the number of workers has changed, each gets the mean of the weights, and the optimizers of
    worker 0. Of buffers that stay own, worker i gets those of worker i modulo the former number.

    Args:
        rounds: the worker's.
        optimizers: returns them.
        scaler: returns the loss scaler, or None.
        common: this process's part of the common state, if only this file has it; None elsewhere.
    """

    structure = Record(
        {
            **dict.fromkeys(("weights", "buffers", "sent"), Each(FLOATS)),
            "optimizers": Each(ANYTHING),
            "scaler": ANYTHING,
            "share": Share.own_structure,
        },
        {"common": CommonState.common_structure, "kept": Each(Leaf("a tensor", torch.is_tensor))},
    )

    def __init__(
        self,
        rounds: LocalRounds,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        scaler: Callable[[], Any],
        common: CommonState | None = None,
    ) -> None:
        self._rounds, self._optimizers, self._scaler = rounds, optimizers, scaler
        self._common = common
        self._restored: list[Any] = []  # states of optimizers

    def own_state(self) -> Tree:
        scaler = self._scaler()
        with self._rounds.present():
            weights, buffers = self._rounds.weights.own()
            kept = self._rounds.weights.kept()
            optimizers = [_state_of(each) for each in self._optimizers()]
        flight = self._rounds.exchange.flight
        sent = {}
        if flight is not None and flight.sent is not None:
            sent = self._rounds.weights.fragments[flight.index].named(flight.sent)
        return {
            "weights": weights,
            "buffers": buffers,
            "sent": sent,
            "optimizers": {str(index): each for index, each in enumerate(optimizers)},
            "scaler": {} if scaler is None else scaler.state_dict(),
            "share": self._rounds.share.own_state(),
            **({"kept": kept} if kept else {}),
            **({} if self._common is None else {"common": self._common.common_state()}),
        }

    def over_workers(self, state: Any, mean: Callable[[Tensor], Tensor]) -> Tree:
        """Return ``own_state()`` with the mean over workers, by the collective ``mean``."""
        common = self._rounds.weights.buffers.common
        buffers = {name: state["buffers"].get(name, each) for name, each in common.items()}
        parts = {"weights": state["weights"], "buffers": buffers, "sent": state["sent"]}
        over: Tree = state | reduced(parts, mean)
        return over

    def load_own_states(self, states: Sequence[Any]) -> None:
        if not states:
            return
        same = len(states) == 1
        if self._common is not None and "common" in states[0]:
            self._common.load_common_state(states[0]["common"])
        parts = ("weights", "buffers", "sent")
        own = (
            {part: states[0][part] for part in parts}
            if same
            else average([{part: state[part] for part in parts} for state in states])
        )
        # No mean of these: of another number of workers, each goes on with those of one.
        kept = states[self._rounds.share.worker % len(states)].get("kept", {})
        with self._rounds.present():
            self._rounds.weights.load_own(own["weights"], {**own["buffers"], **kept})
        flight = self._rounds.exchange.flight
        if flight is not None and flight.sent is not None:
            fragment = self._rounds.weights.fragments[flight.index]
            flight.sent = fragment.flat(own["sent"], flight.sent)
        if same:
            self.take(states[0])
            self._rounds.share.load_own_state(states[0]["share"])

    def take(self, state: Any) -> None:
        """Take the loss scaler of a worker's state, and its optimizers for ``load_optimizers``."""
        optimizers: Mapping[str, Any] = state["optimizers"]
        self._restored = [optimizers[str(index)] for index in range(len(optimizers))]
        scaler = self._scaler()
        if scaler is not None and state["scaler"]:
            scaler.load_state_dict(state["scaler"])

    def load_optimizers(self) -> bool:
        """Give optimizers their own loaded state, if any, in place of worker 0's.

        Returns:
            whether there was one.
        """
        with self._rounds.present():
            for optimizer, state in zip(self._optimizers(), self._restored, strict=False):
                params = (p for group in optimizer.param_groups for p in group["params"])
                mesh = next((p.device_mesh for p in params if isinstance(p, DTensor)), None)
                optimizer.load_state_dict(state if mesh is None else _loaded(state, mesh))
        restored, self._restored = bool(self._restored), []
        return restored


def _state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer's state; its own exception says neither whose it is nor which call."""
    state = explaining(f"{type(optimizer).__name__}.state_dict() failed", optimizer.state_dict)()
    # Tensors among the settings may be given another worker's numbers before they are written.
    settings = {n: copy.deepcopy(state[n]) for n in ("param_groups",) if n in state}
    return each_tensor(state, _saved) | settings


_PART, _OF, _CUT = "part", "shape", "dim"


def _saved(tensor: Tensor) -> Any:
    """Return a tensor as files have it: of one in shards this process's part, and of what."""
    if not isinstance(tensor, DTensor):
        return tensor
    (place,) = tensor.placements
    cut = place.dim if isinstance(place, Shard) else None
    return {_PART: tensor.to_local(), _OF: list(tensor.shape), _CUT: cut}


def _loaded(state: Any, mesh: DeviceMesh) -> Any:
    """Undo ``_saved`` in nested dicts."""
    if not isinstance(state, dict):
        return state
    if state.keys() != {_PART, _OF, _CUT}:
        return {name: _loaded(each, mesh) for name, each in state.items()}
    place = Replicate() if state[_CUT] is None else Shard(state[_CUT])
    whole = torch.empty(state[_OF], device="meta", dtype=torch.uint8)
    own: Tensor = state[_PART]
    return DTensor.from_local(own, mesh, [place], shape=whole.shape, stride=whole.stride())


class ModuleState:
    """A module's whole ``state_dict`` with the common weights, where nothing else saves it.

    If the module is in shards, this is the process's part of it.

    Args:
        module: the rounds' module.
        rounds: the worker's.
    """

    def __init__(self, module: nn.Module, rounds: LocalRounds) -> None:
        self._module, self._rounds = module, rounds

    @property
    def common_structure(self) -> Structure:
        return Record({name: _like(value) for name, value in self._parts().items()})

    def _parts(self) -> dict[str, Any]:
        state = self._module.state_dict()
        return {n: local_part(v) if isinstance(v, Tensor) else v for n, v in state.items()}

    def common_state(self) -> Tree:
        with self._rounds.weights.presented():
            state = self._parts()
            return {n: v.clone() if isinstance(v, Tensor) else v for n, v in state.items()}

    def load_common_state(self, state: Any) -> None:
        now = self._module.state_dict()
        shards = {name: each for name, each in now.items() if isinstance(each, DTensor)}
        for name, each in shards.items():
            local_part(each).copy_(state[name])
        self._module.load_state_dict({**state, **shards})


def _like(value: Any) -> Structure:
    """Return the structure of tensors of this one's shape."""
    if not isinstance(value, Tensor):
        return ANYTHING
    shape = value.shape
    rule = f"a tensor of shape {tuple(shape)}"
    return Leaf(rule, lambda other: isinstance(other, Tensor) and other.shape == shape)


class MeanDrift:
    """How far a worker is from the common weights, for checkpoints that keep only means.

    For a fragment that has been sent and will be rebased, only the distance since then: the mean
    contains the sent part, and a resumed worker has sent the common weights.
    """

    structure = Each(FLOATS)

    def __init__(self, rounds: LocalRounds) -> None:
        self._rounds = rounds

    def own_state(self) -> dict[str, Tensor]:
        rounds, flight = self._rounds, self._rounds.exchange.flight
        with rounds.present():
            drift = rounds.weights.drift()
        saved = flight is not None and not flight.arriving
        rebased = rounds.plan.merge == "rebase"
        if flight is not None and flight.sent is not None and saved and rebased:
            fragment = rounds.weights.fragments[flight.index]
            before = fragment.named(flight.sent - fragment.start())
            drift |= {name: drift[name] - each for name, each in before.items()}
        return drift

    def load_own_state(self, state: Any) -> None:
        with self._rounds.present():
            self._rounds.weights.load_drift(state)


def keep(
    parts: CheckpointParts,
    rounds: Sequence[LocalRounds],
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    scaler: Callable[[], Any],
) -> list[OwnState]:
    """Let checkpoints keep these rounds, which go on with the outer momentum of an earlier fit.

    Args:
        parts: what checkpoints keep of this process's workers.
        rounds: of these workers.
        optimizers: returns the optimizers of the worker that is present.
        scaler: returns the loss scaler, or None.
    """
    before = parts.common.get(ROUNDS)
    parts.rounds, parts.common[ROUNDS] = rounds, CommonState(rounds)
    if before is not None:
        state = before.common_state() | {"since": [], "anchor": {}}
        parts.common[ROUNDS].load_common_state(state)
    for each in rounds:
        each.exchange.optimizers = optimizers
    alone = rounds[0].parts.several and MODULE not in parts.common
    own = [
        OwnState(each, optimizers, scaler, CommonState([each]) if alone else None)
        for each in rounds
    ]
    parts.own[ROUNDS] = own
    return own


def _buffers(module: nn.Module) -> dict[str, Tensor]:
    return {plain_name(name): buffer for name, buffer in module.named_buffers()}


def _untrained(module: nn.Module, names: Mapping[Tensor, str]) -> dict[str, Tensor]:
    reshard(module)
    every = module.named_parameters()
    return {plain_name(n): local_part(p) for n, p in every if p not in names}


def in_rounds(now: Moment, every: int) -> Moment:
    """Return a moment that counts rounds of H as steps, as the engine does."""
    steps = None if now.total_steps is None else max(now.total_steps // every, 1)
    return dataclasses.replace(now, total_steps=steps, rates_to_come=None)
