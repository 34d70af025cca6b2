"""SparseReduce: sparse reduce-scatter of selected elements by index range, then all-gather."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Compressor
from lightning_gc.compressors.joint import Joint, WholeCodec
from lightning_gc.compressors.sparsifiers import sparse_codec, topk_selection
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec, WholeSelection
from lightning_gc.core import Bucket, Exchange, Flow, Gather, Limits, Mean, elias_fano
from lightning_gc.core.combinations import judge
from lightning_gc.core.payload_validation import naming
from lightning_gc.kernels.accumulate import accumulate
from lightning_gc.schemes.base import Scheme

SLACK = 5, 4  # an owner sends at most 5/4 of its equal share of the survivors
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
        given = {"scheme": self, "compressor": compressor}
        other = "AllReduce()" if compressor.traits.linear else "TwoShot()"
        selects = isinstance(compressor.method, SparseCodec)
        judge("SparseReduce", **given, other=other, selects=selects)

    def joint(self, workers: int) -> Joint:
        return "ranges"

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        assert isinstance(codec, WholeSelection)  # check() has seen to it
        workers, numel = bucket.workers, codec.elements(buffer.numel())
        limits: Limits = (numel, elias_fano.most_bytes(numel))
        bounds = codec.bounds(buffer)  # (n, 2), of each parameter
        chosen, values = codec.move(buffer, bucket)  # (k_j,), ascending
        (means,) = yield Mean((_proposed_cuts(chosen, bounds, workers, buffer.dtype),))
        ranges, numbers = _agreed(means, bounds, workers)
        # The host waits once for all parameters.
        edges = torch.searchsorted(chosen, ranges.cuts)  # (n, W + 1)
        read = torch.stack([ranges.widths.sum(0), edges.diff(dim=1).sum(0)]).tolist()
        sizes, counts = read

        # Elements in the order of their owners, and at their places in the owner's ranges.
        lengths = edges.diff(dim=1).t().flatten()  # (W·n,)
        first = edges[:, :-1].t().flatten() - lengths.cumsum(0) + lengths
        shift = (ranges.places - ranges.cuts[:, :-1]).t().flatten()
        both = torch.stack([first, shift]).repeat_interleave(
            lengths, dim=1, output_size=chosen.numel()
        )
        order = both[0] + torch.arange(chosen.numel(), device=chosen.device)
        mine = (chosen[order] + both[1]).split(counts)
        payloads = []
        for i, part in enumerate(values[order].split(counts)):
            payloads.append((part, sparse_codec.code(mine[i], sizes[i], buffer)))
            bucket.tally.count(sizes[i], counts[i], payloads[i])
        arrived = yield Exchange(tuple(payloads), limits)

        me = bucket.worker
        mean = buffer.new_zeros(sizes[me])
        found = []
        for sender, payload in enumerate(arrived):
            with naming(codec, bucket, sender):
                theirs, sent = sparse_codec.places(
                    (payload[0].to(mean.dtype), payload[1]), sizes[me]
                )
                accumulate(mean, theirs, sent, 1 / workers)
            found.append(theirs)
        survivors = _best(mean, torch.cat(found), ranges.places[:, me], numbers, workers)
        payload = sparse_codec.take(mean, survivors, codec.sent_dtype)
        # The error of rounding the mean; times W, since the mean over workers must hold it once.
        second = workers * mean[survivors].nan_to_num_(0.0, 0.0, 0.0)
        buffer[ranges.in_bucket(survivors, me)] += second.nan_to_num_(0.0, 0.0, 0.0)
        gathered = yield Gather(payload, limits)

        if bucket.wanted:
            codec.clear(out)
        kept = []
        for owner, payload in enumerate(gathered):
            with naming(codec, bucket, owner):
                theirs, sent = sparse_codec.places(tuple(payload), sizes[owner])
            kept.append(ranges.in_bucket(theirs, owner))
            if bucket.wanted:
                out.index_add_(0, kept[-1], sent.to(out.dtype))
        dropped = ~sparse_codec.among(chosen, torch.cat(kept).sort().values)
        # NaN and overflow are among the survivors or were cut off; no error must keep them.
        buffer[chosen] += values.to(buffer.dtype).nan_to_num(0.0, 0.0, 0.0).where(dropped, 0.0)


@dataclass(frozen=True)
class _Ranges:
    """The ranges of all owners in all parameters.

    Attributes:
        cuts: first elements and ends in the bucket, ``(n, W + 1)`` int64.
        places: first element of each range if an owner's ranges lay one after the other, ``(n, W)``
            int64.
    """

    cuts: Tensor
    places: Tensor

    @property
    def widths(self) -> Tensor:
        """Elements of each range, ``(n, W)``."""
        return self.cuts.diff(dim=1)

    def in_bucket(self, found: Tensor, owner: int) -> Tensor:
        """Return the places in the bucket of elements of an owner's ranges, ``(k,)`` int64."""
        places = self.places[:, owner].contiguous()
        shift = self.cuts[:, owner] - places
        return found + shift[_parameter_of(found, places)]


def _parameter_of(found: Tensor, places: Tensor) -> Tensor:
    """Return the index of the range that holds each element; ranges begin at ``places``."""
    return torch.searchsorted(places.contiguous(), found, right=True) - 1


def _proposed_cuts(chosen: Tensor, bounds: Tensor, workers: int, dtype: torch.dtype) -> Tensor:
    """Return ``(n·W,)`` to be averaged: W − 1 cuts in units of the grid, and the number selected.

    Whole numbers: ``_rounded`` then finds their mean for any order of addition.
    """
    edges = torch.searchsorted(chosen, bounds)  # (n, 2)
    numbers, sizes = edges.diff(dim=1), bounds.diff(dim=1)  # (n, 1)
    share = torch.arange(1, workers, device=chosen.device)  # (W - 1,)
    cuts = share * sizes // workers
    if chosen.numel():
        at = (edges[:, :1] + share * numbers // workers).clamp_(max=chosen.numel() - 1)
        cuts = torch.where(numbers > 0, chosen[at] - bounds[:, :1], cuts)
    units = cuts // _grid_widths(sizes)
    return torch.cat([units, numbers], dim=1).to(dtype).flatten()


def _agreed(means: Tensor, bounds: Tensor, workers: int) -> tuple[_Ranges, Tensor]:
    """Return the ranges, and the mean number selected in each parameter, ``(n,)`` int64."""
    sizes = bounds.diff(dim=1)  # (n, 1)
    rounded = _rounded(means.view(-1, workers), sizes)
    inner = (rounded[:, :-1] * _grid_widths(sizes)).minimum(sizes).sort(dim=1).values
    cuts = torch.cat([torch.zeros_like(sizes), inner, sizes], dim=1) + bounds[:, :1]
    widths = cuts.diff(dim=1)
    return _Ranges(cuts, widths.cumsum(0) - widths), rounded[:, -1]


def _best(mean: Tensor, found: Tensor, places: Tensor, numbers: Tensor, workers: int) -> Tensor:
    """Return the ascending places of the survivors in this worker's ranges. The host waits.

    Args:
        mean: of this worker's ranges.
        found: what all workers have sent, in any order.
        places: first element of each parameter's range in ``mean``, ``(n,)``.
        numbers: mean number selected in each parameter, ``(n,)``.
        workers: W.
    """
    found = found.sort().values
    owner = _parameter_of(found, places)
    again = torch.zeros_like(found, dtype=torch.bool)
    again[1:] = found[1:] == found[:-1]
    elements = mean[found]
    nonzero = (elements != 0) & ~again
    first = torch.searchsorted(found, places.contiguous())
    total = torch.cat([first[1:], first.new_full((1,), found.numel())]) - first
    share, of = SLACK
    most = -(-share * numbers.clamp(min=1) // (of * workers))
    most = torch.minimum(-(-total // workers), most)
    bits = topk_selection.magnitude_bits(elements).where(nonzero, -1)
    order = bits.argsort(descending=True, stable=True)  # of equal ones the first
    order = order[owner[order].argsort(stable=True)]
    rank = torch.arange(found.numel(), device=found.device) - first[owner]
    chosen = torch.empty_like(nonzero)
    chosen[order] = rank < most[owner]
    return found[chosen & nonzero]


def _grid_widths(sizes: Tensor) -> Tensor:
    return (-(-sizes // GRID)).clamp_(min=1)


def _rounded(means: Tensor, most: Tensor) -> Tensor:
    """Round means of W whole numbers, ``(n, W)``, in 0..``most`` whatever bytes arrived.

    Such a mean is a multiple of 1/W, hence at least 1/(4·W) away from where this rounding jumps;
    float32's own rounding, which depends on the order of addition, changes nothing.
    """
    within = means.double().nan_to_num(0.0, float("inf"), 0.0).clamp_(min=0).minimum(most.double())
    return (within + 0.5 + 0.25 / means.shape[1]).floor_().long()
