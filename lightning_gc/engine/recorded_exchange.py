"""RecordedExchange: a bucket's exchange, started again without its Python while it stays the same.

The first step of a layout runs as it is written. The second one is watched, and the third recorded
if it is equal. From then on a step starts the recorded work again, and asks the recorded requests.
Everything that decides what is started is compared before. If it differs, the step runs as written,
and the next ones are watched and recorded anew.

All recorded exchanges of an engine share memory for what they make and receive: the bytes of the
largest one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lightning_gc.core import Bucket, Exchange, Flow, Gather, Reply, Request, Tally
from lightning_gc.core.flow import Arrived, resume
from lightning_gc.kernels.recording import Span, Tape, tensors_of

TRIES = 8
"""Steps of a bucket that are watched or recorded at first."""
MOST = 4
"""Bytes that a recorded exchange makes and receives, at most, in gradients of the bucket."""
SMALL = 1 << 20
"""Bytes that it may make in any case."""
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
        kept: the tensors that it reads and writes. Launches have only their addresses.
    """

    opening: Span
    exchange: Sequence[Span]
    requests: Sequence[Request]
    replies: Sequence[Reply]
    closing: Span
    error: Tensor
    tally: Tally
    kept: Sequence[Tensor]

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
        bucket: to exchange.
        before: as for ``Tape``.

    Attributes:
        bucket: the same with the step and the tally to use instead.
    """

    def __init__(self, bucket: Bucket, before: tuple[Sequence[Any], Tensor] | None) -> None:
        self._tape = Tape(bucket.step, bucket.grad.device, before)
        self.bucket = replace(bucket, step=self._tape.step, tally=Tally())
        self._spans: list[Span] = []
        self._requests: list[Request] = []
        self._replies: list[Reply] = []
        self._state = entries_of(bucket.state)

    def note(self, part: Callable[[], T]) -> T:
        """Run a part without requests."""
        with self._tape.runs():
            result = part()
        self._spans.append(self._tape.cut())
        return result

    def follow(self, flow: Flow) -> Flow:
        """Run a flow."""
        try:
            yield from self._followed(flow)
        except BaseException:  # also an interrupt: the state stays, and the memory is used again
            self._rescue()
            raise

    def _followed(self, flow: Flow) -> Flow:
        with self._tape.runs():
            request = next(flow, None)
        while request is not None:
            self._spans.append(self._tape.cut())
            tensors = request.payloads if isinstance(request, Exchange) else request.tensors
            self._tape.asks(type(request).__name__, tensors_of(tensors))
            if getattr(request, "limits", None) is not None:
                self._tape.refuse("lengths vary")
            reply = self._tape.arrives((yield request))
            self._requests.append(request)
            self._replies.append(reply)
            with self._tape.runs():
                request = resume(flow, reply)
        self._spans.append(self._tape.cut())

    def carrying(self, part: Callable[[], None]) -> Callable[[], None]:
        """Return a part that also keeps the compressor's state where it was.

        State that the flow has replaced is written there, for the next step to read it.
        """

        def close() -> None:
            part()
            if not carried(self._state, self.bucket.state):
                self._tape.refuse("the compressor's state may be another one")
            if self._tape.refused is not None:
                self._rescue()

        return close

    def _rescue(self) -> None:
        """Take state out of the memory that the next exchange uses."""

        def alone(leaf: Any) -> Any:
            return leaf.clone() if isinstance(leaf, Tensor) and self._tape.holds(leaf) else leaf

        for kept in self.bucket.state.values():
            kept.update(tree_map(alone, kept))

    def seen(self) -> tuple[Sequence[Any], int] | None:
        """Return what was started, and the bytes of what was made; None: it cannot be recorded."""
        grad = self.bucket.grad
        most = max(MOST * grad.numel() * grad.element_size(), SMALL)
        if self._tape.refused is not None or self._tape.nbytes > most:
            return None
        return self._tape.seen, self._tape.nbytes

    def made(self, error: Tensor) -> RecordedExchange | None:
        """Return the recorded exchange; None if the step differed from the one before."""
        if not self._tape.complete:
            return None
        opening, *exchange, closing = self._spans
        requests = [_into(r, reply) for r, reply in zip(self._requests, self._replies, strict=True)]
        counts = self.bucket.tally, self._tape.kept
        return RecordedExchange(opening, exchange, requests, self._replies, closing, error, *counts)


def _into(request: Request, reply: Reply) -> Request:
    """Return a request whose reply is received into the memory of an earlier one, if it can be."""
    if isinstance(request, Gather | Exchange) and isinstance(reply, Arrived):
        return request._replace(into=reply)
    return request


State = Mapping[str, Mapping[str, Any]]


def entries_of(state: State) -> State:
    """Return the entries of a compressor's state, which a flow may replace."""
    return {name: dict(kept) for name, kept in state.items() if kept}


def carried(before: State, state: Mapping[str, dict[str, Any]]) -> bool:
    """Write tensors that a flow has replaced to where they were, and put these back.

    Recorded work reads them there.

    Args:
        before: ``entries_of`` the state before the flow.
        state: after it.

    Returns:
        Whether no more than that has changed; if not, all is as the flow has left it.
    """
    old, new = list[Tensor](), list[Tensor]()
    for name, kept in state.items():
        known = before.get(name, {})
        if known.keys() != kept.keys():
            return False
        for key, value in kept.items():
            if isinstance(value, Tensor) and _alike(value, known[key]):
                if value is not known[key]:
                    old.append(known[key])
                    new.append(value)
            elif not isinstance(value, int | float | str) or value != known[key]:
                return False
    if old:
        torch._foreach_copy_(old, new)
    for name, kept in state.items():
        kept.update(before.get(name, {}))
    return True


def _alike(one: Tensor, other: Any) -> bool:
    """Return whether a tensor can take another one's numbers."""
    if not isinstance(other, Tensor):
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


class Recordings:
    """The recorded exchanges of an engine's buckets."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], RecordedLayout] = {}
        self._memory: Tensor | None = None

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

    def keep_state(self, old: State, bucket: Bucket) -> None:
        """Leave a compressor's state where a recorded step reads it, after one that is not.

        Args:
            old: ``entries_of`` the state before the step.
            bucket: that was exchanged, with the state after it.
        """
        if bucket.names in self._known and not carried(old, bucket.state):
            del self._known[bucket.names]

    def recorder(self, layout: RecordedLayout, bucket: Bucket) -> Recorder | None:
        """Return what watches or records a step that is run as it is written; None: nothing."""
        if not layout.is_due():
            return None
        if layout.seen is None:
            return Recorder(bucket, None)
        seen, needed = layout.seen
        if self._memory is None or self._memory.numel() < needed:
            largest = max(each.seen[1] for each in self._known.values() if each.seen is not None)
            for each in self._known.values():
                each.recorded = None  # its memory would be kept beside the new one
            device = bucket.grad.device
            self._memory = torch.empty(largest, dtype=torch.uint8, device=device)
        return Recorder(bucket, (seen, self._memory))


class RecordedLayout:
    """A bucket's recorded exchange in one situation, or how far its recording is.

    Attributes:
        recorded: the exchange, once two steps were equal.
        seen: what was started in the last watched step, and the bytes of what was made.
    """

    def __init__(self, situation: tuple[Any, ...], kept: tuple[Any, ...]) -> None:
        self.situation, self._kept = situation, kept
        self.recorded: RecordedExchange | None = None
        self.seen: tuple[Sequence[Any], int] | None = None
        self._place = -1
        self._written = self._tried = self._repeated = 0  # steps

    def enter(self, place: int) -> None:
        """Begin a step with the gradient at this address; at another one, record anew."""
        if place != self._place:
            self.recorded, self.seen, self._place, self._written = None, None, place, 0
        if self.recorded is None:
            self._written += 1
        else:
            self._repeated += 1

    def is_due(self) -> bool:
        """Return whether a step that is run as it is written is to be watched or recorded.

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
        """Keep what was watched, or a recorded step that was equal to it."""
        if self.seen is None:
            self.seen = recorder.seen()
        else:
            self.recorded = recorder.made(error)
            if self.recorded is None:
                self.seen = None
