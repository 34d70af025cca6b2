"""TwoHop: encoded shards are averaged in each node, encoded again, averaged between nodes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_gc.compressors.joint import WholeCodec, limits_of, wire_of
from lightning_gc.core import Bucket, Flow, Gather, Limits
from lightning_gc.schemes.base import NodeScheme, book, padded, toward, unpad
from lightning_gc.schemes.two_shot import TwoShot


@dataclass(frozen=True)
class TwoHop(NodeScheme):
    """Average encoded shards within each node, encode the means, and average those between nodes.

    W workers are W/L nodes of L neighbours, worker w in node ⌊w/L⌋. Worker l of a node gets part l
    of its neighbours' tensors, of L equal ones, and averages it; cuts that into W/L shards and
    sends each, encoded again, to worker l of one node, who averages what comes from all nodes, and
    sends the encoded mean to all. ``TwoShot`` sends W − L of W shards to other nodes; here one
    worker sends for L, so a node's links carry an L-th of that in the first half.

    An element is rounded three times. L times the error of the second encoding, and W times the
    error of the third, are added to the errors of the workers that made them, so the mean over
    workers of the errors is exact.

    If W is not a multiple of L, or at most L, or L is 1, it is ``TwoShot()``.

    Args:
        workers_per_node: L. As the machines are: it decides which messages stay within one.

    Communication pattern:
        Two all-to-alls, where most workers send each other nothing, and one all-gather:
        of the payload's bytes P, per worker, ``(L−1)/L·P`` within the node, ``(1 − L/W)·P/L``
        between nodes, and ``(W−1)/W·P`` for the mean. Lengths are sent: 8 bytes for each tensor
        and worker in either all-to-all.

    Raises:
        ValueError: ``workers_per_node`` below 1; a compressor whose workers vote, for whom a
            majority of nodes' majorities is not one of workers.

    Example:
        >>> from lightning_gc import QSGD, CompressedDDPStrategy, TwoHop
        >>> strategy = CompressedDDPStrategy(QSGD(bits=4), scheme=TwoHop(workers_per_node=8))

    Reference:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training", 2023 (qgZ, the first two rounds; there each worker keeps its own shard).
    """

    def encodings(self, workers: int) -> int:
        if not self._hops(workers):
            return TwoShot().encodings(workers)
        return self.workers_per_node + workers // self.workers_per_node + 1

    def _hops(self, workers: int) -> bool:
        near = self.workers_per_node
        return 1 < near < workers and workers % near == 0

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        workers, near = bucket.workers, self.workers_per_node
        if not self._hops(workers):
            yield from TwoShot().flow(codec, bucket, buffer, out)
            return
        nodes, (node, local) = workers // near, divmod(bucket.worker, near)
        size = -(-buffer.numel() // workers)  # of a shard; a part has as many as there are nodes
        neighbours = [node * near + i for i in range(near)]
        counterparts = [i * near + local for i in range(nodes)]

        parts = [_named(bucket.shard(i, nodes * size), "node", 0) for i in range(near)]
        payloads = []
        for i, part in enumerate(parts):
            shard, whole = padded(buffer, i, nodes * size)
            payloads.append(codec.send(whole, part))
            unpad(whole, shard)
        arrived = yield toward(neighbours, payloads, workers, _limits(codec, nodes * size))

        mean = torch.zeros(nodes * size, dtype=buffer.dtype, device=buffer.device)
        for sender in neighbours:
            codec.receive(tuple(arrived[sender]), mean, 1 / near, parts[local], sender)
        mine = [_named(bucket.shard(local * nodes + i, size), "", 1) for i in range(nodes)]
        payloads = [codec.send(mean[i * size : (i + 1) * size], mine[i]) for i in range(nodes)]
        book(buffer, local * nodes * size, mean, near)
        arrived = yield toward(counterparts, payloads, workers, _limits(codec, size))

        mean = torch.zeros(size, dtype=buffer.dtype, device=buffer.device)
        for sender in counterparts:
            codec.receive(tuple(arrived[sender]), mean, 1 / nodes, mine[node], sender)
        payload = codec.send(mean, replace(mine[node], phase=2))
        book(buffer, (local * nodes + node) * size, mean, workers)
        gathered = yield Gather(payload, limits_of(codec, size))

        if not bucket.wanted:
            return
        out.zero_()
        for sender, payload in enumerate(gathered):
            index = sender % near * nodes + sender // near
            shard, whole = padded(out, index, size)
            codec.receive(
                tuple(payload), whole, 1.0, _named(bucket.shard(index, size), "", 2), sender
            )
            unpad(whole, shard)


def _named(bucket: Bucket, suffix: str, phase: int) -> Bucket:
    """Return a shard's bucket for one of the encodings, with its own random numbers."""
    ((name, shape),) = bucket.shapes.items()
    return replace(bucket, shapes={name + suffix: shape}, phase=phase)


def _limits(codec: WholeCodec, size: int) -> Limits:
    """Return the lengths of all tensors of a payload: to most workers nothing is sent."""
    return tuple(field.length for field in wire_of(codec, size))
