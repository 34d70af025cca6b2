"""ReduceScatter: one all-to-all of encoded shards; each worker averages its own, and no other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Collective, Compressor, limits_of
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Exchange, Flow, Payload, together
from lightning_gc.schemes import Scheme


@dataclass(frozen=True)
class ReduceScatter(Scheme):
    """The first half of ``TwoShot``, for FSDP2: shard i of the mean, on worker i only.

    ``out_i = 1/W · Σ_j decode(encode(x_j[i]))``, where ``x_j[i]`` is the i-th of W equal parts of
    a parameter's gradient on worker j. Each worker encodes W parts once, each with random numbers
    of its own, and decodes what it gets in float32. What is sent dense takes the same way, in the
    gradient's own dtype.

    It is not among ``SCHEMES``, for of their second law it keeps nothing: there all workers end
    with one mean. Elements of ``out`` that belong to other workers mean nothing afterwards.

    Communication pattern:
        One all-to-all for a bucket: ``(W−1)/W`` times the payload's bytes per worker, half of what
        ``TwoShot`` sends, and flat in W. The numbers of a parameter must be a multiple of W.

    Raises:
        ValueError: when combined with a compressor that has rounds of its own, or that votes.

    Reference:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training" (qgZ), arXiv 2306.10209. There in two hops, within nodes and between them.
    """

    cuts = scatters = True

    def check(self, compressor: Compressor) -> None:
        """Refuse what has no payload for one worker alone."""
        if isinstance(compressor.method, Collective):
            raise ValueError(
                f"{compressor!r} averages what it sends in rounds of its own, after which all "
                f"workers have the whole mean; of shards each has its own, so a payload must be "
                f"for one worker. Use QSGD(8), say."
            )
        if compressor.traits.needs_sums:
            raise ValueError(
                f"{compressor!r} needs state of whole tensors, and errors that add up over steps; "
                f"of shards there is neither. Use QSGD(8), say."
            )
        if not compressor.traits.conserves:
            raise ValueError(
                f"The result of {compressor!r} is a vote, and what a shard's owner gets here is "
                f"the mean of what was decoded. Use QSGD(8), say."
            )

    def encodings(self, workers: int) -> int:
        """Return W: each part is encoded once."""
        return workers

    def flow(self, codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange a bucket, parameter by parameter, in one message to each worker."""
        if codec.traits.exact:
            yield from self.dense(bucket, buffer, out)
            return
        spans = [(name, slice(start, stop)) for name, start, stop in bucket.spans()]
        flows = [
            _scattered(codec, bucket.part(name, span.start, span.stop), buffer[span], out[span])
            for name, span in spans
        ]
        yield from together(flows, bucket.workers)

    def dense(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange a bucket as it is: as many bytes as a reduce-scatter sends."""
        workers, me = bucket.workers, bucket.worker
        wire = buffer.to(bucket.grad.dtype, copy=True)  # a reply may share it with other workers
        if buffer.data_ptr() != out.data_ptr():
            buffer.zero_()
        spans = [slice(start, stop) for _, start, stop in bucket.spans()]
        payloads = tuple(tuple(_shard(wire[s], i, workers) for s in spans) for i in range(workers))
        arrived = yield Exchange(payloads)
        for at, span in enumerate(spans):
            mean = _shard(out[span], me, workers).zero_()
            for payload in arrived:
                mean.add_(payload[at], alpha=1 / workers)


def _shard(flat: Tensor, index: int, workers: int) -> Tensor:
    """Return the view of part ``index`` of ``workers`` equal ones."""
    size, rest = divmod(flat.numel(), workers)
    assert not rest, "padded to equal parts"
    return flat[index * size : (index + 1) * size]


def _scattered(codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
    """Exchange one parameter."""
    workers, me = bucket.workers, bucket.worker
    mine = _shard(out, me, workers)
    size = mine.numel()
    parts = [bucket.shard(i, size) for i in range(workers)]
    payloads: tuple[Payload, ...] = tuple(
        codec.send(_shard(buffer, i, workers), part) for i, part in enumerate(parts)
    )
    arrived = yield Exchange(payloads, limits_of(codec, size))
    mean = torch.zeros_like(mine)
    for sender, payload in enumerate(arrived):
        codec.receive(tuple(payload), mean, 1 / workers, parts[me], sender)
    mine.copy_(mean)
