"""GTopK: apply the k largest elements of a sum that workers merge in a tree."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Collective, Contraction, Waits
from lightning_gc.compressors.sparsifiers import sparse_codec, topk_selection
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import (
    Bucket,
    Exchange,
    Flow,
    Gather,
    Payload,
    Wire,
    elias_fano,
    payload_validation,
)
from lightning_gc.core.digest import check_same, digest
from lightning_gc.core.wire import limits

Sparse = tuple[Tensor, Tensor]  # ascending positions, values
_DAMAGED = "A message was damaged on its way down the tree; resume from a checkpoint."


@dataclass(frozen=True)
class GTopK(DensitySparsifier, Collective):
    """Select k elements on each worker, add up two selections at a time, keep k of every sum.

    The tree has ⌈log2 W⌉ levels and takes any W: at level l worker i·2^(l+1) adds what comes from
    worker i·2^(l+1) + 2^l, where there is one, to its own and keeps the k elements of greatest
    magnitude. The selection of worker 0 then goes back down the tree, and all apply it, divided by
    W. For any W, k elements are applied, and at most k are received in a round.

    An element that is not applied returns to the error of each worker that had selected it. Parts
    of applied elements that a merge dropped go into the error of the worker that merged. So nothing
    is lost; the paper, which clears errors at all positions applied, loses these parts.

    Args:
        density: share of elements applied, in (0, 1]. Lower means more compression, more error.

    Every worker gets the selection from another one, so a single damaged message would let replicas
    part: workers compare its digest before they apply it.

    Communication pattern:
        2·⌈log2 W⌉ rounds, one after the other, each a ragged all-to-all in which a worker sends
        at most k elements to one other; then an all-gather of 8 bytes. Worker 0 sends ⌈log2 W⌉
        payloads in all, the others fewer; with ``AllGather`` each would send W − 1.

    Raises:
        ValueError: ``density`` outside (0, 1]; a scheme, since it takes no scheme.
        ReplicaError: in a step, on all workers, if they have not got the same selection.

    Example:
        >>> import torch
        >>> from lightning_gc import GTopK
        >>> from lightning_gc.testing import Lockstep
        >>> two = [{"w": torch.tensor([9.0, 0.0, 4.0])}, {"w": torch.tensor([0.0, 8.0, 6.0])}]
        >>> result = Lockstep(2, GTopK(density=0.3)).step(two)
        >>> result.mean["w"], result.errors[1]["w"]
        (tensor([4.5000, 0.0000, 0.0000]), tensor([0., 8., 6.]))

    Reference:
        Shi, Wang, Zhao, Tang, Wang, Huang and Chu, "A Distributed Synchronous SGD Algorithm with
        Global Top-k Sparsification for Low Bandwidth Networks", ICDCS 2019.
    """

    waits = Waits(1)  # for digests

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        k = self.count(buffer.numel())
        me, workers = bucket.worker, bucket.workers
        chosen = topk_selection.largest(buffer, k)
        own = (chosen, buffer[chosen])
        buffer.index_fill_(0, chosen, 0)
        bucket.tally.count(buffer.numel(), k, _packed(own, buffer))
        # One level at least: a single worker asks too, or its bad gradient would go unnoticed.
        spans = [1 << level for level in range(max(1, (workers - 1).bit_length()))]

        partial, lost = own, []
        for span in spans:
            sends = me % (2 * span) == span
            arrived = yield self._towards(me - span if sends else None, partial, bucket, buffer)
            if me % (2 * span) == 0 and me + span < workers:
                other = self._read(arrived[me + span], bucket, buffer, me + span)
                partial, dropped = merged(partial, other, k)
                lost.append(dropped)
        for span in reversed(spans):
            sends = me % (2 * span) == 0 and me + span < workers
            arrived = yield self._towards(me + span if sends else None, partial, bucket, buffer)
            if me % (2 * span) == span:
                partial = self._read(arrived[me - span], bucket, buffer, me - span)

        yield from _agreed(partial, bucket)
        applied, values = partial
        _give_back(buffer, own, ~sparse_codec.among(own[0], applied))
        for dropped in lost:
            _give_back(buffer, dropped, sparse_codec.among(dropped[0], applied))
        if bucket.wanted:
            out.zero_()
            out[applied] = (values / workers).to(out.dtype)

    def _towards(
        self, receiver: int | None, selected: Sparse, bucket: Bucket, buffer: Tensor
    ) -> Exchange:
        """Return an exchange in which only ``receiver`` is sent something, if anybody."""
        nothing: Payload = (buffer.new_empty(0), buffer.new_empty(0, dtype=torch.uint8))
        payloads = [nothing] * bucket.workers
        if receiver is not None:
            payloads[receiver] = _packed(selected, buffer)
        return Exchange(tuple(payloads), limits(self.wire(buffer.numel())))

    def _read(self, payload: Payload, bucket: Bucket, buffer: Tensor, sender: int) -> Sparse:
        with payload_validation.naming(self, bucket, sender):
            return sparse_codec.places(tuple(payload), buffer.numel())

    def bound(self, numel: int) -> Contraction:
        """Return δ = k / numel, as ``TopK``'s, for one worker."""
        return Contraction(self.count(numel) / numel if numel else 1.0)

    def wire(self, numel: int) -> Wire:
        return sparse_codec.wire(self.count(numel), numel, "worker")


def _packed(selected: Sparse, buffer: Tensor) -> Payload:
    where, values = selected
    return values, elias_fano.encode(where, buffer.numel())


def merged(one: Sparse, other: Sparse, k: int) -> tuple[Sparse, Sparse]:
    """Return the k largest elements of the sum of two selections, and its other elements.

    A position that both have is among the others once more, with a value of 0, so that no length
    depends on values. ``one`` has k elements, or as many as the result.
    """
    where, order = torch.cat([one[0], other[0]]).sort(stable=True)
    sums = torch.cat([one[1], other[1].to(one[1].dtype)])[order]
    twice = where[1:] == where[:-1]  # as the one before
    sums[:-1] += sums[1:].where(twice, 0.0)
    sums[1:].masked_fill_(twice, 0.0)
    magnitudes = sums.abs()
    magnitudes[1:].masked_fill_(twice, -1.0)  # behind zeros
    ranked = magnitudes.sort(descending=True, stable=True).indices
    kept, others = ranked[:k].sort().values, ranked[k:].sort().values
    return (where[kept], sums[kept]), (where[others], sums[others])


def _agreed(selected: Sparse, bucket: Bucket) -> Flow:
    """Raise ReplicaError on all workers unless all have arrived at the same selection."""
    found = yield Gather((digest(*selected),))
    digests = torch.cat([each for (each,) in found]).tolist()
    names = ", ".join(bucket.shapes)
    check_same(digests, f"GTopK's selection for {names}", _DAMAGED)


def _give_back(error: Tensor, selected: Sparse, which: Tensor) -> None:
    where, values = selected
    # NaN and overflow that another worker sent; no error must keep them.
    error.index_add_(0, where, values.to(error.dtype).nan_to_num(0.0, 0.0, 0.0).where(which, 0.0))
