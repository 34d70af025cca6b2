"""Solve the knapsack problem: one option per item, least total cost, a budget of total weight."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

EXACT_ITEMS = 60
"""More items are filled greedily."""
STATES = 2000
"""Partial solutions that are kept after each item."""


class Option(NamedTuple):
    """One choice for an item.

    Attributes:
        weight: its share of the budget.
        cost: its share of the minimised sum.
    """

    weight: float
    cost: float


def solve(items: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """Return the index of the option for each item; where nothing fits, the lightest options.

    Up to ``EXACT_ITEMS`` a dynamic programme over partial solutions that no other one beats in both
    weight and cost. As long as there are at most ``STATES`` of them it is exact; then, in each of
    as many equal parts of the budget, the cheapest is kept with its exact weight, so that nothing
    ever exceeds the budget. For more items, greedily.

    Args:
        items: the options of each, one at least.
        budget: the largest total weight.
    """
    if sum(min(option.weight for option in item) for item in items) > budget:
        return _lightest(items)
    if len(items) > EXACT_ITEMS:
        return greedy(items, budget)
    return _dynamic(items, budget)


def _lightest(items: Sequence[Sequence[Option]]) -> list[int]:
    return [min(range(len(item)), key=item.__getitem__) for item in items]


def _dynamic(items: Sequence[Sequence[Option]], budget: float) -> list[int]:
    # Least weight of the remaining items: a state that leaves less room is a dead end.
    rest = [0.0] * (len(items) + 1)
    for i in range(len(items) - 1, -1, -1):
        rest[i] = rest[i + 1] + min(option.weight for option in items[i])
    slack = budget * 1e-12
    states: list[tuple[float, float, int]] = [(0.0, 0.0, -1)]  # weight, cost, place in trail
    trail: list[tuple[int, int]] = []  # place of the state before, option
    for number, item in enumerate(items):
        room = budget - rest[number + 1] + slack
        grown = sorted(
            (weight + option.weight, cost + option.cost, place, choice)
            for weight, cost, place in states
            for choice, option in enumerate(item)
            if weight + option.weight <= room
        )
        best, last = float("inf"), -1
        kept: list[tuple[float, float, int, int]] = []
        coarse = len(grown) > STATES
        for state in grown:
            if state[1] >= best:
                continue
            best = state[1]
            part = int(state[0] / budget * STATES) if coarse and budget > 0 else len(kept)
            if kept and part == last:
                kept[-1] = state  # cheaper, and in the same part of the budget
            else:
                kept.append(state)
            last = part
        # The lightest solution stays, without which a later item could have no room.
        if grown and kept and kept[0][0] > grown[0][0]:
            kept.insert(0, grown[0])
        states = []
        for weight, cost, place, choice in kept:
            trail.append((place, choice))
            states.append((weight, cost, len(trail) - 1))
    place, chosen = min(states, key=lambda state: state[1])[2], list[int]()
    while place >= 0:
        place, choice = trail[place]
        chosen.append(choice)
    return chosen[::-1]


def greedy(items: Sequence[Sequence[Option]], budget: float) -> list[int]:
    """Return a choice that starts with the lightest options and buys what saves most per weight.

    Args:
        items: the options of each.
        budget: the largest total weight, which the lightest options do not exceed.
    """
    chosen = _lightest(items)
    weight = sum(item[i].weight for item, i in zip(items, chosen, strict=True))
    heap: list[tuple[float, int, int, int]] = []  # -saving per weight, item, from, to

    def offer(number: int) -> None:
        now = items[number][chosen[number]]
        for i, option in enumerate(items[number]):
            more, saved = option.weight - now.weight, now.cost - option.cost
            if saved > 0:
                gain = saved / more if more > 0 else float("inf")
                heapq.heappush(heap, (-gain, number, chosen[number], i))

    for number in range(len(items)):
        offer(number)
    while heap:
        _, number, before, i = heapq.heappop(heap)
        if chosen[number] != before:
            continue
        more = items[number][i].weight - items[number][before].weight
        if weight + more <= budget:
            chosen[number], weight = i, weight + more
            offer(number)
    return chosen
