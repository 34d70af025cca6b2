"""Select elements, and quantise the values of those that were selected."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.bucket import Bucket
from lightning_gc.coding import elias_fano, payload_validation
from lightning_gc.compressors.base import (
    AbsoluteError,
    Bound,
    Codec,
    Contraction,
    Multiple,
    Unbounded,
)
from lightning_gc.compressors.quantisers.natural_compression import NaturalCompression
from lightning_gc.compressors.quantisers.qsgd import QSGD
from lightning_gc.compressors.signs.ef_sign_sgd import EFSignSGD
from lightning_gc.compressors.sparsifiers import sparse_payload
from lightning_gc.compressors.sparsifiers.hard_threshold import HardThreshold
from lightning_gc.compressors.sparsifiers.topk import TopK
from lightning_gc.flow import Limits, Payload

_STEP = 16  # positions, that take a byte or more
_SAMPLE = 4096  # elements, of which a payload is measured


@dataclass(frozen=True)
class Quantised(Codec):
    """Send elements that a sparsifier selects, in the few bits of a quantiser.

    ``C(x)_S = Q(x_S)``, 0 elsewhere, with S what the sparsifier chooses and Q the quantiser, which
    is given the selected values as one tensor. What is not selected and what Q leaves of the rest
    both stay in the error.

    The paper proves convergence with error feedback where C is a contraction. For an unbiased Q
    with variance ω that is so for ω < 1: ``QSGD`` needs blocks of fewer than 4·s² elements, 196 for
    4 bits. Its variant for ω > 1, which divides what is sent by 1 + ω, is not offered; see
    ``bound``. It also communicates only every H steps; here it is every step.

    Args:
        sparsifier: a codec that selects elements, such as ``TopK`` or ``HardThreshold``; by default
            ``TopK(0.01)``. Its knob is this compressor's. A ``value_dtype`` of it is not asked.
        quantiser: a codec of a fixed length that sends something of every element, such as
            ``EFSignSGD`` or ``NaturalCompression``; by default ``QSGD(4, block_size=64)``.

    Wire format:
        That of the quantiser for k elements, which may be tensors of length 0 if k is, and
        ``positions  # (coded_bytes(k, numel) + 15 - k mod 16,) uint8``, Elias-Fano coded,
        ascending: at most ``2 + log2(numel/k)`` bits each and a byte or two; then zeros
        ``rest       # (k mod 16,) uint8``, zeros: two lengths that tell k, of which no receiver
        has to read a number from its device
        13.1 bits a sent element for the defaults, where ``TopK(0.01)`` has 40.6. Ragged where the
        sparsifier is.

    Raises:
        ValueError: a sparsifier that does not select, a quantiser that is no codec, is ragged or
            exact, leaves elements out itself, or whose result is no mean.

    Example:
        >>> from lightning_gc import QSGD, Quantised, TopK
        >>> Quantised(TopK(0.01), QSGD(4, block_size=64)).at(0.1).sparsifier.density
        0.1

    Reference:
        Basu, Data, Karakus and Diggavi, "Qsparse-local-SGD: Distributed SGD with Quantization,
        Sparsification, and Local Computations", NeurIPS 2019.
    """

    # Never None after construction. Instances as defaults would be taken apart by LightningCLI's
    # parser, which then mixes their fields into those of another class that YAML names.
    sparsifier: Codec = None  # type: ignore[assignment]
    quantiser: Codec = None  # type: ignore[assignment]

    kind = "sparsifier"

    def __post_init__(self) -> None:
        chosen = TopK(0.01) if self.sparsifier is None else self.sparsifier
        values = QSGD(4, 64) if self.quantiser is None else self.quantiser
        if not isinstance(chosen, Codec) or not chosen.selects:
            raise ValueError(
                f"Quantised(sparsifier={chosen!r}): it must be a codec that selects elements and "
                f"names their positions; use TopK(0.01), say. Wrappers go around Quantised."
            )
        if (
            not isinstance(values, Codec)
            or values.kind == "sparsifier"
            or values.ragged
            or values.exact
            or not values.conserves
        ):
            raise ValueError(
                f"Quantised(quantiser={values!r}): it must be a codec that sends a few bits of "
                f"every value, as many whatever the values are; use QSGD(4, 64), say."
            )
        object.__setattr__(self, "sparsifier", chosen)
        object.__setattr__(self, "quantiser", values)
        for declared in ("ragged", "knob", "default_memory", "conserves"):
            object.__setattr__(self, declared, getattr(chosen, declared))

    @property
    def level(self) -> float | None:
        """The sparsifier's level."""
        return self.sparsifier.level

    def at(self, level: float) -> Quantised:
        """Return the same with the sparsifier at ``level``."""
        return dataclasses.replace(self, sparsifier=self.sparsifier.at(level))

    def compresses(self, shape: tuple[int, ...]) -> bool:
        """As the sparsifier."""
        return self.sparsifier.compresses(shape)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        """Select, take what the quantiser takes of the values; what it leaves goes back."""
        chosen = self.sparsifier.choose(buffer, bucket)  # (k,)
        count, numel = chosen.numel(), buffer.numel()
        # Codecs are not made for tensors without elements: theirs are cut to nothing.
        values = buffer[chosen] if count else buffer.new_zeros(1)
        payload = self.quantiser.encode(values, _values(bucket, values))
        if count:
            buffer[chosen] = values
        else:
            payload = tuple(tensor[:0] for tensor in payload)
        rest = torch.zeros(count % _STEP, dtype=torch.uint8, device=buffer.device)
        coded = pad(elias_fano.encode(chosen, numel), (0, _STEP - 1 - count % _STEP))
        return *payload, coded, rest

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        """Let the quantiser decode the values, and add them where they belong."""
        count = _count(payload, out.numel())
        *quantised, coded, _ = payload
        if not count:
            payload_validation.lengths(tuple(quantised), *[0] * len(_lengths(self.quantiser, 1)))
            return
        values = out.new_zeros(count)
        self.quantiser.decode(tuple(quantised), values, 1.0, _values(bucket, values))
        most = self._most(out.numel()) if self.sparsifier.ragged else None
        coded = coded[: elias_fano.coded_bytes(count, out.numel())]
        sparse_payload.put((values, coded), out, scale, most)

    def limits(self, numel: int) -> Limits | None:
        """Return what the quantiser needs for the most elements, and no end of small positions."""
        if not self.sparsifier.ragged:
            return None
        # A format has blocks and bytes, so parts of a tensor take as much as the whole, or more.
        parts = -(-self._most(numel) // _SAMPLE)
        lengths = _lengths(self.quantiser, min(_SAMPLE, self._most(numel)))
        return (
            *(parts * length for length in lengths),
            elias_fano.most_bytes(numel) + _STEP - 1,
            _STEP - 1,
        )

    def _most(self, numel: int) -> int:
        """Return how many elements are selected at most."""
        limits = self.sparsifier.limits(numel)
        if limits is None:
            x = torch.zeros(numel)
            return self.sparsifier.choose(x, Bucket(x, {"": (numel,)})).numel()
        # (values, coded positions), unless it has a format of its own.
        return min(numel, limits[0] or numel) if len(limits) == 2 else numel

    def bound(self, numel: int) -> Bound:
        """Return what follows from both bounds, the quantiser's being for the most values.

        Of the error ``‖x‖² − ‖x_S‖² + ‖x_S − Q(x_S)‖²`` the last is at most ``q·‖x_S‖²``, where q
        is 1 − δ or ω. For q ≤ 1 that is at most ``‖x‖² − (1 − q)·‖x_S‖²``, and ``‖x_S‖²`` at least
        δ·‖x‖² with the sparsifier's δ. For q > 1 it is at most ``q·‖x‖²``: no contraction.
        """
        selected, left = self.sparsifier.bound(numel), self.quantiser.bound(self._most(numel))
        if isinstance(left, AbsoluteError | Unbounded):
            return Unbounded()
        q = 1 - left.delta if isinstance(left, Contraction) else left.omega
        if q > 1:
            return Multiple(q)
        return Contraction((1 - q) * selected.delta if isinstance(selected, Contraction) else 0.0)

    def sent(self, payload: Payload, numel: int) -> int:
        """Return how many were selected."""
        return _count(payload, numel)

    @classmethod
    def examples(cls) -> tuple[Quantised, ...]:
        """A fixed length, a ragged one, one that may be empty, and one bit a value."""
        return (
            cls(TopK(0.1), QSGD(4, 64)),
            cls(TopK(0.1, selection="sampled"), NaturalCompression()),
            cls(HardThreshold(1.0), EFSignSGD()),
        )


def _values(bucket: Bucket, values: Tensor) -> Bucket:
    """Return the bucket of the selected values, with random numbers of its own."""
    shapes = {f"{'+'.join(bucket.shapes)}%values": (values.numel(),)}
    return dataclasses.replace(bucket, grad=values, shapes=shapes, levels={}, state={})


def _count(payload: Payload, numel: int) -> int:
    """Return how many of ``numel`` elements have positions in the last tensors of a payload.

    Lengths tell: coded positions grow by at least a byte for 16 more of them, and how many there
    are besides is the last tensor's length. What goes with either is always 15 bytes together, so
    that more elements never take fewer bytes.

    Raises:
        ValueError: lengths that no number of elements has.
    """
    coded, rest = payload[-2:]
    over = min(rest.numel(), _STEP - 1, numel)
    choices = range(over, numel + 1, _STEP)
    length = functools.partial(_coded_bytes, numel=numel)
    place = bisect.bisect_left(choices, coded.numel(), key=length)
    count = choices[min(place, len(choices) - 1)]
    payload_validation.lengths((coded, rest), length(count), over)
    return count


def _coded_bytes(count: int, numel: int) -> int:
    return elias_fano.coded_bytes(count, numel) + _STEP - 1 - count % _STEP


@functools.lru_cache(maxsize=1024)
def _lengths(quantiser: Codec, count: int) -> tuple[int, ...]:
    """Return the lengths of what a quantiser makes of ``count`` elements."""
    x = torch.zeros(count)
    return tuple(tensor.numel() for tensor in quantiser.encode(x, Bucket(x, {"": (count,)})))
