"""Send the first round after a resume in the bucket layout of the last round before it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from lightning_gc.flow import Flow
from lightning_gc.transports.background import Background

Shapes = Mapping[str, tuple[int, ...]]


MakeFlow = Callable[[Tensor, Shapes], Flow]
"""Returns the flow that replaces a flat gradient by the mean over workers."""


class Regrouping:
    """Holds DDP's buckets back until all are there, and sends them as others.

    DDP lays its buckets out anew after the first step of every process, but a run that was not
    interrupted has done so long before. Some results depend on the layout: which worker owns which
    shard in ``TwoShot``, and so whose error a second rounding is. So the layout is part of what a
    checkpoint holds, and one step without overlap is the price for going on bit for bit.

    Args:
        layout: names of the parameters in each bucket of the last round before.
    """

    def __init__(self, layout: Sequence[Sequence[str]]) -> None:
        self.layout = [tuple(names) for names in layout]
        self._held: list[tuple[Tensor, Shapes, torch.futures.Future[Tensor]]] = []

    def fits(self, names: Iterable[str]) -> bool:
        """Whether the layout is one of just these parameters."""
        return sorted(name for bucket in self.layout for name in bucket) == sorted(names)

    def hold(
        self, grad: Tensor, shapes: Shapes, background: Background
    ) -> torch.futures.Future[Tensor]:
        """Take a bucket; return the future that will be completed with it."""
        future = background.promise()
        self._held.append((grad, shapes, future))
        return future

    def send(self, make_flow: MakeFlow, background: Background) -> None:
        """Send all that was held, in the old layout, and put the means back where they belong."""
        pieces: dict[str, Tensor] = {}
        for grad, shapes, _ in self._held:
            sizes = [torch.Size(shape).numel() for shape in shapes.values()]
            pieces |= zip(shapes, grad.split(sizes), strict=True)
        known = {name: shape for _, shapes, _ in self._held for name, shape in shapes.items()}
        copies: list[tuple[Tensor, Tensor]] = []
        for names in self.layout:
            flat = torch.cat([pieces[name] for name in names])
            copies += zip(
                (pieces[name] for name in names),
                flat.split([pieces[name].numel() for name in names]),
                strict=True,
            )
            background.submit(make_flow(flat, {name: known[name] for name in names}), flat)
        background.submit(_put_back(copies), self._held[0][0])
        for grad, _, future in self._held:
            background.submit(_put_back([]), grad, future)
        self._held.clear()


def _put_back(copies: Sequence[tuple[Tensor, Tensor]]) -> Flow:
    """Copy each second tensor into the first; a flow, to come in turn, that asks for nothing."""
    for there, here in copies:
        there.copy_(here)
    yield from ()
