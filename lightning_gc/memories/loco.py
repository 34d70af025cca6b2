"""LoCo: error feedback by a moving average of errors, in 8 bits, with a reset every N steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lightning_gc.core import Bucket, Flow, Range
from lightning_gc.memories.base import GradientExchange, Memory, State
from lightning_gc.memories.storage import NAMES, STORAGES, Storage


@dataclass(frozen=True)
class LoCo(Memory):
    """Add a moving average of errors, in a byte per parameter, for quantisers of few bits.

    ``x_t = e_{t−1} + g_t``, ``e_t = R(β·e_{t−1} + (1 − β)·(x_t − C(x_t)))``, and ``e_t = 0`` in
    every ``every``-th step. R rounds to the format of ``dtype``, at random and without bias. It
    costs 1.03 bytes per parameter and worker in int8.

    The average damps the noise of single errors, and the reset drops errors of old weights. Of a
    step's error the share ``1 − β`` enters the average, and what a reset drops is lost. So nothing
    is conserved, and a sparsifier loses most of the gradient. Use it with quantisers.

    Args:
        beta: β, weight of the old average, in [0, 1). 0 keeps the last error alone.
        every: N, steps between resets, at least 1.
        dtype: ``"int8"`` or ``"bfloat16"``, as for ``NarrowResidual``.

    Example:
        >>> from lightning_gc import QSGD, CompressedDDPStrategy, LoCo
        >>> strategy = CompressedDDPStrategy(QSGD(bits=4), memory=LoCo())

    Reference:
        Xie, Lin, Toh and Zhou, "LoCo: Low-Bit Communication Adaptor for Large-scale Model
        Training", 2024. Formula and defaults follow DeepSpeed's ``zeropp_loco_param``. Its
        errors are float16. There and in the paper errors are rounded to the nearest.
    """

    beta: float = 0.8
    every: int = 1024
    dtype: Literal["int8", "bfloat16"] = "int8"
    limits = {
        "beta": "[0, 1) the weight of the old average",
        "every": "[1, inf) the number of steps",
        "dtype": NAMES,
    }

    buffers = ("error",)
    conserves = False
    space = (Range("beta", 0.0, 0.95, scale="linear"),)

    @property
    def stored(self) -> Storage:
        return STORAGES[self.dtype]

    def flow(self, bucket: Bucket, state: State, exchange: GradientExchange) -> Flow:
        error = state["error"]
        average = error.clone()
        yield from exchange(error.add_(bucket.grad))
        error.mul_(1 - self.beta).add_(average, alpha=self.beta)
        if (bucket.step + 1) % self.every == 0:
            error.zero_()

    @classmethod
    def examples(cls) -> tuple[LoCo, ...]:
        return (cls(), cls(0.5, 3, "bfloat16"))
