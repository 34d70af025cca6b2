"""Compressor, Codec and Collective: the base classes of all methods, and the laws they keep."""

from __future__ import annotations

import abc
import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, Self

from torch import Tensor

from lightning_gc.compressors.bounds import Bound
from lightning_gc.compressors.traits import Knob, Traits, Waits
from lightning_gc.core import payload_validation
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Flow, Limits, Mean, Payload
from lightning_gc.core.settings import Settings
from lightning_gc.core.state_structure import NOTHING, Structure
from lightning_gc.core.wire import Wire, limits

Joint = Literal["no", "parts", "shards"]


class CodecScheme(Protocol):
    """What a codec needs of a scheme; see ``lightning_gc.schemes``."""

    @property
    def joint(self) -> Joint:
        """What may be encoded together."""

    @property
    def scatters(self) -> bool:
        """Whether each worker gets its own shard of the mean."""

    def flow(self, codec: Codec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange what ``codec`` takes out of ``buffer`` and leave the mean in ``out``."""

    def dense(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange ``buffer`` as it is and leave the mean in ``out``."""


class Compressor(Settings, abc.ABC):
    """A way to exchange a gradient with fewer bytes.

    Subclasses are frozen dataclasses that hold configuration only; state is in ``bucket.state``. A
    method of one round is a ``Codec``, one with its own rounds a ``Collective``.
    """

    @property
    @abc.abstractmethod
    def traits(self) -> Traits:
        """What this compressor is: a class attribute, or a property where it depends on fields."""

    @abc.abstractmethod
    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        """Exchange ``buffer`` with the other workers.

        Afterwards ``out`` is the mean of what all workers sent, the same bits on all; ``buffer`` is
        what this worker did not send. Both are ``(numel,)``; without a memory they may be one
        tensor, so ``out`` is written last.
        """

    @abc.abstractmethod
    def bound(self, numel: int) -> Bound:
        """Return the bound on the compression error of a tensor of ``numel`` elements."""

    @abc.abstractmethod
    def wire(self, numel: int) -> Wire:
        """Return the tensors that are sent of a tensor of ``numel`` elements."""

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        """Return what ``bucket.state`` has of a tensor of this shape, at any level.

        By default nothing. State that is loaded is held to it before anything changes.
        """
        return NOTHING

    @property
    def waits(self) -> Waits:
        """How often encoding a tensor makes the host wait for an accelerator.

        Of a ``Collective``, a step of one tensor. Messages whose lengths vary wait once more each.
        Decoders do not wait.
        """
        return Waits()

    @property
    def method(self) -> Compressor:
        """The compressor that does the work: itself, or what a wrapper has inside."""
        return self

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape is compressed at all."""
        return not self.traits.exact

    def compressing_step(self, step: int) -> int:
        """Return the first step from ``step`` on in which nothing is sent whole on schedule."""
        return step

    def for_shape(self, shape: tuple[int, ...]) -> Compressor | None:
        """Return the compressor to run on a tensor of this shape; None sends it dense."""
        return self

    def for_shards(self, shards: int) -> Compressor:
        """Return the compressor for tensors that are cut into ``shards`` parts beforehand.

        Limits of size are meant for whole tensors.
        """
        return self

    def joined(self, parts: tuple[Part, ...]) -> Codec | None:
        """Return a codec of the bucket of ``parts`` that makes one payload of theirs.

        Args:
            parts: ascending; other elements of the bucket are to be left alone.

        Returns:
            None if each part has a payload of its own.
        """
        return None

    @property
    def knob(self) -> Knob | None:
        """The one field that a controller turns, or None."""
        return self.traits.knob

    @property
    def level(self) -> float | None:
        """The knob's value, or None where there is no knob."""
        return None if self.knob is None else getattr(self, self.knob.field)

    def at(self, level: float) -> Self:
        """Return this compressor with its knob at ``level``, clamped to the knob's range.

        Raises:
            ValueError: the compressor has no knob, or ``level`` is not a number.
        """
        knob = self.knob
        if knob is None:
            raise ValueError(f"{self!r} has no knob, so level {level!r} means nothing to it.")
        if math.isnan(level):
            raise ValueError(f"{self!r} cannot be set to level nan; give a number.")
        changes: dict[str, Any] = {knob.field: knob.clamp(level)}
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    def with_levels(self, levels: Mapping[str, float | None], *, dense: bool) -> Self:
        """Return this compressor with levels of their own for some parameters.

        Args:
            levels: parameter name -> level; None sends the parameter uncompressed.
            dense: whether all other parameters are sent uncompressed.

        Raises:
            ValueError: it works on whole buckets.
        """
        raise ValueError(
            f"{self!r} works on whole buckets, so parameters cannot have levels of their own "
            f"({', '.join(levels)}); use PerParameter({self!r})."
        )

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return the instances for the contract tests."""
        return (cls(),)


class Part(NamedTuple):
    """A parameter of a bucket, and what compresses it."""

    codec: Compressor
    name: str
    start: int  # in the bucket's flat gradient
    stop: int


class Codec(Compressor):
    """A compressor of one round: ``encode`` here, send, ``decode`` there.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. It takes, and what it does not take stays: ``decode(encode(x)) + x_after == x_before``.
    2. It adds: ``decode`` accumulates ``scale`` times the payload into ``out``.
    3. It is what it declares: ``traits``, ``bound`` and ``keeps`` are true of it.
    4. It has one knob, and ``at(level)`` moves the payload's size in the knob's direction.
    5. Its payloads are those of ``wire(numel)``.
    6. Its randomness is private: from ``bucket.generator`` or ``generator_seed`` only.
    7. It trusts no bytes: whatever numbers a payload of the right lengths holds, ``decode`` raises
       ValueError or writes to ``out`` alone, and all workers get the same bits of the same payload.
       Where raising would mean waiting for a device, what cannot be right makes ``out`` non-finite.
    8. It recovers: after gradients of any finite size, and after any payloads, results are finite
       again within a few rounds. (The engine removes what is not finite from errors.) Gradients of
       up to 1e30 have finite results in every round. Beyond, sums over elements, workers or rounds
       may leave float32; the mean of that parameter is then not finite on all workers.
    """

    @abc.abstractmethod
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Move what is sent out of ``buffer``, in place, and return it.

        Args:
            buffer: ``(numel,)`` float32 or float64; afterwards it holds the compression error.
            bucket: names, shape, step and random generators; its ``grad`` is not to be changed.

        Returns:
            Tensors as ``wire`` declares them, which share no storage with ``buffer``.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add ``scale`` times what ``payload`` stands for to ``out``, ``(numel,)``.

        Number and lengths of tensors have been checked against ``wire``; lengths that depend on one
        another, and numbers, have not.

        Raises:
            ValueError: the payload cannot come from this compressor (bytes are not trusted).
        """

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many of ``numel`` elements the payload carries."""
        return numel

    def taken(self, numel: int) -> int:
        """Return how many of ``numel`` elements are compressed at all."""
        return numel

    def send(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Encode, and count what the payload carries. For schemes."""
        payload = self.encode(buffer, bucket)
        if bucket.phase == 0:
            # A shard's buffer may be padded beyond its bucket.
            sent = min(self.sent(payload, buffer.numel()), bucket.numel)
            bucket.tally.count(self.taken(bucket.numel), sent, payload)
        return payload

    def receive(
        self, payload: Payload, out: Tensor, scale: float, bucket: Bucket, sender: int | None
    ) -> None:
        """Check and decode what worker ``sender`` sent, or the mean of all where None.

        Raises:
            ValueError: the payload cannot come from this compressor; it names the sender.
        """
        with payload_validation.naming(self, bucket, sender):
            payload_validation.fields(payload, wire_of(self, out.numel()))
            self.decode(payload, out, scale, bucket)

    def finish(self, out: Tensor, bucket: Bucket) -> None:
        """Turn the mean of what workers sent into the result, in place. By default it is."""

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        assert scheme is not None
        yield from scheme.flow(self, bucket, buffer, out)
        if bucket.wanted:
            self.finish(out, bucket)


class Collective(Compressor):
    """A compressor with communication rounds of its own, such as PowerSGD; it takes no scheme.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. What ``rounds`` leaves in ``buffer`` is what the worker did not send: the result plus the
       mean over workers of the errors is the mean of the gradients, if ``traits.conserves``.
    2. All workers end with the same bits, or all raise a ``ReplicaError``.
    3. It is what it declares: ``traits``, ``bound`` and ``keeps`` are true of it.
    4. It has one knob, and ``at(level)`` moves the bytes in the knob's direction.
    5. Its requests have the same shapes on all workers but for tensors with a limit.
    6. Its randomness is private: from ``bucket.generator`` or ``generator_seed`` only.
    7. It trusts no bytes: whatever arrives, it raises ValueError or writes to ``out`` and its own
       error and state alone.
    8. It recovers: after gradients of any finite size, and whatever has arrived, state is finite,
       and results are within a few rounds. (The engine removes what is not finite from errors, but
       what a method subtracts from them is its own affair: a NaN takes the whole error with it.)
    """

    @abc.abstractmethod
    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange ``buffer``; as ``flow``."""

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        yield from self.rounds(bucket, buffer, out)


class BatchedCollective(Collective):
    """A collective that exchanges tensors of one shape together, by fewer operations.

    ``PerParameter`` hands it the parameters of a bucket whose shapes and levels are equal, and does
    not call ``rounds``.
    """

    @abc.abstractmethod
    def rounds_of_equals(
        self, buckets: Sequence[Bucket], buffers: Sequence[Tensor], outs: Sequence[Tensor]
    ) -> Flow:
        """Exchange each buffer; all buckets hold one parameter, of one shape.

        A result is as if it were exchanged alone, up to rounding, and what is not finite in one
        buffer stays out of the others. Each buffer and its ``out`` may be one tensor. What is kept
        in ``bucket.state`` shares no memory with others' states, or checkpoints would hold all.
        """

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        yield from self.rounds_of_equals([bucket], [buffer], [out])


def dense(buffer: Tensor, out: Tensor) -> Flow:
    """Send everything exactly, in place where possible."""
    (mean,) = yield Mean((buffer,))
    if mean.data_ptr() != out.data_ptr():
        out.copy_(mean)
    if buffer.data_ptr() != out.data_ptr():
        buffer.zero_()


# Made once, since they are asked for every tensor in every step.
@functools.lru_cache(maxsize=4096)
def wire_of(codec: Codec, numel: int) -> Wire:
    """Return ``codec.wire(numel)``."""
    return codec.wire(numel)


@functools.lru_cache(maxsize=4096)
def limits_of(codec: Codec, numel: int) -> Limits | None:
    """Return the most elements of each ragged tensor of a payload; None if none is ragged."""
    return limits(codec.wire(numel))
