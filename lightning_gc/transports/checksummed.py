"""Checksummed: a transport whose messages carry a checksum, compared before they are decoded."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.core.digest import digest
from lightning_gc.core.flow import Exchange, Gather, Limits, Mean, Payload, Reply, Request
from lightning_gc.transports.base import Transport
from lightning_gc.transports.peer_error import MessageError


class Checksummed(Transport):
    """Adds 8 bytes to every message, a digest of its content, which the receiver compares.

    What is damaged after its sender has packed it is noticed; what a worker computes wrongly and
    sends as it is, is not. Reading a digest makes the host wait for an accelerator.

    Args:
        inner: the transport that communicates.

    Communication pattern:
        ``Gather`` and ``Exchange`` as ``inner`` does them. An all-reduce happens within the
        backend, where nothing can be compared, so ``Mean`` is an all-to-all of shards, which are
        averaged in float32 or wider, and an all-gather of the means: the bytes of a ring
        all-reduce, and the same bits on all workers.

    Raises:
        MessageError: a message is not what its sender, which is named, has packed.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner
        self.worker = inner.worker
        self.workers = inner.workers

    @property
    def sent_bytes(self) -> int:  # type: ignore[override]
        return self.inner.sent_bytes

    @property
    def node_bytes(self) -> int:  # type: ignore[override]
        return self.inner.node_bytes

    def fulfil(self, request: Request) -> Reply:
        if isinstance(request, Mean):
            return self._mean(request)
        if isinstance(request, Gather):
            return self._compared(Gather(_summed(request.tensors), _with_sum(request.limits)))
        payloads = tuple(_summed(payload) for payload in request.payloads)
        return self._compared(Exchange(payloads, _with_sum(request.limits)))

    def _compared(self, request: Gather | Exchange) -> Reply:
        """Return what has arrived, without checksums."""
        reply = self.inner.fulfil(request)
        for sender, (*tensors, announced) in enumerate(reply):
            if sender != self.worker and int(digest(*tensors)) != int(announced):
                raise MessageError(
                    f"What worker {sender} has sent does not have the checksum that came with it: "
                    f"it was damaged on the way to worker {self.worker}, or in the memory of "
                    f"either. Look at their network and memory, and resume from a checkpoint."
                )
        return [payload[:-1] for payload in reply]

    def _mean(self, request: Mean) -> Reply:
        means: dict[int, Tensor] = {}
        for dtype in dict.fromkeys(t.dtype for t in request.tensors):
            members = [i for i, t in enumerate(request.tensors) if t.dtype == dtype]
            given = [request.tensors[i] for i in members]
            flat = self._mean_of(torch.cat([t.reshape(-1) for t in given]))
            pieces = flat.split([t.numel() for t in given])
            for i, t, piece in zip(members, given, pieces, strict=True):
                means[i] = piece.view(t.shape)
        return [means[i] for i in range(len(means))]

    def _mean_of(self, flat: Tensor) -> Tensor:
        size = -(-flat.numel() // self.workers)
        shards = pad(flat, (0, size * self.workers - flat.numel())).split(size or 1)
        wide = torch.promote_types(flat.dtype, torch.float32)
        mean = torch.zeros(size, dtype=wide, device=flat.device)
        for (shard,) in self.fulfil(Exchange(tuple((shard,) for shard in shards))):
            mean.add_(shard.to(wide), alpha=1 / self.workers)
        gathered = self.fulfil(Gather((mean.to(flat.dtype),)))
        return torch.cat([shard for (shard,) in gathered])[: flat.numel()]


def _summed(payload: Payload) -> Payload:
    return (*payload, digest(*payload))


def _with_sum(limits: Limits | None) -> Limits | None:
    return None if limits is None else (*limits, None)
