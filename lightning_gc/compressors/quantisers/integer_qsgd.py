"""Send each element as a few bits of a scale that all workers share, and add these as integers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Compressor, Knob, Variance
from lightning_gc.compressors.quantisers import integer_sums
from lightning_gc.flow import Flow
from lightning_gc.search_space import Range

if TYPE_CHECKING:
    from lightning_gc.schemes.base import Scheme


@dataclass(frozen=True)
class IntegerQSGD(Compressor):
    """Round each element at random to one of s = 2^(bits−1) − 1 levels of the workers' largest.

    ``norm = max_w ‖x_w‖_∞``, ``C(x_w)_i = norm·sign(x_i)·ξ_i / s``, where ξ_i is one of the two
    whole numbers around ``s·|x_i| / norm``, drawn so that ``E C(x) = x``. Since all workers have
    the same norm, the mean is ``norm / (s·W)`` times a sum of integers, which is exact: where QSGD
    in two shots rounds the mean once more, this does not. The price is one norm for the whole
    tensor, of all workers: where one of them has much larger elements, the others send few.

    The paper, in our reading, shares the greatest L2 norm and adds levels by an all-reduce. This
    one shares the greatest magnitude, which is less and so makes less error, and adds shard by
    shard: an all-reduce of narrow integers would overflow, one of wide ones would send more.

    Args:
        bits: 2..16 bits an element, the sign included. Lower means more compression, more error.

    Communication pattern:
        Three rounds. An all-gather of the norms, 4 bytes a tensor; an all-to-all of codes, worker
        i getting everybody's shard i; an all-gather of their sums, at the width that sums of W
        need. Per worker ``(bits + ⌈log2(2·s·W + 1)⌉)·(W−1)/W`` bits an element, about
        ``2·bits + log2 W``: 4 + 7 for 4 bits and 8 workers.

    Wire format:
        ``norm   # (1,) float32``
        ``codes  # (packed_bytes(shard, bits),) uint8`` to each worker: ``level + s``
        ``sums   # (packed_bytes(shard, width),) uint8``: the sum of W codes, 0..2·s·W

    Raises:
        ValueError: ``bits`` outside 2..16; any scheme but ``AllReduce``, which stands for a
            compressor's own rounds.

    Example:
        >>> import torch
        >>> from lightning_gc import IntegerQSGD
        >>> from lightning_gc.testing import Lockstep
        >>> two = [{"w": torch.tensor([7.0, -3.0])}, {"w": torch.tensor([5.0, 0.0])}]
        >>> Lockstep(2, IntegerQSGD(bits=4)).step(two).mean["w"]
        tensor([ 6.0000, -1.5000])

    Reference:
        Vineeth S., "Unbiased Single-scale and Multi-scale Quantizers for Distributed
        Optimization", 2021 (QSGD with a shared norm). Alistarh et al., "QSGD:
        Communication-Efficient SGD via Gradient Quantization and Encoding", NeurIPS 2017.
    """

    bits: int = 4

    kind = "quantiser"
    averages = True
    unbiased = True
    knob = Knob("bits", low=2, high=16, scale="linear", integer=True)
    space = (Range("bits", 2, 8, integer=True),)

    def __post_init__(self) -> None:
        if self.bits not in range(2, 17):
            raise ValueError(
                f"IntegerQSGD(bits={self.bits!r}): bits counts the sign and must be a whole number "
                f"in 2..16; use 4 for about an eighth of the bytes of float32."
            )

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: Scheme) -> Flow:
        """Agree on the norm, round, add up."""
        own = integer_sums.largest(buffer)
        norm = yield from integer_sums.agreed(own)
        payloads = integer_sums.take(buffer, norm, self.bits, bucket)
        sent = (own, *(codes for (codes,) in payloads))
        bucket.tally.count(buffer.numel(), buffer.numel(), sent)
        yield from integer_sums.add(self, payloads, norm, self.bits, bucket, out)

    def bound(self, numel: int) -> Variance:
        """Return ω = (√(1 + (d−1)/s²) − 1)/2, exact for one worker, with a norm of its own.

        A common norm above a worker's own makes its error greater than that; for the gradients of
        all W workers, taken as one tensor of W·d elements, the bound is true again.
        """
        return Variance(integer_sums.variance(numel, self.bits))

    @classmethod
    def examples(cls) -> tuple[IntegerQSGD, ...]:
        """Widths that pack in each way."""
        return (cls(4), cls(2), cls(7), cls(16))
