"""Quantised: send the elements chosen by a sparsifier with quantised values."""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from lightning_gc.compressors.base import (
    AbsoluteError,
    Bound,
    Codec,
    Contraction,
    Multiple,
    Traits,
    Unbounded,
    Waits,
    Worst,
)
from lightning_gc.compressors.joint import (
    CodecScheme,
    JointCodec,
    Part,
    WholeCodec,
    absorbed,
    joined,
)
from lightning_gc.compressors.quantisers.blockwise_codes import JointBlocks
from lightning_gc.compressors.quantisers.natural_compression import NaturalCompression
from lightning_gc.compressors.quantisers.qsgd import QSGD
from lightning_gc.compressors.signs.ef_sign_sgd import EFSignSGD
from lightning_gc.compressors.sparsifiers import sparse_codec
from lightning_gc.compressors.sparsifiers.hard_threshold import HardThreshold
from lightning_gc.compressors.sparsifiers.sparse_codec import (
    JointSelection,
    SparseCodec,
    TableSelection,
)
from lightning_gc.compressors.sparsifiers.topk import TopK
from lightning_gc.core import (
    Bucket,
    Field,
    Payload,
    Structure,
    Wire,
    elias_fano,
    payload_validation,
)
from lightning_gc.core.refusal import refuse
from lightning_gc.kernels.sparse import Selection

_STEP = 16  # positions; that many more always take at least one byte more


@dataclass(frozen=True)
class Quantised(Codec):
    """Send the elements that a sparsifier chooses in the few bits of a quantiser.

    ``C(x)_S = Q(x_S)``, 0 elsewhere, where S are the chosen elements. The quantiser Q gets their
    values as one tensor. The other elements and the quantisation error stay in the error.

    The paper proves convergence with error feedback if C is a contraction. For an unbiased Q that
    means a variance ω below 1, so ``QSGD`` needs blocks of fewer than 4·s² elements, 196 for 4
    bits. The paper's exchange every H steps is ``LocalStepsStrategy``. Its variant for ω > 1, which
    divides by 1 + ω, is not implemented.

    Args:
        sparsifier: a ``SparseCodec``, by default ``TopK(0.01)``. Its knob is this compressor's
            knob. Its ``value_dtype`` has no effect.
        quantiser: a codec of fixed length that codes every element, such as ``EFSignSGD`` or
            ``NaturalCompression``; by default ``QSGD(4, block_size=64)``.

    The payload consists of the quantiser's payload for k elements and coded positions. A sent
    element takes 13.1 bits for the defaults, compared with 40.6 for ``TopK(0.01)``. Padding of
    15 − k mod 16 and k mod 16 bytes makes k follow from the lengths, so receivers need not read a
    number from their device.

    Raises:
        ValueError: the sparsifier is not a ``SparseCodec``. The quantiser is not a codec, is exact
            or a sparsifier, has lengths that depend on values, or its result is not a mean.

    Example:
        >>> from lightning_gc import QSGD, Quantised, TopK
        >>> Quantised(TopK(0.01), QSGD(4, block_size=64)).at(0.1).sparsifier.density
        0.1

    Reference:
        Basu, Data, Karakus and Diggavi, "Qsparse-local-SGD: Distributed SGD with Quantization,
        Sparsification, and Local Computations", NeurIPS 2019.
    """

    # Never None after construction. With instances as defaults, LightningCLI's parser would mix
    # their fields into the fields of another class that YAML names.
    sparsifier: SparseCodec = None  # type: ignore[assignment]
    quantiser: Codec = None  # type: ignore[assignment]

    _turns = "sparsifier"

    def __post_init__(self) -> None:
        chosen = TopK(0.01) if self.sparsifier is None else self.sparsifier
        values = QSGD(4, 64) if self.quantiser is None else self.quantiser
        if not isinstance(chosen, SparseCodec):
            refuse(
                "Quantised",
                "sparsifier must be a SparseCodec, which chooses elements by position; use "
                "TopK(0.01), for example. Wrappers go around Quantised",
                sparsifier=chosen,
            )
        if (
            not isinstance(values, Codec)
            or values.traits.kind == "sparsifier"
            or values.traits.exact
            or not values.traits.conserves
            or any(field.varies != "no" for field in values.wire(1))
        ):
            raise ValueError(
                f"Quantised(quantiser={values!r}): quantiser must be a codec that sends the same "
                f"few bits for every value; use QSGD(4, 64), for example."
            )
        object.__setattr__(self, "sparsifier", chosen)
        object.__setattr__(self, "quantiser", values)

    @functools.cached_property
    def traits(self) -> Traits:
        inner = self.sparsifier.traits
        return Traits(
            kind="sparsifier",
            conserves=inner.conserves,
            needs_sums=inner.needs_sums,
            reads_model=inner.reads_model,
            portable=inner.portable and self.quantiser.traits.portable,
            default_memory=inner.default_memory,
            knob=inner.knob,
            space=inner.level_space,
        )

    @property
    def waits(self) -> Waits:
        return self.sparsifier.waits

    def compresses(self, shape: tuple[int, ...]) -> bool:
        return self.sparsifier.compresses(shape)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        chosen = self.sparsifier.choose(buffer, bucket)  # (k,)
        count, numel = chosen.numel(), buffer.numel()
        # Quantisers need at least one element. Its payload has the right dtypes and is cut to 0.
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
        *quantised, coded, _ = payload
        count = self.sent(payload, out.numel())
        if not count:
            payload_validation.lengths(quantised, *[0] * len(quantised))
            return
        payload_validation.fields(tuple(quantised), self.quantiser.wire(count))
        values = out.new_zeros(count)
        self.quantiser.decode(tuple(quantised), values, 1.0, _values(bucket, values))
        coded = coded[: elias_fano.coded_bytes(count, out.numel())]
        sparse_codec.add((values, coded), out, scale)

    def keeps(self, shape: tuple[int, ...]) -> Structure:
        return self.sparsifier.keeps(shape)

    def wire(self, numel: int) -> Wire:
        values, positions = self.sparsifier.wire(numel)
        fixed, rest = positions.varies == "no", values.length % _STEP
        padded = positions.length + _STEP - 1 - (rest if fixed else 0)
        quantised = self.quantiser.wire(max(1, values.length))
        if not values.length:
            quantised = tuple(dataclasses.replace(field, length=0) for field in quantised)
        fields = (
            *quantised,
            dataclasses.replace(positions, length=padded, note=f"{positions.note}; then zeros"),
            Field("rest", torch.uint8, rest if fixed else _STEP - 1, note="zeros"),
        )
        return tuple(dataclasses.replace(field, varies=positions.varies) for field in fields)

    def bound(self, numel: int) -> Bound:
        """Return the bound that follows from the sparsifier's and the quantiser's bounds.

        The quantiser's bound is taken for the maximal number of values. The error is
        ``‖x‖² − ‖x_S‖² + ‖x_S − Q(x_S)‖²``. Its last term is at most ``q·‖x_S‖²``, where q is 1 − δ
        or ω. For q ≤ 1 the error is at most ``‖x‖² − (1 − q)·‖x_S‖²``, and ``‖x_S‖²`` is at least
        δ·‖x‖² with the sparsifier's δ. For q > 1 the error is at most ``q·‖x‖²``, which is not a
        contraction.
        """
        selected = self.sparsifier.bound(numel)
        left = self.quantiser.bound(self.sparsifier.most(numel))
        if isinstance(left, AbsoluteError | Unbounded | Worst):
            return Unbounded()
        q = 1 - left.delta if isinstance(left, Contraction) else left.omega
        if q > 1:
            return Multiple(q)
        return Contraction((1 - q) * selected.delta if isinstance(selected, Contraction) else 0.0)

    def sent(self, payload: Payload, numel: int) -> int:
        return _count(payload, numel, self.sparsifier.most(numel))

    @property
    def whole(self) -> WholeCodec:
        inner = self.sparsifier.whole.kind, self.quantiser.whole.kind
        known = all(kind is not None for kind in inner) and not self.sparsifier.ragged
        return WholeCodec(self, kind=(Quantised, *inner) if known else None, joint=JointQuantised)

    @classmethod
    def examples(cls) -> tuple[Quantised, ...]:
        return (
            cls(TopK(0.1), QSGD(4, 64)),
            cls(TopK(0.1, selection="sampled"), NaturalCompression()),
            cls(HardThreshold(1.0), EFSignSGD()),
        )


class JointQuantised(JointCodec):
    """Choose elements in each part, and send their values and positions in one payload.

    The payload consists of the quantiser's payload for the values of all parts, and of coded
    positions in the bucket. Separate payloads would have the same elements and mean.

    Args:
        codec: of the first part.
        parts: ascending. Their codecs are ``Quantised``, with fixed numbers of elements and equal
            quantisers.
    """

    @functools.cached_property
    def selection(self) -> JointSelection:
        """The codec of the choice alone."""
        parts = tuple(part._replace(codec=part.codec.sparsifier) for part in self.parts)
        return joined(parts)  # type: ignore[return-value]

    @functools.cached_property
    def quantiser(self) -> JointCodec:
        """The codec of the chosen values, which has a part for the values of each part."""
        parts, stop = list[Part](), 0
        for part in self.parts:
            start, stop = stop, stop + part.codec.sparsifier.most(part.numel)
            inner, name = part.codec.quantiser, _of_values(part.name)
            parts.append(Part(inner, name, start, stop, part.place))
        return joined(tuple(parts))

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        return absorbed(bucket, buffer, scheme, "sparse") and self._in_kernels(buffer) is not None

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        kernels = self._in_kernels(buffer)
        if kernels is not None:
            selection, table = kernels
            sent: Payload = table.encode_chosen(buffer, selection, bucket.pending)
            return sent
        chosen = self.selection.choose(buffer, bucket)  # (k,)
        values, coded = sparse_codec.take(buffer, chosen)
        payload = self.quantiser.encode(values, self._values(bucket, values))
        buffer.index_copy_(0, chosen, values)
        return *payload, coded

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        *quantised, coded = payload
        values = out.new_zeros(self.selection.most)
        self.quantiser.decode(tuple(quantised), values, 1.0, self._values(bucket, values))
        sparse_codec.add((values, coded), out, scale)

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        kernels = self._in_kernels(out)
        if kernels is None or bucket.pending is None:
            super().receive_all(payloads, out, bucket, averaged=averaged)
            return
        self.check(payloads, bucket)
        selection, table = kernels
        table.average_chosen(payloads, out, selection, bucket.pending)

    def _in_kernels(self, flat: Tensor) -> tuple[Selection, Any] | None:
        """Return what kernels of a GPU read; None if they do not take the codecs or ``flat``."""
        inner = self.quantiser
        if not isinstance(self.selection, TableSelection) or not isinstance(inner, JointBlocks):
            return None
        kind, table = inner.kernels(flat), inner.table(flat)
        return (self.selection.selection, table) if kind is not None and kind.chooses else None

    def _values(self, bucket: Bucket, values: Tensor) -> Bucket:
        """Return a bucket of the chosen values of all parts."""
        sizes = {part.name: part.codec.sparsifier.most(part.numel) for part in self.parts}
        shapes = {_of_values(name): (size,) for name, size in sizes.items()}
        changes = {"grad": values, "shapes": shapes, "state": {}, "pending": None}
        return dataclasses.replace(bucket, **changes)  # type: ignore[arg-type]

    def sent(self, payload: Payload, numel: int) -> int:
        return self.selection.most

    def wire(self, numel: int) -> Wire:
        sent = self.selection.most
        return *self.quantiser.wire(sent), sparse_codec.positions_field(sent, numel, "no")


def _values(bucket: Bucket, values: Tensor) -> Bucket:
    """Return a bucket of the chosen values, with other random numbers."""
    shapes = {_of_values("+".join(bucket.shapes)): (values.numel(),)}
    return dataclasses.replace(bucket, grad=values, shapes=shapes, state={})


def _of_values(name: str) -> str:
    return f"{name}%values"


def _count(payload: Payload, numel: int, most: int) -> int:
    """Return how many of ``numel`` elements have positions in the last tensors of a payload.

    Coded positions grow by at least a byte per 16 positions, and the last length is the remainder.
    Both paddings together are always 15 bytes, so more elements never take fewer bytes.

    Raises:
        ValueError: the lengths fit no number of elements up to ``most``.
    """
    coded, rest = payload[-2:]
    over = min(rest.numel(), _STEP - 1, most)
    choices = range(over, most + 1, _STEP)
    length = functools.partial(_coded_bytes, numel=numel)
    place = bisect.bisect_left(choices, coded.numel(), key=length)
    count = choices[min(place, len(choices) - 1)]
    payload_validation.lengths((coded, rest), length(count), over)
    return count


def _coded_bytes(count: int, numel: int) -> int:
    return elias_fano.coded_bytes(count, numel) + _STEP - 1 - count % _STEP
