"""Predict the seconds of a step for every method, bucket size, plan and number of local steps."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_gc.advice.costs import Costs, bucket_trace
from lightning_gc.advice.description import HOOK, PLAIN
from lightning_gc.advice.description import METHODS as METHODS
from lightning_gc.advice.description import SIXTEEN as SIXTEEN
from lightning_gc.advice.traces import Trace, dense
from lightning_gc.exchange.bucketing import Layout, caps, layout, pieces_of, segments
from lightning_gc.exchange.timeline import Module, Timeline, timeline
from lightning_gc.transports.link import Links

CAPS: tuple[float | None, ...] = (None, 5.0, 100.0)
"""Candidates for ``bucket_cap_mb``; None is DDP's default: 1 MiB, then 25 MiB."""
EVERY = (8, 32)
"""H of local steps."""
WHOLE = "Identity()"
"""Name of the method that sends everything uncompressed."""
WORTH = 0.05
"""Minimum relative gain of a plan over compressing everything; predictions are not more precise."""


@dataclass(frozen=True)
class Prediction:
    """A predicted way to exchange.

    Attributes:
        name: as tables show it.
        method: name of a method; None is plain DDP, or torch's 16-bit hook.
        bucket_cap_mb: as for DDP; None is its default.
        whole: parameters that a plan sends uncompressed, though the method would compress them.
        every: H of local steps; 1 exchanges in every step.
        seconds: predicted, of a step.
        nbytes: bytes that one worker sends in a step.
        drawn: its timeline; None with local steps, where nothing is overlapped.
    """

    name: str
    method: str | None
    bucket_cap_mb: float | None
    whole: tuple[str, ...]
    every: int
    seconds: float
    nbytes: float
    drawn: Timeline | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Situation:
    """Measurements of module, device and link.

    Attributes:
        module: seconds of a step without an exchange.
        names: of the parameters, in the order in which their gradients become ready.
        nbytes: of each gradient.
        ready: seconds of each.
        pieces: the segments that ``costs`` describes.
        costs: of each method, by segment.
        whole: name of the method in ``costs`` that sends everything uncompressed.
        workers: W.
        links: between them.
        contention: as for ``timeline``.
        overhead: as for ``timeline``: of DDP's wrapper, which local steps do not use.
        hook: name of torch's 16-bit hook.
        sixteen: share of the gradients' bytes that it sends.
    """

    module: Module
    names: tuple[str, ...]
    nbytes: tuple[int, ...]
    ready: tuple[float, ...]
    pieces: Layout
    costs: Costs
    whole: str
    workers: int
    links: Links
    contention: float = 0.0
    overhead: float = 0.0
    hook: str = HOOK
    sixteen: float = 0.5

    def buckets(
        self, cap: float | None, traces: Sequence[Trace] | None = None, share: float = 1.0
    ) -> list[tuple[float, Trace]]:
        """Return when each bucket is ready, and its exchange.

        Args:
            cap: ``bucket_cap_mb``.
            traces: of the method, one per segment; None: an all-reduce, which computes nothing.
            share: of the gradients' bytes that the all-reduce sends.
        """
        found = []
        for bucket in layout(self.nbytes, caps(cap)):
            if traces is None:
                whole = dense(share * sum(self.nbytes[i] for i in bucket), self.workers)
            else:
                whole = bucket_trace([traces[i] for i in pieces_of(bucket, self.pieces)])
            found.append((max(self.ready[i] for i in bucket), whole))
        return found

    def step(
        self, cap: float | None, traces: Sequence[Trace] | None = None, share: float = 1.0
    ) -> Timeline:
        """Return the timeline of a step, for the arguments of ``buckets``."""
        works = [each.work(ready, self.links) for ready, each in self.buckets(cap, traces, share)]
        return timeline(self.module, works, self.contention, self.overhead)


def pieces_for(nbytes: Sequence[int]) -> Layout:
    """Return segments such that every bucket of every cap in ``CAPS`` consists of some of them."""
    return segments(nbytes, (layout(nbytes, caps(cap)) for cap in CAPS), sum(nbytes) / 16)


def predict(situation: Situation, knobs: Mapping[str, frozenset[str]]) -> list[Prediction]:
    """Return all rows, shortest step first.

    Args:
        situation: the measurements.
        knobs: method -> parameters whose level a controller can set; empty without a knob.
    """
    rows = [*_plain_rows(situation)]
    for method in situation.costs:
        if method != situation.whole:
            rows += _method_rows(situation, method, knobs.get(method, frozenset()))
    rows += _local_rows(situation)
    return sorted(rows, key=lambda row: row.seconds)


def _plain_rows(situation: Situation) -> Iterator[Prediction]:
    for name, share in ((PLAIN, 1.0), (situation.hook, situation.sixteen)):
        nbytes = dense(share * sum(situation.nbytes), situation.workers).nbytes
        for cap in CAPS:
            drawn = situation.step(cap, share=share)
            row = f"{name}{_buckets(cap)}"
            yield Prediction(row, None, cap, (), 1, drawn.seconds, nbytes, drawn)


def _method_rows(situation: Situation, method: str, knob: frozenset[str]) -> Iterator[Prediction]:
    own, whole = situation.costs[method], situation.costs[situation.whole]
    sizes = [sum(situation.nbytes[i] for i in piece) for piece in situation.pieces]

    def chosen(plan: Mask) -> list[Trace]:
        return [a if on else b for on, a, b in zip(plan, own, whole, strict=True)]

    for cap in CAPS:
        drawn = situation.step(cap, own)
        name, nbytes = f"{method}{_buckets(cap)}", sum(each.nbytes for each in own)
        yield Prediction(name, method, cap, (), 1, drawn.seconds, nbytes, drawn)
        if not knob:
            continue

        def seconds(plan: Mask, cap: float | None = cap) -> float:
            return situation.step(cap, chosen(plan)).seconds

        plan = greedy(sizes, seconds)
        traces = chosen(plan)
        planned = situation.step(cap, traces)
        left = tuple(
            situation.names[i]
            for on, piece in zip(plan, situation.pieces, strict=True)
            for i in piece
            if not on and situation.names[i] in knob
        )
        if left and any(plan) and planned.seconds < drawn.seconds * (1 - WORTH):
            name += f", {len(left)} tensor{'s' * (len(left) > 1)} uncompressed"
            nbytes = sum(each.nbytes for each in traces)
            yield Prediction(name, method, cap, left, 1, planned.seconds, nbytes, planned)


def _local_rows(situation: Situation) -> Iterator[Prediction]:
    for method, traces in situation.costs.items():
        whole = bucket_trace(traces)
        for every in EVERY:
            seconds = situation.module.step + whole.takes(situation.links) / every
            name = f"{method}, every {every} steps"
            shown = None if method == situation.whole else method
            yield Prediction(name, shown, None, (), every, seconds, whole.nbytes / every)


def shortlist(rows: Sequence[Prediction], count: int) -> list[Prediction]:
    """Return the rows to measure: the fastest one of each compressed method, at most ``count``.

    Local steps are left out: they train another way, which seconds do not show.
    """
    found: dict[str, Prediction] = {}
    for row in sorted(rows, key=lambda row: row.seconds):
        if row.method is not None and row.every == 1:
            found.setdefault(row.method, row)
    return list(found.values())[:count]


def _buckets(cap: float | None) -> str:
    return "" if cap is None else f", buckets of {cap:g} MiB"


Mask = tuple[bool, ...]
"""Whether each segment is compressed."""


def greedy(sizes: Sequence[int], seconds: Callable[[Mask], float]) -> Mask:
    """Return a plan that no change of one or two segments makes faster.

    The search starts from all segments compressed and from none. It changes one segment at a time,
    the largest first, while that shortens the step; then pairs. Most changes gain nothing, because
    compressing a segment that is sent before a gap of the link only widens the gap.

    Args:
        sizes: of the segments; large ones are tried first.
        seconds: plan -> predicted seconds of a step.

    Reference:
        After Wang, Lin, Zhu and Ng, "Espresso: Revisiting Gradient Compression from the System
        Perspective", EuroSys 2023: its algorithm 1 goes over the tensors once, in this order.
    """
    order = sorted(range(len(sizes)), key=lambda i: -sizes[i])
    ends = [_descend((start,) * len(sizes), order, seconds) for start in (True, False)]
    return min(ends, key=lambda end: end[1])[0]


PAIRS = 12
"""Maximum number of segments for which pairs are tried."""


def _descend(
    plan: Mask, order: Sequence[int], seconds: Callable[[Mask], float]
) -> tuple[Mask, float]:
    moves: list[tuple[int, ...]] = [(i,) for i in order]
    if len(order) <= PAIRS:
        moves += list(itertools.combinations(order, 2))
    best, moved = seconds(plan), True
    while moved:
        moved = False
        for move in moves:
            changed = tuple(on != (i in move) for i, on in enumerate(plan))
            took = seconds(changed)
            if took < best * (1 - 1e-9):
                plan, best, moved = changed, took, True
    return plan, best
