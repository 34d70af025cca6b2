"""LocalRounds: one worker's rounds of local steps, each ended by an exchange of how far it came."""

from __future__ import annotations

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from lightning_gc.local_steps import OuterSGD
from lightning_gc.local_steps.common_buffers import CommonBuffers, mean_of
from lightning_gc.local_steps.fragment import Fragment
from lightning_gc.synchronizer.synchronizer import Synchronizer
from lightning_gc.synchronizer.workers import Workers, plain_name

LOST_IN_A_ROW = 10
"""Rounds that may be lost one after the other before the run stops."""


class LocalRounds:
    """Counts optimizer steps; after H of them exchanges, and moves all workers to common weights.

    Args:
        module: starts with weights and buffers that are equal on all workers.
        workers: this worker's engine and parameter names.
        synchronizer: exchanges.
        every: H.
        outer: the step that is made with the mean.

    Attributes:
        position: steps since the last exchange.
        figures: of the last exchange, for the monitor.

    Communication pattern:
        One exchange of the compressor's every H steps, for which the worker waits, and an
        all-reduce of floating-point buffers, if there are any.

    Raises:
        RuntimeError: on all workers, after ``LOST_IN_A_ROW`` rounds in a row whose result was not
            finite.
    """

    def __init__(
        self,
        module: nn.Module,
        workers: Workers,
        synchronizer: Synchronizer,
        *,
        every: int,
        outer: OuterSGD,
    ) -> None:
        self._module, self._workers, self._synchronizer = module, workers, synchronizer
        self._every = every
        self.weights = Fragment({name: p for p, name in workers.names.items()}, outer)
        self.buffers = CommonBuffers({plain_name(n): b for n, b in module.named_buffers()})
        self.position = 0
        self.figures: dict[str, float] = {}
        self._aside: tuple[Tensor, dict[str, Tensor]] | None = None  # own, while common are shown
        self._lost = 0  # rounds in a row
        self._step_bytes = sum(p.numel() * p.element_size() for p in workers.names)

    @property
    def is_due(self) -> bool:
        """Whether the next step ends a round."""
        return self.position + 1 >= self._every

    def after_step(self, ends: bool) -> bool:
        """Count an optimizer step; exchange if one is due, or if it was the last one.

        Returns:
            False if a round was lost, since some worker's weights were not finite: then all are
            back at the common weights.
        """
        self.position += 1
        return self.exchange() if ends or self.position >= self._every else True

    def exchange(self) -> bool:
        """End the round now; see ``after_step``."""
        tally = self._workers.first.statistics.tally
        tally.local_steps += self.position
        tally.local_bytes += self.position * self._step_bytes
        measured = self._workers.first.statistics.norms_wanted
        distance = self.weights.distance()
        drift = torch.linalg.vector_norm(distance) if measured else None
        arrived = [self._synchronizer.submit(distance, self.weights.shapes)]
        moved = self.buffers.difference()
        if moved.numel():
            arrived.append(self._synchronizer.run(mean_of(moved), moved))
        self._synchronizer.end_round([self.weights.anchor])
        for future in arrived:
            future.wait()
        self._synchronizer.check()
        steps, self.position = self.position, 0
        finite = bool(distance.isfinite().all() and moved.isfinite().all())
        if finite:
            before = self.weights.anchor.clone() if measured else None
            self.weights.step(distance)
            if moved.numel():
                self.buffers.step(moved)
            if drift is not None and before is not None:
                outer = torch.linalg.vector_norm(self.weights.anchor - before)
                self.figures = {"drift": float(drift), "outer_step": float(outer)}
                self.figures["rounds"] = self._workers.first.step
        else:
            self.buffers.put(self.buffers.common)
        self.weights.put(self.weights.anchor)
        self._count_lost(0 if finite else steps)
        return finite

    def _count_lost(self, steps: int) -> None:
        """Warn of a round that was lost, with its number of steps; stop after too many."""
        self._lost = self._lost + 1 if steps else 0
        if not steps:
            return
        step = self._workers.first.step
        sentence = (
            f"The exchange of round {step} was not finite on some worker, so its {steps} steps are "
            f"lost: all workers go on from the weights before them, with their errors as they were."
        )
        if self._lost >= LOST_IN_A_ROW:
            raise RuntimeError(
                f"{sentence} These were {self._lost} such rounds in a row. Lower the learning "
                f"rate, or clip gradients: Trainer(gradient_clip_val=1.0)."
            )
        if self._workers.first.worker == 0:
            warnings.warn(sentence, stacklevel=2)

    def show(self) -> None:
        """Put the common weights and buffers into the module, and this worker's own aside."""
        if self._aside is None:
            self._aside = self.weights.weights(), self.buffers.own()
            self.weights.put(self.weights.anchor)
            self.buffers.put(self.buffers.common)

    def hide(self) -> None:
        """Put this worker's own weights and buffers back."""
        if self._aside is not None:
            weights, buffers = self._aside
            self._aside = None
            self.weights.put(weights)
            self.buffers.put(buffers)

    @property
    def shows(self) -> bool:
        """Whether the module holds the common weights for a while."""
        return self._aside is not None

    def own(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return copies of this worker's weights and buffers by name, also while it shows others'.

        Of the buffers those that a ``state_dict`` has.
        """
        weights, buffers = self._aside or (self.weights.weights(), self.buffers.own())
        saved = {plain_name(name) for name in self._module.state_dict()}
        kept = {name: value for name, value in buffers.items() if name in saved}
        return self.weights.named(weights), kept

    def load_own(self, weights: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
        """Set this worker's weights and buffers; those that are not named stay."""
        self.weights.put(self.weights.flat(weights, self.weights.weights()))
        self.buffers.put(buffers)

    def drift(self) -> dict[str, Tensor]:
        """Return this worker's weights minus those that it has started the round with, by name."""
        weights, _ = self._aside or (self.weights.weights(), None)
        return self.weights.named(weights - self.weights.start())

    def load_drift(self, drift: Mapping[str, Tensor]) -> None:
        """Set this worker's weights to those of the round's start plus ``drift``."""
        zeros = torch.zeros_like(self.weights.anchor)
        self.weights.put(self.weights.start() + self.weights.flat(drift, zeros))
