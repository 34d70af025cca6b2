"""VarianceSparsifier: send the fewest elements for a given variance, at random but unbiased."""

from __future__ import annotations

import abc
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Knob, Traits, Variance, Waits
from lightning_gc.compressors.signs import sign_payload
from lightning_gc.compressors.sparsifiers import sparse_codec, topk_selection
from lightning_gc.core import Bucket, Field, Payload, Range, Wire, payload_validation
from lightning_gc.kernels.accumulate import accumulate

_PASSES = 4  # beside the host, before it waits to see whether they were enough


class MagnitudeSums(NamedTuple):
    """Number, sum and sum of squares of magnitudes, in float64."""

    number: int | Tensor
    magnitudes: Tensor
    squares: Tensor


class MagnitudeSampling(Codec):
    """Send x_i if ``|x_i| ≥ m``, else ``m·sign(x_i)`` with probability ``|x_i|/m``, else nothing.

    ``E C(x) = x``. A subclass says which m it wants, as a function of the elements that reach it;
    it starts from all and is lowered, in a few passes, until it agrees with them. An element sent
    by chance has no value to send: where they are one in a hundred it takes 9.6 bits.
    """

    @abc.abstractmethod
    def least(self, every: MagnitudeSums, reaching: MagnitudeSums) -> Tensor:
        """Return m, 0-dim float64, given the elements that reach it; more elements never raise m.

        Args:
            every: over all elements.
            reaching: over the elements of magnitude m or more.
        """

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take large elements, and ±m of drawn ones. On CUDA the host waits for their number."""
        m = self.magnitude(buffer)
        draw = bucket.generator(shared=False)
        # float32 has 24 random bits: probabilities below 2**-24 would become 0, or too large.
        noise = torch.rand(buffer.shape, generator=draw, device=buffer.device, dtype=torch.float64)
        by_chance = noise.mul_(m) < buffer.abs()
        large = topk_selection.reaching(buffer, m)
        by_chance.index_fill_(0, large, False)
        chosen = by_chance.nonzero().view(-1)
        drawn = sign_payload.take_chosen(buffer, chosen, sign_payload.both(m))
        return *sparse_codec.take(buffer, large), m.view(1), *drawn

    def magnitude(self, buffer: Tensor) -> Tensor:
        """Return m, 0-dim float32, above 0: the least magnitude that is sent as it is."""
        numbers = torch.finfo(torch.float32)
        least = numbers.smallest_normal * numbers.eps
        if not buffer.numel():
            return buffer.new_full((), least, dtype=torch.float32)
        magnitudes = buffer.abs()
        largest = magnitudes.amax()
        # Squares of 1e30 overflow in float32, and squares of 1e-30 vanish.
        magnitudes.div_(largest.clamp_min(least))
        total = magnitudes.sum(dtype=torch.float64).clamp_min(least)
        every = MagnitudeSums(buffer.numel(), total, magnitudes.square().sum(dtype=torch.float64))
        m = self.least(every, MagnitudeSums(0, total.new_zeros(()), total.new_zeros(())))
        before: int | Tensor = -1
        above: int | Tensor = 0
        # m falls, since every element that leaves is m or more; so ever more elements reach it.
        while above > before:
            for _ in range(1 if payload_validation.on_host(buffer) else _PASSES):
                before = above
                reaching = _reaching(magnitudes, m.to(buffer.dtype))
                above, m = reaching.number, self.least(every, reaching)
        return (m * largest).clamp(least, numbers.max).float()

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        numel = out.numel()
        values, positions, m, *drawn = payload
        large = sparse_codec.places((values.to(out.dtype), positions), numel)
        levels = sign_payload.both(m[0]).to(out.dtype)
        others = sign_payload.places(tuple(drawn), levels, numel)
        accumulate(out, *large, scale)
        accumulate(out, *others, scale)

    def wire(self, numel: int) -> Wire:
        large = sparse_codec.wire(numel, numel, "worker")
        drawn, *signs = sign_payload.chosen_fields(numel, numel)
        m = Field("magnitude", torch.float32, 1, note="of those sent by chance")
        return (*large, m, replace(drawn, name="drawn positions"), *signs)

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel() + sign_payload.count(payload)


@dataclass(frozen=True)
class VarianceSparsifier(MagnitudeSampling):
    """Send elements with probability ``min(1, |x_i|/m)``, scaled so that the result is unbiased.

    ``C(x)_i = x_i`` if ``|x_i| ≥ m``, else ``m·sign(x_i)`` with probability ``|x_i|/m``, else 0, so
    that ``E C(x) = x``. Of all probabilities with ``E‖C(x)‖² ≤ (1 + ε)·‖x‖²`` these make the number
    sent least, if over the elements below m ``m = (ε·Σ_all x² + Σ x²) / Σ |x|``: the closed form
    (Algorithm 2) with λ = 1/m. The paper finds it by sorting; here m starts from all elements and
    is lowered, in a few passes, until it agrees with the elements below it.

    The knob is ε, not a density as in the paper's greedy Algorithm 3: ε can be guaranteed. Of d
    normal elements ``0.64·d / (1+ε)`` are sent, on heavy tails far fewer. An element sent by chance
    has no value to send: where they are one in a hundred it takes 9.6 bits.

    Args:
        epsilon: ε, the variance allowed in units of ``‖x‖²``, in 1e-4..1e9. Higher means more
            compression.

    Example:
        >>> from lightning_gc import VarianceSparsifier
        >>> VarianceSparsifier(2.0).bound(1000)
        Variance(omega=2.0)

    Reference:
        Wangni, Wang, Liu and Zhang, "Gradient Sparsification for Communication-Efficient
        Distributed Optimization", NeurIPS 2018.
    """

    epsilon: float = 1.0
    limits = {"epsilon": "[1e-4, 1e9] the variance allowed, in units of the squared norm,"}

    traits = Traits(
        kind="sparsifier",
        unbiased=True,
        knob=Knob("epsilon", low=0.01, high=1000.0, more="compression"),
        space=(Range("epsilon", 0.1, 100.0, scale="log"),),
    )
    waits = Waits(3, math.inf)  # mostly 3 or 4

    def least(self, every: MagnitudeSums, reaching: MagnitudeSums) -> Tensor:
        squares = (1 + self.epsilon) * every.squares - reaching.squares
        return squares / (every.magnitudes - reaching.magnitudes)

    def bound(self, numel: int) -> Variance:
        """Return ω = ε: ``E‖C(x) − x‖² = E‖C(x)‖² − ‖x‖²`` without bias; reached unless x is 0."""
        return Variance(self.epsilon)

    @classmethod
    def examples(cls) -> tuple[VarianceSparsifier, ...]:
        return (cls(0.01), cls(1.0), cls(0.2))


def _reaching(magnitudes: Tensor, m: Tensor) -> MagnitudeSums:
    """Return the sums of magnitudes that are not below m."""
    if payload_validation.on_host(magnitudes):
        found = magnitudes[topk_selection.reaching(magnitudes, m)].double()
        return MagnitudeSums(found.numel(), found.sum(), found.square().sum())
    below = magnitudes < m
    others = magnitudes.masked_fill(below, 0.0)  # all, or the host would wait for their number
    length = torch.linalg.vector_norm(others, dtype=torch.float64)
    return MagnitudeSums((~below).count_nonzero(), others.sum(dtype=torch.float64), length.square())
