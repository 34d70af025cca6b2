"""Timeline of a training step: forward and backward pass, exchange of buckets, optimizer.

Pure arithmetic. One thread exchanges the buckets in order, each as soon as its last gradient is
ready. If that thread and the backward pass share cores, its computation slows the pass down.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class BucketWork:
    """The background thread's work for one bucket: computation and requests alternate.

    Attributes:
        ready: seconds from the beginning of the backward pass until the bucket's last gradient is
            computed, if nothing slows the pass down.
        computing: seconds before, between and after the requests: one more than there are requests.
        communicating: seconds of the requests.
    """

    ready: float
    computing: tuple[float, ...]
    communicating: tuple[float, ...]

    def __post_init__(self) -> None:
        assert len(self.computing) == len(self.communicating) + 1

    @property
    def seconds(self) -> float:
        """Seconds of computation and requests, one after the other."""
        return sum(self.computing) + sum(self.communicating)


@dataclass(frozen=True)
class Module:
    """Seconds of a step of the user's module without any exchange.

    Attributes:
        forward: until the (last) backward pass begins.
        backward: of that backward pass.
        optimizer: all after it.
    """

    forward: float
    backward: float
    optimizer: float

    @property
    def step(self) -> float:
        """Seconds of a step without exchange, the limit of any compressor."""
        return self.forward + self.backward + self.optimizer


@dataclass(frozen=True)
class Interval:
    """A stretch of time in a step, in seconds from its beginning.

    Attributes:
        lane: ``"module"`` or ``"exchange"``.
        what: ``"forward"``, ``"backward"``, ``"optimizer"``, ``"compute"`` or ``"communicate"``.
        start: seconds.
        stop: seconds.
        bucket: its number, from 0; None for the module's.
    """

    lane: str
    what: str
    start: float
    stop: float
    bucket: int | None = None


@dataclass(frozen=True)
class Timeline:
    """A step.

    Attributes:
        seconds: of the step.
        spans: its parts, in order of their beginning within each lane.
        waited: seconds that the optimizer waits for the exchange after the backward pass.
    """

    seconds: float
    spans: tuple[Interval, ...]
    waited: float


Send = Callable[[int, int, float], float]
"""``(bucket, request, seconds since the backward pass began) -> seconds of the request``."""


def timeline(
    module: Module,
    buckets: Sequence[BucketWork],
    contention: float = 0.0,
    overhead: float = 0.0,
    send: Send | None = None,
) -> Timeline:
    """Return the timeline of a step.

    With ``p(t) = t − contention·C(t)``, where C(t) are the seconds that the thread has computed up
    to t, a bucket is ready at the first t with ``p(t) = ready``; it starts when it is ready and the
    one before it has ended. The step takes ``forward + max(end of backward, end of the last bucket)
    + optimizer + overhead``.

    Args:
        module: seconds without an exchange.
        buckets: in the order in which they are exchanged.
        contention: seconds that the backward pass loses for each second of the thread's
            computation, in [0, 1]: 0 with spare cores, 1 if both share one core.
        overhead: seconds that DDP itself adds to a step.
        send: carries out a request at its time, and measures it; None: as ``communicating`` says.
    """
    send = send or (lambda number, turn, at: buckets[number].communicating[turn])
    taken: list[tuple[float, float]] = []  # when the thread computed
    spans: list[Interval] = []
    end = 0.0
    for number, bucket in enumerate(buckets):
        at = max(_reached(bucket.ready, taken, contention), end)
        for turn, computing in enumerate(bucket.computing):
            taken.append((at, at + computing))
            ended = turn == len(bucket.communicating)
            communicating = 0.0 if ended else send(number, turn, at + computing)
            stops = (at + computing, at + computing + communicating)
            for what, start, stop in zip(
                ("compute", "communicate"), (at, stops[0]), stops, strict=True
            ):
                if stop > start:
                    spans.append(Interval("exchange", what, start, stop, number))
            at = stops[1]
        end = at
    backward_end = _reached(module.backward, taken, contention)
    done = max(backward_end, end)
    first, last = module.forward, module.forward + done
    step = last + module.optimizer + overhead
    own = (
        Interval("module", "forward", 0.0, first),
        Interval("module", "backward", first, first + backward_end),
        Interval("module", "optimizer", last, step),
    )
    moved = tuple(
        Interval(s.lane, s.what, s.start + first, s.stop + first, s.bucket) for s in spans
    )
    return Timeline(step, own + moved, done - backward_end)


def _reached(progress: float, taken: Sequence[tuple[float, float]], contention: float) -> float:
    """Return the time at which the backward pass has made this progress.

    Args:
        progress: seconds of the pass by itself.
        taken: when the thread computed, in order.
        contention: share of each of these seconds that the pass lost.
    """
    lost = 0.0
    for start, stop in taken:
        if progress + lost <= start:
            break
        before = start - lost  # progress at that start
        within = (1 - contention) * (stop - start)
        if progress <= before + within and contention < 1:
            return start + (progress - before) / (1 - contention)
        lost += contention * (stop - start)
    return progress + lost
