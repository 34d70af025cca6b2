"""Whole buckets: codecs as schemes use them, and parameters that share a payload or a round.

Compressors name their class of this family in ``whole``. Their authors need not: without it a
parameter has its own payload, and torch encodes it.
"""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_gc.core import Bucket, Flow, Limits, Payload, Wire, payload_validation
from lightning_gc.core.wire import limits
from lightning_gc.kernels.dispatch import fused, table_for
from lightning_gc.kernels.shards import ShardTable

Joint = Literal["no", "parts", "shards", "ranges"]


class CodecScheme(Protocol):
    """The interface of a scheme that codecs use; see ``lightning_gc.schemes``."""

    def joint(self, workers: int) -> Joint:
        """Return whether parameters may share a payload: no, or as parts, shards or ranges."""

    @property
    def averages(self) -> bool:
        """Whether payloads are averaged before they are decoded."""

    @property
    def scatters(self) -> bool:
        """Whether each worker gets only its shard of the mean."""

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange the payloads of ``codec`` for ``buffer`` and write their mean to ``out``."""

    def dense(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange ``buffer`` uncompressed and write the mean to ``out``."""


def joint_of(bucket: Bucket, scheme: CodecScheme | None) -> Joint:
    """Return how parameters of a bucket may share a payload."""
    return "no" if scheme is None else scheme.joint(bucket.workers)


class Whole:
    """A compressor as the engine uses it on a whole bucket."""

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        """Return whether ``flow`` does for this bucket what ``core.segments.Pending`` says.

        By default the engine does that work, in its own kernels.
        """
        return False


class Part(NamedTuple):
    """A parameter of a bucket and the compressor that encodes it.

    Attributes:
        codec: at the parameter's level.
        name: of the parameter.
        start, stop: its place in the bucket, not empty.
        place: its index among the bucket's parameters that are not empty.
    """

    codec: Any
    name: str
    start: int
    stop: int
    place: int

    @property
    def numel(self) -> int:
        """Elements of the parameter."""
        return self.stop - self.start


def in_row(parts: Sequence[Part], workers: int) -> tuple[Part, ...]:
    """Return the parts with ``start`` and ``stop`` of one of W shards, one after the other."""
    found, stop = list[Part](), 0
    for part in parts:
        start, stop = stop, stop - (part.start - part.stop) // workers
        found.append(part._replace(start=start, stop=stop))
    return tuple(found)


@dataclass(frozen=True)
class WholeCodec(Whole):
    """A codec with all that schemes use: it counts what it sends, and checks what arrives.

    Args:
        codec: encodes and decodes.
        kind: parameters of a bucket whose codecs have equal kinds share a payload; None: no others.
        joint: makes the codec of parts of a bucket, whose codecs have this kind. Elements and mean
            are the same, bit for bit, as with a payload for each part. Elements of the bucket
            outside the parts are not changed.
    """

    codec: Any
    kind: Hashable = field(default=None, kw_only=True, compare=False)
    joint: Callable[[Any, tuple[Part, ...]], JointCodec] | None = field(
        default=None, kw_only=True, compare=False
    )

    def __str__(self) -> str:
        return str(self.codec)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        """Exchange ``buffer`` under the contract of ``Compressor.flow``."""
        assert scheme is not None
        yield from scheme.flow(self, bucket, buffer, out)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Do as ``Codec.encode``."""
        payload: Payload = self.codec.encode(buffer, bucket)
        return payload

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Do as ``Codec.decode``."""
        self.codec.decode(payload, out, scale, bucket)

    def wire(self, numel: int) -> Wire:
        """Return the wire format of a buffer of ``numel`` elements."""
        found: Wire = self.codec.wire(numel)
        return found

    def elements(self, numel: int) -> int:
        """Return how many of ``numel`` elements of a buffer are encoded."""
        return numel

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many of ``numel`` elements the payload carries."""
        found: int = self.codec.sent(payload, numel)
        return found

    def send(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Encode and add the payload to the tally."""
        payload = self.encode(buffer, bucket)
        self.note(payload, buffer.numel(), bucket)
        return payload

    def note(self, payload: Payload, numel: int, bucket: Bucket) -> None:
        """Add the payload of a buffer of ``numel`` elements to the tally."""
        if bucket.phase == 0:
            # A shard's buffer may be padded beyond its bucket.
            most = bucket.numel
            sent = min(self.sent(payload, numel), most)
            bucket.tally.count(min(self.elements(numel), most), sent, payload)

    def receive(
        self, payload: Payload, out: Tensor, scale: float, bucket: Bucket, sender: int | None
    ) -> None:
        """Check and decode the payload of worker ``sender``, or the mean of all payloads if None.

        Raises:
            ValueError: the payload cannot come from this compressor. The message names the sender.
        """
        with payload_validation.naming(self, bucket, sender):
            payload_validation.fields(payload, wire_of(self, out.numel()))
            self.decode(payload, out, scale, bucket)

    def check(self, payloads: Sequence[Payload], bucket: Bucket, *, averaged: bool = False) -> None:
        """Raise ValueError, which names the sender, if tensors of a payload have wrong lengths."""
        for sender, payload in enumerate(payloads):
            with payload_validation.naming(self, bucket, None if averaged else sender):
                payload_validation.fields(tuple(payload), wire_of(self, bucket.numel))

    def clear(self, out: Tensor) -> None:
        """Zero the elements of ``out``, ``(numel,)``, that ``decode`` adds to."""
        out.zero_()

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        """Write the mean of the workers' payloads to ``out``, ``(numel,)``.

        Args:
            payloads: of all workers, in their order; or, if ``averaged``, their mean only.
            out: overwritten.
            bucket: as for ``decode``.
            averaged: whether the transport has averaged the payloads.

        Raises:
            ValueError: as ``receive``.
        """
        self.clear(out)
        for sender, payload in enumerate(payloads):
            share = 1.0 if averaged else 1 / len(payloads)
            self.receive(tuple(payload), out, share, bucket, None if averaged else sender)

    def in_shards(self, bucket: Bucket, buffer: Tensor) -> Shards | None:
        """Return kernels that encode all shards of ``buffer`` at once, or None without kernels."""
        return None


@dataclass(frozen=True, eq=False)
class JointCodec(WholeCodec):
    """Encode parts of a bucket in one payload.

    The payload has each field of the parts' codec, the parts' tensors one after the other. This
    class works part by part, which is the reference of kernels.

    Args:
        codec: of the first part.
        parts: ascending. Their codecs are equal and have fixed lengths.
    """

    parts: tuple[Part, ...]

    # Compared by identity, since hashing many parts takes long.
    __eq__ = object.__eq__
    __hash__ = object.__hash__

    @property
    def in_rows(self) -> bool:
        """Whether shards of all parts are copied to rows, which are coded together.

        The configuration alone decides, as all workers must ask for the same. So it is True where
        ``in_shards`` may be used on the host, and where some workers' kernels take full rows.
        """
        return False

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        payloads = [
            part.codec.encode(
                buffer[part.start : part.stop], bucket.part(part.name, part.start, part.stop)
            )
            for part in self.parts
        ]
        if len(payloads) == 1:
            return payloads[0]  # type: ignore[no-any-return]
        return tuple(torch.cat(tensors) for tensors in zip(*payloads, strict=True))

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        cut = [tensor.split(self._lengths[i]) for i, tensor in enumerate(payload)]
        for part, *tensors in zip(self.parts, *cut, strict=True):
            inner = bucket.part(part.name, part.start, part.stop)
            part.codec.decode(tuple(tensors), out[part.start : part.stop], scale, inner)

    def clear(self, out: Tensor) -> None:
        """Zero the parts of ``out``; all of it if nothing else is in it."""
        if self._numel == out.numel():
            out.zero_()
        else:
            torch._foreach_zero_([out[part.start : part.stop] for part in self.parts])

    @functools.cached_property
    def _lengths(self) -> list[list[int]]:
        """Per tensor of the payload, its elements for each part."""
        wires = [wire_of(part.codec, part.numel) for part in self.parts]
        return [[field.length for field in fields] for fields in zip(*wires, strict=True)]

    @functools.cached_property
    def _numel(self) -> int:
        return sum(part.numel for part in self.parts)

    def elements(self, numel: int) -> int:
        return self._numel

    def sent(self, payload: Payload, numel: int) -> int:
        return self._numel

    def wire(self, numel: int) -> Wire:
        fields = wire_of(self.codec, self.parts[0].numel)
        return tuple(replace(field, length=sum(self._lengths[i])) for i, field in enumerate(fields))


def joined(parts: tuple[Part, ...]) -> JointCodec:
    """Return the codec of ascending parts, whose codecs have the same ``kind``."""
    whole = parts[0].codec.whole
    joint: JointCodec = whole.joint(whole.codec, parts)
    return joint


class JointTable(JointCodec):
    """Encode parts of a bucket by a table of kernels; without one part by part.

    Attributes:
        family: module of ``kernels.gpu``, ``kernels.host`` or both.
    """

    family: ClassVar[str]

    @property
    @abc.abstractmethod
    def settings(self) -> tuple[Any, ...] | None:
        """Arguments of the family's table; None: torch encodes."""

    def kernels(self, flat: Tensor) -> type[ShardTable] | None:
        """Return the class of the table for ``flat``, on a GPU or on the host."""
        settings = self.settings
        return None if settings is None else table_for(flat, self.family, settings)

    def table(self, flat: Tensor, shards: int = 1) -> ShardTable | None:
        """Return the table of all parts, or of W shards of each; None: torch encodes."""
        kind = self.kernels(flat)
        return None if kind is None else self._made(kind, flat.device, shards)

    @functools.cached_property
    def _made(self) -> Callable[[Any, torch.device, int], ShardTable]:
        parts = [(part.name, part.place, part.start, part.stop) for part in self.parts]
        settings = self.settings or ()
        return functools.cache(lambda kind, *on: kind(parts, *settings, *on))

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        joint, kind = joint_of(bucket, scheme), self.kernels(buffer)
        able = kind is not None and kind.guards and (kind.cuts or joint == "parts")
        return able and joint != "no"

    def in_shards(self, bucket: Bucket, buffer: Tensor) -> Shards | None:
        kind = self.kernels(buffer)
        if kind is None or not kind.cuts:
            return None
        row = type(self)(self.codec, in_row(self.parts, bucket.workers))
        table = self._made(kind, buffer.device, bucket.workers)
        return Shards(row, self._numel, table, bucket, buffer)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        table = self.table(buffer)
        if table is None or not table.encodes:
            return super().encode(buffer, bucket)
        (payload,) = table.encode(buffer, bucket)
        return payload

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        table = self.table(out)
        if table is None or not table.add(payload, out, scale):
            super().decode(payload, out, scale, bucket)

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        table = self.table(out)
        if table is not None:
            self.check(payloads, bucket, averaged=averaged)
            if table.average(payloads, out, bucket.pending):
                return
        # The reference says which worker has sent a code that no encoder makes.
        super().receive_all(payloads, out, bucket, averaged=averaged)


@dataclass(frozen=True)
class Shards:
    """Exchange one bucket in two rounds of shards; see ``schemes.TwoShot``.

    Attributes:
        row: has the format of a payload.
        elements: of all parts.
        kernels: of all parts.
        bucket, buffer: as for ``Codec.encode``.
    """

    row: WholeCodec
    elements: int
    kernels: ShardTable
    bucket: Bucket
    buffer: Tensor

    def encode(self) -> Sequence[Payload]:
        """Move the sent part out of the buffer: a payload for each worker."""
        payloads = self.kernels.encode(self.buffer, self.bucket)
        tensors = [tensor for payload in payloads for tensor in payload]
        self.bucket.tally.count(self.elements, self.elements, tensors)
        return payloads

    def encode_mean(self, payloads: Sequence[Payload]) -> Payload:
        """Average all workers' payloads of the own shard, encode the mean, and book the error."""
        self.row.check(payloads, self.bucket)
        return self.kernels.again(payloads, self.buffer, self.bucket.again())

    def decode(self, payloads: Sequence[Payload], out: Tensor) -> None:
        """Write the shards of all workers to ``out``."""
        self.row.check(payloads, self.bucket)
        self.kernels.average(payloads, out, self.bucket.pending)


@dataclass(frozen=True, eq=False)
class JointCollective(Whole, abc.ABC):
    """Exchange parts of a bucket together. Subclasses implement ``rounds``.

    Args:
        parts: ascending. Their codecs are equal.
        shapes: of the parts.
    """

    parts: tuple[Part, ...]
    shapes: Sequence[tuple[int, ...]]

    @property
    def codec(self) -> Any:
        """The compressor of all parts."""
        return self.parts[0].codec

    @abc.abstractmethod
    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange the parts of ``buffer``, under the contract of ``Compressor.flow``."""

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        """Run ``rounds``, which need no scheme."""
        yield from self.rounds(bucket, buffer, out)


def absorbed(bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None, family: str) -> bool:
    """Return whether a family's kernels of whole buckets can be used: on a GPU, without shards."""
    return joint_of(bucket, scheme) == "parts" and fused(buffer, family)


# Cached, since every tensor needs its format in every step.
@functools.lru_cache(maxsize=4096)
def wire_of(codec: Any, numel: int) -> Wire:
    """Return ``codec.wire(numel)`` from a cache."""
    found: Wire = codec.wire(numel)
    return found


@functools.lru_cache(maxsize=4096)
def limits_of(codec: Any, numel: int) -> Limits | None:
    """Return the maximal elements per ragged payload tensor; None if all lengths are fixed."""
    return limits(codec.wire(numel))
