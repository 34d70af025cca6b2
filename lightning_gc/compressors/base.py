"""What a compressor is: frozen configuration, local arithmetic, and the laws that it keeps."""

from __future__ import annotations

import abc
import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Self

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.sparsifiers import sparse_payload
from lightning_gc.flow import Flow, Limits, Mean, Payload
from lightning_gc.search_space import Choice, Range

if TYPE_CHECKING:
    from lightning_gc.schemes.base import Scheme

Kind = Literal["dense", "sparsifier", "quantiser", "low rank"]


@dataclass(frozen=True)
class Knob:
    """The one field that a controller turns, Optuna samples and the monitor names.

    Attributes:
        field: name of the dataclass field.
        low: least sensible value.
        high: greatest sensible value.
        scale: whether steps along the range multiply (``"log"``) or add (``"linear"``).
        more: what a higher value means: ``"bytes"`` (less compression) or ``"compression"``.
        integer: whether only whole numbers make sense.
    """

    field: str
    low: float
    high: float
    scale: Literal["log", "linear"] = "log"
    more: Literal["bytes", "compression"] = "bytes"
    integer: bool = False

    def clamp(self, level: float) -> float:
        """Return the value of the range nearest to ``level``."""
        level = min(max(level, self.low), self.high)
        return round(level) if self.integer else level


@dataclass(frozen=True)
class Contraction:
    """The bound ``E‖x − C(x)‖² ≤ (1 − delta)·‖x‖²``, with ``0 ≤ delta ≤ 1``."""

    delta: float

    def allowed(self, squared_norm: float) -> float:
        """Return the greatest ``E‖x − C(x)‖²`` for ``‖x‖² = squared_norm``."""
        return (1 - self.delta) * squared_norm


@dataclass(frozen=True)
class AbsoluteError:
    """The bound ``‖x − C(x)‖² ≤ v²``, whatever x is."""

    v: float

    def allowed(self, squared_norm: float) -> float:
        """Return the greatest ``‖x − C(x)‖²``."""
        return self.v**2


@dataclass(frozen=True)
class Variance:
    """The bound ``E C(x) = x`` and ``E‖x − C(x)‖² ≤ omega·‖x‖²``."""

    omega: float

    def allowed(self, squared_norm: float) -> float:
        """Return the greatest ``E‖x − C(x)‖²`` for ``‖x‖² = squared_norm``."""
        return self.omega * squared_norm


@dataclass(frozen=True)
class Multiple:
    """The bound ``E‖x − C(x)‖² ≤ omega·‖x‖²`` of a compressor that may be biased; no contraction.

    With ``omega > 1`` errors may grow, so such a compressor is used without error feedback.
    """

    omega: float

    def allowed(self, squared_norm: float) -> float:
        """Return the greatest ``E‖x − C(x)‖²`` for ``‖x‖² = squared_norm``."""
        return self.omega * squared_norm


@dataclass(frozen=True)
class Unbounded:
    """No bound: what is sent is a direction, whose length says nothing about the gradient's."""

    def allowed(self, squared_norm: float) -> float:
        """Return infinity."""
        return math.inf


Bound = Contraction | AbsoluteError | Variance | Multiple | Unbounded


class Compressor(abc.ABC):
    """A way to send a gradient with fewer bytes.

    Subclasses are frozen dataclasses and hold configuration only; what must be remembered between
    steps is in ``bucket.state``, owned by the engine. They declare what they are:

    Attributes:
        kind: the family, which picks the default scheme.
        linear: payloads of several workers may be averaged before they are decoded.
        averages: it reaches the mean by rounds of its own, so it goes with ``AllReduce`` only.
        unbiased: the expectation of what is sent is the gradient; error feedback is not needed.
        ragged: payload lengths depend on values.
        elementwise: treats each element alike whatever its neighbours, so that a bucket need not
            be cut into parameters.
        exact: what it sends is the gradient itself: the error is always zero.
        selects: it sends elements and names their positions: ``choose`` says which, and ``take``
            moves any of them, so that a scheme may split what has been selected.
        conserves: the result is the mean of what workers sent, so that with error feedback nothing
            is lost. Not so where they vote.
        default_memory: name of the memory that goes with it if none is chosen; None stands for
            ``"none"`` where it is unbiased and ``"residual"`` where it is not.
        knob: the one field that a controller turns, or None.
        space: what is worth tuning, and in which range. Without an entry of its own the knob is
            tuned over all of its range.
    """

    kind: Kind
    linear: bool = False
    averages: bool = False
    unbiased: bool = False
    ragged: bool = False
    elementwise: bool = False
    exact: bool = False
    selects: bool = False
    conserves: bool = True
    default_memory: str | None = None
    knob: Knob | None = None
    space: tuple[Range | Choice, ...] = ()

    @abc.abstractmethod
    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: Scheme) -> Flow:
        """Exchange ``buffer`` with the other workers.

        When the flow ends, ``out`` holds the mean of what all workers sent, bit-identical on all
        of them, and ``buffer`` holds what this worker did not send. Both are flat, ``(numel,)``;
        without a memory they may be one tensor, so ``out`` is written last.
        """

    @abc.abstractmethod
    def bound(self, numel: int) -> Bound:
        """Return the bound on the compression error of a tensor of ``numel`` elements."""

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """Return whether a tensor of this shape is compressed at all."""
        return not self.exact

    @property
    def level(self) -> float | None:
        """The knob's value, or None where there is no knob."""
        return None if self.knob is None else getattr(self, self.knob.field)

    def at(self, level: float) -> Self:
        """Return this compressor with its knob at ``level``, clamped to the knob's range.

        Raises:
            ValueError: the compressor has no knob, or ``level`` is not a number.
        """
        if self.knob is None:
            raise ValueError(f"{self!r} has no knob, so level {level!r} means nothing to it.")
        if math.isnan(level):
            raise ValueError(f"{self!r} cannot be set to level nan; give a number.")
        changes: dict[str, Any] = {self.knob.field: self.knob.clamp(level)}
        return dataclasses.replace(self, **changes)  # type: ignore[type-var]

    @classmethod
    def examples(cls) -> tuple[Self, ...]:
        """Return the instances on which the contract suite is run; the default one if not given."""
        return (cls(),)


class Codec(Compressor):
    """A compressor of one round: ``encode`` here, send, ``decode`` there.

    Laws, each held by a test of the same number in ``lightning_gc.testing``:

    1. It takes, and what it does not take stays: ``decode(encode(x)) + x_after == x_before``.
    2. It adds: ``decode`` accumulates ``scale`` times the payload into ``out``.
    3. It says what it is: ``linear``, ``unbiased``, ``selects`` and ``bound`` are true of it.
    4. It has one knob, and ``at(level)`` moves the payload's size in the knob's direction.
    5. Payload shapes follow from configuration, shapes and step, unless ``ragged``.
    6. Its randomness is private: from ``bucket.generator`` only.
    7. It trusts no bytes: whatever the payload's tensors hold, ``decode`` raises ValueError or
       writes to ``out`` alone, and all workers get the same bits of the same payload. Where
       raising would mean waiting for a device, what cannot be right makes ``out`` non-finite.
    """

    @abc.abstractmethod
    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Move what is sent out of ``buffer``, in place, and return it.

        Args:
            buffer: ``(numel,)`` float32 or float64; afterwards it holds the compression error.
            bucket: names, shape, step and random generators; its ``grad`` is not to be changed.

        Returns:
            Tensors that share no storage with ``buffer``.
        """

    @abc.abstractmethod
    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Add ``scale`` times what ``payload`` stands for to ``out``, ``(numel,)``.

        Raises:
            ValueError: the payload cannot come from this compressor (bytes are not trusted).
        """

    def limits(self, numel: int) -> Limits | None:
        """Return the most elements of each payload tensor where ``ragged``, else None."""
        return None

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many of ``numel`` elements the payload carries."""
        return numel

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Return the ascending positions of what ``encode`` would send, where it ``selects``.

        Args:
            buffer: as for ``encode``; it stays as it is.
            bucket: as for ``encode``.

        Returns:
            ``(k,)`` int64.
        """
        raise NotImplementedError(f"{self!r} does not select elements.")

    def take(self, buffer: Tensor, positions: Tensor) -> Payload:
        """Move elements out of ``buffer`` into (values, coded positions), where it ``selects``.

        Args:
            buffer: as for ``encode``, or a part of it.
            positions: ``(k,)`` int64, ascending, of this buffer.

        Returns:
            ``values``, ``(k,)`` of a floating dtype, and what ``positions.encode`` makes of the
            positions. What rounding leaves of the values stays in ``buffer``.
        """
        return sparse_payload.take(buffer, positions)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: Scheme) -> Flow:
        """Hand the conversation to the scheme."""
        yield from scheme.flow(self, bucket, buffer, out)


def dense(buffer: Tensor, out: Tensor) -> Flow:
    """Send everything exactly: the flow of "no compression", in place where it can be."""
    (mean,) = yield Mean((buffer,))
    if mean.data_ptr() != out.data_ptr():
        out.copy_(mean)
    if buffer.data_ptr() != out.data_ptr():
        buffer.zero_()
