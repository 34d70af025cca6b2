"""Triton kernels that code ascending positions, and decode them; see ``core.elias_fano``."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core import elias_fano
from lightning_gc.kernels.gpu.launch import kernel, launch
from lightning_gc.kernels.gpu.segments import ROW

FOLD = 256
"""Numbers of pieces or tiles that a program adds at a time."""
GROUPS = 128
"""Groups of eight positions that one program codes."""
TILE = 4096
"""Bits of a bitmap that one program decodes."""


@triton.jit
def sum_of(numbers, first, stop, FOLD: tl.constexpr):
    """Return the sum of ``numbers[first:stop]``."""
    total = tl.zeros([FOLD], tl.int32)
    begin = first + stop * 0  # a tensor, where ``first`` is a constant
    while begin < stop:
        at = begin + tl.arange(0, FOLD)
        total += tl.load(numbers + at, mask=at < stop, other=0)
        begin += FOLD
    return tl.sum(total, axis=0)


@triton.jit
def coding(chosen, numel):
    """Return what ``elias_fano`` derives from k and n: low bits, their bytes, bits of the map."""
    ratio = numel // tl.maximum(chosen, 1)
    low = 0
    while (ratio >> (low + 1)) > 0:
        low += 1
    rest = low % 8
    map_at = low // 8 * chosen + (chosen * rest + 7) // 8
    length = tl.where(chosen > 0, chosen + ((numel - 1) >> low) + 1, 0)
    return low, map_at, length


@kernel()
def code_positions(positions, coded, map_at, end, chosen, low, GROUPS: tl.constexpr):
    """Write the low bits of eight positions to ``low`` bytes, and set bits of the bitmap.

    The bitmap is zero before. The first position with a bit in a byte writes the byte, and looks at
    the seven positions that follow: no atomics.
    """
    group = tl.program_id(0) * GROUPS + tl.arange(0, GROUPS)
    lane = tl.arange(0, 8)[None, :]
    i = group[:, None] * 8 + lane
    inside = i < chosen
    position = tl.load(positions + i, mask=inside, other=0)
    bits = tl.where(inside, position & ((1 << low) - 1), 0)
    whole = low // 8
    rest = low % 8
    j = 0
    while j < whole:
        tl.store(coded + j * chosen + i, ((bits >> (8 * j)) & 255).to(tl.uint8), mask=inside)
        j += 1
    if rest > 0:
        plane = coded + whole * chosen
        word = tl.sum((bits >> (8 * whole)).to(tl.int64) << (rest * lane), axis=1)
        length = chosen // 8 * rest + (chosen % 8 * rest + 7) // 8
        j = 0
        while j < rest:
            byte = group * rest + j
            tl.store(plane + byte, ((word >> (8 * j)) & 255).to(tl.uint8), mask=byte < length)
            j += 1
    bit = (position >> low) + i
    earlier = tl.load(positions + i - 1, mask=inside & (i > 0), other=0)
    last = tl.where(i > 0, ((earlier >> low) + i - 1) >> 3, -1)
    leads = inside & (last != (bit >> 3)) & (bit >= 0) & (map_at + (bit >> 3) < end)
    value = tl.where(leads, 1 << (bit & 7), 0)
    for j in tl.static_range(1, 8):
        there = leads & (i + j < chosen)
        other = (tl.load(positions + i + j, mask=there, other=0) >> low) + i + j
        value |= tl.where(there & ((other >> 3) == (bit >> 3)), 1 << (other & 7), 0)
    tl.store(coded + map_at + (bit >> 3), value.to(tl.uint8), mask=leads)


@triton.jit
def row_of(coded, apart, slope, chosen, counts):
    """Return the first byte of a worker's coded positions."""
    worker = tl.program_id(1)
    return coded + worker.to(tl.int64) * apart + (chosen - tl.load(counts)).to(tl.int64) * slope


@triton.jit
def set_bits(bitmap, bit, inside):
    """Return bits of a bitmap, int32."""
    byte = tl.load(bitmap + bit // 8, mask=inside, other=0).to(tl.int32)
    return (byte >> (bit % 8)) & 1


@triton.jit
def low_bits(coded, i, inside, chosen, low):
    """Return the low bits of the coded positions ``i``."""
    whole = low // 8
    rest = low % 8
    found = tl.zeros_like(i)
    j = 0
    while j < whole:
        byte = tl.load(coded + j * chosen + i, mask=inside, other=0)
        found |= byte.to(tl.int32) << (8 * j)
        j += 1
    plane = coded + whole * chosen
    first = i * rest // 8
    shift = i * rest % 8
    one = tl.load(plane + first, mask=inside & (shift + rest > 0), other=0).to(tl.int32)
    two = tl.load(plane + first + 1, mask=inside & (shift + rest > 8), other=0).to(tl.int32)
    return found | ((((one | (two << 8)) >> shift) & ((1 << rest) - 1)) << (8 * whole))


@kernel()
def count_bits(
    coded, apart, slope, counts, counts_apart,
    numel, tiles, found, wrong,
    TILE: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Count the set bits of each tile of each worker's bitmap."""
    tile = tl.program_id(0)
    worker = tl.program_id(1)
    if tile == 0:
        tl.store(wrong + worker, 0)
    chosen = tl.load(counts + worker * counts_apart)
    _, map_at, length = coding(chosen, numel)
    bitmap = row_of(coded, apart, slope, chosen, counts) + map_at
    total = tl.zeros([ROW], tl.int32)
    for step in tl.static_range(TILE // ROW):
        bit = tile * TILE + step * ROW + tl.arange(0, ROW)
        total += set_bits(bitmap, bit, bit < length)
    tl.store(found + worker * tiles + tile, tl.sum(total, axis=0))


@kernel()
def find_places(
    coded, apart, slope, counts, counts_apart,
    numel, tiles, found, wrong,
    positions, most,
    TILE: tl.constexpr, FOLD: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Decode positions; ``wrong`` is set if they do not ascend below ``numel``, k of them."""
    tile = tl.program_id(0)
    worker = tl.program_id(1)
    chosen = tl.load(counts + worker * counts_apart)
    low, map_at, length = coding(chosen, numel)
    mine = row_of(coded, apart, slope, chosen, counts)
    own = found + worker * tiles
    before = sum_of(own, 0, tile, FOLD)
    bad = tl.zeros([ROW], tl.int32)
    if tile == 0:
        bad += tl.where(sum_of(own, 0, tiles, FOLD) != chosen, 1, 0)
    for step in tl.static_range(TILE // ROW):
        bit = tile * TILE + step * ROW + tl.arange(0, ROW)
        on = set_bits(mine + map_at, bit, bit < length)
        i = before + tl.cumsum(on, axis=0) - 1
        there = (on == 1) & (i < chosen)
        place = ((bit - i) << low) | low_bits(mine, i, there, chosen, low)
        # Positions of neighbouring bits share their high bits, so their low bits must ascend.
        next_to = there & (i > 0)
        next_to = next_to & (set_bits(mine + map_at, bit - 1, next_to) == 1)
        last = low_bits(mine, i - 1, next_to, chosen, low)
        falls = next_to & ((place & ((1 << low) - 1)) <= last)
        bad += tl.where(there & ((place >= numel) | falls), 1, 0)
        tl.store(positions + worker.to(tl.int64) * most + i, place, mask=there)
        before += tl.sum(on, axis=0)
    if tl.sum(bad, axis=0) > 0:
        tl.store(wrong + worker, 1)


def write(positions: Tensor, coded: Tensor, numel: int) -> None:
    """Write ascending ``positions``, int32 below ``numel``, to ``coded``; its bitmap is zero."""
    chosen = positions.numel()
    if chosen:
        low, map_at = elias_fano.layout(chosen, numel)
        grid = (triton.cdiv(chosen, 8 * GROUPS),)
        where = positions, coded, map_at, coded.numel(), chosen, low
        launch(code_positions, grid, *where, GROUPS=GROUPS)


def read(
    coded: Tensor,
    distances: tuple[int, int],
    counts: tuple[Tensor, int],
    longest: int,
    numel: int,
    positions: Tensor,
) -> Tensor:
    """Write all workers' positions to ``positions``; return whose are impossible, ``(W,)`` int32.

    Args:
        coded: of the first worker. The others' begin ``apart`` bytes one after another, and
            ``slope`` bytes later for each element fewer.
        distances: ``apart`` and ``slope``.
        counts: numbers of elements on the device, int32, and their distance.
        longest: bits of the longest bitmap.
        numel: of the bucket.
        positions: ``(W, k)`` int32, with room for the greatest number of elements.
    """
    workers, most = positions.shape
    tiles = max(1, triton.cdiv(longest, TILE))
    found, wrong = positions.new_empty(workers, tiles), positions.new_empty(workers)
    given = coded, *distances, *counts, numel, tiles, found, wrong
    launch(count_bits, (tiles, workers), *given, TILE=TILE, ROW=ROW)
    sizes = {"TILE": TILE, "FOLD": FOLD, "ROW": ROW}
    launch(find_places, (tiles, workers), *given, positions, most, **sizes)
    return wrong


def code(positions: Tensor, numel: int) -> Tensor:
    """Return ``elias_fano.encode(positions, numel)``."""
    nbytes = elias_fano.coded_bytes(positions.numel(), numel)
    coded = torch.zeros(nbytes, dtype=torch.uint8, device=positions.device)
    write(positions.int(), coded, numel)
    return coded


def places(coded: Tensor, chosen: int, numel: int) -> tuple[Tensor, Tensor]:
    """Return the coded positions, ``(chosen,)`` int64 below ``numel``, and ``(1,)`` bool.

    The second is True if the positions were out of range, did not ascend, or were not ``chosen``.

    Args:
        coded: ``(coded_bytes(chosen, numel),)`` uint8.
        chosen: k, at least 1.
        numel: n.
    """
    found = torch.zeros(1, chosen, dtype=torch.int32, device=coded.device)
    count = torch.full((1,), chosen, dtype=torch.int32, device=coded.device)
    wrong = read(coded, (0, 0), (count, 0), elias_fano.map_bits(chosen, numel), numel, found)
    return found[0].long().clamp_(max=numel - 1), wrong != 0
