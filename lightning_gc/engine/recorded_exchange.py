"""RecordedExchange: a bucket's exchange, started again without its Python while it stays the same.

The first step of a layout runs as it is written. The next ones are recorded, until two are equal.
From then on a step starts the recorded work again, and asks the recorded requests. Everything that
decides what is started is compared before. If it differs, the step runs as written, and the next
ones are recorded anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from lightning_gc.core import Bucket, Exchange, Flow, Gather, Reply, Request, Tally
from lightning_gc.core.flow import Arrived, resume
from lightning_gc.kernels.recording import Span, Tape, tensors_of

TRIES = 8
"""Steps of a bucket that are recorded at first, until two are equal."""
KEPT = 1.75
"""Bytes of the tensors that a recording keeps, at most, in gradients of the bucket."""
SMALL = 1 << 20
"""Bytes that it may keep in any case."""
T = TypeVar("T")


@dataclass
class RecordedExchange:
    """Work of one bucket, between its requests.

    Attributes:
        opening: before the engine's statistics see the gradient.
        exchange: before each request, and after the last one.
        requests, replies: in their order. Replies are received into the same memory.
        closing: after statistics have seen the error.
        error: what the exchange leaves, ``(numel,)``.
        tally: what it adds to the counts.
    """

    opening: Span
    exchange: Sequence[Span]
    requests: Sequence[Request]
    replies: Sequence[Reply]
    closing: Span
    error: Tensor
    tally: Tally

    def flow(self, step: int) -> Flow:
        """Exchange the bucket, in the step of this number."""
        *before, last = self.exchange
        for span, request, reply in zip(before, self.requests, self.replies, strict=True):
            span.start(step)
            arrived = yield request
            if arrived is not reply:  # the transport has not received into its memory
                _receive(reply, arrived)
        last.start(step)


def _receive(place: Reply, arrived: Reply) -> None:
    """Copy what has arrived to where the recorded work reads it, unless it lies there."""
    for ours, theirs in zip(place, arrived, strict=True):
        if not isinstance(theirs, Tensor):
            _receive(ours, theirs)
        elif ours is not theirs and ours.data_ptr() != theirs.data_ptr():
            ours.copy_(theirs)


class Recorder:
    """Runs a bucket's exchange as written, and notes what it starts.

    Args:
        bucket: of which the exchange is recorded. ``bucket`` has the step and the tally to use
            instead.
    """

    def __init__(self, bucket: Bucket) -> None:
        grad = bucket.grad
        size = grad.numel() * grad.element_size()
        self._tape = Tape(bucket.step, max(KEPT * size, SMALL))
        self.bucket = replace(bucket, step=self._tape.step, tally=Tally())
        self._spans: list[Span] = []
        self._requests: list[Request] = []
        self._replies: list[Reply] = []
        self._state = {name: dict(kept) for name, kept in bucket.state.items()}

    def note(self, part: Callable[[], T]) -> T:
        """Run a part without requests."""
        with self._tape.runs():
            result = part()
        self._spans.append(self._tape.cut())
        return result

    def follow(self, flow: Flow) -> Flow:
        """Run a flow."""
        with self._tape.runs():
            request = next(flow, None)
        while request is not None:
            self._spans.append(self._tape.cut())
            tensors = request.payloads if isinstance(request, Exchange) else request.tensors
            self._tape.asks(type(request).__name__, tensors_of(tensors))
            if getattr(request, "limits", None) is not None:
                self._tape.refuse("lengths vary")
            reply = yield request
            self._requests.append(request)
            self._replies.append(reply)
            self._tape.arrives(tensors_of(reply))
            with self._tape.runs():
                request = resume(flow, reply)
        self._spans.append(self._tape.cut())

    def carried(self, part: Callable[[], None]) -> Callable[[], None]:
        """Return a part that also keeps the compressor's state where it was.

        State that the flow has replaced is written there, for the next step to read it.
        """

        def close() -> None:
            part()
            self._carry()

        return close

    def _carry(self) -> None:
        old, new = list[Tensor](), list[Tensor]()
        for name, kept in self.bucket.state.items():
            before = self._state[name]
            for key, value in kept.items():
                known = before.get(key)
                if known is value or (not isinstance(value, Tensor) and known == value):
                    continue
                if not isinstance(known, Tensor) or not _alike(known, value):
                    self._tape.refuse(f"{key} of the compressor's state changes")
                    return
                old.append(known)
                new.append(value)
                kept[key] = known
            if before.keys() != kept.keys():
                self._tape.refuse("the compressor's state has other entries")
        if old:
            torch._foreach_copy_(old, new)

    def seen(self) -> Any:
        """Return what was started, in a form that is equal in an equal step; None: unknown."""
        return None if self._tape.refused else self._tape.seen

    def made(self, error: Tensor) -> RecordedExchange:
        """Return the recorded exchange."""
        opening, *exchange, closing = self._spans
        requests = [_into(r, reply) for r, reply in zip(self._requests, self._replies, strict=True)]
        tally = self.bucket.tally
        return RecordedExchange(opening, exchange, requests, self._replies, closing, error, tally)


def _into(request: Request, reply: Reply) -> Request:
    """Return a request whose reply is received into the memory of an earlier one, if it can be."""
    if isinstance(request, Gather) and isinstance(reply, Arrived):
        return request._replace(into=reply)
    return request


def _alike(one: Tensor, other: Any) -> bool:
    """Return whether a tensor can take another one's numbers."""
    return isinstance(other, Tensor) and (one.shape, one.dtype) == (other.shape, other.dtype)


class Recordings:
    """The recorded exchanges of an engine's buckets."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], RecordedLayout] = {}

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        """Leave out what has addresses of this process."""
        return type(self), ()

    def of(
        self, names: tuple[str, ...], place: int, situation: tuple[Any, ...], kept: tuple[Any, ...]
    ) -> RecordedLayout:
        """Return what is known of a bucket, in a step like the one before or in a new one.

        Args:
            names: of the bucket's parameters.
            place: address of its gradient.
            situation: all else that decides what is started.
            kept: objects that ``situation`` has by their address, which must not be used again.
        """
        layout = self._known.get(names)
        if layout is None or layout.situation != situation:
            new = set(names)
            self._known = {n: kept for n, kept in self._known.items() if new.isdisjoint(n)}
            layout = self._known[names] = RecordedLayout(situation, kept)
        layout.enter(place)
        return layout


class RecordedLayout:
    """What is known of a bucket in one situation.

    Attributes:
        recorded: the exchange, once two steps were equal.
    """

    def __init__(self, situation: tuple[Any, ...], kept: tuple[Any, ...]) -> None:
        self.situation, self._kept = situation, kept
        self.recorded: RecordedExchange | None = None
        self._place = -1
        self._seen: Any = None  # in the step before, if it was recorded
        self._written = self._tried = self._repeated = 0  # steps

    def enter(self, place: int) -> None:
        """Begin a step with the gradient at this address; at another one, record anew."""
        if place != self._place:
            self.recorded, self._seen, self._place, self._written = None, None, place, 0
        if self.recorded is None:
            self._written += 1
        else:
            self._repeated += 1

    def is_due(self) -> bool:
        """Return whether a step that is run as it is written is to be recorded.

        Not the first one, which may compile kernels and lay out buffers. Recording takes longer, so
        it is not tried again and again: at first, as long as it has paid, and now and then.
        """
        if self._written == 1:
            return False
        paid = self._tried < TRIES + self._repeated // 4
        later = (self._written & -2).bit_count() == 1  # 2 and 3, 4 and 5, 8 and 9, 16 and 17, ...
        self._tried += paid or later
        return paid or later

    def compare(self, recorder: Recorder, error: Tensor) -> None:
        """Keep a recorded step if the one before was equal."""
        seen = recorder.seen()
        if seen is not None and seen == self._seen:
            self.recorded, self._seen = recorder.made(error), None
        else:
            self._seen = seen
