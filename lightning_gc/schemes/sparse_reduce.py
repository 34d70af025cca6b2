"""SparseReduce: sparse reduce-scatter of selected elements by index range, then all-gather."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Compressor
from lightning_gc.compressors.sparsifiers import sparse_codec, topk_selection
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec
from lightning_gc.core import Bucket, Exchange, Flow, Gather, Limits, Mean, elias_fano
from lightning_gc.core.payload_validation import naming
from lightning_gc.schemes.base import Scheme

SLACK = 1.25  # an owner sends at most this many times its equal share of the survivors
GRID = 1 << 16  # maximal number of positions at which a tensor may be cut


@dataclass(frozen=True)
class SparseReduce(Scheme):
    """Select over the whole tensor and send each element to the owner of its range to average.

    Worker j selects k_j elements and sends each to worker i, the *owner* of its range. The owner
    averages the a_i elements received and sends the ``min(ceil(a_i / W), ceil(1.25·k / W))`` of
    greatest magnitude (*survivors*) to all, k being the mean of k_j; about k survive in all. Each
    worker adds the elements it sent that have not survived back to its error.

    ``TwoShot`` cuts the tensor into equal shards instead and selects in each; a shard that holds
    all large elements then sends as many as any other.

    Ranges: every worker proposes cuts that split its own selection into W equal parts; their mean
    is used. If workers select similar elements, all owners receive equally much, even if large
    elements are neighbours. If not, an owner may receive more, at worst all W·k elements; what
    exceeds 1.25 times its share of the survivors returns to errors. Nothing is lost, but that is
    delayed.

    Communication pattern:
        One all-reduce of W numbers; one ragged all-to-all of ``(W−1)/W`` times the worker's own
        payload P; one ragged all-gather of ``(W−1)/W·P`` for equal ranges, at most 1.25 times that.
        So ``2·(W−1)/W·P`` per worker as in a ring all-reduce, and lengths: 48·(W−1) bytes. On an
        accelerator the host waits for the cuts, the survivors' number and the lengths.

    Wire format:
        ``proposal   # (W,) float32``: W − 1 cuts, in 65,536ths of a larger tensor, and k_j
        ``values     # (m,)`` of the compressor's own dtype
        ``positions  # (coded_bytes(m, range),) uint8``, Elias-Fano coded, within the range.

    Raises:
        ValueError: when combined with a compressor that does not select elements.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, SparseReduce, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), scheme=SparseReduce())

    Reference:
        Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk),
        PPoPP 2022. There thresholds and ranges are kept for many steps. Here ranges are agreed on
        in each step, and whether thresholds are kept is the compressor's: ``ReusedThreshold``.
    """

    waits = 2  # for cuts, and for the number of survivors

    def check(self, compressor: Compressor) -> None:
        super().check(compressor)
        if not isinstance(compressor.method, SparseCodec):
            other = "AllReduce()" if compressor.traits.linear else "TwoShot()"
            raise ValueError(
                f"{self!r} splits selected elements by position, but {compressor!r} does not "
                f"select any. Use {other}, or a compressor such as TopK(0.01)."
            )

    def flow(self, codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        workers, numel = bucket.workers, buffer.numel()
        limits: Limits = (numel, elias_fano.most_bytes(numel))
        assert isinstance(codec, SparseCodec)  # check() has seen to it
        chosen = codec.choose(buffer, bucket)  # (k_j,) int64, ascending
        (means,) = yield Mean((_proposed_cuts(chosen, workers, buffer),))
        bounds = _common_cuts(means, numel)  # (W + 2,): W + 1 cuts, the number selected
        read = torch.cat([bounds, torch.searchsorted(chosen, bounds[:-1])]).tolist()
        cuts, (number, *edges) = read[: workers + 1], read[workers + 1 :]
        most = math.ceil(SLACK * max(number, 1) / workers)

        mine = [chosen[edges[i] : edges[i + 1]] - cuts[i] for i in range(workers)]
        ranges = [slice(cuts[i], cuts[i + 1]) for i in range(workers)]
        payloads = [codec.take(buffer[r], found) for r, found in zip(ranges, mine, strict=True)]
        for i, payload in enumerate(payloads):
            bucket.tally.count(cuts[i + 1] - cuts[i], mine[i].numel(), payload)
        arrived = yield Exchange(tuple(payloads), limits)

        error = buffer[ranges[bucket.worker]]
        mean = torch.zeros_like(error)
        for sender, payload in enumerate(arrived):
            with naming(codec, bucket, sender):
                sparse_codec.add(tuple(payload), mean, 1 / workers)
        share = -(-sum(payload[0].numel() for payload in arrived) // workers)
        nonzero = topk_selection.reaching(mean, topk_selection.smallest(mean))
        survivors = topk_selection.best(mean, nonzero, min(share, most))
        payload = codec.take(mean, survivors)
        # The error of rounding the mean; times W, since the mean over workers must hold it once.
        second = workers * mean[survivors].nan_to_num_(0.0, 0.0, 0.0)
        error[survivors] += second.nan_to_num_(0.0, 0.0, 0.0)
        gathered = yield Gather(payload, limits)

        if bucket.wanted:
            out.zero_()
        for owner, payload in enumerate(gathered):
            with naming(codec, bucket, owner):
                found, values = sparse_codec.places(tuple(payload), cuts[owner + 1] - cuts[owner])
            if bucket.wanted:
                out[ranges[owner]].index_add_(0, found, values.to(out.dtype))
            _return_to_error(buffer[ranges[owner]], mine[owner], payloads[owner][0], found)


def _return_to_error(error: Tensor, sent: Tensor, values: Tensor, survivors: Tensor) -> None:
    """Add to ``error`` the elements sent that have not survived; positions ascend in both."""
    dropped = ~sparse_codec.among(sent, survivors)
    # NaN and overflow are among the survivors or were cut off; no error must keep them.
    error[sent] += values.to(error.dtype).nan_to_num(0.0, 0.0, 0.0).where(dropped, 0.0)


def _proposed_cuts(chosen: Tensor, workers: int, like: Tensor) -> Tensor:
    """Return ``(W,)`` to be averaged: W − 1 cuts in units of the grid, and the number selected.

    Whole numbers: ``_rounded`` then finds their mean for any order of addition.
    """
    number = chosen.numel()
    if number:
        cuts = chosen[torch.arange(1, workers, device=chosen.device) * number // workers]
    else:
        cuts = torch.arange(1, workers, device=chosen.device) * like.numel() // workers
    units = cuts // _grid_width(like.numel())
    return torch.cat([units, units.new_full((1,), number)]).to(like.dtype)


def _common_cuts(means: Tensor, numel: int) -> Tensor:
    """Return ``(W + 2,)`` int64: ascending cuts from 0 to ``numel``, and the mean selected."""
    rounded = _rounded(means, numel)
    cuts = (rounded[:-1] * _grid_width(numel)).clamp_(max=numel).sort().values
    return torch.cat([cuts.new_zeros(1), cuts, cuts.new_full((1,), numel), rounded[-1:]])


def _grid_width(numel: int) -> int:
    return max(1, -(-numel // GRID))


def _rounded(means: Tensor, most: int) -> Tensor:
    """Round means of W whole numbers, ``(W,)``, in 0..``most`` whatever bytes arrived.

    Such a mean is a multiple of 1/W, hence at least 1/(4·W) away from where this rounding jumps;
    float32's own rounding, which depends on the order of addition, changes nothing.
    """
    within = means.double().nan_to_num(0.0, most, 0.0).clamp_(0, most)
    return (within + 0.5 + 0.25 / means.numel()).floor_().long()
