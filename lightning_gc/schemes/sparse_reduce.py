"""Reduce what has been selected by ranges of positions, select again, all-gather."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc import positions
from lightning_gc.bucket import Bucket
from lightning_gc.compressors import sparse
from lightning_gc.compressors.compressor import Codec
from lightning_gc.flow import Exchange, Flow, Gather, Limits, Mean
from lightning_gc.schemes.scheme import Scheme, count, naming

SLACK = 1.25
"""How many times its equal share of the survivors an owner may send."""


@dataclass(frozen=True)
class SparseReduce(Scheme):
    """Select over the whole tensor, send each element to the owner of its range, who averages.

    Worker j selects k_j elements and sends those of range i to worker i, its *owner*. The owner
    adds up the a_i elements that arrive, divides by W, and sends the
    ``min(ceil(a_i / W), ceil(1.25·k / W))`` of greatest magnitude to all, k being the mean of
    k_j. So survivors are shared out by what arrives, and about k survive in all. What does not
    survive is the owner's to remember: W times as much goes into its error, so that the mean over
    workers of the errors is true. ``TwoShot`` cuts the tensor into equal shards instead and
    selects in each; a shard that holds all large elements then sends as many as any other.

    Ranges: every worker has cuts that split its own selection into W equal parts, and the common
    cuts are the mean of these. Where workers select alike, all ranges are equally busy, however
    unevenly large elements lie; where they do not, an owner may be sent more than others (at worst
    all W·k elements, while what one worker sends stays below its own k), and of what exceeds 1.25
    times its share of the survivors the rest waits in its error. Nothing is lost, and the bytes
    that a worker sends stay bounded, but what waits there arrives later.

    Communication pattern:
        One small all-reduce, of W numbers; one ragged all-to-all, of ``(W−1)/W`` times the
        worker's own payload P; one ragged all-gather, of ``(W−1)/W·P`` for equal ranges and at
        most 1.25 times that. So ``2·(W−1)/W·P`` per worker as in a ring all-reduce, and lengths:
        32·(W−1) bytes. On an accelerator the host waits for the cuts and for lengths.

    Wire format:
        ``shares     # (W,) float32``: of the tensor below each of W − 1 cuts, and k_j / numel
        ``values     # (m,)`` of the compressor's own dtype
        ``positions  # (coded_bytes(m, range),) uint8``, Elias-Fano coded, within the range.

    Raises:
        ValueError: when combined with a compressor that does not select elements.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, SparseReduce, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), scheme=SparseReduce())

    Reference:
        Li and Hoefler, "Near-Optimal Sparse Allreduce for Distributed Deep Learning" (Ok-Topk),
        PPoPP 2022. There the thresholds and the ranges are kept for many steps and what an owner
        drops returns to those who sent it; here both are found anew, and the owner books it.
    """

    splits = True

    def flow(self, codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Select, agree on ranges, exchange, average one, select in it, gather W, decode."""
        workers, numel = bucket.workers, buffer.numel()
        limits: Limits = (numel, positions.most_bytes(numel))
        chosen = codec.choose(buffer, bucket)  # (k_j,) int64, ascending
        (shares,) = yield Mean((_shares(chosen, workers, buffer),))
        cuts, most = _agreed(shares.tolist(), numel)

        edges = torch.searchsorted(chosen, torch.tensor(cuts, device=chosen.device)).tolist()
        payloads = []
        for i in range(workers):
            mine = chosen[edges[i] : edges[i + 1]] - cuts[i]
            payloads.append(codec.take(buffer[cuts[i] : cuts[i + 1]], mine))
            count(bucket, cuts[i + 1] - cuts[i], mine.numel(), payloads[-1])
        arrived = yield Exchange(tuple(payloads), limits)

        error = buffer[cuts[bucket.worker] : cuts[bucket.worker + 1]]
        mean = torch.zeros_like(error)
        for sender, payload in enumerate(arrived):
            with naming(codec, bucket, sender):
                sparse.put(tuple(payload), mean, 1 / workers)
        share = -(-sum(payload[0].numel() for payload in arrived) // workers)
        nonzero = sparse.reaching(mean, sparse.smallest(mean))
        survivors = codec.take(mean, sparse.best(mean, nonzero, min(share, most)))
        error.add_(mean, alpha=workers)  # what has not survived
        # NaN and overflow that another worker sent are in the payload; no error must keep them.
        error.nan_to_num_(0.0, 0.0, 0.0)
        gathered = yield Gather(survivors, limits)

        if not bucket.wanted:
            return
        out.zero_()
        for sender, payload in enumerate(gathered):
            with naming(codec, bucket, sender):
                sparse.put(tuple(payload), out[cuts[sender] : cuts[sender + 1]], 1.0)


def _shares(chosen: Tensor, workers: int, like: Tensor) -> Tensor:
    """Return what workers agree on: W − 1 cuts and the number selected, as shares of the tensor.

    Shares are as good as numbers here, for what rounds them is the same for all.
    """
    number, numel = chosen.numel(), max(like.numel(), 1)
    if number:
        marks = [number * i // workers for i in range(1, workers)]
        cuts = chosen[torch.tensor(marks, dtype=torch.int64, device=chosen.device)]
    else:
        cuts = torch.arange(1, workers, device=chosen.device) * numel // workers
    agreed = torch.cat([cuts, cuts.new_tensor([number])])
    return agreed.to(torch.float64).div_(numel).to(like.dtype)


def _agreed(shares: Sequence[float], numel: int) -> tuple[list[int], int]:
    """Return W + 1 ascending cuts, from 0 to ``numel``, and the most that one owner sends.

    Any bytes may have arrived: what is no share counts as 0 or 1.
    """
    numbers = [round(min(max(s, 0.0), 1.0) * numel) if s == s else 0 for s in shares]
    *cuts, number = numbers
    most = math.ceil(SLACK * max(number, 1) / len(shares))
    return [0, *sorted(cuts), numel], most
