"""The timeline is that of a clock that ticks, and obeys what no timeline may break."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.exchange.timeline import BucketWork, Module, timeline
from tests.support.replay import patient

TICK = 0.5
WHOLE = st.integers(0, 6).map(float)


@st.composite
def buckets(draw: st.DrawFn) -> list[BucketWork]:
    """Up to four, ready in order."""
    found, ready = [], 0.0
    for _ in range(draw(st.integers(0, 4))):
        ready += draw(WHOLE)
        requests = draw(st.integers(1, 2))
        computing = tuple(draw(WHOLE) for _ in range(requests + 1))
        communicating = tuple(draw(WHOLE) for _ in range(requests))
        found.append(BucketWork(ready, computing, communicating))
    return found


def ticking(module: Module, work: list[BucketWork], contention: float) -> float:
    """Return the seconds of a step by a clock: slow, obvious."""
    todo = []  # (bucket, is computation, seconds), in order
    for number, bucket in enumerate(work):
        turns = [*zip(bucket.computing, (*bucket.communicating, 0.0), strict=True)]
        for computing, communicating in turns:
            todo += [(number, True, computing), (number, False, communicating)]
    now = progress = thread = 0.0
    backward_end = None
    while todo or backward_end is None:
        while todo and work[todo[0][0]].ready <= progress and todo[0][2] == 0:
            todo.pop(0)
        if backward_end is None and progress >= module.backward:
            backward_end = now
        if not todo and backward_end is not None:
            break
        computes = False
        if todo and work[todo[0][0]].ready <= progress:
            number, computes, left = todo[0]
            todo[0] = (number, computes, left - TICK)
            if todo[0][2] == 0:
                todo.pop(0)
            thread = now + TICK
        progress += TICK * (1 - contention) if computes else TICK
        now += TICK
    return module.forward + max(backward_end or 0.0, thread) + module.optimizer


@patient
@given(buckets(), WHOLE, WHOLE, WHOLE, st.sampled_from([0.0, 0.5, 1.0]))
def test_as_a_clock_ticks(
    work: list[BucketWork], forward: float, more: float, optimizer: float, contention: float
) -> None:
    backward = max([bucket.ready for bucket in work], default=0.0) + more
    module = Module(forward, backward, optimizer)
    found = timeline(module, work, contention)
    assert found.seconds == pytest.approx(ticking(module, work, contention))
    assert found.waited >= 0


def scaled(work: list[BucketWork], factor: float) -> list[BucketWork]:
    return [
        BucketWork(b.ready, b.computing, tuple(c * factor for c in b.communicating)) for b in work
    ]


@patient
@given(buckets(), st.floats(0, 1), st.floats(0, 1))
def test_more_bandwidth_never_makes_a_step_longer(
    work: list[BucketWork], contention: float, factor: float
) -> None:
    module = Module(1.0, max([bucket.ready for bucket in work], default=0.0), 1.0)
    slow = timeline(module, work, contention).seconds
    assert timeline(module, scaled(work, factor), contention).seconds <= slow + 1e-9


@patient
@given(buckets(), st.floats(0, 1))
def test_a_step_lies_between_its_parts_and_their_sum(
    work: list[BucketWork], contention: float
) -> None:
    module = Module(1.0, max([bucket.ready for bucket in work], default=0.0), 1.0)
    exchange = sum(bucket.seconds for bucket in work)
    found = timeline(module, work, contention, overhead=0.25).seconds
    assert max(module.step, exchange) + 0.25 <= found + 1e-9
    # With contention 1 a second of computation costs the backward pass one, no more.
    assert found <= module.step + exchange + 0.25 + 1e-9


@patient
@given(buckets(), st.floats(0, 1), st.floats(0, 1))
def test_less_contention_never_makes_a_step_longer(
    work: list[BucketWork], one: float, other: float
) -> None:
    module = Module(0.0, max([bucket.ready for bucket in work], default=0.0) + 1, 0.0)
    low, high = (timeline(module, work, each).seconds for each in sorted((one, other)))
    assert low <= high + 1e-9


def test_spans_are_what_is_drawn() -> None:
    work = [BucketWork(1.0, (1.0, 0.0), (2.0,)), BucketWork(2.0, (1.0, 1.0), (1.0,))]
    found = timeline(Module(1.0, 2.0, 0.5), work)
    assert [(s.what, s.start, s.stop, s.bucket) for s in found.spans] == [
        ("forward", 0.0, 1.0, None),
        ("backward", 1.0, 3.0, None),
        ("optimizer", 8.0, 8.5, None),
        ("compute", 2.0, 3.0, 0),
        ("communicate", 3.0, 5.0, 0),
        ("compute", 5.0, 6.0, 1),
        ("communicate", 6.0, 7.0, 1),
        ("compute", 7.0, 8.0, 1),
    ]
    assert (found.seconds, found.waited) == (8.5, 5.0)
