"""Regrouping: after a resume, exchange the first round in the bucket layout of the saved run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_gc.core.flow import Flow
from lightning_gc.transports.background import Background

Shapes = Mapping[str, tuple[int, ...]]
MakeFlow = Callable[[Tensor, Shapes], Flow]
"""Makes the flow that replaces a flat gradient by the mean over workers."""


class Regrouping:
    """Collects all of DDP's buckets of a round and exchanges them in another layout.

    DDP rebuilds its buckets after the first step of every process. Some results depend on the
    layout: in ``TwoShot``, which worker owns which shard, and so to whose error the second rounding
    is added. One step without overlap is the price of resuming bit for bit.

    Args:
        layout: parameter names in each bucket of the last round before the checkpoint.
    """

    def __init__(self, layout: Sequence[Sequence[str]]) -> None:
        self.layout = [tuple(names) for names in layout]
        self._held: list[tuple[Tensor, Shapes, torch.futures.Future[Tensor]]] = []

    def hold(
        self, grad: Tensor, shapes: Shapes, background: Background
    ) -> torch.futures.Future[Tensor]:
        """Add a bucket; return the future that ``send`` will complete with its mean."""
        future = background.promise()
        self._held.append((grad, shapes, future))
        return future

    def send(self, make_flow: MakeFlow, background: Background) -> None:
        """Exchange the buckets held in ``layout`` and copy the means back into them."""
        pieces: dict[str, Tensor] = {}
        for grad, shapes, _ in self._held:
            sizes = [torch.Size(shape).numel() for shape in shapes.values()]
            pieces |= zip(shapes, grad.split(sizes), strict=True)
        known = {name: shape for _, shapes, _ in self._held for name, shape in shapes.items()}
        copies: list[tuple[Tensor, Tensor]] = []
        for names in self.layout:
            members = [pieces[name] for name in names]
            flat = torch.cat(members)
            copies += zip(members, flat.split([m.numel() for m in members]), strict=True)
            background.submit(make_flow(flat, {name: known[name] for name in names}), flat)
        background.submit(_copy_back(copies), self._held[0][0])
        for grad, _, future in self._held:
            background.submit(_copy_back([]), grad, future)
        self._held.clear()


def _copy_back(copies: Sequence[tuple[Tensor, Tensor]]) -> Flow:
    """Copy each second tensor into the first, as a flow without requests, to run in order."""
    for there, here in copies:
        there.copy_(here)
    yield from ()
