"""CodedQSGD: QSGD with the L2 norm of the whole tensor, its sparse levels entropy-coded."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Knob, Traits, Variance, Waits
from lightning_gc.compressors.quantisers import coded_multiples
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.core import Bucket, Field, Payload, Range, Wire

_MOST = 1 << 20  # levels: beyond, float32 has hardly as many
_LARGEST, _SMALLEST = 2.0**127, 2.0**-149  # steps that float32 has
_ROUNDING = 2.0**-9  # of the step and its multiples in float32, in steps: see AbsoluteRounding


@dataclass(frozen=True)
class CodedQSGD(Codec):
    """Round each element at random to a multiple of the tensor's L2 norm over s, and code those.

    ``C(x)_i = ‖x‖₂/s · k_i``, ``k_i = floor(s·x_i/‖x‖₂ + u_i)`` with u_i uniform in [0, 1), so that
    ``E C(x) = x``. Of d elements ``s·(s + √d)`` at most are expected not to become 0, so a fixed
    width, as ``QSGD(norm="l2")`` has, is mostly wasted; here gaps between them, and their
    magnitudes, are entropy-coded, and the number of bits follows from s and the gradient.

    In a normal tensor of a million elements an element takes 0.011, 0.084, 0.56 and 2.4 bits with
    s = 1, 10, 100 and 1,000. An element at least 16 times the median of the sent magnitudes goes
    unquantised, in float32, as in ``AbsoluteRounding``, which has one step for the whole model and
    all of training, where here it follows each tensor's norm.

    Where it differs from the paper: Golomb-Rice codes with parameters fitted to each tensor,
    in place of Elias codes.

    Args:
        levels: s, from 1 to 1,048,576. Higher means less compression, less variance. The paper's
            sparse regime is 1, its dense one √d.

    Example:
        >>> from lightning_gc import CodedQSGD
        >>> CodedQSGD(64).bound(10_000)
        Variance(omega=0.6151292473077774)

    Reference:
        Alistarh et al., "QSGD: Communication-Efficient SGD via Gradient Quantization and
        Encoding", NeurIPS 2017.
    """

    levels: int = 64
    limits = {"levels": f"[1, {_MOST}] a magnitude's number of levels"}

    traits = Traits(
        kind="quantiser",
        unbiased=True,
        knob=Knob("levels", low=1, high=4096, integer=True),
        space=(Range("levels", 4, 1024, scale="log", integer=True),),
    )
    waits = Waits(coded_multiples.WAITS.least + 1, coded_multiples.WAITS.limit + 1)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the rounded elements. On CUDA the host waits for the step and for lengths."""
        unit = self._unit(buffer)
        step = torch.full((1,), unit, dtype=torch.float32, device=buffer.device)
        return step, *coded_multiples.take(buffer, unit, bucket)

    def _unit(self, buffer: Tensor) -> float:
        """Return ``‖x‖/s`` as float32 has it; the largest one that it has if x is not finite."""
        if not buffer.numel():
            return _SMALLEST
        largest = buffer.abs().amax().double()
        shares = buffer.double() / largest.clamp_min(topk_selection.smallest(buffer))
        length = float(torch.linalg.vector_norm(shares) * largest)
        unit = length / self.levels
        return float(np.float32(min(max(unit, _SMALLEST), _LARGEST))) if unit == unit else _LARGEST

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        coded_multiples.add(payload[1:], payload[0][0], out, scale)

    def bound(self, numel: int) -> Variance:
        """Return ω = min(d/(4s²), √d/s), the paper's but for a quarter; and float32's rounding.

        An element f steps above a multiple adds ``f·(1 − f)`` squared steps: at most a quarter, and
        at most ``|x|/step``; their sum is ``‖x‖₁·‖x‖₂/s ≤ √d/s·‖x‖²``.
        """
        d, s = numel, self.levels
        rounding = (1 + 2 * _ROUNDING) ** 2
        return Variance(min(d / (4 * s**2) * rounding, math.sqrt(d) / s))

    def wire(self, numel: int) -> Wire:
        return Field("step", torch.float32, 1), *coded_multiples.fields(numel)

    def sent(self, payload: Payload, numel: int) -> int:
        return coded_multiples.count(payload[1:])

    @classmethod
    def examples(cls) -> tuple[CodedQSGD, ...]:
        return (cls(4), cls(1), cls(1000))
