"""PerParameter: compress each parameter of a bucket separately, as the papers do."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from lightning_gc.compressors.base import (
    BatchedCollective,
    CodecScheme,
    Compressor,
    Contraction,
    Joint,
    Traits,
)
from lightning_gc.compressors.sparsifiers.sparse_codec import SparseCodec
from lightning_gc.compressors.wrappers.wrapper import Wrapper
from lightning_gc.core import Bucket, Flow, Mean, Payload, together


@dataclass(frozen=True)
class PerParameter(Wrapper):
    """Run the inner compressor on each parameter of a bucket separately.

    A bucket still costs one message per round, and one payload if the compressor can join parts. A
    controller may set a level for each parameter.

    Args:
        inner: the compressor of each parameter.
        levels: pairs of parameter name and level, for levels other than the inner compressor's.
            None sends the parameter uncompressed.
        others_dense: send parameters that are not in ``levels`` uncompressed.

    Communication pattern:
        The inner compressor's pattern, with the payloads of all parameters in one message. Under
        ``AllGather`` and ``TwoShot``, sparsifiers send one payload: values, and positions in the
        bucket or in a worker's shards of all parameters.

    Example:
        >>> from lightning_gc import PerParameter, TopK
        >>> PerParameter(TopK(0.01)).level
        0.01
    """

    inner: Compressor
    levels: tuple[tuple[str, float | None], ...] = field(default=(), repr=False)
    others_dense: bool = field(default=False, repr=False)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        joint = "no" if scheme is None else scheme.joint
        plan = _plan(self, tuple(bucket.shapes.items()), joint, bucket.workers)
        flows, means = [], list[Tensor]()
        for codec, parts in plan.equals:
            spans = [slice(part.start, part.stop) for part in parts]
            inner = [bucket.part(part.name, part.start, part.stop) for part in parts]
            mine, theirs = ([flat[span] for span in spans] for flat in (buffer, out))
            flows.append(codec.rounds_of_equals(inner, mine, theirs))
        for part in plan.alone:
            span = slice(part.start, part.stop)
            alone = bucket.part(part.name, part.start, part.stop)
            flows.append(part.codec.flow(alone, buffer[span], out[span], scheme))
        if plan.joint is not None and plan.rows is not None and scheme is not None:
            flows.append(flow_in_rows(plan.joint, plan.rows, bucket, buffer, out, scheme))
        elif plan.joint is not None:
            flows.append(plan.joint.flow(bucket, buffer, out, scheme))
        whole = plan.dense
        if scheme is not None and scheme.scatters:
            for name, span in whole.items():
                alone = bucket.part(name, span.start, span.stop)
                flows.append(scheme.dense(alone, buffer[span], out[span]))
            whole = {}
        elif whole:
            flows.append(_average([buffer[span] for span in whole.values()], means))
        yield from together(flows, bucket.workers)
        if whole:
            torch._foreach_zero_([buffer[span] for span in whole.values()])
            torch._foreach_copy_([out[span] for span in whole.values()], means)

    def with_levels(self, levels: Mapping[str, float | None], *, dense: bool) -> Self:
        return dataclasses.replace(self, levels=tuple(levels.items()), others_dense=dense)


class ParameterSlice(NamedTuple):
    """A parameter of a bucket and its compressor."""

    codec: Compressor
    name: str
    start: int  # in the bucket's flat gradient
    stop: int


class _Plan(NamedTuple):
    """How the parameters of a bucket are exchanged."""

    equals: list[tuple[BatchedCollective, list[ParameterSlice]]]  # groups of the same shape
    alone: list[ParameterSlice]  # one payload each
    joint: _JointSelection | None  # encodes all other compressed parameters in one payload
    dense: dict[str, slice]  # uncompressed
    rows: Rows | None  # layout for ``joint`` if it encodes shards


# Cached, since levels change per epoch and shapes never, but flows are made in every step.
@functools.lru_cache(maxsize=4096)
def _plan(
    compressor: PerParameter,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
    joint: Joint,
    workers: int,
) -> _Plan:
    levels = dict(compressor.levels)
    others = None if compressor.others_dense else compressor.inner
    parts, dense, stop = list[ParameterSlice](), dict[str, slice](), 0
    equals: dict[tuple[BatchedCollective, tuple[int, ...]], list[ParameterSlice]] = {}
    for name, shape in shapes:
        start, stop = stop, stop + math.prod(shape)
        inner = _at(compressor.inner, levels[name]) if name in levels else others
        inner = None if inner is None else inner.for_shape(shape)
        if inner is None:
            dense[name] = slice(start, stop)
        elif start < stop and isinstance(inner, BatchedCollective):
            alike = equals.setdefault((inner, shape), [])
            alike.append(ParameterSlice(inner, name, start, stop))
        elif start < stop:
            parts.append(ParameterSlice(inner, name, start, stop))
    groups = [(codec, some) for (codec, _), some in equals.items()]
    if joint == "no" or len(parts) < 2:
        return _Plan(groups, parts, None, dense, None)
    rows = Rows(tuple(parts), workers) if joint == "shards" else None
    codec = _joined(tuple(parts) if rows is None else rows.in_row)
    return _Plan(groups, [] if codec is not None else parts, codec, dense, rows)


def _joined(parts: tuple[ParameterSlice, ...]) -> _JointSelection | None:
    """Return a codec that encodes all ``parts`` in one payload; None if their payloads differ."""
    codecs = [part.codec for part in parts if isinstance(part.codec, SparseCodec)]
    joins = len(codecs) == len(parts) and all(codec.joins for codec in codecs)
    same = len({codec.sent_dtype for codec in codecs}) == 1
    return _JointSelection(parts, tuple(codecs)) if joins and same else None


@dataclass(frozen=True, eq=False)  # compared by identity, since hashing many parts takes long
class _JointSelection(SparseCodec):
    """Choose elements in each part by the part's codec, and send one payload for all parts.

    The elements and their mean are the same as with separate payloads. Coding, checking and adding
    cost once per bucket, not once per parameter.

    Args:
        parts: ascending; other elements of the bucket are not changed.
        codecs: the parts' codecs.
    """

    parts: tuple[ParameterSlice, ...]
    codecs: tuple[SparseCodec, ...]

    @property
    def traits(self) -> Traits:
        return self.codecs[0].traits

    @property
    def ragged(self) -> bool:
        return any(codec.ragged for codec in self.codecs)

    @property
    def sent_dtype(self) -> torch.dtype:
        return self.codecs[0].sent_dtype

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        found = []
        for codec, (_, name, start, stop) in zip(self.codecs, self.parts, strict=True):
            part = bucket.part(name, start, stop)
            found.append(codec.choose(buffer[start:stop], part).add_(start))
        return torch.cat(found)

    def most(self, numel: int) -> int:
        pairs = zip(self.codecs, self.parts, strict=True)
        return sum(codec.most(part.stop - part.start) for codec, part in pairs)

    def send(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Encode and add the payload to the tally, without elements outside the parts."""
        payload = self.encode(buffer, bucket)
        if bucket.phase == 0:
            elements = min(bucket.numel, sum(part.stop - part.start for part in self.parts))
            bucket.tally.count(elements, min(payload[0].numel(), bucket.numel), payload)
        return payload

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0; each part keeps its codec's bound."""
        return Contraction(0.0)

    def __repr__(self) -> str:
        return f"PerParameter({self.codecs[0]!r})"


def _at(compressor: Compressor, level: float | None) -> Compressor | None:
    if level is None:
        return None
    return compressor if level == compressor.level else compressor.at(level)


def _average(tensors: list[Tensor], means: list[Tensor]) -> Flow:
    """Append the tensors' means to ``means``; do not change the tensors."""
    (mean,) = yield Mean((torch.cat(tensors),))
    means.extend(mean.split([tensor.numel() for tensor in tensors]))


def layerwise(compressor: Compressor) -> Compressor:
    """Return ``compressor`` per parameter, unless it is elementwise."""
    if compressor.traits.elementwise or isinstance(compressor, PerParameter):
        return compressor
    return PerParameter(compressor)


@dataclass(frozen=True, eq=False)
class Rows:
    """The layout of a bucket as W rows: row i holds shard i of each parameter.

    Args:
        parts: the parameters, ascending in the bucket.
        workers: W, the number of rows.
    """

    parts: tuple[ParameterSlice, ...]
    workers: int

    @functools.cached_property
    def in_row(self) -> tuple[ParameterSlice, ...]:
        """The parts with ``start`` and ``stop`` of their shards in a row."""
        found, stop = list[ParameterSlice](), 0
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
        """Return pairs of views of ``rows`` and ``flat``, of the same shape.

        Each part has a pair for its full shards, and one for a last, shorter shard.
        """
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
        """Return shard ``index`` of each parameter of ``flat``, without padding."""
        found = {}
        for part, place in zip(self.parts, self.in_row, strict=True):
            size = place.stop - place.start
            start = min(part.start + index * size, part.stop)
            found[part.name] = flat[start : min(start + size, part.stop)]
        return found


def flow_in_rows(
    codec: SparseCodec, rows: Rows, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme
) -> Flow:
    """Exchange the parts of ``buffer`` in rows; ``codec`` encodes one row.

    The contract is ``Compressor.flow``'s.
    """
    own = rows.of(buffer)
    mean = torch.empty_like(own)
    cut = _RowsBucket(**_fields_of(bucket), rows=rows)
    yield from codec.flow(cut, own.view(-1), mean.view(-1), scheme)
    rows.put_back(own, buffer)
    if bucket.wanted:
        rows.put_back(mean, out)


@dataclass(frozen=True)
class _RowsBucket(Bucket):
    """A bucket with rows as shards."""

    rows: Rows = field(kw_only=True)

    def shard(self, index: int, size: int) -> Bucket:
        shards = self.rows.shards(self.grad, index)
        return _Row(**_fields_of(self), shards=shards, index=index)


@dataclass(frozen=True)
class _Row(Bucket):
    """A row: its parts are shards of parameters, its ``grad`` and ``shapes`` are the bucket's."""

    shards: Mapping[str, Tensor] = field(kw_only=True, repr=False)
    index: int = field(kw_only=True)

    @property
    def numel(self) -> int:
        return sum(shard.numel() for shard in self.shards.values())

    def part(self, name: str, start: int, stop: int) -> Bucket:
        """Return shard ``index`` of a parameter; with padding it has ``stop - start`` elements."""
        own = {"grad": self.shards[name], "shapes": {f"{name}#{self.index}": (stop - start,)}}
        return Bucket(**_fields_of(self) | own | {"state": {}})


def _fields_of(bucket: Bucket) -> dict[str, Any]:
    return {each.name: getattr(bucket, each.name) for each in fields(Bucket)}
