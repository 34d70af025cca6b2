"""Hierarchical: gradients are averaged dense in each node, and their encodings between nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_gc.compressors.joint import WholeCodec, wire_of
from lightning_gc.core import Bucket, Flow
from lightning_gc.schemes.all_gather import AllGather
from lightning_gc.schemes.base import NodeScheme, book, padded, toward, unpad


@dataclass(frozen=True)
class Hierarchical(NodeScheme):
    """Average in each node without compression, and encode only what goes to other nodes.

    W workers are R = W/L nodes of L neighbours, worker w in node ⌊w/L⌋. A tensor is cut into L
    parts of ⌈n/L⌉ elements, the last ones shorter or empty. Worker l of a node gets part l of its
    neighbours' tensors, in float32, and averages it: a reduce-scatter. It encodes the mean, sends
    that to worker l of all other nodes, and averages what comes from them. Then each worker gets
    the other parts from its neighbours: an all-gather. So a tensor is encoded once per node, of an
    L-th by each of its workers, and compression loses as much as with R workers.

    The error of worker l's encoding, times L, becomes its own error of that part; elsewhere its
    error is zero, as it has sent all. The mean over workers of the errors is exact. Each worker has
    buffers for whole tensors, as with other schemes: 4 bytes per parameter.

    For links that are much slower between nodes than within them: Ethernet, beside NVLink or the
    memory of a machine. Each part is encoded by itself: ``TopK`` takes the largest of each.

    If W is not a multiple of L, or L is 1, it is ``AllGather()``. A single node encodes nothing.

    Args:
        workers_per_node: L. As the machines are: it decides which messages stay within one. With
            ``torchrun``, ``int(os.environ["LOCAL_WORLD_SIZE"])``. When a fit begins, real workers
            compare it with the names of their machines, and warn if a node spans several, or if it
            is ``AllGather()``.

    Communication pattern:
        Three all-to-alls, in which workers that are neither neighbours nor counterparts send each
        other nothing. A tensor has n elements and a payload of P bytes. Each worker sends
        ``(L−1)/L·4n`` bytes to its neighbours, twice, and ``(R−1)·P/L`` to other nodes. Only the
        latter count as its wire bytes, with lengths of 8 bytes for each tensor and worker; the
        monitor shows the former as ``node_bytes``.

    Raises:
        ValueError: ``workers_per_node`` below 1; a compressor with a vote, as a node would
            have one vote; a compressor with its own rounds, such as ``PowerSGD``.

    Example:
        >>> from lightning_gc import CompressedDDPStrategy, Hierarchical, TopK
        >>> strategy = CompressedDDPStrategy(TopK(0.01), scheme=Hierarchical(workers_per_node=8))

    Reference:
        Jia et al., "Highly Scalable Deep Learning Training System with Mixed-Precision", 2018 (the
        hierarchical all-reduce, without compression).
    """

    averages_first = True

    def neighbours(self, workers: int) -> int:
        near = self.workers_per_node
        return near if near > 1 and workers % near == 0 else 1

    def misplaced(self, hosts: Sequence[str]) -> str | None:
        workers, near = len(hosts), self.neighbours(len(hosts))
        if workers > 1 and near < self.workers_per_node:
            return (
                f"{self}: {workers} workers are not nodes of {self.workers_per_node}, so all "
                f"exchange encodings with all, as with AllGather()."
            )
        for first in range(0, workers, near):
            machines = sorted(set(hosts[first : first + near]))
            if len(machines) > 1:
                return (
                    f"{self}: workers {first} to {first + near - 1} are a node, but run on "
                    f"{' and '.join(machines)}, between which their gradients go uncompressed. "
                    f"Give the number of workers of each machine."
                )
        return None

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        workers, near = bucket.workers, self.neighbours(bucket.workers)
        if near == 1:
            yield from AllGather().flow(codec, bucket, buffer, out)
            return
        first = bucket.worker // near * near
        neighbours = range(first, first + near)
        size = -(-buffer.numel() // near)  # of a part

        parts = [(padded(buffer, i, size)[1],) for i in range(near)]
        arrived = yield toward(neighbours, parts, workers, (size,))
        mean = torch.zeros(size, dtype=buffer.dtype, device=buffer.device)
        for sender in neighbours:
            mean.add_(arrived[sender][0], alpha=1 / near)
        total = mean
        if workers > near:
            total = torch.zeros_like(mean)
            yield from self._between(codec, bucket, buffer, mean, total)
        arrived = yield toward(neighbours, [(total,)] * near, workers, (size,))
        if workers == near:
            buffer.zero_()  # nobody reads it any more

        if not bucket.wanted:
            return
        for i, sender in enumerate(neighbours):
            part, whole = padded(out, i, size)
            whole.copy_(arrived[sender][0])
            unpad(whole, part)

    def _between(
        self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, mean: Tensor, total: Tensor
    ) -> Flow:
        """Add the mean over nodes of this worker's part to ``total``; book the error."""
        workers, near = bucket.workers, self.workers_per_node
        local, nodes, size = bucket.worker % near, workers // near, mean.numel()
        counterparts = range(local, workers, near)
        limits = tuple(field.length for field in wire_of(codec, size))
        part = bucket.shard(local, size)
        payload = codec.send(mean, part)  # mean now holds the error
        arrived = yield toward(counterparts, [payload] * nodes, workers, limits)
        buffer.zero_()  # all of it was sent, and nobody reads it any more
        book(buffer, local * size, mean, near)
        for sender in counterparts:
            codec.receive(tuple(arrived[sender]), total, 1 / nodes, part, sender)
