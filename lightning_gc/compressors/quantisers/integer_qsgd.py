"""IntegerQSGD: QSGD with one norm for all workers, so that their codes add up as integers."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_gc.compressors.base import Collective, Variance
from lightning_gc.compressors.quantisers import integer_sums
from lightning_gc.compressors.quantisers.blockwise_codes import BITS, CODES
from lightning_gc.core import Bucket, Flow, Wire


@dataclass(frozen=True)
class IntegerQSGD(Collective):
    """Round each element at random to one of s = 2^(bits−1) − 1 levels of the workers' largest.

    ``norm = max_w ‖x_w‖_∞``, ``C(x_w)_i = norm·sign(x_i)·ξ_i / s``, where ξ_i is one of the two
    whole numbers around ``s·|x_i| / norm``, drawn so that ``E C(x) = x``. The mean is
    ``norm / (s·W)`` times an exact sum of integers: it is not rounded a second time, as by
    ``TwoShot`` with QSGD. But if one worker has much larger elements, the others send few.

    The paper, in our reading, shares the greatest L2 norm, which makes more error, and adds levels
    by an all-reduce: of narrow integers it would overflow, of wide ones send more than our sums.

    Args:
        bits: 2..16 bits an element, the sign included. Lower means more compression, more error.

    Communication pattern:
        Three rounds. An all-gather of the norms, 4 bytes a tensor; an all-to-all of codes, worker
        i getting everybody's shard i; an all-gather of their sums, at the width that sums of W
        need. Per worker ``(bits + ⌈log2(2·s·W + 1)⌉)·(W−1)/W`` bits an element: 4 + 7 for 4 bits
        and 8 workers.

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
    limits = {"bits": CODES}

    traits = BITS

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        norm = yield from integer_sums.agreed(integer_sums.largest(buffer))
        payloads = integer_sums.take(buffer, norm, self.bits, bucket)
        yield from integer_sums.add(self, payloads, norm, self.bits, bucket, out)

    def bound(self, numel: int) -> Variance:
        """Return ω = (√(1 + (d−1)/s²) − 1)/2, exact for one worker, with its own norm.

        For W workers it holds for their gradients taken as one tensor of W·d elements.
        """
        return Variance(integer_sums.variance(numel, self.bits))

    def wire(self, numel: int) -> Wire:
        return integer_sums.wire("norm", numel, self.bits)

    @classmethod
    def examples(cls) -> tuple[IntegerQSGD, ...]:
        return (cls(4), cls(2), cls(7), cls(16))
