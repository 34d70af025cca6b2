"""What a transport is: it fulfils requests and knows no compressor."""

from __future__ import annotations

import abc
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gc.flow import Flow, Limits, Payload, Reply, Request


class Transport(abc.ABC):
    """Moves tensors between workers, and counts the bytes that this worker hands to the network.

    Attributes:
        worker: this worker's index.
        workers: how many workers there are.
        sent_bytes: bytes sent since construction, by the volume of the algorithms used: a ring for
            all-reduce and all-gather. Not counted: frame headers of the network, and the backend's
            own handshakes (Gloo: 0.4 to 1.7 KB a request and other worker).
    """

    worker: int
    workers: int
    sent_bytes: int

    @abc.abstractmethod
    def fulfil(self, request: Request) -> Reply:
        """Carry out one request together with the other workers and return the reply."""


def run(flow: Flow, transport: Transport) -> None:
    """Drive a flow to its end."""
    try:
        request = next(flow)
        while True:
            request = flow.send(transport.fulfil(request))
    except StopIteration:
        return


def all_reduce_bytes(nbytes: int, workers: int) -> int:
    """Return what one worker sends in a ring all-reduce of ``nbytes``."""
    return 2 * (workers - 1) * nbytes // workers


def all_gather_bytes(nbytes: int, workers: int) -> int:
    """Return what one worker sends in an all-gather of messages of ``nbytes``."""
    return (workers - 1) * nbytes


ALIGNMENT = 8
LENGTH_BYTES = 8


class Message:
    """The layout of one payload as one contiguous byte string.

    Tensors lie in the order of falling element size, each aligned to it without padding between
    them; the end is padded to 8 bytes so that messages can stand in a row.
    """

    def __init__(self, like: Payload, lengths: Sequence[int] | None = None) -> None:
        """Lay out tensors of the dtypes and shapes of ``like``.

        Args:
            like: the tensors.
            lengths: where given, element counts that override the tensors' own (ragged payloads).
        """
        self.dtypes = [t.dtype for t in like]
        self.shapes: list[tuple[int, ...]] = [tuple(t.shape) for t in like]
        if lengths is not None:
            self.shapes = [
                (n,) if n != t.numel() else tuple(t.shape)
                for t, n in zip(like, lengths, strict=True)
            ]
        self.order = sorted(range(len(like)), key=lambda i: -like[i].element_size())
        self.spans: list[tuple[int, int]] = [(0, 0)] * len(like)
        end = 0
        for i in self.order:
            start = end
            end += torch.Size(self.shapes[i]).numel() * self.dtypes[i].itemsize
            self.spans[i] = (start, end)
        self.nbytes = -(-end // ALIGNMENT) * ALIGNMENT
        self.padding = self.nbytes - end

    def pack(self, tensors: Payload) -> Tensor:
        """Return the message, ``(nbytes,)`` uint8."""
        pieces = [as_bytes(tensors[i]) for i in self.order]
        if self.padding or not pieces:
            device = tensors[0].device if tensors else None
            pieces.append(torch.zeros(self.padding, dtype=torch.uint8, device=device))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Return the tensors, as views of a message which may be longer than they need.

        Raises:
            ValueError: it is shorter, or not of bytes.
        """
        if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() < self.nbytes:
            raise ValueError(
                f"A message of {self.nbytes} bytes was expected, but {tuple(message.shape)} of "
                f"{message.dtype} arrived; sender and receiver disagree on the format."
            )
        return [
            _typed(message[start:stop], dtype).view(shape)
            for (start, stop), dtype, shape in zip(
                self.spans, self.dtypes, self.shapes, strict=True
            )
        ]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as a flat uint8 view."""
    # as_strided, since a tensor of one element may be contiguous with any stride.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _typed(data: Tensor, dtype: torch.dtype) -> Tensor:
    # A bool of any other byte than 0 and 1 would be neither true nor false.
    return data != 0 if dtype == torch.bool else data.view(dtype)


def check_lengths(lengths: Sequence[int], own: Payload, limits: Limits, sender: int) -> None:
    """Refuse lengths that no honest worker of this configuration can announce.

    Raises:
        ValueError: a fixed length that differs, a negative one, or one over its limit.
    """
    for length, tensor, limit in zip(lengths, own, limits, strict=True):
        if limit is None and length != tensor.numel():
            raise ValueError(
                f"Worker {sender} announces {length} elements where all workers send "
                f"{tensor.numel()}; is its configuration or its model another one?"
            )
        if limit is not None and not 0 <= length <= limit:
            raise ValueError(
                f"Worker {sender} announces {length} elements where at most {limit} are possible; "
                f"the message is damaged or its model is another one."
            )
