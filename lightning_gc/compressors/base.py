"""Define Compressor, Codec and Collective, their laws, and what a subclass declares of itself."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from lightning_gc.core import (
    Bucket,
    Choice,
    Flow,
    Limits,
    Mean,
    Payload,
    Range,
    Structure,
    Wire,
    payload_validation,
)
from lightning_gc.core.saved_state import NOTHING
from lightning_gc.core.segments import Pending
from lightning_gc.core.settings import Settings
from lightning_gc.core.wire import limits
from lightning_gc.kernels.dispatch import fused

Kind = Literal["dense", "sparsifier", "quantiser", "low rank"]

LEVEL = "level"
"""Name of the knob in the search space of a wrapper around the compressor with the knob."""


@dataclass(frozen=True)
class Knob:
    """The field that controls the compression level, for controllers, Optuna and the monitor.

    Attributes:
        field: name of the dataclass field.
        low: least sensible value.
        high: greatest sensible value.
        scale: whether steps along the range multiply (``"log"``) or add (``"linear"``).
        more: effect of a higher value: ``"bytes"`` (less compression) or ``"compression"``.
        integer: whether the field takes only whole numbers.
    """

    field: str
    low: float
    high: float
    scale: Literal["log", "linear"] = "log"
    more: Literal["bytes", "compression"] = "bytes"
    integer: bool = False

    @property
    def range(self) -> Range:
        """The full range, as an entry of a search space."""
        return Range(self.field, self.low, self.high, self.scale, self.integer)

    @property
    def tightest(self) -> float:
        """The end of the range that compresses most."""
        return self.low if self.more == "bytes" else self.high

    def clamp(self, level: float) -> float:
        """Return the value of the range nearest to ``level``."""
        level = min(max(level, self.low), self.high)
        return round(level) if self.integer else level


@dataclass(frozen=True)
class Waits:
    """How often an operation makes the host wait for the accelerator.

    The host waits for a number computed on the accelerator, such as the count of elements above a
    threshold. It also waits for copies from pageable memory. Meanwhile it cannot start further
    operations of the exchange or the backward pass.

    Attributes:
        least: least number of waits, for a gradient that is not zero.
        most: greatest number of waits; ``math.inf`` without a limit. None means ``least``.
    """

    least: int = 0
    most: float | None = None

    @property
    def limit(self) -> float:
        """The greatest number of waits."""
        return self.least if self.most is None else self.most

    def __str__(self) -> str:
        if self.limit == self.least:
            return str(self.least)
        return f"{self.least} or more" if self.limit == math.inf else f"{self.least} to {self.most}"


@dataclass(frozen=True)
class Traits:
    """Properties of a compressor. Wrappers forward the inner compressor's, except ``space``.

    Attributes:
        kind: the family, which determines the default scheme.
        linear: payloads of several workers may be averaged before they are decoded.
        unbiased: the expectation of the decoded payload is the gradient, so error feedback is not
            needed.
        elementwise: elements are independent, so a bucket need not be cut into parameters.
        exact: the decoded payload is the gradient, so the error is always zero.
        conserves: the result is the mean of the sent parts, not a vote, so error feedback loses
            nothing.
        needs_sums: the choice of elements depends on sums over steps and on state of full tensors.
            The memory must have ``accumulates``, and the scheme must not cut tensors into shards.
        reads_model: a tensor's choice depends on the state of all tensors, ``Bucket.before``.
        portable: devices of different models get the same bits from the same payloads. Computations
            repeated on all workers treat elements one by one. They use neither matrix products nor
            sums of many elements nor a generator's numbers.
        default_memory: name of the default memory; None means ``"none"`` for unbiased compressors,
            otherwise ``"error_feedback"``.
        knob: the field that a controller sets, or None.
        space: fields worth tuning, with ranges. A knob missing here is tuned over its own range.
            ``level`` means a knob that is a field of the inner compressor.
    """

    kind: Kind
    linear: bool = False
    unbiased: bool = False
    elementwise: bool = False
    exact: bool = False
    conserves: bool = True
    needs_sums: bool = False
    reads_model: bool = False
    portable: bool = True
    default_memory: str | None = None
    knob: Knob | None = None
    space: tuple[Range | Choice, ...] = ()

    @property
    def plain(self) -> bool:
        """Whether gradients are sent as they are."""
        return self.exact and self.linear

    @property
    def level_space(self) -> tuple[Range | Choice, ...]:
        """The knob's entry under the name ``level``, for the space of a wrapper.

        Empty if the space has no entry for the knob. The wrapper then also searches the full range.
        """
        known = {entry.field: entry for entry in self.space}
        entry = None if self.knob is None else known.get(LEVEL, known.get(self.knob.field))
        return () if entry is None else (replace(entry, field=LEVEL),)


@dataclass(frozen=True)
class Contraction:
    """The bound ``E‖x − C(x)‖² ≤ (1 − delta)·‖x‖²``, with ``0 ≤ delta ≤ 1``."""

    delta: float

    def allowed(self, squared_norm: float) -> float:
        """Return the greatest ``E‖x − C(x)‖²`` for ``‖x‖² = squared_norm``."""
        return (1 - self.delta) * squared_norm


@dataclass(frozen=True)
class AbsoluteError:
    """The bound ``E‖x − C(x)‖² ≤ v²`` for every x."""

    v: float

    def allowed(self, squared_norm: float) -> float:
        return self.v**2


@dataclass(frozen=True)
class Multiple:
    """The bound ``E‖x − C(x)‖² ≤ omega·‖x‖²`` of a possibly biased compressor.

    With ``omega > 1`` it does not imply convergence with error feedback.
    """

    omega: float

    def allowed(self, squared_norm: float) -> float:
        return self.omega * squared_norm


@dataclass(frozen=True)
class Variance(Multiple):
    """The bound ``E C(x) = x`` and ``E‖x − C(x)‖² ≤ omega·‖x‖²``."""


@dataclass(frozen=True)
class Unbounded:
    """No bound: the sent direction has a length unrelated to the gradient's length."""

    def allowed(self, squared_norm: float) -> float:
        return math.inf


Bound = Contraction | AbsoluteError | Multiple | Unbounded


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

    def flow(self, codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange the payloads of ``codec`` for ``buffer`` and write their mean to ``out``."""

    def dense(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange ``buffer`` uncompressed and write the mean to ``out``."""


class Compressor(Settings, abc.ABC):
    """Exchange gradients in fewer bytes.

    Subclasses are frozen dataclasses that hold configuration only; state is in ``bucket.state``. A
    method with one communication round is a ``Codec``. A method that defines its rounds is a
    ``Collective``.
    """

    @property
    @abc.abstractmethod
    def traits(self) -> Traits:
        """The declared properties: a class attribute, or a property if they depend on fields."""

    @abc.abstractmethod
    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        """Exchange ``buffer`` with the other workers.

        Afterwards ``out`` is the mean of all workers' sent parts, with the same bits on all
        workers. ``buffer`` is the unsent part, the compression error. Both are ``(numel,)``.
        Without a memory they may be the same tensor, so ``out`` is written last.
        """

    @abc.abstractmethod
    def bound(self, numel: int) -> Bound:
        """Return the bound on the compression error of a tensor of ``numel`` elements."""

    @abc.abstractmethod
    def wire(self, numel: int) -> Wire:
        """Return the wire format of the payload for a tensor of ``numel`` elements."""

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        """Return the structure of ``bucket.state`` for a tensor of this shape, at any level.

        By default a compressor keeps no state. Loaded state is checked against the structure before
        any change.
        """
        return NOTHING

    @property
    def waits(self) -> Waits:
        """How often encoding a tensor makes the host wait for an accelerator.

        For a ``Collective``, the waits of one tensor's step. Each message of varying length adds
        one wait. Decoders do not wait. Kernels of whole buckets do not wait either, but every
        compressor can also be used without them.
        """
        return Waits()

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        """Return whether ``flow`` does for this bucket what ``core.segments.Pending`` says.

        By default the engine does that work, in kernels of its own.
        """
        return False

    @property
    def method(self) -> Compressor:
        """The innermost compressor: this one, or the one inside a wrapper."""
        return self

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape is compressed at all."""
        return not self.traits.plain

    def compressing_step(self, step: int) -> int:
        """Return the first step from ``step`` on that does not send uncompressed on schedule."""
        return step

    def for_shape(self, shape: tuple[int, ...]) -> Compressor | None:
        """Return the compressor to run on a tensor of this shape; None sends it dense."""
        return self

    def for_shards(self, shards: int) -> Compressor:
        """Return the compressor for tensors that are first cut into ``shards`` parts.

        Size limits refer to full tensors, so they must be scaled for shards.
        """
        return self

    @property
    def knob(self) -> Knob | None:
        """The field that a controller sets, or None."""
        return self.traits.knob

    @property
    def main_field(self) -> str | None:
        return None if self.knob is None else self.knob.field

    @property
    def level(self) -> float | None:
        """The knob's value, or None without a knob."""
        return None if self.knob is None else getattr(self, self.knob.field)

    def at(self, level: float) -> Self:
        """Return this compressor with its knob at ``level``, clamped to the knob's range.

        Raises:
            ValueError: the compressor has no knob, or ``level`` is not a number.
        """
        knob = self.knob
        if knob is None:
            raise ValueError(f"{self} has no knob, so it cannot be set to level {level!r}.")
        if math.isnan(level):
            raise ValueError(f"{self} cannot be set to level nan; give a number.")
        changes: dict[str, Any] = {knob.field: knob.clamp(level)}
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def with_levels(self, levels: Mapping[str, float | None], *, dense: bool) -> Self:
        """Return this compressor with separate levels for some parameters.

        Args:
            levels: parameter name -> level; None sends the parameter uncompressed.
            dense: whether all other parameters are sent uncompressed.

        Raises:
            ValueError: the compressor works on whole buckets.
        """
        raise ValueError(
            f"{self} works on whole buckets, so parameters cannot have separate levels "
            f"({', '.join(levels)}); use PerParameter({self})."
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return instances for the contract tests."""
        return (cls(),)


class Codec(Compressor):
    """Compress in one round: encode, send, decode.

    Laws, each checked by the test of the same number in ``lightning_gc.testing``:

    1. It conserves: ``decode(encode(x)) + x_after == x_before``.
    2. It adds: ``decode`` accumulates ``scale`` times the payload into ``out``.
    3. It keeps its declarations: ``traits``, ``bound`` and ``keeps`` are true.
    4. It has one knob, and ``at(level)`` changes the payload's size in the knob's direction.
    5. Its payloads have the format ``wire(numel)``.
    6. Its randomness is private: from ``bucket.generator``, ``generator_seed`` or ``key`` only.
    7. It does not trust bytes. For any numbers in a payload of the right lengths, ``decode`` raises
       ValueError or writes to ``out`` only. All workers get the same bits from the same payload.
       If raising would make the host wait, an impossible payload makes ``out`` non-finite.
    8. It recovers. After gradients of any finite size, and after any payloads, results are finite
       again within a few rounds. (The engine removes NaN and infinity from errors.) Gradients of up
       to 1e30 give finite results in every round. Above 1e30, sums over elements, workers or rounds
       may overflow float32; the parameter's mean is then not finite on all workers.
    """

    @abc.abstractmethod
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Move the sent part out of ``buffer``, in place, and return it as a payload.

        Args:
            buffer: ``(numel,)`` float32 or float64; afterwards it holds the compression error.
            bucket: names, shape, step and random generators; ``encode`` must not change its
                ``grad``.

        Returns:
            Tensors in the format of ``wire``. They share no storage with ``buffer``.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add ``scale`` times the decoded payload to ``out``, ``(numel,)``.

        The caller has checked the number of tensors and their lengths against ``wire``. ``decode``
        must check numbers, and lengths that depend on one another.

        Raises:
            ValueError: the payload cannot come from this compressor (bytes are not trusted).
        """

    @property
    def joint_kind(self) -> Hashable:
        """Parameters of a bucket whose codecs have equal kinds share a payload; None: no others."""
        return None

    def join(self, parts: tuple[Part, ...]) -> Codec:
        """Return a codec that encodes ``parts`` of a bucket in one payload.

        Elements and mean are the same, bit for bit, as with a payload for each part. Elements of
        the bucket outside the parts are not changed. Called only if ``joint_kind`` is not None.
        """
        raise NotImplementedError(f"{self} does not join parameters.")

    def in_shards(self, bucket: Bucket, buffer: Tensor) -> Shards | None:
        """Return kernels that encode all shards of ``buffer`` at once; None: there are none."""
        return None

    def in_rows(self, buffer: Tensor) -> bool:
        """Return whether shards of all parts are best copied to rows, which are coded together."""
        return False

    def elements(self, numel: int) -> int:
        """Return how many of ``numel`` elements of a buffer are encoded."""
        return numel

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many of ``numel`` elements the payload carries."""
        return self.elements(numel)

    def send(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Encode and add the payload to the tally. For schemes."""
        payload = self.encode(buffer, bucket)
        self.note(payload, buffer.numel(), bucket)
        return payload

    def note(self, payload: Payload, numel: int, bucket: Bucket) -> None:
        """Add the payload of a buffer of ``numel`` elements to the tally."""
        if bucket.phase == 0:
            # A shard's buffer may be padded beyond its bucket.
            sent = min(self.sent(payload, numel), bucket.numel)
            bucket.tally.count(min(self.elements(numel), bucket.numel), sent, payload)

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

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        assert scheme is not None
        yield from scheme.flow(self, bucket, buffer, out)


def absorbed(bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None, family: str) -> bool:
    """Return whether a family's kernels of whole buckets can be used: on a GPU, without shards."""
    parts = scheme is not None and scheme.joint(bucket.workers) == "parts"
    return parts and fused(buffer, family)


class ShardKernels(Protocol):
    """Kernels that encode and decode all shards of a bucket at once."""

    def encode(self, buffer: Tensor, bucket: Bucket) -> Sequence[Payload]:
        """Move the sent part out of ``buffer``: a payload for each worker, its shards' parts."""

    def again(self, payloads: Sequence[Payload], buffer: Tensor, bucket: Bucket) -> Payload:
        """Average all workers' ``payloads`` of the own shard, and encode the mean.

        W times the error of this second encoding is added to ``buffer``.
        """

    def average(self, payloads: Sequence[Payload], out: Tensor, pending: Pending | None) -> None:
        """Write the shards of all workers to ``out``."""


@dataclass(frozen=True)
class Shards:
    """Exchange one bucket in two rounds of shards; see ``schemes.TwoShot``.

    Attributes:
        row: has the format of a payload.
        elements: of all parts.
        kernels: of all parts.
        bucket, buffer: as for ``Codec.encode``.
    """

    row: Codec
    elements: int
    kernels: ShardKernels
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


def clear_parts(parts: Sequence[Part], out: Tensor) -> None:
    """Zero the parts of ``out``; all of it if nothing else is in it."""
    if sum(part.numel for part in parts) == out.numel():
        out.zero_()
    else:
        torch._foreach_zero_([out[part.start : part.stop] for part in parts])


@dataclass(frozen=True, eq=False)  # compared by identity, since hashing many parts takes long
class JointCodec(Codec):
    """Encode parts of a bucket in one payload whose tensors are those of the parts, one by one.

    The payload has each field of the parts' codec, the parts' tensors one after the other. Its
    message thus has the same bytes as messages of separate payloads. ``encode`` and ``decode`` work
    part by part, and are the reference of subclasses with kernels for whole buckets.

    Args:
        parts: ascending. Their codecs are equal and have fixed lengths.
    """

    parts: tuple[Part, ...]

    @property
    def codec(self) -> Any:
        """The codec of all parts."""
        return self.parts[0].codec

    @property
    def traits(self) -> Traits:
        return self.codec.traits  # type: ignore[no-any-return]

    def as_written(self) -> Settings:
        return self.codec.as_written()  # type: ignore[no-any-return]

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
        clear_parts(self.parts, out)

    @functools.cached_property
    def _lengths(self) -> list[list[int]]:
        """Per tensor of the payload, its elements for each part."""
        wires = [wire_of(part.codec, part.numel) for part in self.parts]
        return [[field.length for field in fields] for fields in zip(*wires, strict=True)]

    def elements(self, numel: int) -> int:
        return sum(part.numel for part in self.parts)

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0; each part keeps its codec's bound."""
        return Contraction(0.0)

    def wire(self, numel: int) -> Wire:
        fields = wire_of(self.codec, self.parts[0].numel)
        return tuple(replace(field, length=sum(self._lengths[i])) for i, field in enumerate(fields))

    def __repr__(self) -> str:
        return f"PerParameter({self.codec!r})"


class Collective(Compressor):
    """Compress in several communication rounds, as PowerSGD does, without a scheme.

    Laws, each checked by the test of the same number in ``lightning_gc.testing``:

    1. ``rounds`` leaves the unsent part in ``buffer``. With ``traits.conserves``, the result plus
       the mean error over workers is the mean of the gradients.
    2. All workers end with the same bits, or all raise a ``ReplicaError``.
    3. It keeps its declarations: ``traits``, ``bound`` and ``keeps`` are true.
    4. It has one knob, and ``at(level)`` changes the bytes in the knob's direction.
    5. Its requests have the same shapes on all workers, except for tensors with a limit.
    6. Its randomness is private: from ``bucket.generator`` or ``generator_seed`` only.
    7. It does not trust bytes. For any received bytes it raises ValueError, or writes only to
       ``out``, its error and its state.
    8. It recovers. After gradients of any finite size and any received bytes, state is finite, and
       results are finite within a few rounds. The engine removes NaN and infinity from errors. The
       method must not subtract a NaN from an error, since that destroys the error.
    """

    @abc.abstractmethod
    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange ``buffer`` and write the mean to ``out``, under the contract of ``flow``."""

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        yield from self.rounds(bucket, buffer, out)


class BatchedCollective(Collective):
    """Exchange several parameters of a bucket together, in fewer operations.

    ``PerParameter`` calls ``join`` once for all parameters of a bucket with equal compressors.
    """

    @abc.abstractmethod
    def join(self, parts: tuple[Part, ...], shapes: Sequence[tuple[int, ...]]) -> JointCollective:
        """Return a collective that exchanges ``parts`` of a bucket.

        A result equals that parameter's result alone, up to rounding. NaN and infinity in one part
        do not reach the others. Elements of the bucket outside the parts are not changed.

        Args:
            parts: ascending, not empty. Their codecs are equal to this compressor.
            shapes: of the parts.
        """

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        part = Part(self, "+".join(bucket.shapes), 0, bucket.numel, 0)
        yield from self.join((part,), [bucket.shape]).rounds(bucket, buffer, out)


@dataclass(frozen=True, eq=False)
class JointCollective(Collective):
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

    @property
    def traits(self) -> Traits:
        return self.codec.traits  # type: ignore[no-any-return]

    def as_written(self) -> Settings:
        return self.codec.as_written()  # type: ignore[no-any-return]

    def bound(self, numel: int) -> Bound:
        return self.codec.bound(numel)  # type: ignore[no-any-return]

    def wire(self, numel: int) -> Wire:
        return self.codec.wire(numel)  # type: ignore[no-any-return]


def dense(buffer: Tensor, out: Tensor) -> Flow:
    """Send the gradient uncompressed, in place where possible."""
    (mean,) = yield Mean((buffer,))
    if mean.data_ptr() != out.data_ptr():
        out.copy_(mean)
    if buffer.data_ptr() != out.data_ptr():
        buffer.zero_()


# Cached, since every tensor needs its format in every step.
@functools.lru_cache(maxsize=4096)
def wire_of(codec: Codec, numel: int) -> Wire:
    """Return ``codec.wire(numel)`` from a cache."""
    return codec.wire(numel)


@functools.lru_cache(maxsize=4096)
def limits_of(codec: Codec, numel: int) -> Limits | None:
    """Return the maximal elements per ragged payload tensor; None if all lengths are fixed."""
    return limits(codec.wire(numel))
