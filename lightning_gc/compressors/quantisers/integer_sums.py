"""Exact sums of integer codes over workers, for quantisers with one scale for all workers.

Code c of ``bits`` bits stands for level ``c − s``, a whole number in −s..s with
``s = 2^(bits−1) − 1``, and level l for ``scale·l / s``. As all workers have the same scale, the
mean follows from the sum of their codes, which is exact, sent at the width that W codes need.
"""

from __future__ import annotations

import math
from collections.abc import Generator

import torch
from torch import Tensor

from lightning_gc.compressors.base import Compressor
from lightning_gc.core import (
    Bucket,
    Exchange,
    Field,
    Flow,
    Gather,
    Payload,
    Reply,
    Request,
    Wire,
    payload_validation,
)
from lightning_gc.core.bit_packing import pack, packed_bytes, unpack
from lightning_gc.kernels.quantise import quantise

_BLOCK = 512  # elements that ``quantise`` takes at a time; the scale is the same for all of them


def levels(bits: int) -> int:
    """Return s, the number of levels above zero."""
    return int(2 ** (bits - 1) - 1)


def largest(buffer: Tensor) -> Tensor:
    """Return the largest magnitude, ``(1,)`` float32."""
    if not buffer.numel():
        return buffer.new_zeros(1, dtype=torch.float32)
    low, high = buffer.aminmax()
    return torch.maximum(-low, high).float().view(1)


def agreed(own: Tensor) -> Generator[Request, Reply, Tensor]:
    """Return the greatest of all workers' numbers, ``(1,)``; not finite if one of them is not."""
    gathered = yield Gather((own,))
    return torch.cat([number for (number,) in gathered]).amax(0, keepdim=True)


def take(buffer: Tensor, scale: Tensor, bits: int, bucket: Bucket) -> tuple[Payload, ...]:
    """Round elements to levels at random, subtract them from ``buffer``, return the codes.

    ``level = sign(x)·⌊s·|x| / scale + u⌋`` with u uniform in [0, 1): its expectation is
    ``s·x / scale``.

    Args:
        buffer: x, ``(numel,)``, changed in place.
        scale: ``(1,)``, at least the largest magnitude. If it is not finite, nothing is taken.
        bits: 2..16, of a code.
        bucket: its private random numbers are used.

    Returns:
        A payload per worker: packed codes of its shard, all of one length. Shorter or empty shards
        at the end are filled up with level 0.
    """
    size = _shard_size(buffer, bucket)
    block = min(_BLOCK, max(1, size))
    scales = scale.where(scale.isfinite(), 0.0).expand(-(-size // block)).contiguous()
    payloads = []
    for i in range(bucket.workers):
        shard = buffer[i * size : (i + 1) * size]
        short = size - shard.numel()
        whole = torch.nn.functional.pad(shard, (0, short)) if short else shard
        draw = bucket.shard(i, size).generator(shared=False)
        payloads.append((quantise(whole, scales, block, bits, draw),))
        if short:
            shard.copy_(whole[: shard.numel()])
    return tuple(payloads)


def add(
    compressor: Compressor,
    payloads: tuple[Payload, ...],
    scale: Tensor,
    bits: int,
    bucket: Bucket,
    out: Tensor,
) -> Flow:
    """Send the codes of shard i to worker i, who sends their sum to all; leave the mean in ``out``.

    Args:
        compressor: for messages.
        payloads: as returned by ``take``.
        scale: ``(1,)``, the same on all workers.
        bits: 2..16, of a code.
        bucket: workers, and names for messages.
        out: ``(numel,)``: becomes ``scale·(sum of levels) / (s·W)``.

    Raises:
        ValueError: codes or sums that no worker makes. Where looking would mean waiting for a
            device, the mean becomes NaN instead.
    """
    workers, s, size = bucket.workers, levels(bits), _shard_size(out, bucket)

    def read(
        sender: int, payload: Payload, width: int, highest: int, sound: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the codes, ``(size,)``, and ``sound``, NaN where they cannot be right."""
        with payload_validation.naming(compressor, bucket, sender):
            payload_validation.lengths(tuple(payload), packed_bytes(size, width))
            dtype = torch.uint8 if width <= 8 else torch.int32 if width <= 31 else torch.int64
            codes = unpack(payload[0], width, size, dtype)
            return codes, payload_validation.codes(codes, highest, sound)

    highest = 2 * s * workers
    wide = highest.bit_length()
    sent = (scale, *(codes for (codes,) in payloads))
    bucket.tally.count(out.numel(), out.numel(), sent)

    arrived = yield Exchange(payloads)
    whole = torch.int32 if wide <= 31 else torch.int64
    sums = torch.zeros(size, dtype=whole, device=out.device)
    sound = torch.zeros(1, dtype=torch.float32, device=out.device)
    for sender, payload in enumerate(arrived):
        codes, sound = read(sender, payload, bits, 2 * s, sound)
        sums += codes
    if not payload_validation.on_host(sums):
        # ``highest`` is even, so this code is above it: all workers see that the sum is invalid.
        sums.masked_fill_(sound.isnan(), (1 << wide) - 1)
    gathered = yield Gather((pack(sums, wide),))

    if not bucket.wanted:
        return
    for owner, payload in enumerate(gathered):
        codes, factor = read(owner, payload, wide, highest, scale)
        shard = out[owner * size : (owner + 1) * size]
        total = codes[: shard.numel()].to(whole) - s * workers  # the sum of levels
        # Divided first: the quotient is 1 at most, and so the product as large as the scale.
        shard.copy_((total.to(out.dtype) / (s * workers)).mul_(factor))


def wire(scale: str, numel: int, bits: int) -> Wire:
    """Return the format for one worker. One of W sends the sums of a shard, in wider codes."""
    length = packed_bytes(numel, bits)
    return (
        Field(scale, torch.float32, 1),
        Field("codes", torch.uint8, length, note=f"level + s, {bits} bits each, by shards"),
        Field("sums", torch.uint8, length, note="of W codes, 0..2·s·W, for one shard"),
    )


def variance(numel: int, bits: int) -> float:
    """Return the least ω for which ``E‖x − C(x)‖² ≤ ω·‖x‖²`` with the largest magnitude as scale.

    In units of ``scale / s`` the largest element is s and sent as it is, and one with fractional
    part p adds ``p·(1 − p)`` to the error. The ratio to ``‖x‖²`` is greatest if all others are one
    p in 0..1: ``(d−1)·p·(1−p) / (s² + (d−1)·p²)``, with its maximum
    ``(√(1 + (d−1)/s²) − 1) / 2`` at ``p = s / (s + √(s² + d − 1))``.
    """
    return (math.sqrt(1 + max(0, numel - 1) / levels(bits) ** 2) - 1) / 2


def _shard_size(flat: Tensor, bucket: Bucket) -> int:
    return -(-flat.numel() // bucket.workers)
