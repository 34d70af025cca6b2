"""Lossless: send every bit of the gradient, with entropy-coded exponents."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors.base import Codec, Contraction, Traits, Waits
from lightning_gc.compressors.joint import WholeCodec, wire_of
from lightning_gc.core import Bucket, Field, Payload, Wire, golomb_rice, payload_validation
from lightning_gc.core.bit_packing import pack, packed_bytes, unpack

_LOW = 7  # most low bits of an exponent's rank
_WIDTHS = (0, 3, 16)  # low bits of the mantissa: of bfloat16, of float16, of float32


@dataclass(frozen=True)
class Lossless(Codec):
    """Send every bit of the gradient, for slow links where no bit may change: ``C(x) = x``.

    An element's sign and mantissa are as good as random. Its exponent is one of a few: in a normal
    tensor it has 2.5 bits of entropy, and float32 and bfloat16 spend 8 on it. Exponents are ranked
    by frequency, and ranks are coded by Golomb-Rice with a parameter fitted to the tensor.
    Elements that are zero take one bit, without sign and mantissa, if no element is −0 or
    subnormal. The low 16 bits of the mantissa are left out if they are zero, as in bfloat16.

    A gradient in float32 takes 27 to 28 bits an element, in float16 14 to 15, in bfloat16 11 to 12.
    So it sends 1.15 to 1.2, 1.05 to 1.15, and 1.35 to 1.45 times fewer bytes. It pays on slow links
    only: between two workers with one CPU core each below about 0.05 Gbit/s, since an element takes
    about 20 ns to code and 20 ns per worker to decode. ``python benchmarks/lossless.py`` measures
    this.

    The message has every bit of a gradient in float32, of NaN too, and one worker gets them back.
    Arithmetic outside of the message changes these bits, and no others:

    - NaN: it stays NaN. A sum over workers makes a signalling NaN quiet. So does the cast of
      float16 to float32. The cast of float32 to bfloat16 may replace a NaN's sign and payload.
    - −0: ``TwoShot`` and FSDP add what they decode to zero, which makes 0 of it.

    Between two workers the mean has the bits of ``Identity()``. Among more, workers' gradients are
    added in the order of workers. ``Identity()`` among simulated workers does the same: the means
    have equal bits for float32, and for 16-bit gradients if W is 4. A real all-reduce adds each
    part of the gradient in another order, so the last bits of its means may differ.

    Raises:
        ValueError: in the first step, float64 gradients.

    Example:
        >>> import torch
        >>> from lightning_gc import Lossless
        >>> from lightning_gc.testing import Lockstep
        >>> gradients = [{"w": torch.randn(100_000)} for _ in range(2)]
        >>> result = Lockstep(2, Lossless()).step(gradients)
        >>> mean = (gradients[0]["w"] + gradients[1]["w"]) / 2
        >>> torch.equal(result.mean["w"], mean), 320_000 < result.wire_bytes[0] < 340_000
        (True, True)
    """

    traits = Traits(kind="dense", unbiased=True, elementwise=True, exact=True)
    waits = Waits(3, 4)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Take everything. On CUDA the host waits for frequencies and lengths."""
        if buffer.dtype != torch.float32:
            raise ValueError(
                f"Lossless() codes gradients of 32 bits or fewer, but got "
                f"{str(buffer.dtype).removeprefix('torch.')}; use Identity()."
            )
        bits = buffer.view(torch.int32)
        frequencies = bits.new_zeros(256, dtype=torch.int64)
        for part in golomb_rice.pieces(bits):
            frequencies += torch.bincount(_exponents(part), minlength=256)
        falling, order = frequencies.sort(descending=True)
        # A value from bfloat16 has only the upper 7 of a mantissa's 23 bits, from float16 10.
        others = [torch.count_nonzero(each) for each in (bits, bits & 0xFFFF, bits & 0x1FFF)]
        figures = torch.cat([falling, torch.stack([frequencies[0], *others])])
        *counts, zeros, nonzero, beyond_0, beyond_3 = figures.tolist()
        width = 16 if beyond_3 else 3 if beyond_0 else 0
        known = order[: 256 - counts.count(0)].to(torch.uint8)
        rank_of = torch.empty_like(order, dtype=torch.uint8)
        rank_of[order] = torch.arange(256, device=order.device, dtype=torch.uint8)

        # The receiver takes an element for zero by its exponent alone.
        sparse = 0 < zeros == bits.numel() - nonzero
        ranks, tops, lows = [], [], []
        for part in golomb_rice.pieces(bits):
            ranks.append(rank_of.index_select(0, _exponents(part)))
            kept = part[part != 0] if sparse else part
            tops.append((kept >> 24 & 128 | kept >> 16 & 127).to(torch.uint8))
            lows.append(kept.to(torch.int16))
        buffer.zero_()
        coded = golomb_rice.encode(torch.cat(ranks), _low_bits(counts))
        return known, *coded, torch.cat(tops), _packed(torch.cat(lows), width)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        out.add_(_restored(payload, out.numel()), alpha=scale)

    @property
    def whole(self) -> WholeCodec:
        return _WholeLossless(self)

    def bound(self, numel: int) -> Contraction:
        """Return ``‖x − C(x)‖ = 0``."""
        return Contraction(1.0)

    def wire(self, numel: int) -> Wire:
        """Return the fields. Their sum is at most 33 bits an element and 263 bytes."""
        byte, filled = torch.uint8, -(-numel // 16) * 16
        return (
            Field("exponents", byte, 256, "worker", "in use, most frequent first"),
            Field("low parts", byte, golomb_rice.low_bytes(numel, _LOW), "worker", "of ranks"),
            Field("high parts", byte, packed_bytes(9 * numel, 1), "worker", "of ranks, unary"),
            Field("tops", byte, numel, "worker", "sign, 7 bits of mantissa"),
            Field("lows", torch.int16, filled, "worker", "rest of the mantissa"),
        )


class _WholeLossless(WholeCodec):
    """Adds as plain DDP does."""

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        """Write the mean, rounded as an all-reduce of the gradient's dtype rounds it."""
        narrow = bucket.grad.dtype if bucket.grad.dtype.itemsize < 4 else None
        fits = torch.ones_like(out, dtype=torch.bool) if narrow is not None else None
        for sender, payload in enumerate(payloads):
            with payload_validation.naming(self, bucket, sender):
                payload_validation.fields(tuple(payload), wire_of(self, out.numel()))
                values = _restored(payload, out.numel())
            # One worker's own bits: a product makes signalling NaNs quiet.
            share = values if len(payloads) == 1 else values * (1 / len(payloads))
            if narrow is not None and fits is not None:
                rounded = values.to(narrow)
                fits &= rounded == values
                share = torch.where(fits, (rounded * (1 / len(payloads))).float(), share)
            if sender == 0:
                out.copy_(share)
            else:
                out.add_(share)
        if narrow is not None and fits is not None:
            # Else the second encoding of ``TwoShot`` would have the sum's 24 bits.
            out.copy_(torch.where(fits, out.to(narrow).float(), out))


def _low_bits(counts: list[int]) -> int:
    """Return the Golomb-Rice parameter with the shortest code of ranks with these frequencies."""

    def length(low: int) -> int:
        return sum(count * (low + 1 + (rank >> low)) for rank, count in enumerate(counts))

    return min(range(_LOW + 1), key=length)


def _exponents(bits: Tensor) -> Tensor:
    return (bits >> 23).bitwise_and_(255)


def _packed(lows: Tensor, width: int) -> Tensor:
    """Return the upper ``width`` bits of the low 16 bits of mantissas, ``(c,)`` int16."""
    filled = pad(lows, (0, -lows.numel() % 16)) if width else lows[:0]
    if width in (0, 16):
        return filled
    return pack((filled >> 16 - width) & (1 << width) - 1, width).view(torch.int16)


def _restored(payload: Payload, numel: int) -> Tensor:
    """Return the values, ``(numel,)`` float32.

    Raises:
        ValueError: an impossible payload, where values can be read on the host. Elsewhere the
            values are NaN.
    """
    known, low_parts, high_parts, tops, lows = payload
    count, look = tops.numel(), payload_validation.on_host(tops)
    low = min(_LOW, low_parts.numel() // max(1, golomb_rice.low_bytes(numel, 1)))
    groups = -(-count // 16)
    width = lows.numel() // max(1, groups)
    payload_validation.lengths((low_parts, lows), golomb_rice.low_bytes(numel, low), width * groups)
    if bool(numel) > known.numel() or width not in _WIDTHS:
        raise ValueError(
            f"The payload has {known.numel()} exponents, and mantissas of {width + 7} bits; it is "
            f"damaged."
        )
    ranks = golomb_rice.decode(low_parts, high_parts, numel, low, 256, look)
    rest = _signs_and_mantissas(tops, lows, width)
    highest = known.numel() - 1
    if count < numel:
        present = (known != 0).index_select(0, ranks.clamp(max=highest))
        places = present.cumsum(0)
        if look and int(places[-1]) != count:
            raise ValueError(
                f"The payload has {count:,} mantissas for {int(places[-1]):,} elements that are "
                f"not zero; it is damaged."
            )
        ranks = ranks.masked_fill(places[-1] != count, 256)
        rest = pad(rest, (0, 1))[(places - 1).clamp_(0, count)].masked_fill_(~present, 0)
    powers = (known.int() << 23).view(torch.float32)
    powers = payload_validation.codes(ranks, highest, powers).view(torch.int32)
    for part, rank in zip(golomb_rice.pieces(rest), golomb_rice.pieces(ranks), strict=True):
        part |= powers.index_select(0, rank.clamp(max=highest))
    return rest.view(torch.float32)


def _signs_and_mantissas(tops: Tensor, lows: Tensor, width: int) -> Tensor:
    """Return the bits that are not of the exponent, ``(c,)`` int32."""
    count = tops.numel()
    if 0 < width < 16:
        lows = unpack(lows.view(torch.uint8), width, 16 * lows.numel() // width, torch.int16)
    found = torch.empty(count, dtype=torch.int32, device=tops.device)
    for part, top in zip(golomb_rice.pieces(found), golomb_rice.pieces(tops), strict=True):
        torch.bitwise_or((top & 128).int() << 24, (top & 127).int() << 16, out=part)
    if width:
        used = golomb_rice.pieces(lows[:count])
        for part, low in zip(golomb_rice.pieces(found), used, strict=True):
            part |= (low.int() << 16 - width) & 0xFFFF
    return found
