"""Choose the bits of a quantiser by the gradient's norm and the epoch, for a bounded error."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_gc.core.combinations import judge

from .base import Controller, Decision, KnobLike, Level, Needs, Observation, State

NEGLIGIBLE = 1e-9
"""Share by which a number of levels may exceed a whole number of bits without another bit."""


def check_bits_of(controller: Controller, knob: KnobLike | None) -> None:
    """Raise ValueError unless the knob is a quantiser's bits."""
    has = "has no level" if knob is None else f"has the level {knob.field}"
    judge("DQSGD and AdaQS", controller=controller, knob=knob, has=has)


def check_order(controller: Controller, low: float, first: float, high: float) -> None:
    """Raise ValueError unless these are whole numbers of bits, ascending, from 2 to 16."""
    bits = (low, first, high)
    if not 2 <= low <= first <= high <= 16 or any(each != int(each) for each in bits):
        raise ValueError(
            f"{controller}: bits count the sign, are whole numbers in 2..16, and rise from low "
            f"over bits to high; use low=2, bits=4, high=8."
        )


@dataclass(frozen=True)
class DQSGD(Controller):
    """Set a quantiser's bits by the gradient's norm: the fewest for a bounded sum of errors.

    In epoch t a magnitude has as many levels as
    ``s_t = s_0·α^(−t/2)·‖g_t‖/‖g_0‖``, with ``s = 2^(bits−1) − 1``, rounded up to whole bits.
    So bits fall with the gradient's norm and rise with time.

    Derivation, ours, from the paper's objective. Quantising g to s levels adds at most
    ``c·‖g‖²/s²`` of squared error. An error early in the run is contracted by the steps after it,
    so it counts with the weight ``α^(T−t)``. Minimise the bits ``Σ_t b_t`` for
    ``Σ_t α^(T−t)·c·‖g_t‖²/(2^b_t − 1)² ≤ ε``. With the multiplier μ, each b must satisfy
    ``1 = 2·ln 2·μ·α^(T−t)·c·‖g_t‖²·2^b / (2^b − 1)³``. As ``2^b / (2^b − 1)`` is near 1,
    ``2^b_t − 1 ∝ α^((T−t)/2)·‖g_t‖``: every epoch adds the same weighted error, ``ε/T``. The first
    epoch's ``bits`` therefore fix ε, and neither T nor later norms are needed.

    Norms are the root mean square of the elements of all workers' gradients, of the epoch before.

    Args:
        bits: of the first epoch, with the sign. More means a smaller bound on the error.
        alpha: α, the share of an error's weight that is left an epoch later, in (0, 1]. 1: bits
            follow the norm alone. Lower means more bits towards the end.
        low: least number of bits.
        high: greatest number of bits.

    Raises:
        ValueError: settings out of range; a compressor without the knob ``bits``.

    Example:
        >>> from lightning_gc.controllers import DQSGD, Observation
        >>> controller = DQSGD(bits=5, alpha=1.0)
        >>> _, state = controller.decide(Observation(-1), controller.init())
        >>> _, state = controller.decide(Observation(0, gradient_scale=0.4), state)
        >>> controller.decide(Observation(1, gradient_scale=0.1), state)[0].level
        4

    Reference:
        Yan et al., "DQ-SGD: Dynamic Quantization in SGD for Communication-Efficient Distributed
        Learning", 2021. We have read its abstract; the rule's form is known, its constants are not.
    """

    bits: int = 4
    alpha: float = 0.95
    low: int = 2
    high: int = 8
    limits = {
        "alpha": (
            "(0, 1] the weight of an error an epoch later; 0.95, or 1.0 for the gradient's norm "
            "alone"
        ),
    }

    def __post_init__(self) -> None:
        check_order(self, self.low, self.bits, self.high)

    @property
    def needs(self) -> Needs:
        return Needs(scale=True)

    def known_levels(self) -> tuple[Level, ...]:
        return self.low, self.high

    def check(self, knob: KnobLike | None) -> None:
        check_bits_of(self, knob)
        super().check(knob)

    def init(self) -> State:
        return {"level": self.bits, "first": None}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        new, scale, epoch = dict(state), observation.gradient_scale, observation.epoch + 1
        if not observation.ended or epoch == 0:
            return Decision(new["level"], reason="The number of bits is kept."), new
        if not 0 < scale < math.inf:
            reason = f"The gradient's scale is {scale:g}, so the number of bits is kept."
            return Decision(new["level"], reason=reason), new
        new["first"] = new["first"] or scale
        exact = self._bits(epoch, scale / new["first"])
        new["level"] = min(max(math.ceil(exact - NEGLIGIBLE), self.low), self.high)
        reason = f"The gradient has {scale / new['first']:.2g} of its first norm: {exact:.2f} bits."
        return Decision(new["level"], reason=reason, figures={"exact_bits": exact}), new

    def _bits(self, epoch: int, norm: float) -> float:
        """Return the bits, sign included, of an epoch with a gradient of this share of ‖g_0‖."""
        most = 2.0**64  # where a long run's weight would leave float64
        growth = min(math.exp(min(-epoch / 2 * math.log(self.alpha), 44.0)) * norm, most)
        return math.log2(1 + (2 ** (self.bits - 1) - 1) * growth) + 1
