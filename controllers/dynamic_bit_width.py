"""Use more bits as a validation metric improves, and uncompressed epochs on a plateau."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Literal

from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse

from .base import Controller, Decision, KnobLike, Level, Observation, State, compresses_less


@dataclass(frozen=True)
class DynamicBitWidth(Controller):
    """Choose the level by a validation metric and the change of the training loss.

    The level belongs to the last of ``steps`` with a bound that the metric has reached.
    Independently, if the training loss has changed by less than ``loss_delta`` since the last
    epoch, the next of ``steps`` is taken. After ``patience`` epochs at one level,
    ``release_epochs`` epochs are uncompressed; then the level is resumed. It never falls unless
    ``allow_decrease``.

    The paper removes compression "if the model remains trapped at the same step", for every step.
    The last step is not a sign of stagnation, because every run ends there: with the defaults each
    ninth epoch of the rest of the run is uncompressed. ``release_at_last=False`` avoids that.

    The paper names these three rules but not their constants, and has no code: the defaults are our
    reading. Works with any knob; the paper's is the bits of a quantiser.

    Args:
        steps: pairs (bound, level), in order; the first bound is ignored. With ``mode="min"``
            bounds fall.
        monitor: name of the validation metric.
        mode: ``"max"`` if higher is better (accuracy), ``"min"`` if lower is (perplexity).
        loss_delta: change of the training loss below which the next step is taken; None: never.
        loss: name of the training loss; ``<loss>_epoch`` is used if logged. Log it with
            ``on_epoch=True``: logged per step only, it is the last batch's, and a warning says so.
        patience: epochs at one level before compression is released.
        release_epochs: epochs without compression.
        allow_decrease: follow the metric to a lower step too.
        release_at_last: release compression at the last of ``steps`` too.

    Raises:
        ValueError: settings out of range; at the end of the first epoch, a metric that was not
            logged. Missing in a checkpoint from which a run is resumed, it is warned of, and the
            level is kept for an epoch.

    Example:
        >>> from lightning_gc.controllers import DynamicBitWidth, Observation
        >>> controller = DynamicBitWidth(loss_delta=None)
        >>> seen = Observation(0, metrics={"val_accuracy": 0.7})
        >>> controller.decide(seen, controller.init())[0].level
        8

    Reference:
        Tirupati, Suresh and Arya, "Distributed Model Training With Dynamic Gradient Compression".
    """

    steps: tuple[tuple[float, float], ...] = ((0.0, 4), (0.6, 8), (0.8, 16))
    monitor: str = "val_accuracy"
    mode: Literal["max", "min"] = "max"
    loss_delta: float | None = 0.01
    loss: str = "train_loss"
    patience: int = 8
    release_epochs: int = 1
    allow_decrease: bool = False
    release_at_last: bool = True
    limits = {
        "loss_delta": "[0, inf) a change of the loss; 0.01, or None for never",
        "patience": "[1, inf)",
        "release_epochs": "[1, inf)",
    }

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple((bound, level) for bound, level in self.steps))
        if not self.steps:
            refuse("DynamicBitWidth", "at least one (bound, level) is needed", steps=())
        super().__post_init__()
        bounds = [bound for bound, _ in self.steps[1:]]
        for bound in bounds:
            if not isinstance(bound, int | float) or math.isnan(bound):
                why = f"a bound is a number, but one is {bound!r}; write it as 0.6, without quotes"
                refuse("DynamicBitWidth", why, steps=self.steps)
        if bounds != sorted(bounds, reverse=self.mode == "min"):
            way = "rise" if self.mode == "max" else "fall"
            why = f"with mode={self.mode!r} bounds must {way}"
            refuse("DynamicBitWidth", why, steps=self.steps)

    def known_levels(self) -> tuple[Level, ...]:
        return tuple(level for _, level in self.steps)

    def check(self, knob: KnobLike | None) -> None:
        super().check(knob)
        assert knob is not None
        for (_, before), (_, after) in itertools.pairwise(self.steps):
            harder = not compresses_less(after, before, knob)
            given = {"controller": self, "knob": knob, "before": before, "after": after}
            judge("DynamicBitWidth", "DynamicBitWidth", **given, harder=harder)

    def init(self) -> State:
        return {"step": 0, "epochs": 0, "released": 0, "loss": None}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        missing = [name for name in self._read(observation) if name not in observation.metrics]
        if observation.resumed and observation.epoch >= 0 and missing:
            return self._without(missing), dict(state)
        decision, new = self._choose(observation, state)
        return replace(decision, warning=self._warning(observation)), new

    def _choose(self, observation: Observation, state: State) -> tuple[Decision, State]:
        if observation.epoch < 0:
            return self._at(0, "The first step."), dict(state)
        metric = self._metric(observation, self.monitor)
        loss: float | None = None
        if self.loss_delta is not None:
            loss = self._metric(observation, self._loss_name(observation))
        step, released = state["step"], state["released"]
        epochs = 0 if released else state["epochs"] + 1  # released epochs do not count
        moved, why = self._move(step, metric, loss, state["loss"])
        kept = loss if loss is not None and math.isfinite(loss) else state["loss"]
        new: State = {"step": moved, "epochs": epochs, "released": 0, "loss": kept}
        if moved != step:
            new["epochs"] = 0
            return self._at(moved, why), new
        if released > 1:
            new["released"] = released - 1
            return Decision(None, reason="Compression is still released."), new
        if released == 1:
            return self._at(step, "Compression is resumed."), new
        if epochs >= self.patience and (self.release_at_last or step < len(self.steps) - 1):
            new["released"] = self.release_epochs
            reason = f"Compression is released after {epochs} epochs on one step."
            return Decision(None, reason=reason, figures={"step": step}), new
        return self._at(step, why), new

    def _move(
        self, step: int, metric: float, loss: float | None, before: float | None
    ) -> tuple[int, str]:
        if math.isnan(metric):
            return step, f"{self.monitor} is nan, so the level is kept."
        reached = 0
        for index, (bound, _) in enumerate(self.steps[1:], start=1):
            if metric >= bound if self.mode == "max" else metric <= bound:
                reached = index
        if reached > step or (self.allow_decrease and reached < step):
            return reached, f"{self.monitor} is {metric:.4g}: step {reached}."
        last = len(self.steps) - 1
        if self.loss_delta is not None and loss is not None and before is not None and step < last:
            if math.isnan(loss):
                return step, f"{self.loss} is nan, so the level is kept."
            if abs(loss - before) < self.loss_delta:
                return step + 1, f"{self.loss} changed by {abs(loss - before):.2g} only: next step."
        return step, f"{self.monitor} is {metric:.4g}: the step is kept."

    def _loss_name(self, observation: Observation) -> str:
        whole = f"{self.loss}_epoch"
        return whole if whole in observation.metrics else self.loss

    def _read(self, observation: Observation) -> list[str]:
        """Return the names of the metrics by which it decides, each once."""
        loss = [] if self.loss_delta is None else [self._loss_name(observation)]
        return list(dict.fromkeys([self.monitor, *loss]))

    def _without(self, missing: list[str]) -> Decision:
        """Return the decision after a resume from a checkpoint without these metrics."""
        names = " and ".join(repr(name) for name in missing)
        warning = (
            f"DynamicBitWidth keeps its level for an epoch: the checkpoint was saved before the "
            f"epoch's {names} was known. Save it at the end of the epoch, as "
            f"ModelCheckpoint(save_on_train_epoch_end=True) does."
        )
        reason = f"{names} is not known after a resume, so the level is kept."
        return Decision(None, reason=reason, warning=warning, keeps_levels=True)

    def _warning(self, observation: Observation) -> str:
        """Return a sentence about metrics of the last batch, after the first epoch only."""
        found = [name for name in self._read(observation) if name in observation.step_metrics]
        if observation.epoch != 0 or not found:
            return ""
        calls = " and ".join(f"self.log({name!r}, ..., on_epoch=True)" for name in found)
        return (
            f"DynamicBitWidth decides by {' and '.join(found)}, logged per step: at the end of an "
            f"epoch that is the last batch's, mostly noise. Use {calls}."
        )

    def _at(self, step: int, reason: str) -> Decision:
        return Decision(self.steps[step][1], reason=reason, figures={"step": step})

    def _metric(self, observation: Observation, name: str) -> float:
        if name not in observation.metrics:
            logged = ", ".join(sorted(observation.metrics)) or "nothing"
            raise ValueError(
                f"DynamicBitWidth needs the metric {name!r}, not logged in epoch "
                f"{observation.epoch}; logged were: {logged}. Use self.log({name!r}, ...), "
                f"or name another one."
            )
        return float(observation.metrics[name])
