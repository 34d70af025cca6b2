"""Local state: what a checkpoint keeps of local steps, common to all workers and of each alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.core.pytree import Tree, average
from lightning_gc.core.state_structure import (
    ANYTHING,
    COUNT,
    ERRORS,
    FLOATS,
    NUMBER,
    TEXT,
    WHOLE,
    Each,
    Listed,
    Optional,
    Record,
)
from lightning_gc.exchange.peers import explaining
from lightning_gc.local_steps.local_rounds import Flight, LocalRounds


class CommonState:
    """Place in the round, outer momentum, and common weights finer than the parameters' dtype.

    And the mean of an exchange that has arrived, but has not been taken over yet, and the names of
    parameters that are exchanged though they are not trained. The common weights themselves are the
    checkpoint's ``state_dict``.
    """

    common_structure = Record(
        {"position": WHOLE, "velocity": Each(ERRORS), "anchor": Each(ERRORS)},
        {
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
        },
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
        flight = rounds.flight
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
        rounds.flight = None
        rounds.weights.buffers.take(state.get("parameters", ()))
        for each in rounds.weights.fragments:
            each.anchor = each.flat(state["anchor"], each.anchor)
            if each.velocity is not None:
                each.velocity = each.flat(state["velocity"], torch.zeros_like(each.velocity))
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
            rounds.flight = Flight(
                state["index"], mean, buffers, state["left"], state["steps"], sent, [], None, rate
            )


class OwnState:
    """A worker's weights and buffers within a round, its optimizers and its loss scaler.

    If the number of workers has changed, each gets the mean of the weights, and the optimizers of
    worker 0.

    Args:
        rounds: the worker's.
        optimizers: returns them.
        scaler: returns the loss scaler, or None.
    """

    structure = Record(
        {"weights": Each(FLOATS), "buffers": Each(FLOATS), "sent": Each(FLOATS)},
        {"optimizers": Each(ANYTHING), "scaler": ANYTHING},
    )

    def __init__(
        self,
        rounds: LocalRounds,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
        scaler: Callable[[], Any],
    ) -> None:
        self._rounds, self._optimizers, self._scaler = rounds, optimizers, scaler
        self._restored: list[Any] = []  # states of optimizers

    def own_state(self) -> Tree:
        scaler = self._scaler()
        with self._rounds.present():
            weights, buffers = self._rounds.weights.own()
            optimizers = [_state_of(each) for each in self._optimizers()]
        flight = self._rounds.flight
        sent = {}
        if flight is not None and flight.sent is not None:
            sent = self._rounds.weights.fragments[flight.index].named(flight.sent)
        return {
            "weights": weights,
            "buffers": buffers,
            "sent": sent,
            "optimizers": {str(index): each for index, each in enumerate(optimizers)},
            "scaler": {} if scaler is None else scaler.state_dict(),
        }

    def load_own_states(self, states: Sequence[Any]) -> None:
        if not states:
            return
        same = len(states) == 1
        parts = ("weights", "buffers", "sent")
        own = (
            {part: states[0][part] for part in parts}
            if same
            else average([{part: state[part] for part in parts} for state in states])
        )
        with self._rounds.present():
            self._rounds.weights.load_own(own["weights"], own["buffers"])
        flight = self._rounds.flight
        if flight is not None and flight.sent is not None:
            fragment = self._rounds.weights.fragments[flight.index]
            flight.sent = fragment.flat(own["sent"], flight.sent)
        if not same:
            return
        optimizers: Mapping[str, Any] = states[0]["optimizers"]
        self._restored = [optimizers[str(index)] for index in range(len(optimizers))]
        scaler = self._scaler()
        if scaler is not None and states[0]["scaler"]:
            scaler.load_state_dict(states[0]["scaler"])

    def load_optimizers(self) -> bool:
        """Give optimizers their own loaded state, if any, in place of worker 0's.

        Returns:
            whether there was one.
        """
        with self._rounds.present():
            for optimizer, state in zip(self._optimizers(), self._restored, strict=False):
                optimizer.load_state_dict(state)
        restored, self._restored = bool(self._restored), []
        return restored


def _state_of(optimizer: torch.optim.Optimizer) -> Any:
    """Return an optimizer's state; its own exception says neither whose it is nor which call."""
    return explaining(f"{type(optimizer).__name__}.state_dict() failed", optimizer.state_dict)()


class MeanDrift:
    """How far a worker is from the common weights, for checkpoints that keep only means.

    For a fragment that has been sent and will be rebased, only the distance since then: the mean
    contains the sent part, and a resumed worker has sent the common weights.
    """

    structure = Each(FLOATS)

    def __init__(self, rounds: LocalRounds) -> None:
        self._rounds = rounds

    def own_state(self) -> dict[str, Tensor]:
        rounds, flight = self._rounds, self._rounds.flight
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
