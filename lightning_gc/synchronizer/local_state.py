"""Local state: what a checkpoint keeps of local steps, common to all workers and of each alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.engine.state_structure import (
    ANYTHING,
    ERRORS,
    FLOATS,
    WHOLE,
    Each,
    Record,
)
from lightning_gc.synchronizer.local_rounds import LocalRounds
from lightning_gc.synchronizer.pytree import Tree, average


class CommonState:
    """Position in the round, outer momentum, and common weights finer than the parameters' dtype.

    The common weights themselves are the checkpoint's ``state_dict``.
    """

    common_structure = Record(
        {"position": WHOLE, "velocity": Each(ERRORS), "anchor": Each(ERRORS)},
    )

    def __init__(self, rounds: LocalRounds) -> None:
        self._rounds = rounds

    def common_state(self) -> Tree:
        weights = self._rounds.weights
        params = weights.params.values()
        fine = any(param.dtype != weights.dtype for param in params)
        return {
            "position": self._rounds.position,
            "velocity": {} if weights.velocity is None else weights.named(weights.velocity),
            "anchor": weights.named(weights.anchor) if fine else {},
        }

    def load_common_state(self, state: Any) -> None:
        weights = self._rounds.weights
        self._rounds.position = state["position"]
        weights.anchor = weights.flat(state["anchor"], weights.anchor)
        if weights.velocity is not None:
            zeros = torch.zeros_like(weights.velocity)
            weights.velocity = weights.flat(state["velocity"], zeros)


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
        {"weights": Each(FLOATS), "buffers": Each(FLOATS)},
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
        weights, buffers = self._rounds.own()
        optimizers = enumerate(self._optimizers())
        return {
            "weights": weights,
            "buffers": buffers,
            "optimizers": {str(index): each.state_dict() for index, each in optimizers},
            "scaler": {} if scaler is None else scaler.state_dict(),
        }

    def load_own_states(self, states: Sequence[Any]) -> None:
        if not states:
            return
        same = len(states) == 1
        parts = ("weights", "buffers")
        own = (
            {part: states[0][part] for part in parts}
            if same
            else average([{part: state[part] for part in parts} for state in states])
        )
        self._rounds.load_own(own["weights"], own["buffers"])
        if not same:
            return
        optimizers: Mapping[str, Any] = states[0]["optimizers"]
        self._restored = [optimizers[str(index)] for index in range(len(optimizers))]
        scaler = self._scaler()
        if scaler is not None and states[0]["scaler"]:
            scaler.load_state_dict(states[0]["scaler"])

    def load_optimizers(self) -> None:
        """Give optimizers the state that was loaded, if any: after those of worker 0 have been."""
        for optimizer, state in zip(self._optimizers(), self._restored, strict=False):
            optimizer.load_state_dict(state)
        self._restored = []


class MeanDrift:
    """How far a worker is from the common weights, for checkpoints that keep only means."""

    structure = Each(FLOATS)

    def __init__(self, rounds: LocalRounds) -> None:
        self._rounds = rounds

    def own_state(self) -> dict[str, Tensor]:
        return self._rounds.drift()

    def load_own_state(self, state: Any) -> None:
        self._rounds.load_drift(state)
