"""NarrowBuffers: error buffers that are kept in fewer bits, and are float32 during an exchange."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.bucket import Bucket
from lightning_gc.engine.error_buffers import Buffers, check_shape
from lightning_gc.engine.made import Made
from lightning_gc.kernels.streams import used_here
from lightning_gc.memories.storage import Kept, Storage


class _Part(NamedTuple):
    """What is kept of a parameter."""

    kept: Kept
    shape: tuple[int, ...]


class NarrowBuffers(Buffers):
    """Keeps a memory's buffers by parameter name as a ``Storage`` does; as ``ErrorBuffers`` else.

    A parameter begins a block of its own, so what is kept of it does not depend on the bucket that
    it is in.

    Args:
        buffers: names of the buffers of every parameter.
        storage: how numbers are kept.
    """

    def __init__(self, buffers: tuple[str, ...], storage: Storage) -> None:
        super().__init__(buffers)
        self.storage = storage
        self._parts: dict[str, dict[str, _Part]] = {}  # parameter -> buffer
        self._flat: dict[tuple[str, ...], dict[str, Kept]] = {}  # layout -> buffer

    @property
    def named(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Parameter name -> buffer -> float32 tensor, made when it is asked for."""
        return Made(self._parts, lambda parts: Made(parts, self._restored))

    def _restored(self, part: _Part) -> Tensor:
        return self.storage.restored(part.kept)[: math.prod(part.shape)].view(part.shape)

    def flat(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return new tensors, ``{buffer: flat tensor}`` in the layout of ``bucket``."""
        wide = torch.promote_types(bucket.grad.dtype, torch.float32)
        layout = self._layout(bucket).items()
        return {b: self._joined(self.storage.restored(k), bucket).to(wide) for b, k in layout}

    def keep(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        """Store what ``flat`` has returned, as a round has changed it."""
        for buffer, kept in self._layout(bucket).items():
            # Not the numbers that a compressor of this bucket has drawn in this round.
            alike = replace(bucket, shapes={f"{'+'.join(bucket.shapes)}%{buffer}": ()})
            seed = alike.generator_seed(shared=False)
            self.storage.store(self._padded(state[buffer].float(), bucket), kept, seed)

    def live(self, bucket: Bucket) -> list[Tensor]:
        """Return what is kept, in fewer bits."""
        return [tensor for kept in self._layout(bucket).values() for tensor in kept]

    def load(self, named: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the contents by copies, rounded where they have not been restored before."""
        self._flat.clear()
        self._parts = {
            name: {b: self._part(t.detach()) for b, t in tensors.items() if b in self.buffers}
            for name, tensors in named.items()
        }

    def _part(self, tensor: Tensor) -> _Part:
        """Return what is kept of a parameter's numbers: all, if they have been restored before."""
        flat = tensor.float().reshape(-1)
        whole = pad(flat, (0, -flat.numel() % self.storage.block))
        kept = self.storage.zeros(whole.numel(), whole.device)
        self.storage.store(whole, kept, seed=0)
        return _Part(kept, tuple(tensor.shape))

    def _layout(self, bucket: Bucket) -> dict[str, Kept]:
        if bucket.names not in self._flat:
            self._lay_out(bucket)
        return self._flat[bucket.names]

    def _lay_out(self, bucket: Bucket) -> None:
        total = sum(self.storage.padded(stop - start) for _, start, stop in bucket.spans())
        layout = {b: self.storage.zeros(total, bucket.grad.device) for b in self.buffers}
        for buffer, flat in layout.items():
            begin = 0
            for name, start, stop in bucket.spans():
                end = begin + self.storage.padded(stop - start)
                part = _Part(self.storage.of(flat, begin, end), bucket.shapes[name])
                begin = end
                old = self._parts.setdefault(name, {}).get(buffer, part)
                check_shape(buffer, name, old.shape, part.shape)
                for there, here in zip(part.kept, old.kept, strict=True):
                    there.copy_(here)
                    used_here(here)
                self._parts[name][buffer] = part
        valid = {n: f for n, f in self._flat.items() if bucket.shapes.keys().isdisjoint(n)}
        self._flat = {**valid, bucket.names: layout}

    def _padded(self, flat: Tensor, bucket: Bucket) -> Tensor:
        """Return ``flat`` with each parameter in whole blocks; itself where they all are."""
        short = [-(stop - start) % self.storage.block for _, start, stop in bucket.spans()]
        if not any(short):
            return flat
        pieces = []
        for (_, start, stop), missing in zip(bucket.spans(), short, strict=True):
            pieces += [flat[start:stop], flat.new_zeros(missing)]
        return torch.cat(pieces)

    def _joined(self, whole: Tensor, bucket: Bucket) -> Tensor:
        """Undo ``_padded``."""
        if whole.numel() == bucket.numel:
            return whole
        pieces, begin = [], 0
        for _, start, stop in bucket.spans():
            pieces.append(whole[begin : begin + stop - start])
            begin += self.storage.padded(stop - start)
        return torch.cat(pieces)
