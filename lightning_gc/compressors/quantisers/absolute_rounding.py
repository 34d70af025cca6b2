"""AbsoluteRounding: round at random to multiples of a fixed step, and entropy-code them."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import golomb_rice, payload_validation
from lightning_gc.coding.bit_packing import packed_bytes
from lightning_gc.coding.elias_fano import check_count
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.bounds import AbsoluteError
from lightning_gc.compressors.sparsifiers import sparse_codec, sparse_sign_payload, topk_selection
from lightning_gc.compressors.traits import Knob, Traits, Waits
from lightning_gc.flow import Payload
from lightning_gc.kernels.accumulate import accumulate
from lightning_gc.search_space import Range

_LOW = 10  # most low bits of a level
_HIGH = 16  # highest high part of a level
_SAMPLE = 16  # log2 of the elements that the low bits are chosen by, about
_PIECE = 1 << 16  # elements, so that what is made of them stays in the cache
_LARGEST = 2.0**127  # what is larger is never rounded up: it might leave float32
_ROUNDING = 2.0**-9  # of float32, in steps: see bound


@dataclass(frozen=True)
class AbsoluteRounding(Codec):
    """Round each element at random to one of the two multiples of a fixed step around it.

    ``C(x)_i = step · k_i``, ``k_i = floor(x_i/step + u_i)`` with u_i uniform in [0, 1), so that
    ``E C(x) = x`` and ``E‖x − C(x)‖² ≤ d·step²/4`` whatever x is: with ``HardThreshold`` one of
    the *absolute* compressors, whose error does not grow with the gradient. One step for the whole
    model; a tensor whose elements are small sends few, one that grows sends more.

    The whole numbers k_i are entropy-coded: gaps between those that are not 0, and their
    magnitudes, by Golomb-Rice codes with a parameter per tensor. Of a normal tensor with a standard
    deviation of 10, 1, 0.1 and 0.01 steps an element takes 6.3, 2.4, 0.56 and 0.084 bits; the
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

    Raises:
        ValueError: a ``step`` outside 1e-37..1e38.

    Example:
        >>> import torch
        >>> from lightning_gc import AbsoluteRounding
        >>> from lightning_gc.testing import Lockstep
        >>> alone = Lockstep(1, AbsoluteRounding(0.5))
        >>> alone.step([{"w": torch.tensor([1.5, 0.0, -2.0])}]).mean["w"]  # multiples stay
        tensor([ 1.5000,  0.0000, -2.0000])

    Reference:
        Sahu et al., "Rethinking gradient sparsification as total error minimization",
        NeurIPS 2021 (absolute compressors, of which stochastic rounding with a bounded error is
        one). Rounding: Gupta et al., "Deep Learning with Limited Numerical Precision", ICML 2015.
    """

    step: float = 0.01

    traits = Traits(
        kind="quantiser",
        unbiased=True,
        default_memory="residual",
        knob=Knob("step", low=1e-9, high=1e3, more="compression"),
        space=(Range("step", 1e-5, 0.1, scale="log"),),
    )
    waits = Waits(3, 6)

    def __post_init__(self) -> None:
        if not 1e-37 <= self.step <= 1e38:
            raise ValueError(
                f"AbsoluteRounding(step={self.step!r}): elements are rounded to multiples of the "
                f"step, which must be in 1e-37..1e38; use 0.01, say."
            )

    @property
    def _unit(self) -> float:
        """The step as float32 has it, by which sender and receivers multiply."""
        return float(np.float32(self.step))

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take what rounding gives. On CUDA the host waits for lengths."""
        low = self._low(buffer)
        limit = min((_HIGH << low) * self._unit, _LARGEST)
        whole = sparse_codec.take(buffer, topk_selection.reaching(buffer, limit))
        found, levels = self._draw(buffer, bucket.generator(shared=False))
        buffer[found] -= levels.to(buffer.dtype) * self._unit
        gaps = found.diff(prepend=found.new_full((1,), -1)) - 1
        gap_low = _gap_low(found.numel(), buffer.numel())
        return (
            *whole,
            torch.cat(golomb_rice.encode(gaps, gap_low)),
            *golomb_rice.encode(levels.abs() - 1, low),
            *sparse_sign_payload.pack_signs(levels < 0),
        )

    def _low(self, buffer: Tensor) -> int:
        """Return the log2 of the median level's magnitude that is to be expected, rounded."""
        sample = buffer[:: (buffer.numel() >> _SAMPLE) | 1].abs().double()
        sample = sample.div_(self._unit).nan_to_num_(0.0)
        counts = [(sample >= 1).sum(), sample.where(sample < 1, 0.0).sum()]
        sure, by_chance = torch.stack(counts).tolist()  # float64, as the sample
        if sure <= by_chance:
            return 0
        median = float(topk_selection.kth_largest(sample, max(1, int((sure + by_chance) / 2))))
        return round(math.log2(min(median, 2**_LOW)))

    def _draw(self, buffer: Tensor, random: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return the positions of levels other than 0, ascending, and these, ``(c,)`` int64."""
        numel = buffer.numel()
        host = buffer.device.type == "cpu"
        numbers = np.random.Generator(np.random.SFC64(random.initial_seed()))
        size = _PIECE if host else max(1, numel)
        positions, levels = [], []
        for start in range(0, numel, size):
            # float64: single precision has few fractions of a step beside thousands of them.
            drawn = buffer[start : start + size].to(torch.float64, copy=True).div_(self._unit)
            if host:
                drawn.add_(torch.from_numpy(numbers.random(drawn.numel())))
            else:
                drawn.add_(torch.rand(drawn.shape, generator=random, out=torch.empty_like(drawn)))
            found = topk_selection.reaching(drawn.floor_(), 0.5)
            positions.append(found + start)
            levels.append(drawn[found].long())
        return torch.cat(positions), torch.cat(levels)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        values, positions, *levels = payload
        large = sparse_codec.places((values.to(out.dtype), positions), out.numel())
        others = self._places(tuple(levels), out)
        accumulate(out, *large, scale)
        accumulate(out, *others, scale)

    def _places(self, payload: Payload, out: Tensor) -> tuple[Tensor, Tensor]:
        """Return ascending positions, and the multiples of the step to add there."""
        gaps, low_parts, high_parts, *signs = payload
        count, numel = sparse_sign_payload.count(payload), out.numel()
        check_count(count, numel)
        look = payload_validation.on_host(gaps)
        low = min(_LOW, low_parts.numel() // max(1, golomb_rice.low_bytes(count, 1)))
        payload_validation.lengths((low_parts,), golomb_rice.low_bytes(count, low))
        highest = _HIGH << low  # one more than there should be: limits are rounded to float32
        levels = golomb_rice.decode(low_parts, high_parts, count, low, highest + 1, look)
        multiples = (levels + 1).to(out.dtype).mul_(self._unit)
        multiples = payload_validation.codes(levels, highest, multiples)
        negative = sparse_sign_payload.unpack_signs(tuple(signs))
        multiples = torch.where(negative, -multiples, multiples)

        gap_low = _gap_low(count, numel)
        cut = golomb_rice.low_bytes(count, gap_low)
        between = golomb_rice.decode(gaps[:cut], gaps[cut:], count, gap_low, numel, look)
        return payload_validation.positions((between + 1).cumsum(0) - 1, multiples, numel)

    def bound(self, numel: int) -> AbsoluteError:
        """Return v = (1/2 + 2^−9)·step·√numel.

        Of an element that lies f steps above a multiple, ``E (x − C(x))² = f·(1 − f)·step²``, at
        most a quarter. Float32 rounds ``step·k`` by at most 2^−24 of it, and k is at most 2^14.
        """
        return AbsoluteError((0.5 + _ROUNDING) * self.step * math.sqrt(numel))

    def wire(self, numel: int) -> Wire:
        values, positions = sparse_codec.wire(numel, numel, "worker")
        byte, groups = torch.uint8, -(-numel // 8)
        gap_bytes = packed_bytes(numel, 2) + 2  # at most 1.4 bits an element, in two parts
        return (
            values,
            positions,
            Field("gaps", byte, gap_bytes, "worker", "between levels that are not 0, Golomb-Rice"),
            Field("low parts", byte, _LOW * groups, "worker", "of levels: their last bits"),
            Field("high parts", byte, (_HIGH + 1) * groups, "worker", "of levels, unary"),
            *sparse_sign_payload.sign_fields(numel),
        )

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel() + sparse_sign_payload.count(payload)

    @classmethod
    def examples(cls) -> tuple[AbsoluteRounding, ...]:
        return (cls(0.3), cls(1e-4))


def _gap_low(count: int, numel: int) -> int:
    """Return the low bits of gaps: those of their mean, which receivers know as well."""
    return max(0, ((numel - count) // max(1, count)).bit_length() - 1)
