"""Double the levels of a quantiser as the gradient becomes noisier (AdaQS)."""

from __future__ import annotations

import math
from dataclasses import dataclass

from .base import Controller, Decision, KnobLike, Level, Needs, Observation, State
from .dqsgd import check_bits_of, check_order


@dataclass(frozen=True)
class AdaQS(Controller):
    """Add a bit to a quantiser whenever gradients become noisier, to begin with few bits.

    With ``r = √(‖∇f‖² / E‖g − ∇f‖²)`` at the end of an epoch: if ``r ≤ r_ref/factor``, the number
    of quantisation levels is doubled and r becomes the new ``r_ref``. After a fall by ``factor²``
    it is doubled twice. The first epoch's r is the first ``r_ref``. Bits never fall.

    Early in training gradients agree, and coarse levels suffice. Near a minimum the mean is small
    compared with the noise, so the quantiser's own noise must be small too.

    The rule's form is the paper's, as far as we know it; that both moments are estimated from the
    steps of an epoch, mean over workers, is our reading. An epoch needs several steps.

    Args:
        bits: of the first epoch, with the sign.
        factor: by which the ratio must fall, above 1. Higher means fewer bits.
        high: greatest number of bits.

    Raises:
        ValueError: settings out of range; a compressor without the knob ``bits``.

    Example:
        >>> from lightning_gc.controllers import AdaQS, Observation
        >>> controller = AdaQS(bits=3)
        >>> state = controller.init()
        >>> for epoch, squared in enumerate((1.0, 0.5, 0.2)):
        ...     seen = Observation(epoch, gradient_squared=squared, gradient_noise=1.0)
        ...     decision, state = controller.decide(seen, state)
        >>> decision.level
        4

    Reference:
        Guo, Liu, Hu, Li and Xiao, "Accelerating Distributed Deep Learning By Adaptive Gradient
        Quantization", ICASSP 2020.
    """

    bits: int = 3
    factor: float = 2.0
    high: int = 8
    limits = {"factor": "(1, inf) the fall of the ratio that doubles the levels"}

    def __post_init__(self) -> None:
        check_order(self, 2, self.bits, self.high)

    @property
    def needs(self) -> Needs:
        return Needs(moments=True)

    def known_levels(self) -> tuple[Level, ...]:
        return self.bits, self.high

    def check(self, knob: KnobLike | None) -> None:
        check_bits_of(self, knob)
        super().check(knob)

    def init(self) -> State:
        return {"level": self.bits, "ratio": None}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        new, level = dict(state), state["level"]
        squared, noise = observation.gradient_squared, observation.gradient_noise
        if not observation.ended or observation.epoch < 0:
            return Decision(level, reason="The number of bits is kept."), new
        if not (0 < squared < math.inf and 0 < noise < math.inf):
            reason = "The gradient's mean cannot be told from its noise, so bits are kept."
            return Decision(level, reason=reason), new
        ratio = math.sqrt(squared / noise)
        if new["ratio"] is None:
            new["ratio"] = ratio
        fallen = 0
        while level + fallen < self.high and ratio * self.factor <= new["ratio"]:
            new["ratio"] /= self.factor
            fallen += 1
        if fallen:
            new["ratio"] = ratio
        new["level"] = level + fallen
        reason = f"The gradient's mean is {ratio:.2g} of its deviation: {new['level']} bits."
        return Decision(new["level"], reason=reason, figures={"mean_to_deviation": ratio}), new
