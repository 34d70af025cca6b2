"""Lay out a payload as one contiguous message, and reserve a message that kernels fill in place."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gc.core.flow import Payload

FORMAT = 4
"""Number of the layout of messages. Every change of what workers send raises it."""

ALIGNMENT = 16
"""Bytes. NCCL is slow where a worker's part of a collective is not a multiple of it."""

SEAL_BYTES = 8


class Message:
    """Byte layout of one payload as one contiguous message.

    Tensors are sorted by descending element size, so each is aligned without padding. The message
    is padded to a multiple of 16 bytes, so that messages can be concatenated and each worker's part
    of a collective is aligned. A message with announced lengths ends in a seal, behind the padding:
    8 bytes computed from the lengths. A missing seal shows that the lengths were false.

    Args:
        dtypes: of the payload's tensors.
        shapes: of the payload's tensors.
        sealed: the announced lengths in elements, or None.
    """

    def __init__(
        self,
        dtypes: Sequence[torch.dtype],
        shapes: Sequence[tuple[int, ...]],
        sealed: Sequence[int] | None = None,
    ) -> None:
        self.dtypes, self.shapes = list(dtypes), list(shapes)
        self.order = sorted(range(len(dtypes)), key=lambda i: -dtypes[i].itemsize)
        self.spans: list[tuple[int, int]] = [(0, 0)] * len(dtypes)
        end = 0
        for i in self.order:
            start = end
            end += torch.Size(self.shapes[i]).numel() * self.dtypes[i].itemsize
            self.spans[i] = (start, end)
        self.seal: int | None = None
        if sealed is not None:
            self.seal = ~zlib.crc32(str(list(sealed)).encode())  # negative: no small number
        ending = 0 if sealed is None else SEAL_BYTES
        self.padding = -(end + ending) % ALIGNMENT
        self.nbytes = end + self.padding + ending

    @classmethod
    def of(cls, like: Payload, lengths: Sequence[int] | None = None) -> Message:
        """Return the layout of tensors like ``like``, with ``lengths`` if they are announced."""
        numels = [t.numel() for t in like] if lengths is None else lengths
        shapes: list[tuple[int, ...]] = [
            tuple(t.shape) if n == t.numel() else (n,) for t, n in zip(like, numels, strict=True)
        ]
        return cls([t.dtype for t in like], shapes, lengths)

    def pack(self, tensors: Payload) -> Tensor:
        """Return the message, ``(nbytes,)`` uint8; without a copy if the payload is ``Packed``."""
        if isinstance(tensors, Packed) and tensors.layout.same(self):
            return tensors.message
        pieces = [as_bytes(tensors[i]) for i in self.order]
        device = tensors[0].device if tensors else None
        if self.padding or not pieces:
            pieces.append(torch.zeros(self.padding, dtype=torch.uint8, device=device))
        if self.seal is not None:
            pieces.append(as_bytes(torch.full((1,), self.seal, device=device)))
        return torch.cat(pieces) if len(pieces) > 1 else pieces[0]

    def unpack(self, message: Tensor) -> list[Tensor]:
        """Return views of ``message``, maybe padded.

        Raises:
            ValueError: it is short, not flat uint8, or, on the host, without its seal.
        """
        if message.dtype != torch.uint8 or message.dim() != 1 or message.numel() < self.nbytes:
            raise ValueError(
                f"A message of {self.nbytes} bytes was expected, but {tuple(message.shape)} of "
                f"{message.dtype} arrived; sender and receiver disagree on the format."
            )
        if self.seal is not None and message.device.type == "cpu":
            found = message[self.nbytes - SEAL_BYTES : self.nbytes].view(torch.int64)
            if int(found) != self.seal:
                raise ValueError(
                    f"The message does not end after {self.nbytes} bytes, as announced. It was "
                    f"damaged on the way."
                )
        return self.views(message)

    def views(self, message: Tensor) -> list[Tensor]:
        """Return views of ``message`` without any check."""
        tensors = []
        for span, dtype, shape in zip(self.spans, self.dtypes, self.shapes, strict=True):
            data = message[slice(*span)]
            # A bool from a byte other than 0 and 1 is undefined behaviour.
            tensors.append((data != 0 if dtype == torch.bool else data.view(dtype)).view(shape))
        return tensors

    def same(self, other: Message) -> bool:
        """Return whether both layouts have the same bytes in the same places."""
        ours = self.spans, self.dtypes, self.nbytes, self.seal
        return ours == (other.spans, other.dtypes, other.nbytes, other.seal)


class Packed(tuple[Tensor, ...]):
    """A payload of tensors that are views of the message in which it is sent.

    The message may have room for tensors of others, such as the guard's flag. They are not in the
    payload before ``more`` adds them.

    Attributes:
        message: ``(nbytes,)`` uint8. Kernels write all of it, zeros into the padding too.
        layout: of the message.
        room: tensors in the message that are not in the payload.
    """

    message: Tensor
    layout: Message
    room: int

    @property
    def flag(self) -> Tensor:
        """The guard's flag, the last tensor of a complete payload, ``(1,)``."""
        return self[-1]

    @property
    def padding(self) -> Tensor:
        """The bytes behind the last tensor, 0 to 15."""
        end = self.layout.nbytes - (SEAL_BYTES if self.layout.seal is not None else 0)
        return self.message[end - self.layout.padding : end]

    @property
    def seal(self) -> Tensor:
        """The bytes of the seal, if the message has one."""
        return self.message[self.layout.nbytes - SEAL_BYTES : self.layout.nbytes]

    def first(self, count: int) -> Packed:
        """Return a payload of the first ``count`` tensors; the message has room for the others."""
        return _packed(self[:count], self.message, self.layout)

    def more(self) -> Packed:
        """Return the payload with the first tensor for which there is room."""
        tensors = self.layout.views(self.message)
        return _packed(tensors[: len(self) + 1], self.message, self.layout)


def _packed(tensors: Sequence[Tensor], message: Tensor, layout: Message) -> Packed:
    packed = Packed(tensors)
    packed.message, packed.layout = message, layout
    packed.room = len(layout.spans) - len(tensors)
    return packed


Fields = Sequence[tuple[torch.dtype, int]]
"""Dtype and length of each tensor of a payload."""


@functools.lru_cache(maxsize=1024)
def _layout(fields: tuple[tuple[torch.dtype, int], ...], sealed: Sequence[int] | None) -> Message:
    return Message([dtype for dtype, _ in fields], [(length,) for _, length in fields], sealed)


def packed(message: Tensor, fields: Fields, sealed: Sequence[int] | None = None) -> Packed:
    """Return the payload of ``message``, bytes that may be more than are needed."""
    layout = _layout(tuple(fields), sealed)
    return _packed(layout.views(message), message, layout)


def reserve(
    fields: Fields,
    device: torch.device,
    *,
    sealed: tuple[int, ...] | None = None,
) -> Packed:
    """Return a complete payload with contents that are not written yet.

    Args:
        fields: dtype and length of each tensor.
        device: of the message.
        sealed: the announced lengths, as for ``Message``.

    Example:
        >>> codes, norms = reserve([(torch.uint8, 3), (torch.float32, 2)], torch.device("cpu"))
        >>> codes.shape, norms.shape
        (torch.Size([3]), torch.Size([2]))
    """
    message = torch.empty(_layout(tuple(fields), sealed).nbytes, dtype=torch.uint8, device=device)
    return packed(message, fields, sealed)


def reserve_all(fields: Fields, device: torch.device, count: int) -> list[Packed]:
    """Return ``count`` payloads as ``reserve`` does, with messages one after the other."""
    layout = _layout(tuple(fields), None)
    block = torch.empty(count * layout.nbytes, dtype=torch.uint8, device=device)
    messages = block.split(layout.nbytes)
    return [_packed(layout.views(message), message, layout) for message in messages]


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the tensor's bytes as a flat uint8 view."""
    # as_strided, since a tensor of one element may be contiguous with any stride.
    return tensor.contiguous().as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def joined(flats: Sequence[Tensor]) -> Tensor:
    """Return flat tensors of one dtype as one; without a copy if they lie together."""
    if not lie_together(flats):
        return torch.cat(list(flats))
    return flats[0].as_strided((sum(flat.numel() for flat in flats),), (1,))


def lie_together(flats: Sequence[Tensor]) -> bool:
    """Return whether flat tensors of one dtype lie one after another in one allocation."""
    first, end = flats[0], flats[0].data_ptr()
    for flat in flats:
        if flat.data_ptr() != end or storage_of(flat) != storage_of(first):
            return False
        end += flat.numel() * flat.element_size()
    return True


def lies_in(flats: Sequence[Tensor], whole: Tensor) -> bool:
    """Return whether ``joined`` has returned ``whole`` without a copy."""
    return all(storage_of(flat) == storage_of(whole) for flat in flats)


def evenly(tensors: Sequence[Tensor]) -> tuple[Tensor, int]:
    """Return the first of equal tensors, and the distance in elements from each to the next.

    Tensors of messages that have arrived together lie at equal distances. Others are copied.
    """
    first = tensors[0]
    if len(tensors) == 1:
        return first, 0
    addresses = [tensor.data_ptr() for tensor in tensors]
    width = first.element_size()
    apart, rest = divmod(addresses[1] - addresses[0], width)
    together = all(b - a == apart * width for a, b in itertools.pairwise(addresses))
    same = len({storage_of(tensor) for tensor in tensors}) == 1
    if together and same and not rest:
        return first, apart
    return torch.stack([tensor.contiguous() for tensor in tensors]), first.numel()


def storage_of(tensor: Tensor) -> int:
    """Return the address of the allocation in which a tensor lies."""
    return tensor.untyped_storage().data_ptr()
