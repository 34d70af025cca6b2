"""Buffers of a memory, keyed by parameter name; ErrorBuffers keeps them as flat float32 tensors."""

from __future__ import annotations

import abc
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.core import Bucket
from lightning_gc.core.segments import Segments
from lightning_gc.kernels.dispatch import used_here
from lightning_gc.memories.storage import Kept, Storage


class Buffers(abc.ABC):
    """Keeps a memory's buffers by parameter name, independent of buckets.

    When DDP rebuilds its buckets, after the first step, contents are copied by name.

    Args:
        buffers: names of the buffers of every parameter.

    Attributes:
        named: parameter name -> buffer -> tensor in the parameter's shape: a view, or float32 that
            is made when it is asked for.
        laid_out: names of a bucket -> its tensors by buffer; another dict with other tensors.
        layouts: places of the buckets' parameters, on the host and on the device.
        replaced: how often the contents have been replaced.
    """

    named: Mapping[str, Mapping[str, Tensor]]
    laid_out: Mapping[tuple[str, ...], Mapping[str, Any]]

    def __init__(self, buffers: tuple[str, ...]) -> None:
        self.buffers = buffers
        self.layouts = Layouts()
        self.replaced = 0

    @abc.abstractmethod
    def flat(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return ``{buffer: flat tensor}`` in the layout of ``bucket``; new ones are zero."""

    @abc.abstractmethod
    def keep(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        """Keep the tensors that ``flat`` has returned and a round has changed."""

    @abc.abstractmethod
    def live(self, bucket: Bucket) -> list[Tensor]:
        """Return the tensors that a round of ``bucket`` changes, which remain the same ones."""

    @abc.abstractmethod
    def load(self, named: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the contents by copies of ``named``; leave out buffers of other names."""

    @abc.abstractmethod
    def forget(self, bucket: Bucket) -> None:
        """Drop the contents of a bucket's parameters."""


class ErrorBuffers(Buffers):
    """Keeps one flat tensor per bucket and buffer, float32 or wider, with named views."""

    def __init__(self, buffers: tuple[str, ...]) -> None:
        super().__init__(buffers)
        self.named: dict[str, dict[str, Tensor]] = {}
        self.laid_out: dict[tuple[str, ...], dict[str, Tensor]] = {}  # layout -> buffer -> flat

    def flat(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return the kept tensors, to be changed in place."""
        if bucket.names not in self.laid_out:
            self._lay_out(bucket)
        return self.laid_out[bucket.names]

    def keep(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        """Do nothing: ``flat`` returns the kept tensors themselves."""

    def live(self, bucket: Bucket) -> list[Tensor]:
        """Return the tensors of ``flat``."""
        return list(self.flat(bucket).values())

    def load(self, named: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the contents by copies."""
        self.laid_out.clear()
        self.replaced += 1
        self.named = {
            name: {b: _wide(t.detach().clone()) for b, t in tensors.items() if b in self.buffers}
            for name, tensors in named.items()
        }

    def forget(self, bucket: Bucket) -> None:
        """Drop the contents of a bucket's parameters."""
        self.laid_out.pop(bucket.names, None)
        for name in bucket.names:
            self.named.pop(name, None)

    def _lay_out(self, bucket: Bucket) -> None:
        layout = {buffer: _wide(torch.zeros_like(bucket.grad)) for buffer in self.buffers}
        for buffer, flat in layout.items():
            for name, view in bucket.split(flat).items():
                kept = self.named.setdefault(name, {})
                old = kept.get(buffer, view)
                check_shape(buffer, name, old.shape, view.shape)
                kept[buffer] = view.copy_(old)
                used_here(old)
        valid = {n: f for n, f in self.laid_out.items() if bucket.shapes.keys().isdisjoint(n)}
        self.laid_out = {**valid, bucket.names: layout}


def check_shape(buffer: str, name: str, old: tuple[int, ...], new: tuple[int, ...]) -> None:
    """Refuse a parameter with a stored buffer of another shape."""
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


class Layouts:
    """Keeps the segments of each layout of a bucket.

    Numbers that come from the host make it wait for the device, so they are copied once: layouts
    change when DDP rebuilds its buckets, after the first step.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], Segments] = {}

    def of(self, bucket: Bucket) -> Segments:
        """Return the places of the bucket's parameters that are not empty."""
        key = (bucket.grad.device, *bucket.shapes.items())
        if key not in self._known:
            spans = [(start, stop) for _, start, stop in bucket.spans() if stop > start]
            self._known[key] = Segments(spans, bucket.grad.device)
        return self._known[key]


V = TypeVar("V")


class Made(Mapping[str, V]):
    """Makes a value from another mapping's, each time that it is asked for.

    Example:
        >>> dict(Made({"a": 1}, lambda kept: kept + 1))
        {'a': 2}
    """

    def __init__(self, kept: Mapping[str, Any], make: Callable[[Any], V]) -> None:
        self._kept, self._make = kept, make

    def __getitem__(self, name: str) -> V:
        return self._make(self._kept[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._kept)

    def __len__(self) -> int:
        return len(self._kept)


class _Stored(NamedTuple):
    """A parameter's stored buffer."""

    kept: Kept
    shape: tuple[int, ...]


def _restored(storage: Storage, part: _Stored) -> Tensor:
    return storage.restored(part.kept)[: math.prod(part.shape)].view(part.shape)


class NarrowBuffers(Buffers):
    """Keeps a memory's buffers by parameter name in fewer bits, by a ``Storage``.

    Each parameter begins a new block, so its stored numbers do not depend on its bucket.

    Args:
        buffers: names of the buffers of every parameter.
        storage: how numbers are kept.
    """

    def __init__(self, buffers: tuple[str, ...], storage: Storage) -> None:
        super().__init__(buffers)
        self.storage = storage
        self._parts: dict[str, dict[str, _Stored]] = {}  # parameter -> buffer
        restored = partial(_restored, storage)  # not of self: errors are to be freed at once
        self.named = Made(self._parts, lambda parts: Made(parts, restored))
        self.laid_out: dict[tuple[str, ...], dict[str, Kept]] = {}  # layout -> buffer

    def flat(self, bucket: Bucket) -> dict[str, Tensor]:
        """Return new tensors, ``{buffer: flat tensor}`` in the layout of ``bucket``."""
        wide = torch.promote_types(bucket.grad.dtype, torch.float32)
        layout = self._layout(bucket).items()
        return {b: self._joined(self.storage.restored(k), bucket).to(wide) for b, k in layout}

    def keep(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        """Store the tensors that ``flat`` has returned and a round has changed."""
        for buffer, kept in self._layout(bucket).items():
            # Not the numbers that a compressor of this bucket has drawn in this round.
            alike = replace(bucket, shapes={f"{'+'.join(bucket.shapes)}%{buffer}": ()})
            seed = alike.generator_seed(shared=False)
            self.storage.store(self._padded(state[buffer].float(), bucket), kept, seed)

    def live(self, bucket: Bucket) -> list[Tensor]:
        """Return the stored tensors."""
        return [tensor for kept in self._layout(bucket).values() for tensor in kept]

    def load(self, named: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Replace the contents by copies, rounded where they have not been restored before."""
        self.laid_out.clear()
        self.replaced += 1
        parts = {
            name: {b: self._part(t.detach()) for b, t in tensors.items() if b in self.buffers}
            for name, tensors in named.items()
        }
        self._parts.clear()
        self._parts |= parts

    def forget(self, bucket: Bucket) -> None:
        """Drop the contents of a bucket's parameters."""
        self.laid_out.pop(bucket.names, None)
        for name in bucket.names:
            self._parts.pop(name, None)

    def _part(self, tensor: Tensor) -> _Stored:
        """Store a parameter's numbers; exactly, if they have been restored before."""
        flat = tensor.float().reshape(-1)
        whole = pad(flat, (0, -flat.numel() % self.storage.block))
        kept = self.storage.zeros(whole.numel(), whole.device)
        self.storage.store(whole, kept, seed=0)
        return _Stored(kept, tuple(tensor.shape))

    def _layout(self, bucket: Bucket) -> dict[str, Kept]:
        if bucket.names not in self.laid_out:
            self._lay_out(bucket)
        return self.laid_out[bucket.names]

    def _lay_out(self, bucket: Bucket) -> None:
        total = sum(self.storage.padded(stop - start) for _, start, stop in bucket.spans())
        layout = {b: self.storage.zeros(total, bucket.grad.device) for b in self.buffers}
        for buffer, flat in layout.items():
            begin = 0
            for name, start, stop in bucket.spans():
                end = begin + self.storage.padded(stop - start)
                part = _Stored(self.storage.of(flat, begin, end), bucket.shapes[name])
                begin = end
                old = self._parts.setdefault(name, {}).get(buffer, part)
                check_shape(buffer, name, old.shape, part.shape)
                for there, here in zip(part.kept, old.kept, strict=True):
                    there.copy_(here)
                    used_here(here)
                self._parts[name][buffer] = part
        valid = {n: f for n, f in self.laid_out.items() if bucket.shapes.keys().isdisjoint(n)}
        self.laid_out = {**valid, bucket.names: layout}

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


class LossScaling:
    """Restores errors after a skipped optimizer step, and holds the loss scale.

    A scaler skips the step if a gradient is not finite. The round's result is then lost, so its
    errors are rolled back, when the next round begins: only the device knows of it.

    Attributes:
        scale: factor of the gradients, a 0-dim tensor, or None.
        revocable: steps may be skipped. Costs a copy of the memory's buffers.
        verdicts: per bucket of the last round, a bool tensor: whether its result is finite, as the
            scaler sees it. That is more than finite gradients: a sum may overflow.
    """

    def __init__(self) -> None:
        self.scale: Tensor | None = None
        self.revocable = False
        self.verdicts: list[Tensor] = []
        self._before: list[tuple[Tensor, Tensor]] = []  # (live flat buffer, its copy)

    def back_up(self, buffers: Iterable[Tensor]) -> None:
        """Copy buffers before a round changes them."""
        self._before += [(buffer, buffer.clone()) for buffer in buffers]

    def settle(self) -> None:
        """Roll the last round back if its result was not finite, since its step was skipped."""
        if self.verdicts:
            skipped = ~torch.stack(self.verdicts).all()
            for live, copy in self._before:
                if live.device.type != "cpu":
                    torch.where(skipped, copy, live, out=live)
                elif skipped:
                    live.copy_(copy)
        self.forget()

    def revoke(self) -> None:
        """Roll this round back even if its result was finite, since workers will repeat it."""
        for live, copy in self._before:
            live.copy_(copy)
        self.forget()

    def forget(self) -> None:
        """Drop verdicts and copies."""
        self.verdicts.clear()
        self._before.clear()


class LearningRates:
    """Rescales errors by γ_{t−1}/γ_t, for memories that are ``lr_aware``.

    Attributes:
        now: parameter name -> learning rate γ_t of this round's step.
        of_errors: parameter name -> learning rate to which its error is scaled.
    """

    def __init__(self) -> None:
        self.now: dict[str, float] = {}
        self.of_errors: dict[str, float] = {}

    def follow(self, buffers: Buffers) -> None:
        """Rescale errors to the learning rates ``now``; a rate of 0 is ignored."""
        for name, rate in self.now.items():
            if rate == 0:
                continue
            ratio = self.of_errors.get(name, rate) / rate
            self.of_errors[name] = rate
            if ratio != 1:
                for kept in buffers.named.get(name, {}).values():
                    kept.mul_(ratio)

    def back_up(self, bucket: Bucket, buffers: Buffers) -> list[tuple[Tensor, Tensor]]:
        """Return errors of parameters with learning rate 0, and copies to restore after the round.

        In units of the update, a step at learning rate 0 changes no error. The gradient is sent all
        the same: an optimizer may average it.
        """
        if 0 not in self.now.values():
            return []
        buffers.flat(bucket)  # creates them if new
        names = [name for name in bucket.names if self.now.get(name) == 0]
        views = [view for name in names for view in buffers.named[name].values()]
        return [(view, view.clone()) for view in views]
