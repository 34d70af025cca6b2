"""Define Compressor, Codec and Collective, their laws, and what a subclass declares of itself."""

from __future__ import annotations

import abc
import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, Self

from torch import Tensor

from lightning_gc.compressors.joint import CodecScheme, JointCollective, Part, Whole, WholeCodec
from lightning_gc.core import Bucket, Choice, Flow, Mean, Payload, Range, Structure, Wire
from lightning_gc.core.saved_state import NOTHING
from lightning_gc.core.settings import Settings

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


@dataclass(frozen=True)
class Worst:
    """Each bound may be the one that holds."""

    bounds: tuple[Bound, ...]

    def allowed(self, squared_norm: float) -> float:
        return max(bound.allowed(squared_norm) for bound in self.bounds)


Bound = Contraction | AbsoluteError | Multiple | Unbounded | Worst


class Compressor(Settings, abc.ABC):
    """Exchange gradients in fewer bytes.

    Subclasses are frozen dataclasses that hold configuration only; state is in ``bucket.state``. A
    method with one communication round is a ``Codec``. A method that defines its rounds is a
    ``Collective``.
    """

    _turns: ClassVar[str] = ""
    """Name of the field with the compressor that has the knob; "": this compressor has it."""

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

    @property
    def whole(self) -> Whole:
        """The compressor as the engine uses it; authors need not know this object."""
        return Whole()

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

    @property
    def knob(self) -> Knob | None:
        """The field that a controller sets, or None."""
        return self.traits.knob

    @property
    def _main_field(self) -> str | None:
        return None if self.knob is None else self.knob.field

    @property
    def level(self) -> float | None:
        """The knob's value, or None without a knob."""
        if self._turns:
            inner: Compressor = getattr(self, self._turns)
            return inner.level
        return None if self.knob is None else getattr(self, self.knob.field)

    def at(self, level: float) -> Self:
        """Return this compressor with its knob at ``level``, clamped to the knob's range.

        Raises:
            ValueError: the compressor has no knob, or ``level`` is not a number.
        """
        if self._turns:
            inner: Compressor = getattr(self, self._turns)
            return dataclasses.replace(self, **{self._turns: inner.at(level)})  # type: ignore[type-var]
        knob = self.knob
        if knob is None:
            raise ValueError(f"{self} has no knob, so it cannot be set to level {level!r}.")
        if math.isnan(level):
            raise ValueError(f"{self} cannot be set to level nan; give a number.")
        changes: dict[str, Any] = {knob.field: knob.clamp(level)}
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return instances for the contract tests."""
        return (cls(),)


def has_knob_inside(compressor: type[Compressor]) -> bool:
    """Return whether a class turns the knob of a compressor that it wraps."""
    return bool(compressor._turns) or compressor.level is not Compressor.level


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

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many of ``numel`` elements the payload carries: by default all."""
        return numel

    @property
    def whole(self) -> WholeCodec:
        return WholeCodec(self)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        yield from self.whole.flow(bucket, buffer, out, scheme)


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


def dense(buffer: Tensor, out: Tensor) -> Flow:
    """Send the gradient uncompressed, in place where possible."""
    (mean,) = yield Mean((buffer,))
    if mean.data_ptr() != out.data_ptr():
        out.copy_(mean)
    if buffer.data_ptr() != out.data_ptr():
        buffer.zero_()
