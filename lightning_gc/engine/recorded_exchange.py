"""RecordedExchange: a bucket's exchange, started again without its Python while it stays the same.

The first step of a layout runs as it is written. The second one is watched, and the third recorded
if it is equal. From then on a step starts the recorded work again, and asks the recorded requests.
Everything that decides what is started, and from which memory, is compared in every step, also in
those that are not repeated. If it differs, the recording is dropped, the step runs as written, and
the next ones are watched and recorded anew.

The first repeated steps, and one in 1024 later, are proven: the step runs as written, and then the
recorded work runs on copies of the same numbers, with the same replies. If any bit differs, this
engine's exchanges run as written from then on, and a warning says so.

All recorded exchanges of an engine share memory for what they make and receive: the bytes of the
largest one.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar, cast

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_map

from lightning_gc.compressors import Compressor
from lightning_gc.core import Bucket, Exchange, Flow, Gather, Reply, Request, Tally
from lightning_gc.core.flow import Arrived, resume
from lightning_gc.kernels import dispatch
from lightning_gc.kernels.recording import Span, Tape, allocation, tensors_of
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme

TRIES = 8
"""Steps of a bucket that are watched or recorded at first."""
MOST = 4
"""What a recorded exchange makes and receives, at most, in float32 gradients of the bucket."""
SMALL = 1 << 20
"""Bytes that it may make in any case."""
PROVEN = 2
"""Repeated steps of a layout that are proven at first."""
AGAIN = 1024
"""Of so many repeated steps later one is proven."""
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


class ExchangeRecorder:
    """Runs a bucket's exchange as written, and notes what it starts.

    Args:
        bucket: to exchange.
        before: as for ``Tape``.

    Attributes:
        given: the bucket.
        bucket: the same with the step and the tally to use instead.
    """

    def __init__(self, bucket: Bucket, before: tuple[Sequence[Any], Tensor] | None) -> None:
        self.given = bucket
        most = max(MOST * bucket.numel * 4, SMALL)
        self._tape = Tape(bucket.step, bucket.grad.device, before, most)
        self.bucket = replace(bucket, step=cast(int, self._tape.step), tally=Tally())
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
        tape = self._tape
        try:
            with tape.runs():
                request = next(flow, None)
            while request is not None:
                self._spans.append(tape.cut())
                tape.asks(type(request).__name__, _asked(request))
                if getattr(request, "limits", None) is not None:
                    tape.refuse("lengths vary")
                reply = tape.arrives((yield request))
                self._requests.append(request)
                self._replies.append(reply)
                with tape.runs():
                    request = resume(flow, reply)
            self._spans.append(tape.cut())
        except BaseException:  # also an interrupt: the state stays, and the memory is used again
            self._rescue()
            raise

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
        return None if self._tape.refused is not None else (self._tape.seen, self._tape.nbytes)

    @property
    def is_large(self) -> bool:
        """Whether it makes too much to be recorded, in any step."""
        return self._tape.is_large

    def made(self, error: Tensor) -> RecordedExchange | None:
        """Return the recorded exchange; None if the step differed from the one before."""
        if not self._tape.complete:
            return None
        opening, *exchange, closing = self._spans
        requests = [_into(r, reply) for r, reply in zip(self._requests, self._replies, strict=True)]
        return RecordedExchange(
            opening=opening,
            exchange=exchange,
            requests=requests,
            replies=self._replies,
            closing=closing,
            error=error,
            tally=self.bucket.tally,
            kept=self._tape.kept,
        )


def _into(request: Request, reply: Reply) -> Request:
    """Return a request that receives its reply into the memory of an earlier one, if it can."""
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
        Whether no more than that has changed, and no new tensor lies in the memory of an old one;
        if not, all is as the flow has left it.
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
        memory = {allocation(t) for kept in before.values() for t in tensors_of([*kept.values()])}
        if not memory.isdisjoint(map(allocation, new)):
            return False
        torch._foreach_copy_(old, new)
    for name, kept in state.items():
        kept.update(before.get(name, {}))
    return True


def _alike(one: Tensor, other: Any) -> bool:
    """Return whether a tensor can take another one's numbers."""
    if not isinstance(other, Tensor):
        return False
    return (one.shape, one.dtype, one.device) == (other.shape, other.dtype, other.device)


class Proof:
    """Runs an exchange as written, then the recorded one on the same numbers; compares all bits.

    Args:
        recorded: to be proven.
        places: tensors that the exchange reads and writes: gradient, errors, state.
    """

    def __init__(self, recorded: RecordedExchange, places: Sequence[Tensor]) -> None:
        self._recorded, self._places = recorded, places
        self._before = [_clone(each) for each in places]
        self._asked: list[list[Tensor]] = []
        self._replies: list[Reply] = []
        self._whole = True  # there was memory for all copies

    def follow(self, flow: Generator[Request, Reply, Tensor]) -> Generator[Request, Reply, Tensor]:
        """Run the flow as written, keep copies of its requests and replies, return its error."""
        try:
            request = next(flow)
            while True:
                self._keep(self._asked, _asked(request))
                reply = yield request
                self._keep(self._replies, reply)
                request = flow.send(reply)
        except StopIteration as end:
            error: Tensor = end.value
            return error

    def _keep(self, kept: list[Any], value: Any) -> None:
        try:
            kept.append(_copied(value))
        except torch.OutOfMemoryError:
            self._whole = False

    def holds(self, error: Tensor, step: int) -> bool | None:
        """Run the recorded exchange; return whether it does the same. The places stay as they are.

        Args:
            error: that the flow has left.
            step: its number.

        Returns:
            None if there is too little memory to tell.
        """
        recorded = self._recorded
        if not self._whole:
            return None
        if len(self._asked) != len(recorded.requests):
            return False
        try:
            wanted = [_clone(each) for each in (*self._places, error)]
        except torch.OutOfMemoryError:
            return None
        try:
            _copy(self._places, self._before)
            same = self._does(step)
            return same and _equal([*self._places, recorded.error], wanted)
        except torch.OutOfMemoryError:
            return None
        finally:
            _copy(self._places, wanted[:-1])

    def _does(self, step: int) -> bool:
        """Run the recorded exchange with the replies kept; return whether it asks the same."""
        recorded = self._recorded
        recorded.opening.start(step)
        flow, same = recorded.flow(step), True
        request = next(flow, None)
        for asked, reply in zip(self._asked, self._replies, strict=True):
            assert request is not None
            same = same and _equal(_asked(request), asked)
            request = resume(flow, reply)
        recorded.closing.start(step)
        return same


def _asked(request: Request) -> list[Tensor]:
    return tensors_of(request.payloads if isinstance(request, Exchange) else request.tensors)


def _copied(reply: Any) -> Any:
    return _clone(reply) if isinstance(reply, Tensor) else [_copied(each) for each in reply]


def _clone(tensor: Tensor) -> Tensor:
    return tensor.clone()


def _copy(places: Sequence[Tensor], numbers: Sequence[Tensor]) -> None:
    for place, each in zip(places, numbers, strict=True):
        place.copy_(each)


def _equal(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> bool:
    return len(ours) == len(theirs) and all(map(same_bits, ours, theirs))


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same shape and bits; the device is waited for."""
    bits = (each.reshape(-1).view(torch.uint8) for each in (one, other))
    return one.shape == other.shape and torch.equal(*bits)


class Turn(Protocol):
    """One bucket in one round, as it is written."""

    def as_written(
        self, bucket: Bucket, recorder: ExchangeRecorder | None
    ) -> Generator[Request, Reply, Tensor]:
        """Exchange a bucket, record it if that is due, and return the error."""

    def live(self, bucket: Bucket) -> list[Tensor]:
        """Return the memory's tensors of the bucket."""


class Recordings:
    """The recorded exchanges of an engine's buckets.

    Attributes:
        busy: an exchange runs that reads or writes the common memory.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str, ...], RecordedLayout] = {}
        self._memory: Tensor | None = None
        self._large: set[Any] = set()  # what makes too much to be recorded
        self._trusted = True
        self.busy = False

    def __reduce__(self) -> tuple[type[Recordings], tuple[()]]:
        """Leave out what has addresses of this process."""
        return type(self), ()

    def of(
        self, names: tuple[str, ...], place: int, situation: tuple[Any, ...], held: Sequence[Any]
    ) -> RecordedLayout:
        """Return what is known of a bucket, in a step like the one before or in a new one.

        Args:
            names: of the bucket's parameters.
            place: address of its gradient.
            situation: values that decide what is started.
            held: objects that recorded work reads or writes. Another one, even if it is equal, is
                another situation.
        """
        key = (place, *situation, *map(id, held))
        layout = self._known.get(names)
        if layout is None or layout.key != key:
            if layout is None or layout.seen is not None:
                new = set(names)
                self._known = {n: kept for n, kept in self._known.items() if new.isdisjoint(n)}
                layout = self._known[names] = RecordedLayout(layout)
            layout.key, layout.held, layout.method = key, held, situation[:2]
        layout.enter()
        return layout

    def flow(self, layout: RecordedLayout, bucket: Bucket, turn: Turn) -> Flow | None:
        """Return a flow as written that is watched, recorded or proven; None: nothing is due."""
        if layout.recorded is not None:
            return self._prove(layout, layout.recorded, bucket, turn)
        if not self._trusted or (self._large and layout.method in self._large):
            return None
        if not layout.is_due(bucket.grad):
            return None
        if layout.seen is None:
            return self._record(layout, ExchangeRecorder(bucket, None), turn)
        seen, needed = layout.seen
        if self._memory is None or self._memory.numel() < needed:
            largest = max(each.seen[1] for each in self._known.values() if each.seen is not None)
            for each in self._known.values():
                each.recorded = each.proven = None  # its memory would be kept beside the new one
            device = bucket.grad.device
            self._memory = torch.empty(largest, dtype=torch.uint8, device=device)
        return self._record(layout, ExchangeRecorder(bucket, (seen, self._memory)), turn)

    def _record(self, layout: RecordedLayout, recorder: ExchangeRecorder, turn: Turn) -> Flow:
        self.busy = True
        try:
            error = yield from turn.as_written(recorder.given, recorder)
        finally:
            self.busy = False
        recorder.given.tally.add(recorder.bucket.tally)
        if recorder.is_large and recorder.bucket.numel * 4 * MOST > SMALL:
            self._large.add(layout.method)
        layout.compare(recorder, error)

    def _prove(
        self, layout: RecordedLayout, recorded: RecordedExchange, bucket: Bucket, turn: Turn
    ) -> Flow:
        old = entries_of(bucket.state)
        state = [t for kept in old.values() for t in tensors_of([*kept.values()])]
        try:
            proof = Proof(recorded, [bucket.grad, *turn.live(bucket), *state])
        except torch.OutOfMemoryError:
            self.stop()
            yield from turn.as_written(bucket, None)
            return
        self.busy = True
        try:
            error = yield from proof.follow(turn.as_written(bucket, None))
            if not carried(old, bucket.state):
                layout.forget()
                return
            same = proof.holds(error, bucket.step)
            if same:
                layout.proofs += 1
            else:
                self.stop()
            if same is False:
                warnings.warn(
                    f"{layout.method[0]}: a recorded exchange gave other bits than the exchange as "
                    f"written, with torch {torch.__version__} on this device. Only the latter has "
                    f"been used, and all exchanges run so from now on. Without recording: "
                    f"{dispatch.SWITCH}=prepared. Please report this.",
                    stacklevel=2,
                )
        finally:
            self.busy = False

    def stop(self) -> None:
        """Record nothing from now on."""
        self._trusted = False
        self._known, self._memory = {}, None


def is_ours(part: Any) -> bool:
    """Return whether a compressor, memory or scheme is of this library, with all in it."""
    if isinstance(part, Mapping):
        part = [*part.values()]
    if isinstance(part, list | tuple):
        return all(map(is_ours, part))
    if not isinstance(part, Compressor | Memory | Scheme):
        return True
    names = getattr(part, "__dataclass_fields__", ())
    ours = type(part).__module__.startswith("lightning_gc.")
    return ours and all(is_ours(getattr(part, name)) for name in names)


class RecordedLayout:
    """A bucket's recorded exchange in one situation, or how far its recording is.

    Attributes:
        key: all that decides what is started.
        held: objects that it has by their address, which must not be used again.
        method: compressor and dtype.
        recorded: the exchange, once two steps were equal.
        proven: the same, in a step that starts it again: it is not due to be proven.
        seen: what was started in the last watched step, and the bytes of what was made.
        repeats: whether this step does no more than an exchange.
        proofs: steps in which the recorded exchange has done as the one as written.
    """

    def __init__(self, before: RecordedLayout | None = None) -> None:
        self.key: tuple[Any, ...] = ()
        self.held: Sequence[Any] = ()
        self.method: tuple[Any, ...] = ()
        self.recorded: RecordedExchange | None = None
        self.proven: RecordedExchange | None = None
        self.seen: tuple[Sequence[Any], int] | None = None
        self.repeats = True
        self.proofs = 0
        self._grad: StorageWeakRef | None = None  # of the last step that was run as written
        self._written = self._tried = self._repeated = 0  # steps
        if before is not None:  # what has been tried in vain counts
            self._tried, self._repeated = before._tried, before._repeated

    def forget(self) -> None:
        """Record anew."""
        self.recorded = self.proven = self.seen = None

    def enter(self) -> None:
        """Begin a step."""
        if self.recorded is None:
            self._written += 1
            return
        self._repeated += 1
        due = self.proofs < PROVEN or not self._repeated % AGAIN
        self.proven = None if due else self.recorded

    def is_due(self, grad: Tensor) -> bool:
        """Return whether a step that is run as it is written is to be watched or recorded.

        Not the first one, which may compile kernels and lay out buffers. Not one with a gradient
        in new memory in each step: it would be kept for another one that never comes. Recording
        takes longer, so it is not tried again and again: at first, as long as it has paid, and now
        and then.
        """
        before, self._grad = self._grad, StorageWeakRef(grad.untyped_storage())
        if before is None or before.expired():
            return False
        paid = self._tried < TRIES + self._repeated // 4
        later = (self._written & -2).bit_count() == 1  # 2 and 3, 4 and 5, 8 and 9, 16 and 17, ...
        self._tried += paid or later
        return paid or later

    def compare(self, recorder: ExchangeRecorder, error: Tensor) -> None:
        """Keep what was watched, or a recorded step that was equal to it."""
        if self.seen is None:
            self.seen = recorder.seen()
        else:
            self.recorded = recorder.made(error)
            self.proofs = 0
            if self.recorded is None:
                self.seen = None
