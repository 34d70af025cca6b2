"""Parts of a bucket in W shards: where they lie, and the tables of kernels that code them."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor

from lightning_gc.core.bit_packing import packed_bytes
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.message import Fields, Packed, reserve_all
from lightning_gc.core.segments import Pending, pieces_of
from lightning_gc.kernels import segments

Parts = Sequence[tuple[str, int, int, int]]
"""Parts: each has the parameter's name, its index among the bucket's that are not empty, its first
element and its end."""
Payloads = Sequence[Payload]


class Row(NamedTuple):
    """A shard of a part, and where its codes and numbers lie in the shard's payload.

    Attributes:
        place: index of the parameter among the bucket's that are not empty.
        begin: first element of the parameter.
        start, stop: first element of the shard in the bucket, and end.
        numel: elements that are encoded, with zeros behind ``stop`` if there are more.
        byte: first byte of its codes.
        block: index of its first block.
        shard: its number.
        row: its first element in a row of shards.
    """

    place: int
    begin: int
    start: int
    stop: int
    numel: int
    byte: int
    block: int
    shard: int
    row: int


class Layout:
    """The parts of a bucket, or W shards of each, that share payloads of codes and numbers.

    Args:
        parts: of a bucket.
        bits: of a code.
        block_size: elements that share a number, or several.
        shards: W, or 1. A payload holds one shard of each part.

    Attributes:
        rows: by shard, a row for each part.
        names: of all rows, for random numbers.
        codes, blocks: bytes of codes in a payload, and blocks.
        numel: elements of a row of shards.
    """

    def __init__(self, parts: Parts, bits: int, block_size: int, shards: int = 1) -> None:
        self.shards, self.rows, self.names = shards, list[list[Row]](), list[str]()
        for shard in range(shards):
            self.codes = self.blocks = self.numel = 0
            self.rows.append([])
            for name, place, begin, end in parts:
                size = -(-(end - begin) // shards)
                start = min(begin + shard * size, end)
                sent = size, self.codes, self.blocks, shard, self.numel
                self.rows[-1].append(Row(place, begin, start, min(start + size, end), *sent))
                self.names.append(name if shards == 1 else f"{name}#{shard}")
                self.codes += packed_bytes(size, bits)
                self.blocks -= -size // block_size
                self.numel += size

    @functools.cached_property
    def pieces(self) -> Callable[[int, torch.device], Tensor]:
        """Return the pieces of a shard on a device, as ``pieces_of`` does; from a cache."""

        def made(shard: int, device: torch.device) -> Tensor:
            places = [(row.place, row.start, row.stop, row.row) for row in self.rows[shard]]
            return pieces_of(places, device)

        return functools.cache(made)


class ShardTable(abc.ABC):
    """Encodes and decodes parts of a bucket, or W shards of each, by kernels.

    Each family of kernels has a module in ``kernels.gpu``, in ``kernels.host`` or in both. The
    module's ``Table`` is made of parts, as for ``Layout``, then the family's settings, the device
    and the number of shards.

    Args:
        layout: of the payloads. A payload is codes, and a tensor of each of the numbers.
        numbers: lengths of the tensors of numbers, which are float32.

    Attributes:
        guards: whether it does the engine's work, as ``core.segments.Pending`` says.
        cuts: whether it encodes all shards at once, and a mean again.
        chooses: whether it also encodes the elements that a sparsifier chooses.
        encodes: whether its kernels encode; else they only decode.
        fields: dtype and length of each tensor of a payload.
    """

    guards: ClassVar[bool] = True
    cuts: ClassVar[bool] = True
    chooses: ClassVar[bool] = False
    encodes: bool = True

    @classmethod
    def takes(cls, *settings: Any) -> bool:
        """Return whether the kernels take these settings of the family."""
        return True

    def __init__(self, layout: Layout, *numbers: int) -> None:
        self.layout = layout
        self.fields: Fields = [(torch.uint8, layout.codes), *((torch.float32, n) for n in numbers)]

    @abc.abstractmethod
    def _encode(
        self, packed: Sequence[Packed], buffer: Tensor, bucket: Bucket, mine: int | None
    ) -> None:
        """Fill a payload for each shard, or the payload of shard ``mine``.

        Args:
            packed: filled, with the ends of messages.
            buffer: of the bucket, as ``core.segments.Pending`` says; or the mean of shard ``mine``,
                which keeps what is not sent.
            bucket: has the engine's work.
            mine: this worker's shard, or None.
        """

    @abc.abstractmethod
    def average(
        self, payloads: Payloads, out: Tensor, pending: Pending | None, mine: int | None = None
    ) -> bool:
        """Write the mean of all workers' payloads, or all shards' payloads, to ``out``.

        Args:
            payloads: of all workers, in their order; or of all shards.
            out: overwritten.
            pending: has the flags that arrived.
            mine: with it, write the mean of this shard as a row of shards.

        Returns:
            False if a code is one that no encoder makes. Kernels of a GPU write NaN there instead.
        """

    def add(self, payload: Payload, out: Tensor, scale: float) -> bool:
        """Add ``scale`` times a payload to the parts of ``out``.

        Returns:
            False if nothing was added: by default, and for a code that no encoder makes.
        """
        return False

    def encode(self, buffer: Tensor, bucket: Bucket) -> list[Packed]:
        """Move the sent part out of ``buffer``, as ``core.segments.Pending`` says.

        Returns:
            A payload for each worker, its shards of all parts; or only one.
        """
        packed = self._reserve(buffer, bucket.pending, self.layout.shards)
        self._encode(packed, buffer, bucket, None)
        return [payload.first(len(self.fields)) for payload in packed]

    def again(self, payloads: Payloads, buffer: Tensor, bucket: Bucket) -> Packed:
        """Return the payload of the mean of this worker's shard, and book what it loses.

        Args:
            payloads: of this shard, from all workers.
            buffer: of the whole bucket; W times the loss is added to the shard.
            bucket: in its second phase.
        """
        pending, mine = bucket.pending, bucket.worker
        mean = buffer.new_empty(self.layout.numel)
        self.average(payloads, mean, None, mine)
        packed = self._reserve(buffer, pending, 1)
        self._encode(packed, mean, bucket, mine)
        if pending is None or pending.grad is not None:
            pieces = self.layout.pieces(mine, buffer.device)
            segments.book(buffer, mean, self.layout.shards, pieces, pending)
        return packed[0].first(len(self.fields))

    def _reserve(self, buffer: Tensor, pending: Pending | None, count: int) -> list[Packed]:
        """Return payloads to fill; only one alone has room for the guard's flag."""
        if pending is None or count > 1:
            return reserve_all(self.fields, buffer.device, count)
        return [pending.reserve(self.fields)]


class LevelTable(ShardTable):
    """Encodes and decodes parts of a bucket, or W shards of each, in levels of their norms.

    Args:
        parts, shards: as for ``Layout``.
        bits: of a code.
        block_size: elements that share a norm.
        nearest: whether elements are rounded to the nearest level, or at random.
        device: of the bucket.
    """

    def __init__(
        self,
        parts: Parts,
        bits: int,
        block_size: int,
        nearest: bool,
        device: torch.device,
        shards: int = 1,
    ) -> None:
        layout = Layout(parts, bits, block_size, shards)
        super().__init__(layout, layout.blocks)
        self.bits, self.block_size, self.nearest, self.device = bits, block_size, nearest, device

    @abc.abstractmethod
    def quantise(self, buffer: Tensor, norms: Tensor, noise: torch.Generator | None) -> Tensor:
        """Do as ``kernels.quantise.quantise``, for the only part."""
