"""Lookahead: move weights by a worker's error during its forward and backward pass (StepAhead)."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gc.bucket import in_memory_order


class Lookahead:
    """Moves weights by a share of a worker's error, and restores them bit for bit.

    Through ``.data``, whose changes autograd does not notice: the caller must not restore weights
    between forward and backward pass.

    Args:
        share: of the error, as ``Memory.lookahead``.
        names: parameter -> name.
    """

    def __init__(self, share: float, names: Mapping[Tensor, str]) -> None:
        self.share = share
        self._names = names
        self._before: list[tuple[Tensor, Tensor]] = []

    def move(self, errors: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        """Move every parameter by ``−share · learning rate · error``."""
        self.put_back()
        with torch.no_grad():
            for param, name in self._names.items():
                if name in errors and rates.get(name):
                    self._before.append((param, param.data.clone()))
                    step = errors[name].to(param.dtype)
                    in_memory_order(param.data).add_(step, alpha=-self.share * rates[name])

    def common(self) -> list[Tensor]:
        """Return the weights that all workers have in common, moved ahead or not."""
        before = {id(param): tensor for param, tensor in self._before}
        return [before.get(id(param), param) for param in self._names]

    def put_back(self) -> None:
        for param, before in self._before:
            param.data.copy_(before)
        self._before.clear()
