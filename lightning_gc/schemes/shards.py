"""Shards of a flat tensor, all of one size, and the request that sends them to some workers.

The last shards may be shorter, or empty, and are padded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from lightning_gc.flow import Exchange, Limits, Payload


def padded(flat: Tensor, index: int, size: int) -> tuple[Tensor, Tensor]:
    """Return shard ``index`` and its copy padded to ``size``, or twice itself if it is full."""
    shard = flat[index * size : (index + 1) * size]
    short = size - shard.numel()
    return shard, torch.nn.functional.pad(shard, (0, short)) if short else shard


def unpad(whole: Tensor, shard: Tensor) -> None:
    """Copy a padded shard back, if it is one."""
    if whole is not shard:
        shard.copy_(whole[: shard.numel()])


def toward(
    receivers: Sequence[int], payloads: Sequence[Payload], workers: int, limits: Limits
) -> Exchange:
    """Return the request that sends each receiver its payload, and others nothing."""
    nothing = tuple(tensor[:0] for tensor in payloads[0])
    to_all = [nothing] * workers
    for receiver, payload in zip(receivers, payloads, strict=True):
        to_all[receiver] = payload
    return Exchange(tuple(to_all), limits)


def book(buffer: Tensor, start: int, error: Tensor, times: int) -> None:
    """Add an encoding's error to the worker's own, so many times, from ``start`` on.

    An element whose sum leaves float32 becomes zero, as the engine does with kept errors.
    """
    mine = buffer[start : start + error.numel()]
    # NaN and overflow from other workers are in the payload, and are added to no error.
    mine.add_(error[: mine.numel()].nan_to_num_(0.0, 0.0, 0.0), alpha=times)
    mine.nan_to_num_(0.0, 0.0, 0.0)
