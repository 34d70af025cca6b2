"""Distributed: fulfil requests by collectives of torch.distributed, over NCCL or Gloo."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
import torch.distributed as dist

from lightning_gc.flow import Exchange, Gather, Limits, Mean, Payload, Reply, Request
from lightning_gc.transports.base import (
    LENGTH_BYTES,
    Message,
    Transport,
    all_gather_bytes,
    all_reduce_bytes,
    check_lengths,
)
from lightning_gc.transports.p2p import PIECE, swap

# Renamed in torch 2.13, where the old name warns.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_NAMES = {Mean: "all-reduce", Gather: "all-gather", Exchange: "all-to-all"}


class PeerError(RuntimeError):
    """A collective failed because of another worker."""


class Distributed(Transport):
    """Fulfils requests over a process group of NCCL or Gloo, one contiguous message each.

    Calls block the calling thread (on CUDA: the current stream), for the group's timeout at most.
    Only one thread may use the group.

    Args:
        group: the process group; None is the default group.

    Communication pattern:
        ``Mean`` is one all-reduce per dtype; ``Gather`` one all-gather; ``Exchange`` one
        all-to-all. Ragged payloads first send their lengths, 8 bytes per tensor. On the host an
        ``Exchange``, and a large ``Gather`` of two workers, is sent point to point in pieces.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.worker = dist.get_rank(group)
        self.workers = dist.get_world_size(group)
        self.sent_bytes = 0

    def fulfil(self, request: Request) -> Reply:
        """Carry out one request; PeerError if a peer has died, hangs, or makes other requests."""
        started = time.monotonic()
        try:
            if isinstance(request, Mean):
                return self._mean(request)
            if isinstance(request, Gather):
                return self._gather(request)
            return self._exchange(request)
        except RuntimeError as error:
            peers = ", ".join(str(i) for i in range(self.workers) if i != self.worker)
            raise PeerError(
                f"Worker {self.worker}: {_NAMES[type(request)]} with worker{'s'[: len(peers) > 1]} "
                f"{peers} failed after {time.monotonic() - started:.1f} s, in an exchange of "
                f"gradients. One of them has died, hangs, or has fewer batches or has stopped "
                f"earlier than the others; its own output says more. The backend says: {error}"
            ) from error

    def _mean(self, request: Mean) -> Reply:
        tensors = [t.contiguous() for t in request.tensors]
        means = list(tensors)
        for dtype in dict.fromkeys(t.dtype for t in tensors):
            members = [i for i, t in enumerate(tensors) if t.dtype == dtype]
            views = [tensors[i].view(-1) for i in members]
            flat = torch.cat(views) if len(views) > 1 else views[0]
            # Divided before the sum, as DDP does: half precision must not overflow.
            flat.mul_(1 / self.workers)
            dist.all_reduce(flat, group=self.group)
            self.sent_bytes += all_reduce_bytes(flat.numel() * flat.element_size(), self.workers)
            if len(views) > 1:
                pieces = flat.split([v.numel() for v in views])
                for i, piece in zip(members, pieces, strict=True):
                    means[i] = piece.view(tensors[i].shape)
        return means

    def _gather(self, request: Gather) -> Reply:
        own = request.tensors
        layouts = self._incoming([own] * self.workers, request.limits)
        longest = max(layout.nbytes for layout in layouts)
        message = layouts[self.worker].pack(own)
        if message.numel() < longest:
            message = torch.nn.functional.pad(message, (0, longest - message.numel()))
        gathered = message.new_empty(self.workers * longest)
        rows = gathered.split(longest) if longest else [gathered] * self.workers
        if message.device.type == "cpu" and self.workers == 2 and longest > PIECE:
            swap([message] * 2, rows, self.group)
        elif longest:
            _all_gather(gathered, message, group=self.group)
        self.sent_bytes += all_gather_bytes(longest, self.workers)
        return [layout.unpack(row) for layout, row in zip(layouts, rows, strict=True)]

    def _exchange(self, request: Exchange) -> Reply:
        outgoing = [Message(payload) for payload in request.payloads]
        incoming = self._incoming(request.payloads, request.limits)
        messages = [m.pack(p) for m, p in zip(outgoing, request.payloads, strict=True)]
        sizes = [m.nbytes for m in incoming]
        arrived = messages[0].new_empty(sum(sizes))
        rows = arrived.split(sizes)
        if messages[0].device.type == "cpu":
            swap(messages, rows, self.group)
        else:
            dist.all_to_all_single(
                arrived,
                torch.cat(messages),
                output_split_sizes=sizes,
                input_split_sizes=[m.nbytes for m in outgoing],
                group=self.group,
            )
        self.sent_bytes += sum(m.nbytes for i, m in enumerate(outgoing) if i != self.worker)
        return [m.unpack(row) for m, row in zip(incoming, rows, strict=True)]

    def _incoming(self, toward: Sequence[Payload], limits: Limits | None) -> list[Message]:
        """Return the layouts of the messages sent here; ``toward[i]`` is about to go to worker i.

        Ragged lengths are exchanged for that.
        """
        own = toward[self.worker]
        if limits is None:
            return [Message(own)] * self.workers
        lengths = [[t.numel() for t in payload] for payload in toward]
        ours = torch.tensor(lengths, dtype=torch.int64, device=own[0].device)
        theirs = torch.empty_like(ours)
        dist.all_to_all_single(theirs, ours, group=self.group)
        announced: list[list[int]] = theirs.tolist()
        for sender, arriving in enumerate(announced):
            check_lengths(arriving, own, limits, sender)
        self.sent_bytes += all_gather_bytes(LENGTH_BYTES * len(own), self.workers)
        return [Message(own, arriving) for arriving in announced]


MAX_TEXT = 1 << 24
"""Maximal bytes of a text sent between workers."""


def gather_text(text: str, transport: Transport, device: torch.device) -> list[str]:
    """Return every worker's text, in worker order, without pickle."""
    texts = transport.fulfil(Gather((_encoded(text, device),), (MAX_TEXT,)))
    return [_decoded(payload[0]) for payload in texts]


def broadcast_text(text: str | None, device: torch.device) -> str:
    """Return worker 0's text on all workers of the default group, without pickle.

    Args:
        text: worker 0's; ignored on the others.
        device: one that the group's backend can send from: a GPU with NCCL.

    Communication pattern:
        Two broadcasts: the length in bytes, as int64, and the text in UTF-8.

    Raises:
        ValueError: on all workers, a text of more than ``MAX_TEXT`` bytes.
    """
    if not dist.is_initialized():
        return text or ""
    own = _encoded(text or "", device)
    announced = torch.tensor([own.numel()], dtype=torch.int64, device=device)
    dist.broadcast(announced, src=0)
    length = int(announced)
    if not 0 <= length <= MAX_TEXT:
        raise ValueError(
            f"Worker 0 announces a text of {length:,} bytes, where 0..{MAX_TEXT:,} are possible."
        )
    data = own if dist.get_rank() == 0 else own.new_empty(length)
    if length:
        dist.broadcast(data, src=0)
    return _decoded(data)


def _encoded(text: str, device: torch.device) -> torch.Tensor:
    return torch.tensor(list(text.encode()), dtype=torch.uint8, device=device)


def _decoded(data: torch.Tensor) -> str:
    return bytes(data.tolist()).decode(errors="replace")
