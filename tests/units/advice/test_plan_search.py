"""The greedy plan against exhaustive search, on random timelines."""

import itertools
import random

import pytest

from lightning_gc.advice.prediction import Mask, greedy
from lightning_gc.exchange.timeline import BucketWork, Module, timeline


def case(draw: random.Random) -> tuple[list[int], Module, list[tuple[BucketWork, BucketWork]]]:
    """Sizes, and for each segment its dense and its compressed work, in buckets of one."""
    count = draw.randint(1, 10)
    sizes = [int(10 ** draw.uniform(3, 6)) for _ in range(count)]
    ready = sorted(draw.uniform(0, 0.1) for _ in range(count))
    rate, ratio = 10 ** draw.uniform(-9, -7), draw.uniform(0.01, 0.3)
    compute = 10 ** draw.uniform(-9, -7.5)
    work = []
    for size, at in zip(sizes, ready, strict=True):
        dense = BucketWork(at, (0.0, 0.0), (2e-4 + 4 * size * rate,))
        small = BucketWork(at, (1e-4 + compute * size, 0.2 * compute * size),
                           (2e-4 + ratio * 4 * size * rate,))  # fmt: skip
        work.append((dense, small))
    return sizes, Module(0.05, 0.1, 0.01), work


@pytest.mark.parametrize(
    "cases", [range(20), pytest.param(range(20, 220), marks=pytest.mark.nightly)]
)
def test_within_one_percent_of_exhaustive_search(cases: range) -> None:
    for seed in cases:
        draw = random.Random(seed)
        sizes, module, work = case(draw)
        contention = draw.choice([0.0, 0.5, 1.0])

        def seconds(plan: Mask, work=work, module=module, contention=contention) -> float:
            chosen = [pair[on] for on, pair in zip(plan, work, strict=True)]
            return timeline(module, chosen, contention).seconds

        best = min(map(seconds, itertools.product((False, True), repeat=len(sizes))))
        found = greedy(sizes, seconds)
        assert seconds(found) <= 1.01 * best
        # Never worse than either extreme.
        for every in (True, False):
            assert seconds(found) <= seconds((every,) * len(sizes)) + 1e-12


def test_no_change_of_one_or_two_segments_helps() -> None:
    """Whatever the seconds of plans are, drawn at random."""
    for seed in range(50):
        draw = random.Random(seed)
        count = draw.randint(1, 5)
        table = {plan: draw.random() for plan in itertools.product((False, True), repeat=count)}
        found = greedy([draw.randint(1, 9) for _ in range(count)], table.__getitem__)
        near = [p for p in table if sum(a != b for a, b in zip(p, found, strict=True)) <= 2]
        assert table[found] == min(table[plan] for plan in near)
        for every in (True, False):
            assert table[found] <= table[(every,) * count]
