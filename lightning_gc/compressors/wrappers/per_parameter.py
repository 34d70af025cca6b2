"""PerParameter: compress each parameter of a bucket separately, as the papers do."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_gc.compressors.base import BatchedCollective, Codec, Compressor
from lightning_gc.compressors.joint import (
    CodecScheme,
    Joint,
    JointCodec,
    JointCollective,
    Part,
    Whole,
    in_row,
    joined,
    joint_of,
    limits_of,
    wire_of,
)
from lightning_gc.compressors.wrappers.menu import Menu
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL, SizeSwitch
from lightning_gc.compressors.wrappers.wrapper import Wrapper
from lightning_gc.core import Bucket, Exchange, Flow, Gather, Mean, together
from lightning_gc.core.combinations import judge
from lightning_gc.core.flow import is_gathered, resume
from lightning_gc.core.message import Packed
from lightning_gc.core.segments import Pending, pieces_of
from lightning_gc.kernels import segments


@dataclass(frozen=True)
class PerParameter(Wrapper, Whole):
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
        plan = self._plan(bucket, scheme)
        flows, means = [], list[Tensor]()
        flows += [_alone(part, bucket, buffer, out, scheme) for part in plan.alone]
        whole = plan.uncompressed
        pending = bucket.pending
        if pending is not None and whole.parts:
            (joint,) = plan.joint
            if joint.takes_along(bucket, scheme, 4 * whole.numel):
                room = replace(bucket, pending=replace(pending, uncompressed=whole.numel))
                flow = joint.codec.flow(room, buffer, out, scheme)
                yield from whole.ride(flow, buffer, out, pending)
                return
            # The mean is asked for first, so its message has the flag.
            bucket = replace(bucket, pending=replace(pending, flagged=False))
        for joint in plan.joint:
            flows += joint.flows(bucket, buffer, out, scheme)
        if scheme is not None and scheme.scatters:
            for part in whole.parts:
                alone = bucket.part(part.name, part.start, part.stop)
                span = slice(part.start, part.stop)
                flows.append(scheme.dense(alone, buffer[span], out[span]))
        elif whole.parts:
            flows.append(_average(whole.take(buffer, pending), means))
        yield from together(flows, bucket.workers)
        if means:
            whole.put(means, out, pending)

    @property
    def whole(self) -> Whole:
        return self

    def for_shape(self, shape: tuple[int, ...]) -> Compressor | None:
        return self if self.levels or self.others_dense else self.inner.for_shape(shape)

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        plan = self._plan(bucket, scheme)
        one = len(plan.joint) == 1 and not plan.alone
        return one and plan.joint[0].codec.absorbs(bucket, buffer, scheme)

    def _plan(self, bucket: Bucket, scheme: CodecScheme | None) -> _Plan:
        joint = joint_of(bucket, scheme)
        return _plan(self, tuple(bucket.shapes.items()), joint, bucket.workers)

    def _as_written(self) -> Compressor:
        """Return the inner compressor for which strategies make this; see ``by_default``."""
        written: Compressor = self
        inner: Compressor = self
        while isinstance(inner, Wrapper):
            inner = inner.inner
            if by_default(inner) == self:
                written = inner
        return written


class _Plan(NamedTuple):
    """How the parameters of a bucket are exchanged."""

    alone: list[Part]  # one payload each
    joint: list[_Joint]
    uncompressed: Uncompressed


class _Joint(NamedTuple):
    """Parameters that share a payload or rounds of communication, or are cut into shards."""

    parts: Sequence[Part]
    codec: JointCodec | JointCollective  # of all parts
    cut: bool  # into shards
    rows: Rows | None  # of shards, if the codec says so

    def flows(
        self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None
    ) -> list[Flow]:
        codec, given = self.codec, (bucket, buffer, out, scheme)
        if not self.cut or isinstance(codec, JointCollective):
            return [codec.flow(*given)]
        if codec.in_shards(bucket, buffer) is not None:
            return [codec.flow(*given)]
        if self.rows is None:
            return [_alone(part, *given) for part in self.parts]
        return [self.rows.flow(*given)]

    def takes_along(self, bucket: Bucket, scheme: CodecScheme | None, nbytes: int) -> bool:
        """Return whether uncompressed parameters of ``nbytes`` travel in the first message.

        Sums do, and gathered payloads of fixed lengths if the mean would be gathered too.
        """
        if scheme is None or scheme.averages:
            return True
        fixed = isinstance(self.codec, JointCodec) and limits_of(self.codec, bucket.numel) is None
        return not self.cut and fixed and is_gathered(nbytes, bucket.workers)


def _alone(
    part: Part, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None
) -> Flow:
    """Exchange one parameter by its own compressor."""
    span, inner = slice(part.start, part.stop), bucket.part(part.name, part.start, part.stop)
    flow: Flow = part.codec.flow(inner, buffer[span], out[span], scheme)
    return flow


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
    parts, dense, stop, place = list[Part](), list[Part](), 0, 0
    batches: dict[BatchedCollective, list[tuple[Part, tuple[int, ...]]]] = {}
    for name, shape in shapes:
        start, stop = stop, stop + math.prod(shape)
        if start == stop:
            continue
        inner = _at(compressor.inner, levels[name]) if name in levels else others
        inner = None if inner is None else inner.for_shape(shape)
        part = Part(inner, name, start, stop, place)
        place += 1
        if inner is None:
            dense.append(part)
        elif isinstance(inner, BatchedCollective):
            batches.setdefault(inner, []).append((part, shape))
        else:
            parts.append(part)
    joints = list[_Joint]()
    for batched, group in batches.items():
        several, theirs = zip(*group, strict=True)
        joints.append(_Joint(several, batched.join(several, theirs), False, None))
    whole = Uncompressed(tuple(dense))
    if joint == "no":
        return _Plan(parts, joints, whole)
    alike: dict[Hashable, list[Part]] = {}
    for part in parts:
        kind = part.codec.whole.kind if isinstance(part.codec, Codec) else None
        alike.setdefault(kind, []).append(part)
    alone = alike.pop(None, [])
    for some in alike.values():
        codec, cut = joined(tuple(some)), joint == "shards"
        rows = Rows(tuple(some), workers) if cut and len(some) > 1 and codec.in_rows else None
        joints.append(_Joint(some, codec, cut, rows))
    return _Plan(alone, joints, whole)


def forget_plans() -> None:
    """Empty the caches of plans and formats, which keep the names of all parameters seen."""
    for cache in (_plan, wire_of, limits_of):
        cache.cache_clear()


@dataclass(frozen=True, eq=False)
class Uncompressed:
    """Parameters of a bucket that are sent uncompressed.

    Args:
        parts: ascending; their codecs are None.
    """

    parts: tuple[Part, ...]

    @functools.cached_property
    def numel(self) -> int:
        """Elements of all parts."""
        return sum(part.numel for part in self.parts)

    def take(self, buffer: Tensor, pending: Pending | None) -> Tensor:
        """Move the parts out of ``buffer``, where zeros remain, to ``(numel,)``.

        With ``pending`` as ``core.segments.Pending`` says.
        """
        if pending is not None:
            taken = buffer.new_empty(self.numel)
            segments.take(buffer, self._table(buffer.device), taken, pending)
            return taken
        views = self._views(buffer)
        taken = torch.cat(views)
        torch._foreach_zero_(views)
        return taken

    def put(self, taken: Sequence[Tensor], out: Tensor, pending: Pending | None) -> None:
        """Write the mean of what was ``taken``, or the only tensor, to the parts of ``out``."""
        if pending is not None:
            segments.put(taken, out, self._table(out.device), pending)
            return
        (mean,) = taken
        torch._foreach_copy_(self._views(out), mean.split([part.numel for part in self.parts]))

    def ride(self, flow: Flow, buffer: Tensor, out: Tensor, pending: Pending) -> Flow:
        """Run ``flow``, whose first request is for a message with room for the parts."""
        request = next(flow)
        assert not isinstance(request, Exchange)
        assert isinstance(request.tensors, Packed)
        own = request.tensors.more()
        segments.take(buffer, self._table(buffer.device), own[-1], pending)
        if isinstance(request, Mean):
            *reply, mean = yield Mean(own)
            taken = [mean]
        else:
            arrived = yield Gather(own)
            reply = [payload[:-1] for payload in arrived]
            taken = [payload[-1] for payload in arrived]
        following = resume(flow, reply)
        while following is not None:
            following = resume(flow, (yield following))
        self.put(taken, out, pending)

    def _views(self, flat: Tensor) -> list[Tensor]:
        return [flat[part.start : part.stop] for part in self.parts]

    @functools.cached_property
    def _table(self) -> Callable[[torch.device], Tensor]:
        ends = itertools.accumulate((part.numel for part in self.parts), initial=0)
        parts = zip(self.parts, ends, strict=False)  # the last end is nobody's place
        places = [(part.place, part.start, part.stop, place) for part, place in parts]
        return functools.cache(lambda device: pieces_of(places, device))


def _at(compressor: Compressor, level: float | None) -> Compressor | None:
    if level is None:
        return None
    return compressor if level == compressor.level else compressor.at(level)


def _average(own: Tensor, means: list[Tensor]) -> Flow:
    """Append the mean of ``own`` to ``means``."""
    (mean,) = yield Mean((own,))
    means.append(mean)


def with_levels(
    compressor: Compressor, levels: Mapping[str, float | None], *, dense: bool
) -> Compressor:
    """Return a compressor with separate levels for some parameters.

    Args:
        compressor: a ``PerParameter``, also in other wrappers.
        levels: parameter name -> level; None sends the parameter uncompressed.
        dense: whether all other parameters are sent uncompressed.

    Raises:
        ValueError: the compressor works on whole buckets.
    """
    if isinstance(compressor, PerParameter):
        return replace(compressor, levels=tuple(levels.items()), others_dense=dense)
    if isinstance(compressor, Wrapper):
        inner = with_levels(compressor.inner, levels, dense=dense)
        return replace(compressor, inner=inner)  # type: ignore[type-var]
    raise ValueError(
        f"{compressor} works on whole buckets, so parameters cannot have separate levels "
        f"({', '.join(levels)}); use PerParameter({compressor})."
    )


def layerwise(compressor: Compressor) -> Compressor:
    """Return ``compressor`` per parameter, unless it is elementwise."""
    if isinstance(compressor, Menu):
        return compressor.each(layerwise)
    if compressor.traits.elementwise or isinstance(compressor, PerParameter):
        return compressor
    return PerParameter(compressor)


def by_default(
    compressor: Compressor, min_numel: int = MIN_NUMEL, owner: str = "by_default"
) -> Compressor:
    """Wrap a bare compressor so that it works per parameter and sends small tensors uncompressed.

    Three kinds of compressors are not wrapped in a ``SizeSwitch`` and compress every tensor:
    elementwise ones, those whose workers vote (``conserves`` is False), and one that the user has
    put in a ``PerParameter``. A ``SizeSwitch`` of the user's keeps its own limits. In a menu each
    compressor is wrapped by itself, and those that compress every tensor go on to do so.

    Args:
        compressor: bare, or in the user's wrappers.
        min_numel: tensors with fewer elements, and 1-D tensors, are sent uncompressed. 0 compresses
            every tensor, also 1-D ones.
        owner: the class or function with this argument, for error messages.

    Raises:
        ValueError: ``min_numel`` is not a number of elements, or is changed where it has no effect.
    """
    if type(min_numel) is not int or min_numel < 0:
        raise ValueError(
            f"{owner}(min_numel={min_numel!r}): give the number of elements from which on a tensor "
            f"is compressed; use {MIN_NUMEL}, or 0 for every tensor."
        )
    if isinstance(compressor, Menu):
        return _each_by_default(compressor, min_numel, owner)
    traits, changed = compressor.traits, min_numel != MIN_NUMEL
    wrapped = isinstance(compressor, PerParameter | SizeSwitch)
    if wrapped or traits.elementwise or not traits.conserves:
        if changed:
            given = {"compressor": compressor, "min_numel": min_numel}
            judge("min_numel", owner, **given, wrapped=wrapped)
        return layerwise(compressor)
    return PerParameter(SizeSwitch(compressor, min_numel) if min_numel else compressor)


def _each_by_default(menu: Menu, min_numel: int, owner: str) -> Menu:
    """Wrap the compressors of a menu; those that have no use for ``min_numel`` do without."""
    refused = list[ValueError]()

    def wrap(compressor: Compressor) -> Compressor:
        try:
            return by_default(compressor, min_numel, owner)
        except ValueError as error:
            refused.append(error)
            return by_default(compressor)

    wrapped = menu.each(wrap)
    if len(refused) == len(menu.compressors):
        raise refused[0]
    return wrapped


@dataclass(frozen=True, eq=False)
class Rows:
    """The layout of a bucket as W rows: row i holds shard i of each parameter.

    Args:
        parts: the parameters, ascending in the bucket.
        workers: W, the number of rows.
    """

    parts: tuple[Part, ...]
    workers: int

    @functools.cached_property
    def in_row(self) -> tuple[Part, ...]:
        """The parts with ``start`` and ``stop`` of their shards in a row."""
        return in_row(self.parts, self.workers)

    @functools.cached_property
    def codec(self) -> JointCodec:
        """The codec of one row."""
        return joined(self.in_row)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        """Exchange the parts of ``buffer`` in rows, under the contract of ``Compressor.flow``."""
        own = self.of(buffer)
        mean = torch.empty_like(own)
        cut = _RowsBucket(**_fields_of(bucket), rows=self)
        yield from self.codec.flow(cut, own.view(-1), mean.view(-1), scheme)
        self.put_back(own, buffer)
        if bucket.wanted:
            self.put_back(mean, out)

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

    def name_of(self, part: str) -> str:
        return f"{part}#{self.index}"

    def part(self, name: str, start: int, stop: int) -> Bucket:
        """Return shard ``index`` of a parameter; with padding it has ``stop - start`` elements."""
        own = {"grad": self.shards[name], "shapes": {self.name_of(name): (stop - start,)}}
        return Bucket(**_fields_of(self) | own | {"state": {}})


def _fields_of(bucket: Bucket) -> dict[str, Any]:
    return {each.name: getattr(bucket, each.name) for each in fields(Bucket)}
