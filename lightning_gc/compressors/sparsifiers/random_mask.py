"""RandomMask: send the elements under a random mask, the same one on every worker."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding.wire import Field, Wire
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.sparsifiers import random_indices, sparse_payload
from lightning_gc.compressors.sparsifiers.sparse_codec import DENSITY
from lightning_gc.flow import Payload
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class RandomMask(Codec):
    """Send each element with probability ``density``, independently of the others.

    ``C(x)_i = x_i`` with probability ``density``, else 0. All workers draw the same mask from
    (seed, parameter name, step), so no positions are sent and values can be all-reduced: 32 bits a
    sent element. Their number is binomial, and of a small tensor often nothing is sent at all:
    ``RandomK`` sends as many at every step, and at least one. With both an element waits in the
    error equally long on average.

    Args:
        density: probability of each element, in (0, 1]. Lower means more compression, more error.

    Raises:
        ValueError: ``density`` outside (0, 1].

    Example:
        >>> from lightning_gc import RandomMask
        >>> RandomMask(0.25).bound(1000)
        Contraction(delta=0.25)

    Reference:
        Konečný, McMahan, Yu, Richtárik, Suresh and Bacon, "Federated Learning: Strategies for
        Improving Communication Efficiency", 2016. There every client has a mask of its own and
        sends the seed.
    """

    density: float = 0.01

    traits = replace(DENSITY, linear=True, space=(Range("density", 1e-3, 0.5, scale="log"),))

    def __post_init__(self) -> None:
        sparse_payload.check_density("RandomMask", self.density)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the elements under the mask."""
        chosen = self._mask(buffer.numel(), bucket)
        values = buffer[chosen]  # (c,) buffer.dtype
        buffer[chosen] = 0
        return (values,)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Draw the same mask again and add c elements."""
        random_indices.put(payload, self._mask(out.numel(), bucket), out, scale)

    def _mask(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the positions under this step's mask, ``(c,)`` int64.

        A mask drawn element by element has a binomial number of elements, and all masks with that
        number are equally likely. So it is enough to draw c, and then c positions. Tensors of equal
        size have masks of their own with the same c.
        """
        c = random_indices.how_many(self.density, numel, bucket)
        return random_indices.positions(numel, c, bucket.generator(shared=True))

    def bound(self, numel: int) -> Contraction:
        """Return δ = density, in expectation over the draw."""
        return Contraction(self.density)

    def wire(self, numel: int) -> Wire:
        """Return c values."""
        return (Field("values", torch.float32, numel, "step", "binomial number"),)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return c."""
        return payload[0].numel()

    @classmethod
    def examples(cls) -> tuple[RandomMask, ...]:
        """A sparse and a dense one."""
        return (cls(0.3), cls(1.0))
