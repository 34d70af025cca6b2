"""Buffers of a memory, keyed by parameter name; ErrorBuffers keeps them as flat float32 tensors."""

from __future__ import annotations

import abc
from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.engine.layouts import Layouts
from lightning_gc.kernels.streams import used_here


class Buffers(abc.ABC):
    """Keeps a memory's buffers by parameter name, whatever the buckets are.

    When DDP rebuilds its buckets, after the first step, contents are copied by name.

    Args:
        buffers: names of the buffers of every parameter.

    Attributes:
        layouts: of the buckets, for what needs to know them on the device.
    """

    def __init__(self, buffers: tuple[str, ...]) -> None:
        self.buffers = buffers
        self.layouts = Layouts()

    @property
    @abc.abstractmethod
    def named(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Parameter name -> buffer -> tensor in the parameter's shape."""

    @abc.abstractmethod
    def flat(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return ``{buffer: flat tensor}`` in the layout of ``bucket``; new ones are zero."""

    @abc.abstractmethod
    def keep(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        """Keep what ``flat`` has returned, as a round has changed it."""

    @abc.abstractmethod
    def live(self, bucket: Bucket) -> list[Tensor]:
        """Return the tensors that a round of ``bucket`` changes, which remain the same ones."""

    @abc.abstractmethod
    def load(self, named: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the contents by copies of ``named``, without buffers that are not kept."""


class ErrorBuffers(Buffers):
    """Keeps one flat tensor per bucket and buffer, float32 or wider, with named views."""

    def __init__(self, buffers: tuple[str, ...]) -> None:
        super().__init__(buffers)
        self._named: dict[str, dict[str, Tensor]] = {}  # parameter -> buffer -> view, own shape
        self._flat: dict[tuple[str, ...], dict[str, Tensor]] = {}  # layout -> buffer -> flat

    @property
    def named(self) -> dict[str, dict[str, Tensor]]:
        """Parameter name -> buffer -> view."""
        return self._named

    def flat(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return what is kept, to be changed in place."""
        if bucket.names not in self._flat:
            self._lay_out(bucket)
        return self._flat[bucket.names]

    def keep(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        """Do nothing: what ``flat`` returns is what is kept."""

    def live(self, bucket: Bucket) -> list[Tensor]:
        """Return what ``flat`` returns."""
        return list(self.flat(bucket).values())

    def load(self, named: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the contents by copies."""
        self._flat.clear()
        self._named = {
            name: {b: _wide(t.detach().clone()) for b, t in tensors.items() if b in self.buffers}
            for name, tensors in named.items()
        }

    def _lay_out(self, bucket: Bucket) -> None:
        layout = {buffer: _wide(torch.zeros_like(bucket.grad)) for buffer in self.buffers}
        for buffer, flat in layout.items():
            for name, view in bucket.split(flat).items():
                kept = self._named.setdefault(name, {})
                old = kept.get(buffer, view)
                check_shape(buffer, name, old.shape, view.shape)
                kept[buffer] = view.copy_(old)
                used_here(old)
        valid = {n: f for n, f in self._flat.items() if bucket.shapes.keys().isdisjoint(n)}
        self._flat = {**valid, bucket.names: layout}


def check_shape(buffer: str, name: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Refuse a parameter of another shape than that of what is kept of it."""
    if old != new:
        raise ValueError(
            f"The stored {buffer} of {name} has shape {tuple(old)}, but the parameter now has "
            f"{tuple(new)}; the model has changed."
        )


def to_host(tensor: Tensor) -> Tensor:
    """Return a copy in the host's memory."""
    return tensor.detach().to("cpu", copy=True)


def _wide(tensor: Tensor) -> Tensor:
    """Return ``tensor`` in float32 or wider."""
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))
