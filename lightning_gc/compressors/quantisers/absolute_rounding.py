"""AbsoluteRounding: round at random to multiples of a fixed step, and entropy-code them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from lightning_gc.compressors.base import AbsoluteError, Codec, Knob, Traits
from lightning_gc.compressors.quantisers import coded_multiples
from lightning_gc.core import Bucket, Payload, Range, Wire

_ROUNDING = 2.0**-9  # of float32, in steps: see bound


@dataclass(frozen=True)
class AbsoluteRounding(Codec):
    """Round each element at random to one of the two multiples of a fixed step around it.

    ``C(x)_i = step · k_i``, ``k_i = floor(x_i/step + u_i)`` with u_i uniform in [0, 1), so that
    ``E C(x) = x`` and ``E‖x − C(x)‖² ≤ d·step²/4`` whatever x is: with ``HardThreshold`` one of
    the *absolute* compressors: their error does not grow with the gradient. One step for the whole
    model; a tensor of small elements sends few, one that grows sends more.

    The whole numbers k_i are entropy-coded: gaps between those that are not 0, and their
    magnitudes, by Golomb-Rice codes with a parameter per tensor. An element of a normal tensor with
    a standard deviation of 10, 1, 0.1 and 0.01 steps takes 6.3, 2.4, 0.56 and 0.084 bits. The
    entropies are 5.4, 2.2, 0.48 and 0.075.

    An element of 16 or more times the median magnitude (a power of two next to it, from 1 to 1,024
    steps) is sent as it is, in float32. Magnitudes decide that, not what was drawn, and the error
    is 0, so C stays unbiased and keeps its bound. No element takes more than 35 bits on average,
    however small the step.

    Error feedback is the default, although C is unbiased: the errors of T steps are then no more
    than those of one, and without it up to T times as much. Under ``AllGather()`` an element's
    error is below a step on every worker; under ``TwoShot``, the default among more than two
    workers, the mean is rounded again, and that is W times as much on the worker that owns the
    shard, so two steps in the mean.

    Args:
        step: in units of the (unscaled) gradient, in 1e-37..1e38. Higher means more compression. A
            step of 2λ has about the bound of ``HardThreshold(λ)``.

    Example:
        >>> import torch
        >>> from lightning_gc import AbsoluteRounding
        >>> from lightning_gc.testing import Lockstep
        >>> alone = Lockstep(1, AbsoluteRounding(0.5))
        >>> alone.step([{"w": torch.tensor([1.5, 0.0, -2.0])}]).mean["w"]  # multiples stay
        tensor([ 1.5000,  0.0000, -2.0000])

    Reference:
        Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021 (absolute compressors; stochastic rounding with a bounded error is
        one). Rounding: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015.
    """

    step: float = 0.01
    limits = {"step": "[1e-37, 1e38] the step, to whose multiples elements are rounded,"}

    traits = Traits(
        kind="quantiser",
        unbiased=True,
        default_memory="error_feedback",
        knob=Knob("step", low=1e-9, high=1e3, more="compression"),
        space=(Range("step", 1e-5, 0.1, scale="log"),),
    )
    waits = coded_multiples.WAITS

    @property
    def _unit(self) -> float:
        """The step as float32 has it, by which sender and receivers multiply."""
        return float(np.float32(self.step))

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the rounded elements. On CUDA the host waits for lengths."""
        return coded_multiples.take(buffer, self._unit, bucket)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        coded_multiples.add(payload, self._unit, out, scale)

    def bound(self, numel: int) -> AbsoluteError:
        """Return v = (1/2 + 2^−9)·step·√numel.

        Of an element that lies f steps above a multiple, ``E (x − C(x))² = f·(1 − f)·step²``, at
        most a quarter. Float32 rounds ``step·k`` by at most 2^−24 of it, and k is at most 2^14.
        """
        return AbsoluteError((0.5 + _ROUNDING) * self.step * math.sqrt(numel))

    def wire(self, numel: int) -> Wire:
        return coded_multiples.fields(numel)

    def sent(self, payload: Payload, numel: int) -> int:
        return coded_multiples.count(payload)

    @classmethod
    def examples(cls) -> tuple[AbsoluteRounding, ...]:
        return (cls(0.3), cls(1e-4))
