"""Average, map and all-reduce pytrees: nested dicts with tensors and numbers as leaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

Tree = dict[str, Any]


def average(trees: Sequence[Tree]) -> Tree:
    """Return the mean of trees of the same structure; a leaf missing from a tree counts as zero.

    A new number of workers can all start with the mean of the old errors. The mean error over
    workers stays the same, so no gradient is lost.
    """
    return _merge(trees, 1 / len(trees))


def _merge(trees: Sequence[Tree], share: float) -> Tree:
    merged: Tree = {}
    for name in dict.fromkeys(name for tree in trees for name in tree):
        leaves = [tree[name] for tree in trees if name in tree]
        if isinstance(leaves[0], dict):
            merged[name] = _merge(leaves, share)
        elif isinstance(leaves[0], Tensor):
            total = leaves[0].float() * share
            for leaf in leaves[1:]:
                total.add_(leaf.float(), alpha=share)
            merged[name] = total
        else:
            merged[name] = sum(leaf * share for leaf in leaves)
    return merged


def each_tensor(tree: Tree, change: Callable[[Tensor], Tensor]) -> Tree:
    """Return a copy with ``change`` applied to every tensor."""
    return _each_leaf(tree, lambda leaf: change(leaf) if isinstance(leaf, Tensor) else leaf)


def reduced(tree: Tree, mean: Callable[[Tensor], Tensor]) -> Tree:
    """Return the mean of all workers' trees of the same structure, by the collective ``mean``."""

    def mean_of(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return mean(leaf.float())
        return float(mean(torch.tensor(float(leaf), dtype=torch.float64, device="cpu")))

    return _each_leaf(tree, mean_of)


def _each_leaf(tree: Tree, change: Callable[[Any], Any]) -> Tree:
    return {
        name: _each_leaf(leaf, change) if isinstance(leaf, dict) else change(leaf)
        for name, leaf in tree.items()
    }
