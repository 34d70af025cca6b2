"""Send as few elements as a variance allows: the large ones as they are, others by chance."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Codec, Knob, Variance
from lightning_gc.compressors.sparsifiers import sparse_payload, sparse_sign_payload, topk_selection
from lightning_gc.flow import Limits, Payload
from lightning_gc.kernels.accumulate import accumulate
from lightning_gc.search_space import Range


@dataclass(frozen=True)
class VarianceSparsifier(Codec):
    """Send elements with probability ``min(1, |x_i|/m)``, made larger so that the mean stays true.

    ``C(x)_i = x_i`` if ``|x_i| ≥ m``, else ``m·sign(x_i)`` with probability ``|x_i|/m``, else 0, so
    that ``E C(x) = x``. Of all probabilities with ``E‖C(x)‖² ≤ (1 + ε)·‖x‖²`` these make the number
    sent least, if over the elements below m ``m = (ε·Σ_all x² + Σ x²) / Σ |x|``: the closed form
    (Algorithm 2) with λ = 1/m. The paper finds it by sorting; here the m of all elements is
    lowered until those below it are those of which it was made, in a few passes.

    The knob is ε, and no density as in the paper's greedy Algorithm 3, since ε is what can be
    promised: how few elements it takes is the tensor's to say. Of d normal ones ``0.64·d / (1+ε)``
    are sent; where few of them make up the norm, far fewer.

    Args:
        epsilon: ε, the variance allowed in units of ``‖x‖²``, in 1e-4..1e9. Higher means more
            compression.

    Wire format:
        Ragged; k elements are sent as they are and c by chance, differently at every step.
        ``values     # (k,) float32``
        ``positions  # (coded_bytes(k, numel),) uint8``, Elias-Fano coded, ascending: at most
        ``2 + log2(numel/k)`` bits each and a byte or two
        ``magnitude  # (1,) float32``: m
        ``drawn      # (coded_bytes(c, numel),) uint8``, positions likewise
        ``signs      # (floor(c / 8),) uint8``, eight elements a byte
        ``last       # (c mod 8,) uint8``, the last signs, one a byte, whose number tells c
        Elements by chance have no value to send: one in a hundred takes 9.6 bits.

    Raises:
        ValueError: ``epsilon`` outside 1e-4..1e9.

    Example:
        >>> from lightning_gc import VarianceSparsifier
        >>> VarianceSparsifier(2.0).bound(1000)
        Variance(omega=2.0)

    Reference:
        Wangni, Wang, Liu and Zhang, "Gradient Sparsification for Communication-Efficient
        Distributed Optimization", NeurIPS 2018.
    """

    epsilon: float = 1.0

    kind = "sparsifier"
    unbiased = True
    ragged = True
    knob = Knob("epsilon", low=0.01, high=1000.0, more="compression")
    space = (Range("epsilon", 0.1, 100.0, scale="log"),)

    def __post_init__(self) -> None:
        if not 1e-4 <= self.epsilon <= 1e9:
            raise ValueError(
                f"VarianceSparsifier(epsilon={self.epsilon!r}): the variance allowed, in units of "
                f"the squared norm, must be in 1e-4..1e9; use 1.0, say."
            )

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take the large ones, and m of what is drawn. On CUDA the host waits for numbers."""
        m = self.magnitude(buffer)
        draw = bucket.generator(shared=False)
        # Of float32's 24 random bits a probability below 2**-24 would be none, or too large.
        noise = torch.rand(buffer.shape, generator=draw, device=buffer.device, dtype=torch.float64)
        by_chance = noise.mul_(m) < buffer.abs()
        large = topk_selection.reaching(buffer, m)
        by_chance[large] = False
        drawn = sparse_sign_payload.take(
            buffer, by_chance.nonzero().view(-1), sparse_sign_payload.both(m)
        )
        return *sparse_payload.take(buffer, large), m.view(1), *drawn

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
        squares = (1 + self.epsilon) * magnitudes.square().sum(dtype=torch.float64)
        m = squares / total
        above = 0
        # m falls, since every element that leaves is m or more; so those above it only grow.
        while (large := topk_selection.reaching(magnitudes, m.to(buffer.dtype))).numel() > above:
            above = large.numel()
            taken = magnitudes[large].double()
            m = (squares - taken.square().sum()) / (total - taken.sum())
        return (m * largest).clamp(least, numbers.max).float()

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add what came as it is, and m or −m where it was drawn."""
        numel, k = out.numel(), payload[0].numel()
        coded = sparse_payload.index_bytes(min(k, numel), numel)
        sparse_sign_payload.check(payload, numel, k, coded, 1)
        values, positions, m, *drawn = payload
        large = sparse_payload.places((values.to(out.dtype), positions), numel)
        others = sparse_sign_payload.places(
            tuple(drawn), sparse_sign_payload.both(m[0]).to(out.dtype), numel
        )
        accumulate(out, *large, scale)
        accumulate(out, *others, scale)

    def bound(self, numel: int) -> Variance:
        """Return ω = ε: ``E‖C(x) − x‖² = E‖C(x)‖² − ‖x‖²`` where the mean is true.

        It is reached by every tensor, but for those of zeros.
        """
        return Variance(self.epsilon)

    def limits(self, numel: int) -> Limits:
        """All elements at most, of either kind."""
        coded = sparse_payload.most_index_bytes(numel, numel)
        return numel, coded, None, *sparse_sign_payload.limits(numel, numel)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many came as they are or were drawn."""
        return payload[0].numel() + sparse_sign_payload.count(payload)

    @classmethod
    def examples(cls) -> tuple[VarianceSparsifier, ...]:
        """One that sends nearly all as it is, one that draws nearly all, one between."""
        return (cls(0.01), cls(1.0), cls(0.2))
