"""Positions drawn at random without replacement, and payloads of values at such positions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.coding import payload_validation
from lightning_gc.compressors.sparsifiers import sparse_payload
from lightning_gc.flow import Payload

_SPARSE = 0.2  # of all elements: above that a permutation takes less time


def positions(numel: int, k: int, generator: torch.Generator) -> Tensor:
    """Return k different positions below ``numel``, ``(k,)`` int64; all sets are equally likely.

    A permutation of all positions takes longer than anything else that a sparsifier does. Where
    few are wanted the host draws somewhat more, with replacement, and keeps k of those that
    differ: no step of this prefers any position, so all sets stay equally likely.
    """
    device = generator.device
    if not k:
        return torch.empty(0, dtype=torch.int64, device=device)
    if device.type != "cpu" or k > _SPARSE * numel:
        return torch.randperm(numel, generator=generator, device=device)[:k]
    expected = -numel * math.log1p(-k / numel)  # draws until k differ, on average
    draws = int(expected + 6 * math.sqrt(expected)) + 8
    while True:
        drawn = torch.randint(numel, (draws,), generator=generator)
        found = torch.from_numpy(np.unique(drawn.numpy()))
        if found.numel() >= k:
            return found[torch.randperm(found.numel(), generator=generator)[:k]]


def shared(density: float, numel: int, bucket: Bucket) -> Tensor:
    """Return the positions that all workers draw for this tensor in this step, ``(k,)``."""
    return positions(numel, sparse_payload.count(density, numel), bucket.generator(shared=True))


def how_many(density: float, numel: int, bucket: Bucket) -> int:
    """Return how many of ``numel`` elements a mask of independent draws keeps in this step.

    Binomial, and drawn on the host, as it is a shape. It depends on nothing but seed, step and the
    tensor's size, so payloads of a two-shot scheme's shards are equally long.
    """
    draw = replace(bucket, shapes={f"{numel} elements": (numel,)}).generator(shared=True)
    host = torch.Generator().manual_seed(draw.initial_seed())
    trials = torch.tensor(numel, dtype=torch.float64)
    return int(torch.binomial(trials, torch.full_like(trials, density), generator=host))


def put(payload: Payload, chosen: Tensor, out: Tensor, scale: float) -> None:
    """Add ``scale`` times the values, which are all of the payload, to ``out`` at ``chosen``.

    Raises:
        ValueError: another number of values than positions.
    """
    payload_validation.lengths(payload, chosen.numel())
    (values,) = payload
    out.index_add_(0, chosen, values.to(out.dtype), alpha=scale)
