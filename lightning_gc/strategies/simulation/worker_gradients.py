"""Gradients: flat gradient buffers per simulated worker, filled by their backward passes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Part:
    """Gradients of all parameters of one dtype, exchanged as one bucket.

    Attributes:
        shapes: parameter name -> shape, in the order of registration.
        flats: per worker, its gradients, ``(numel,)``.
    """

    shapes: dict[str, tuple[int, ...]]
    flats: list[Tensor]


class Gradients:
    """Sets ``.grad`` to the flat buffer of the worker whose micro-batch is running.

    Autograd adds to an existing ``.grad`` in place, so a worker's micro-batches are summed in its
    flat buffer without copies. Costs W gradients of memory. After a round every ``.grad`` is a view
    of worker 0's buffer, until the next round begins.

    Args:
        names: parameter -> name, of all that are trained.
        workers: W.
    """

    def __init__(self, names: Mapping[Tensor, str], workers: int) -> None:
        self.parts: list[Part] = []
        self._views: list[dict[Tensor, Tensor]] = [{} for _ in range(workers)]
        self._before: dict[Tensor, Tensor | None] = {}
        self._used: set[Tensor] = set()
        for dtype in dict.fromkeys(param.dtype for param in names):
            members = [param for param in names if param.dtype == dtype]
            numel = sum(param.numel() for param in members)
            flats = [members[0].new_zeros(numel) for _ in range(workers)]
            for flat, views in zip(flats, self._views, strict=True):
                pieces = flat.split([param.numel() for param in members])
                views |= {p: _like(p, piece) for p, piece in zip(members, pieces, strict=True)}
            shapes = {names[param]: tuple(param.shape) for param in members}
            self.parts.append(Part(shapes, flats))
        self._hooks = [p.register_post_accumulate_grad_hook(self._used.add) for p in names]

    def begin(self) -> None:
        """Start a round: set every worker's gradient to ``.grad``, mostly None, that is, zero."""
        self._used.clear()
        self._before = {param: param.grad for param in self._views[0]}
        kept = {p: grad.clone() for p, grad in self._before.items() if grad is not None}
        for part in self.parts:
            torch._foreach_zero_(part.flats)
        for views in self._views:
            for param, grad in kept.items():
                views[param].copy_(grad)

    def lend(self, worker: int) -> None:
        for param, view in self._views[worker].items():
            param.grad = view

    def collect(self, worker: int) -> None:
        """Copy gradients that a backward pass has stored elsewhere, as with ``create_graph``."""
        for param, view in self._views[worker].items():
            if param.grad is not view and param.grad is not None:
                view.copy_(param.grad.detach())

    def end(self) -> None:
        """Set ``.grad`` to the mean; to its old value where unused (``find_unused_parameters``)."""
        for param, view in self._views[0].items():
            param.grad = view if param in self._used else self._before[param]
        self._before = {}

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()


def _like(param: Tensor, flat: Tensor) -> Tensor:
    """Return ``flat`` as a view of the parameter's shape and memory format, as in DDP."""
    return flat.as_strided(param.shape, torch.empty_like(param).stride())
