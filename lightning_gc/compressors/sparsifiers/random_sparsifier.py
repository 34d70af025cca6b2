"""RandomSparsifier: base class of methods that send elements drawn at random."""

from __future__ import annotations

import abc
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Traits, Variance
from lightning_gc.compressors.joint import CodecScheme, JointCodec, WholeCodec, absorbed
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import Bucket, Field, Payload, Range, Wire, payload_validation
from lightning_gc.core.elias_fano import check_count
from lightning_gc.core.registry import given_fields
from lightning_gc.kernels import permutation

_SPARSE = 0.2  # share of elements above which a permutation is faster on the host


class RandomSparsifier(DensitySparsifier, Codec):
    """Send k = density·numel elements at positions that follow from a seed.

    Subclasses have ``shared`` and ``unbiased``, as fields or as class attributes.
    """

    @property
    @abc.abstractmethod
    def shared(self) -> bool:
        """Whether all workers draw the same positions; otherwise each worker sends its seed."""

    @property
    @abc.abstractmethod
    def unbiased(self) -> bool:
        """Whether sent elements are multiplied by numel/k, so that the expectation is exact."""

    @functools.cached_property
    def traits(self) -> Traits:  # type: ignore[override]
        least = 0.01 if self.unbiased else 1e-3
        return replace(
            DensitySparsifier.traits,
            linear=self.shared,
            unbiased=self.unbiased,
            space=(Range("density", least, 0.5, scale="log"),),
        )

    def how_many(self, numel: int, bucket: Bucket) -> int:
        """Return how many of ``numel`` elements are sent in this step."""
        return self.count(numel)

    def drawn(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the positions that this worker draws for a tensor in this step, ``(k,)``."""
        k, device = self.how_many(numel, bucket), bucket.grad.device
        if self.shared and not by_generator(device):
            return permutation.first(numel, k, bucket.shared_key, device, step=bucket.step)
        return positions(numel, k, bucket.generator_seed(shared=self.shared), device)

    @property
    def whole(self) -> WholeCodec:
        kind = (RandomSparsifier, self.unbiased) if self.shared else None
        return WholeCodec(self, kind=kind, joint=JointDraw)

    def _drawn_once(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the shared positions; they are drawn once per round, to encode and to decode."""
        key = (self, numel, bucket.names)
        if key not in bucket.cache:
            bucket.cache[key] = self.drawn(numel, bucket)
        return bucket.cache[key]

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        numel = buffer.numel()
        chosen = self._drawn_once(numel, bucket) if self.shared else self.drawn(numel, bucket)
        values = _take(buffer, chosen, numel / max(1, chosen.numel()) if self.unbiased else None)
        if self.shared:
            return (values,)
        seed = bucket.generator_seed(shared=False)
        return values, torch.full((1,), seed, dtype=torch.int64, device=buffer.device)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        values, *seeds = payload
        if self.shared:
            chosen = self._drawn_once(out.numel(), bucket)
            payload_validation.lengths(payload, chosen.numel())
        else:
            check_count(values.numel(), out.numel())
            chosen = _of_sender(out.numel(), values.numel(), *seeds)
        out.index_add_(0, chosen, values.to(out.dtype), alpha=scale)

    def wire(self, numel: int) -> Wire:
        values = self.values_field(numel)
        return (values,) if self.shared else (values, Field("seed", torch.int64, 1))

    def values_field(self, numel: int) -> Field:
        """Return the format of the sent values."""
        return Field("values", torch.float32, self.count(numel))

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()

    def bound(self, numel: int) -> Contraction | Variance:
        """Return δ = k/d in expectation over the draw; if unbiased, ω = d/k − 1."""
        k = self.count(numel)
        return Variance(numel / max(1, k) - 1) if self.unbiased else Contraction(k / max(1, numel))

    def __repr__(self) -> str:
        """Leave out default fields but ``density``."""
        fields = {"density": self.density, **given_fields(self)}
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in fields.items())})"


class JointDraw(JointCodec):
    """Send the drawn elements of all parts of a bucket; on a GPU by kernels of whole buckets."""

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        return absorbed(bucket, buffer, scheme, "random_k")

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        if bucket.pending is None:
            return (_take(buffer, self._drawn_once(bucket), self._factors(buffer)),)
        from lightning_gc.kernels.gpu import random_k as gpu

        pieces, _ = self._tables(bucket.seed, buffer.device)
        sent, scaled = sum(self._counts), self.codec.unbiased
        return gpu.encode(buffer, pieces, bucket.step, sent, scaled, bucket.pending)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        (values,) = payload
        out.index_add_(0, self._drawn_once(bucket), values.to(out.dtype), alpha=scale)

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        if bucket.pending is None:
            super().receive_all(payloads, out, bucket, averaged=averaged)
            return
        from lightning_gc.kernels.gpu import random_k as gpu

        self.check(payloads, bucket, averaged=averaged)
        _, blocks = self._tables(bucket.seed, out.device)
        values = [payload[0] for payload in payloads]
        gpu.average(values, out, blocks, bucket.step, bucket.pending)

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()

    def _drawn_once(self, bucket: Bucket) -> Tensor:
        """Return the positions in the bucket that are drawn in this round, ``(k,)``."""
        if self not in bucket.cache:
            drawn = []
            for part in self.parts:
                inner = bucket.part(part.name, part.start, part.stop)
                drawn.append(part.codec.drawn(part.numel, inner).add_(part.start))
            bucket.cache[self] = torch.cat(drawn)
        return bucket.cache[self]

    def _factors(self, like: Tensor) -> Tensor | None:
        """Return the factor of each sent element, numel/k of its part; None if it is 1."""
        if not self.codec.unbiased:
            return None
        pairs = zip(self.parts, self._counts, strict=True)
        return torch.cat([like.new_full((k,), part.numel / k) for part, k in pairs])

    @functools.cached_property
    def _counts(self) -> list[int]:
        """Elements that are drawn of each part."""
        return [part.codec.count(part.numel) for part in self.parts]

    @functools.cached_property
    def _tables(self) -> Callable[[int, torch.device], tuple[Tensor, Tensor]]:
        """Return the kernels' tables for the run's seed, on a device."""

        def made(seed: int, device: torch.device) -> tuple[Tensor, Tensor]:
            from lightning_gc.kernels.gpu import random_k as gpu

            rows = []
            for part, k in zip(self.parts, self._counts, strict=True):
                nothing = torch.empty(0, dtype=torch.float32, device="cpu")
                key = Bucket(nothing, {part.name: (part.numel,)}, seed=seed).shared_key
                rows.append((part.place, part.start, part.stop, k, key))
            return gpu.tables_of(rows, self.codec.unbiased, device)

        return functools.cache(made)


def _take(buffer: Tensor, chosen: Tensor, factor: float | Tensor | None) -> Tensor:
    """Move elements out of ``buffer``, with a factor; return them, ``(k,)`` of its dtype."""
    values = buffer[chosen]
    if factor is None:
        buffer.index_fill_(0, chosen, 0)
    else:
        values *= factor
        buffer[chosen] -= values
    return values


def by_generator(device: torch.device) -> bool:
    """Return whether the host's random generator draws positions; it is equal on all machines.

    Generators of GPUs differ between models: the same seed gives different numbers. Workers would
    then write values at different positions without an error. So positions for GPUs are computed
    in whole numbers.
    """
    return device.type == "cpu"


def positions(numel: int, k: int, seed: int, device: torch.device) -> Tensor:
    """Return k different positions below ``numel``, ``(k,)`` int64; all sets are equally likely."""
    if not k:
        return torch.empty(0, dtype=torch.int64, device=device)
    if by_generator(device):
        return _on_host(numel, k, torch.Generator().manual_seed(seed))
    return permutation.first(numel, k, seed, device)


def _of_sender(numel: int, k: int, seed: Tensor) -> Tensor:
    """Return the positions that follow from a received seed; any seed gives valid positions."""
    if by_generator(seed.device):
        return positions(numel, k, int(seed), seed.device)
    return permutation.first(numel, k, seed, seed.device)  # the host does not wait for the seed


def _on_host(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return positions from the host's generator, which is the same on all machines.

    A permutation of all positions is slow. For a small k, draw some more than k positions with
    replacement, and keep k of the different ones, without preferring any position.
    """
    if k > _SPARSE * numel:
        return torch.randperm(numel, generator=generator, device="cpu")[:k]
    expected = -numel * math.log1p(-k / numel)  # draws until k differ, on average
    # So many that fewer than k different positions are rare; then all are drawn again.
    draws = int(expected + 6 * math.sqrt(expected)) + 8
    while True:
        drawn = torch.randint(numel, (draws,), generator=generator, device="cpu")
        found = torch.from_numpy(np.unique(drawn.numpy()))
        if found.numel() >= k:
            return found[torch.randperm(found.numel(), generator=generator, device="cpu")[:k]]
