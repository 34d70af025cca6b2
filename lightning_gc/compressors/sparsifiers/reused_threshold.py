"""ReusedThreshold: send elements above a threshold that is used for up to N steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

from lightning_gc.compressors.base import Contraction, Waits
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import COUNT, WHOLE, Bucket, Number, Numbers, Record, Structure


@dataclass(frozen=True)
class ReusedThreshold(DensitySparsifier, SparseCodec):
    """Send the elements that reach a threshold, computed now and then from the k largest.

    ``C(x)_i = x_i`` if ``|x_i| ≥ τ``, else 0. In some steps τ is the k-th largest magnitude of what
    a worker has of a tensor, k = density·numel; in between it stays, for N steps at most, so that a
    step costs one comparison. Zeros are never sent; where the k-th largest is zero, the next step
    finds a threshold again.

    Errors grow for some 1/density steps, and a threshold from before lets ever more of them pass:
    with normal gradients at density 1 %, that of step 0 would let 9.5 times k pass in most of 1,000
    steps. So τ is used for one step at first, then each time for a quarter longer than before (at
    least for one step longer), up to N steps, which 1,000 are after some 4,000 steps; and so again
    when the density has changed. With the same gradients and N = 1000, steps 0 to 9 sent 2.1 times
    k, steps 10 to 99 1.4, steps 100 to 999 1.1. The number sent has no limit.

    Args:
        density: share of elements sent when a threshold is found, in (0, 1]. Lower means more
            compression.
        every: N, the most steps for which a threshold is used, at least 1. Higher costs less time,
            and follows the gradient less closely.

    At density 1 % a sent element takes 40.6 bits.

    State:
        Per tensor τ, the step that found it, for how many steps it is used, and the density. They
        are in checkpoints. Shards of ``TwoShot`` keep none: each finds a threshold in every step.

    Example:
        >>> from lightning_gc import ReusedThreshold
        >>> ReusedThreshold(0.01, every=100)
        ReusedThreshold(density=0.01, every=100)

    Reference:
        Gupta et al., "Training Recommender Systems at Scale: Communication-Efficient Model and Data
        Parallelism" (DCT), KDD 2021, for the gradients of the data-parallel part. Our reading, from
        its abstract, by which the threshold is updated once every few thousand steps, and from the
        1,000 that others report; that it is used for fewer steps at first is ours.
    """

    every: int = 1000
    limits = {"every": "[1, inf) the number of steps"}

    waits = Waits(1, 2)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        # Shards of a tensor and parts of several have no state: their threshold is always new.
        state = next(iter(bucket.state.values())) if len(bucket.state) == 1 else {}
        lowest = topk_selection.smallest(buffer)
        if state.get("density") != self.density:
            state.clear()
        used = min(self.every, state.get("steps", 0))
        if not used or not 0 <= bucket.step - state["found"] < used:
            magnitudes = buffer.abs()
            threshold = topk_selection.kth_largest(magnitudes, self.count(buffer.numel()))
            state.clear()
            if 0 < float(threshold) < math.inf:
                steps = min(self.every, max(used + 1, used * 5 // 4))
                state |= {"density": self.density, "threshold": threshold}
                state |= {"found": bucket.step, "steps": steps}
        else:
            threshold = state["threshold"]
        return topk_selection.reaching(buffer, threshold.to(buffer.dtype).clamp_min(lowest))

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        """Return all four values: none of them is there alone."""
        return Record(
            {
                "density": Number(0, 1),
                "threshold": Numbers((), low=0),
                "found": WHOLE,
                "steps": COUNT,
            }
        )

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: between the steps that find a threshold, nothing may reach it."""
        return Contraction(0.0)

    @classmethod
    def examples(cls) -> tuple[ReusedThreshold, ...]:
        return (cls(0.1, 5), cls(0.3, 1))
