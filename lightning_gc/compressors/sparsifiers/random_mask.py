"""Send the elements under a random mask, the same one on every worker."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Codec, Contraction, Knob
from lightning_gc.compressors.sparsifiers import random_indices, sparse_payload
from lightning_gc.flow import Payload
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class RandomMask(Codec):
    """Send each element with probability ``density``, decided for each on its own.

    ``C(x)_i = x_i`` with probability ``density``, else 0. All workers draw the same mask from
    (seed, parameter name, step), so that no position travels and values can be all-reduced. The
    number sent varies from step to step, and of a small tensor often nothing is sent at all:
    ``RandomK`` sends as many at every step, and at least one. Both wait in the error as long.

    Args:
        density: probability of each element, in (0, 1]. Lower means more compression, more error.

    Wire format:
        ``values  # (c,) float32``: 32 bits a sent element. c is binomial and alike on all workers.

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

    kind = "sparsifier"
    linear = True
    knob = Knob("density", low=1e-5, high=1.0)
    space = (Range("density", 1e-3, 0.5, scale="log"),)

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

        Of a mask that is drawn element by element the number is binomial, and of masks with that
        number all are equally likely. So it is enough to draw c, and c positions. Tensors of equal
        size have masks of their own with the same c.
        """
        c = random_indices.how_many(self.density, numel, bucket)
        return random_indices.positions(numel, c, bucket.generator(shared=True))

    def bound(self, numel: int) -> Contraction:
        """Return δ = density, in expectation over the draw."""
        return Contraction(self.density)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return c."""
        return payload[0].numel()

    @classmethod
    def examples(cls) -> tuple[RandomMask, ...]:
        """A sparse and a dense one."""
        return (cls(0.3), cls(1.0))
