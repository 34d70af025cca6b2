"""Rows: shards of several parameters side by side, which schemes that cut encode as one.

Row i has shard i of each parameter, padded: what a scheme does with the shards of a tensor it does
with rows, and every parameter is cut as it would be by itself.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Codec, CodecScheme, Part
from lightning_gc.flow import Flow


@dataclass(frozen=True, eq=False)
class Rows:
    """Where the shards of a bucket's parameters lie in W rows.

    Args:
        parts: ascending, in the bucket.
        workers: W, the number of rows.
    """

    parts: tuple[Part, ...]
    workers: int

    @functools.cached_property
    def in_row(self) -> tuple[Part, ...]:
        """The parts of a row, with where their shards lie in it."""
        found, stop = list[Part](), 0
        for part in self.parts:
            start, stop = stop, stop - (part.start - part.stop) // self.workers
            found.append(part._replace(start=start, stop=stop))
        return tuple(found)

    def of(self, flat: Tensor) -> Tensor:
        """Return a copy of the parts of ``flat``, ``(numel,)``, as rows, ``(W, size)``."""
        rows = flat.new_zeros(self.workers, self.in_row[-1].stop)
        for row, here in self._pairs(rows, flat):
            row.copy_(here)
        return rows

    def put_back(self, rows: Tensor, flat: Tensor) -> None:
        """Copy rows, ``(W, size)``, to the parts of ``flat``, ``(numel,)``."""
        for row, here in self._pairs(rows, flat):
            here.copy_(row)

    def _pairs(self, rows: Tensor, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return views of one shape of rows and of ``flat``: full shards, and one that is not."""
        pairs = []
        for part, place in zip(self.parts, self.in_row, strict=True):
            size, mine = place.stop - place.start, flat[part.start : part.stop]
            full, rest = divmod(mine.numel(), size)
            block = rows[:, place.start : place.stop]
            pairs.append((block[:full], mine[: full * size].view(full, size)))
            if rest:
                pairs.append((block[full, :rest], mine[full * size :]))
        return pairs

    def shards(self, flat: Tensor, index: int) -> dict[str, Tensor]:
        """Return shard ``index`` of each parameter of ``flat``, not padded."""
        found = {}
        for part, place in zip(self.parts, self.in_row, strict=True):
            size = place.stop - place.start
            start = min(part.start + index * size, part.stop)
            found[part.name] = flat[start : min(start + size, part.stop)]
        return found


def flow_in_rows(
    codec: Codec, rows: Rows, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme
) -> Flow:
    """Exchange the parts of ``buffer`` as ``Compressor.flow``, by a codec of one row."""
    own = rows.of(buffer)
    mean = torch.empty_like(own)
    cut = _RowsBucket(**_fields_of(bucket), rows=rows)
    yield from codec.flow(cut, own.view(-1), mean.view(-1), scheme)
    rows.put_back(own, buffer)
    if bucket.wanted:
        rows.put_back(mean, out)


@dataclass(frozen=True)
class _RowsBucket(Bucket):
    """A bucket whose shards are rows."""

    rows: Rows = field(kw_only=True)

    def shard(self, index: int, size: int) -> Bucket:
        shards = self.rows.shards(self.grad, index)
        return _Row(**_fields_of(self), shards=shards, index=index)


@dataclass(frozen=True)
class _Row(Bucket):
    """A row, whose parts are shards of parameters; ``grad`` and ``shapes`` are the bucket's."""

    shards: Mapping[str, Tensor] = field(kw_only=True, repr=False)
    index: int = field(kw_only=True)

    @property
    def numel(self) -> int:
        return sum(shard.numel() for shard in self.shards.values())

    def part(self, name: str, start: int, stop: int) -> Bucket:
        """Return shard ``index`` of a parameter, which takes ``stop - start`` elements padded."""
        own = {"grad": self.shards[name], "shapes": {f"{name}#{self.index}": (stop - start,)}}
        return Bucket(**_fields_of(self) | own | {"state": {}})


def _fields_of(bucket: Bucket) -> dict[str, Any]:
    return {each.name: getattr(bucket, each.name) for each in fields(Bucket)}
