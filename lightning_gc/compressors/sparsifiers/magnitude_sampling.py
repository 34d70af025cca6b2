"""MagnitudeSampling: base class of codecs that draw elements by their magnitudes, unbiased."""

from __future__ import annotations

import abc
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.sparsifiers import sparse_codec, sparse_sign_payload, topk_selection
from lightning_gc.core import payload_validation
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.wire import Field, Wire
from lightning_gc.kernels.accumulate import accumulate

_PASSES = 4  # beside the host, before it waits to see whether they were enough


class Sums(NamedTuple):
    """Of magnitudes: how many they are, their sum and their squares' sum, in float64."""

    number: int | Tensor
    magnitudes: Tensor
    squares: Tensor


class MagnitudeSampling(Codec):
    """Sends x_i if ``|x_i| ≥ m``, else ``m·sign(x_i)`` with probability ``|x_i|/m``, else nothing.

    ``E C(x) = x``. A subclass says which m it wants, as a function of the elements that reach it;
    it starts from all and is lowered, in a few passes, until it agrees with them. An element sent
    by chance has no value to send: where they are one in a hundred it takes 9.6 bits.
    """

    @abc.abstractmethod
    def least(self, every: Sums, reaching: Sums) -> Tensor:
        """Return m, 0-dim float64, given which elements reach it; more of them never raise it.

        Args:
            every: of all elements.
            reaching: of those of magnitude m or more.
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
        drawn = sparse_sign_payload.take(buffer, chosen, sparse_sign_payload.both(m))
        return *sparse_codec.take(buffer, large), m.view(1), *drawn

    def magnitude(self, buffer: Tensor) -> Tensor:
        """Return m, 0-dim float32, above 0: the least magnitude that is sent as it is."""
        numbers = torch.finfo(torch.float32)
        least = numbers.smallest_normal * numbers.eps
        if not buffer.numel():
            return buffer.new_full((), least, dtype=torch.float32)
        magnitudes = buffer.abs()
        largest = magnitudes.amax()
        # Squares of 1e30 and of 1e-30 are no numbers in float32.
        magnitudes.div_(largest.clamp_min(least))
        total = magnitudes.sum(dtype=torch.float64).clamp_min(least)
        every = Sums(buffer.numel(), total, magnitudes.square().sum(dtype=torch.float64))
        m = self.least(every, Sums(0, total.new_zeros(()), total.new_zeros(())))
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
        levels = sparse_sign_payload.both(m[0]).to(out.dtype)
        others = sparse_sign_payload.places(tuple(drawn), levels, numel)
        accumulate(out, *large, scale)
        accumulate(out, *others, scale)

    def wire(self, numel: int) -> Wire:
        large = sparse_codec.wire(numel, numel, "worker")
        drawn, *signs = sparse_sign_payload.fields(numel, numel)
        m = Field("magnitude", torch.float32, 1, note="of those sent by chance")
        return (*large, m, replace(drawn, name="drawn positions"), *signs)

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel() + sparse_sign_payload.count(payload)


def _reaching(magnitudes: Tensor, m: Tensor) -> Sums:
    """Return the sums of magnitudes that are not below m."""
    if payload_validation.on_host(magnitudes):
        found = magnitudes[topk_selection.reaching(magnitudes, m)].double()
        return Sums(found.numel(), found.sum(), found.square().sum())
    below = magnitudes < m
    others = magnitudes.masked_fill(below, 0.0)  # all, or the host would wait for their number
    length = torch.linalg.vector_norm(others, dtype=torch.float64)
    return Sums((~below).count_nonzero(), others.sum(dtype=torch.float64), length.square())
