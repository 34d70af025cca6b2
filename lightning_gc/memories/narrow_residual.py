"""NarrowResidual: error feedback with errors in 8 or 16 bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_gc.core import Bucket, Flow
from lightning_gc.memories.base import GradientExchange, Memory, State
from lightning_gc.memories.storage import NAMES, STORAGES, Storage


@dataclass(frozen=True)
class NarrowResidual(Memory):
    """Add the stored error to the gradient, and store errors in 8 or 16 bits, not in 32.

    ``x_t = decay·e_{t−1} + g_t``, ``e_t = R(x_t − C(x_t))``, where R rounds at random, without
    bias. ``"int8"`` costs 1.03 bytes per parameter and worker, where ``ErrorFeedback`` costs 4, and
    ``"bfloat16"`` 2. While a bucket is exchanged its errors are there in float32 too.

    Args:
        dtype: ``"int8"``: a byte per element and one for every 32 elements of a parameter, which
            share a step, a power of two that is less than 1/63 of the largest of them.
            ``"bfloat16"``: steps of at most 1/128 of each element.
        decay: weight of the old error, in (0, 1]. 1 loses nothing on average; lower values damp
            stale errors at the price of a biased sum.

    Law:
        What a step loses by rounding, ``ρ_t = x_t − C(x_t) − e_t``, is less than one step of the
        storage for each element, and 0 on average: ``E[ρ_t | x_t] = 0``, to 2^−17 of a step in
        int8. With decay 1, ``Σ mean_t`` plus the mean errors plus the mean ``Σ ρ_t`` is the sum of
        the mean gradients, and the last of these grows like the square root of the steps. As
        ``E‖e_t‖² ≤ (1 + ω)·E‖x_t − C(x_t)‖²``, with ω = 0.002 in int8 and 1/65,536 in bfloat16,
        errors stay bounded with a contraction for which ``(1 − δ)·(1 + ω) < 1``. That is the worst
        case; it says nothing of int8 for a δ below 0.002.

    Errors smaller than a step beside large ones are not lost, as by rounding to the nearest, but
    are there with a probability. In checkpoints errors are float32: a run resumes bit for bit, and
    with another memory. ``lr_aware`` errors are not offered, since each change of the learning rate
    would round them again.

    Example:
        >>> from lightning_gc import NarrowResidual
        >>> NarrowResidual("int8").stored.bytes_per_element
        1.03125

    Reference:
        The idea to keep errors in 8 bits: Xie, Lin, Toh and Zhou, "LoCo: Low-Bit Communication
        Adaptor for Large-scale Model Training", 2024. Its moving average of errors and its reset
        are the memory ``LoCo``.
    """

    dtype: Literal["int8", "bfloat16"] = "int8"
    decay: float = 1.0
    limits = {
        "dtype": NAMES,
        "decay": "(0, 1] the weight of the old error; 1.0, or NoMemory() to remember nothing",
    }

    buffers = ("error",)
    conserves = False  # but on average

    @property
    def stored(self) -> Storage:
        return STORAGES[self.dtype]

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        yield from exchange.feedback(state["error"], self.decay)

    @classmethod
    def examples(cls) -> tuple[NarrowResidual, ...]:
        return (cls(), cls("bfloat16"), cls(decay=0.9))
