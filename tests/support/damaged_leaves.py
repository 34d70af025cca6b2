"""Nested state with one leaf at a time replaced by what must not be there."""

import copy
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor


def replaced(state: dict[str, Any], place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield what was done, and a copy of ``state`` with one leaf that is wrong or missing."""
    for path, leaf in leaves(state):
        for what, wrong in wrongs(leaf):
            damaged = copy.deepcopy(state)
            holder: Any = damaged
            for name in path[:-1]:
                holder = holder[name]
            holder[path[-1]] = wrong
            yield f"{'/'.join(path)} as {what}", damaged
        damaged = copy.deepcopy(state)
        holder = damaged
        for name in path[:-1]:
            holder = holder[name]
        del holder[path[-1]]
        if holder:
            yield f"{'/'.join(path)} missing", damaged
        holder["foreign"] = leaf
        yield f"{'/'.join(path)} under another name", damaged


def leaves(state: dict[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in state.items():
        if isinstance(value, dict):
            yield from (((name, *path), leaf) for path, leaf in leaves(value))
        else:
            yield (name,), value


def wrongs(leaf: Any) -> Iterator[tuple[str, Any]]:
    """Yield values of another type, shape or range than a leaf's."""
    yield "a text", "nonsense"
    yield "None", None
    yield "a list", [1, 2]
    if isinstance(leaf, Tensor):
        yield "a number", 0.5
        yield "whole numbers", torch.ones_like(leaf, dtype=torch.int64)
        yield "one dimension more", leaf.unsqueeze(-1)
        yield "longer", torch.cat([leaf.reshape(-1), leaf.reshape(-1)[:1]])
        for name, value in (("NaN", math.nan), ("infinity", math.inf)):
            yield f"a tensor with {name}", torch.full_like(leaf, value)
    else:
        yield "a tensor", torch.ones(3)
        yield "NaN", math.nan
        yield "infinity", math.inf
        yield "negative", -1
