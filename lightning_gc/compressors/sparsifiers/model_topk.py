"""ModelTopK: send what reaches one threshold for all tensors of the model."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from lightning_gc.compressors.base import Contraction, Waits
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import WHOLE, Bucket, Numbers, Record, Structure
from lightning_gc.kernels.dispatch import used_here

_FURTHEST = math.log(4)  # beyond the thresholds of the step before, in units of the logarithm
_FLATTEST, _STEEPEST = 2.0, 0.02  # mean logarithms of how far elements are above a threshold
_HALVINGS = 32
_CACHED = "lightning_gc: threshold of the model"


@dataclass(frozen=True)
class ModelTopK(DensitySparsifier, SparseCodec):
    """Send the elements that reach one threshold for the model, about k in all.

    ``C(x)_i = x_i`` if ``|x_i| ≥ λ_t``, else 0, with one λ_t for all tensors of a worker, where
    ``TopK`` sends the k largest of each: tensors with large gradients send more of their elements,
    others fewer. Buckets are sent while others do not exist yet, so λ_t is the previous step's λ,
    corrected by how many elements reached it: as if in each tensor p the number that reaches λ were
    ``c_p·(λ_{t−1}/λ)^(1/h_p)``, a Pareto tail, with c_p elements that were sent and h_p the mean of
    ``log(|x_i|/λ_{t−1})`` over them (Hill's estimate), λ_t is such that these numbers sum to k =
    density·numel, summed over tensors. It is at most 4 times, and at least a quarter of, what it
    was. In the first step each tensor sends its own k largest.

    So what is sent floats around k, is not limited, and follows a sudden change of scale steps
    later: where a test's gradients became a thousand times as large, five steps sent 7 to 46 times
    k, and where they became as much smaller, a third of k was sent for dozens of steps. Workers
    have their own thresholds. Tensors that are not compressed do not count.

    Args:
        density: share of the model's compressed elements that is sent, in (0, 1]. Lower means more
            compression.

    At density 1 % a sent element takes 40.6 bits, if tensors send equal shares.

    State:
        Per tensor λ, c, the sum of logarithms, k, and their step. They are in checkpoints. Shards
        of ``TwoShot`` keep none: there each shard sends its own k largest in every step.

    Example:
        >>> import torch
        >>> from lightning_gc import ModelTopK
        >>> from lightning_gc.testing import Lockstep
        >>> given = {"a": torch.tensor([8.0, 4.0]), "b": torch.tensor([0.2, 0.1])}
        >>> alone = Lockstep(1, ModelTopK(0.5))
        >>> _ = alone.step([given])
        >>> alone.step([given]).mean  # of the errors and the same again
        {'a': tensor([8., 8.]), 'b': tensor([0., 0.])}

    Reference:
        Aji and Heafield, "Sparse Communication for Distributed Gradient Descent", EMNLP 2017 (one
        threshold for all, from a sample of the whole gradient; layer normalisation is the model's
        affair). Hill, "A Simple General Approach to Inference About the Tail of a Distribution",
        Annals of Statistics 1975. That the threshold is the corrected one of the step before is
        ours.
    """

    traits = replace(DensitySparsifier.traits, reads_model=True)
    waits = Waits(1, 2)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        lowest = topk_selection.smallest(buffer)
        if self.density == 1:  # no threshold, and none to be found for others
            for state in bucket.state.values():
                state.clear()
            return topk_selection.reaching(buffer, lowest)
        threshold = self._threshold(buffer, bucket).to(buffer.dtype).clamp_min(lowest)
        found = topk_selection.reaching(buffer, threshold)
        if len(bucket.state) == 1:
            (state,) = bucket.state.values()
            state["tail"] = _tail(buffer, found, threshold, self.count(buffer.numel()))
            state["step"] = bucket.step
        return found

    def _threshold(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Return λ_t, 0-dim; where nothing is known of a step before, the tensor's own."""
        if bucket.state and _CACHED not in bucket.cache:
            # A tensor that has been sent whole since tells nothing of the step before.
            last = [s for s in bucket.before.values() if s.get("step") == bucket.step - 1]
            bucket.cache[_CACHED] = common_threshold(last, buffer)
        common = bucket.cache[_CACHED] if bucket.state else buffer.new_zeros(())
        if common > 0:
            return common
        return topk_selection.kth_largest(buffer.abs(), self.count(buffer.numel()))

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        return Record({"tail": Numbers((4,), low=0, dtype=torch.float64), "step": WHOLE})

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0: no element of a tensor may reach the model's threshold."""
        return Contraction(0.0)


def _tail(buffer: Tensor, found: Tensor, threshold: Tensor, k: int) -> Tensor:
    """Return a tensor's tail statistics, ``(4,)`` float64; zeros if they are not finite.

    Where nothing has reached the threshold, that one element reaches the largest magnitude.
    """
    if found.numel():
        reached, count = threshold.double(), found.numel()
        above = (buffer[found].abs().double() / reached).log().sum()
    else:
        reached, count = buffer.abs().amax().double(), 1
        above = torch.zeros_like(reached)
    tail = torch.stack(
        [reached, torch.full_like(reached, count), above, torch.full_like(reached, k)]
    )
    return tail.where(tail.isfinite().all() & (reached > 0), 0.0)


def common_threshold(states: Iterable[Mapping[str, Any]], like: Tensor) -> Tensor:
    """Return the threshold, 0-dim float64, that about Σ k elements reach, by bisection.

    Args:
        states: of all tensors. Their ``tail`` has a threshold, how many elements reached it, the
            sum of logarithms of how far they were above it, and k; or zeros.
        like: a tensor on the result's device.

    Returns:
        Zero if no tensor says anything.
    """
    tails = [state["tail"] for state in states if "tail" in state]
    if not tails:
        return like.new_zeros((), dtype=torch.float64)
    for tail in tails:
        used_here(tail)
    thresholds, counts, above, wanted = torch.stack([t.to(like.device) for t in tails]).unbind(1)
    there = thresholds > 0
    logs = thresholds.where(there, 1.0).log()
    means = (above / counts.clamp_min(1)).clamp(_STEEPEST, _FLATTEST)
    low = logs.where(there, math.inf).amin() - _FURTHEST
    high = logs.where(there, -math.inf).amax() + _FURTHEST
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        reaching = (counts * ((logs - middle) / means).exp()).sum()
        too_many = reaching > wanted.sum()
        low, high = torch.where(too_many, middle, low), torch.where(too_many, high, middle)
    return ((low + high) / 2).exp().where(there.any(), 0.0)
