"""CommonBuffers: a module's running statistics, averaged over workers at each exchange."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from lightning_gc.flow import Flow, Mean


class CommonBuffers:
    """Keeps the floating-point buffers that all workers had after the last exchange.

    Exchanged is the difference to them, exactly 0 where nothing has changed: constants, such as
    position tables and masks of −∞, keep every bit. Integers and booleans are left alone: they are
    constants or count steps, and so are equal on all workers.

    Args:
        find: returns buffer name -> buffer, equal on all workers now. Called each time: a module
            may assign a new tensor to a name.
    """

    def __init__(self, find: Callable[[], Mapping[str, Tensor]]) -> None:
        self._find = find
        floats = {name: b for name, b in find().items() if b.is_floating_point()}
        self.common = {name: b.detach().clone() for name, b in floats.items()}

    @property
    def live(self) -> dict[str, Tensor]:
        """This worker's buffers."""
        now = self._find()
        return {name: now[name] for name in self.common}

    def difference(self) -> Tensor:
        """Return the common buffers minus this worker's, flat, float32; 0 where they are equal."""
        parts = [torch.zeros(0)] if not self.common else []
        for name, live in self.live.items():
            common = self.common[name]
            gap = torch.where(live == common, 0.0, common.float() - live.float())
            parts.append(gap.reshape(-1))
        return torch.cat(parts)

    def step(self, mean: Tensor) -> None:
        """Subtract the mean difference, and let this worker go on with the result."""
        gaps = mean.split([common.numel() for common in self.common.values()])
        for common, gap in zip(self.common.values(), gaps, strict=True):
            gap = gap.view(common.shape)
            common.copy_(torch.where(gap == 0, common, (common.float() - gap).to(common.dtype)))
        self.put(self.common)

    def put(self, named: Mapping[str, Tensor]) -> None:
        """Set this worker's buffers, those that are named."""
        now = self.live
        for name, value in named.items():
            if name in now:
                now[name].data.copy_(value)

    def own(self) -> dict[str, Tensor]:
        """Return copies of this worker's buffers."""
        return {name: live.detach().clone() for name, live in self.live.items()}


def mean_of(flat: Tensor) -> Flow:
    """Replace a flat tensor by its mean over workers."""
    (mean,) = yield Mean((flat,))
    if mean is not flat:
        flat.copy_(mean)
