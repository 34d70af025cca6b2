"""ErrorBuffers: flat error tensors in the layout of DDP's buckets, keyed by parameter name."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.engine.layouts import Layouts
from lightning_gc.kernels.streams import used_here


class ErrorBuffers:
    """Keeps a memory's buffers: one flat tensor per bucket and buffer, with named views.

    When DDP rebuilds its buckets, after the first step, contents are copied by name.

    Args:
        buffers: names of the buffers of every parameter.

    Attributes:
        layouts: of the buckets, for what needs to know them on the device.
    """

    def __init__(self, buffers: tuple[str, ...]) -> None:
        self.buffers = buffers
        self.layouts = Layouts()
        self.named: dict[str, dict[str, Tensor]] = {}  # parameter -> buffer -> view, own shape
        self._flat: dict[tuple[str, ...], dict[str, Tensor]] = {}  # layout -> buffer -> flat

    def flat(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return ``{buffer: flat tensor}`` in the layout of ``bucket``; new ones are zero."""
        if bucket.names not in self._flat:
            self._lay_out(bucket)
        return self._flat[bucket.names]

    def load(self, named: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the contents by copies of ``named``, without buffers that are not kept."""
        self._flat.clear()
        self.named = {
            name: {b: _wide(t.detach().clone()) for b, t in tensors.items() if b in self.buffers}
            for name, tensors in named.items()
        }

    def _lay_out(self, bucket: Bucket) -> None:
        layout = {buffer: _wide(torch.zeros_like(bucket.grad)) for buffer in self.buffers}
        for buffer, flat in layout.items():
            for name, view in bucket.split(flat).items():
                kept = self.named.setdefault(name, {})
                old = kept.get(buffer, view)
                if old.shape != view.shape:
                    raise ValueError(
                        f"The stored {buffer} of {name} has shape {tuple(old.shape)}, but the "
                        f"parameter now has {tuple(view.shape)}; the model has changed."
                    )
                kept[buffer] = view.copy_(old)
                used_here(old)
        valid = {n: f for n, f in self._flat.items() if bucket.shapes.keys().isdisjoint(n)}
        self._flat = {**valid, bucket.names: layout}


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


def _wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
