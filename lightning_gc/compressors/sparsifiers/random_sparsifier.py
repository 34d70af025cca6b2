"""RandomSparsifier: base class of methods that send elements drawn at random."""

from __future__ import annotations

import abc
import functools
import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Contraction, Traits, Variance
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import Bucket, Field, Payload, Range, Wire, payload_validation
from lightning_gc.core.elias_fano import check_count
from lightning_gc.core.registry import given_fields
from lightning_gc.kernels.splitmix import words

_SPARSE = 0.2  # share of elements above which a permutation is faster on the host


class RandomSparsifier(DensitySparsifier, Codec):
    """Send k = density·numel elements whose positions follow from a seed.

    Subclasses set ``shared`` and ``unbiased``, as fields or as class attributes.
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
        seed = bucket.generator_seed(shared=self.shared)
        return positions(numel, self.how_many(numel, bucket), seed, bucket.grad.device)

    def _drawn_once(self, numel: int, bucket: Bucket) -> Tensor:
        """Return the shared positions; they are drawn once per round, to encode and to decode."""
        key = (self, numel, bucket.names)
        if key not in bucket.cache:
            bucket.cache[key] = self.drawn(numel, bucket)
        return bucket.cache[key]

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        numel = buffer.numel()
        chosen = self._drawn_once(numel, bucket) if self.shared else self.drawn(numel, bucket)
        values = buffer[chosen]  # (k,) buffer.dtype
        if self.unbiased:
            values *= numel / max(1, chosen.numel())
            buffer[chosen] -= values
        else:
            buffer.index_fill_(0, chosen, 0)
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
        """Leave out default fields but ``density``, as version 0.1 and its checkpoints do."""
        fields = {"density": self.density, **given_fields(self)}
        return f"{type(self).__name__}({', '.join(f'{n}={v!r}' for n, v in fields.items())})"


def positions(numel: int, k: int, seed: int, device: torch.device) -> Tensor:
    """Return k different positions below ``numel``, ``(k,)`` int64; all sets are equally likely.

    Random generators of GPUs differ between models: the same seed gives different permutations.
    Workers would then write values at different positions without an error. So positions for GPUs
    are computed from the seed in integers.
    """
    if not k:
        return torch.empty(0, dtype=torch.int64, device=device)
    if device.type == "cpu":
        return _on_host(numel, k, torch.Generator().manual_seed(seed))
    return by_hash(numel, k, seed, device)


def by_hash(numel: int, k: int, seed: int | Tensor, device: torch.device) -> Tensor:
    """Return the k positions with the largest integer hashes; the host does not wait.

    All hashes differ, so the device breaks no ties.
    """
    return words(numel, seed, device).topk(k).indices


def _of_sender(numel: int, k: int, seed: Tensor) -> Tensor:
    """Return the positions that follow from a received seed; any seed gives valid positions."""
    if seed.device.type == "cpu":
        return positions(numel, k, int(seed), seed.device)
    return by_hash(numel, k, seed, seed.device)  # the host does not wait for the seed


def _on_host(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return positions from the host's generator, which is the same on all machines.

    A permutation of all positions is slow. For a small k, draw some more than k positions with
    replacement, and keep k of the different ones, without preferring any position.
    """
    if k > _SPARSE * numel:
        return torch.randperm(numel, generator=generator, device="cpu")[:k]
    expected = -numel * math.log1p(-k / numel)  # draws until k differ, on average
    draws = int(expected + 6 * math.sqrt(expected)) + 8
    while True:
        drawn = torch.randint(numel, (draws,), generator=generator, device="cpu")
        found = torch.from_numpy(np.unique(drawn.numpy()))
        if found.numel() >= k:
            return found[torch.randperm(found.numel(), generator=generator, device="cpu")[:k]]
