"""SparseCodec: base of sparsifiers that choose elements; their payload of values and positions."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec, Part
from lightning_gc.compressors.bounds import Contraction
from lightning_gc.compressors.traits import Traits
from lightning_gc.core import elias_fano, payload_validation
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Payload
from lightning_gc.core.wire import Field, Wire
from lightning_gc.kernels.accumulate import accumulate

Varies = Literal["no", "step", "worker"]
_OF_PAYLOADS = ("encode", "decode", "take", "wire", "send", "receive", "finish")


class SparseCodec(Codec):
    """Sends the elements that ``choose`` names, as values and Elias-Fano coded positions.

    Positions take at most ``2 + log2(numel/k)`` bits each, and a byte or two in all. Schemes may
    split the chosen elements: see ``SparseReduce``.
    """

    @property
    def ragged(self) -> bool:
        """Whether the number of elements depends on values, and so differs between workers."""
        return True

    @property
    def sent_dtype(self) -> torch.dtype:
        """What values are rounded to; what rounding leaves of them stays in the error."""
        return torch.float32

    @abc.abstractmethod
    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Return the ascending positions of the elements to send, ``(k,)`` int64.

        Arguments are as for ``encode``, but ``buffer`` is not changed.
        """

    def most(self, numel: int) -> int:
        """Return how many of ``numel`` elements are sent at most; if not ``ragged``, always."""
        return numel

    def take(self, buffer: Tensor, positions: Tensor) -> Payload:
        """Move elements out of ``buffer``, or a part of one, into (values, coded positions).

        ``positions`` are ascending, ``(k,)`` int64, of this buffer.
        """
        narrow = None if self.sent_dtype == torch.float32 else self.sent_dtype
        return take(buffer, positions, narrow)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        return self.take(buffer, self.choose(buffer, bucket))

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        add(payload, out, scale)

    def wire(self, numel: int) -> Wire:
        return wire(self.most(numel), numel, "worker" if self.ragged else "no", self.sent_dtype)

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()

    @property
    def own_payload(self) -> bool:
        """Whether a subclass encodes or decodes otherwise, so that payloads cannot be joined."""
        ours, own = SparseCodec, type(self)
        return any(getattr(own, name) is not getattr(ours, name) for name in _OF_PAYLOADS)

    def joined(self, parts: tuple[Part, ...]) -> Codec | None:
        codecs = [part.codec for part in parts if isinstance(part.codec, SparseCodec)]
        alike = len(codecs) == len(parts) and len({codec.sent_dtype for codec in codecs}) == 1
        if not alike or any(codec.own_payload for codec in codecs):
            return None
        return _JointSelection(parts)


@dataclass(frozen=True, eq=False)  # compared by identity, since hashing many parts takes long
class _JointSelection(SparseCodec):
    """Chooses in each part of a bucket by the part's own codec, and sends one payload for all.

    What is chosen, and the mean, are those of the codecs on their parts; coding, checking and
    adding cost once a bucket, not once a parameter. Made by ``PerParameter``; no registered method.

    Args:
        parts: ascending; other elements of the bucket are left alone.
    """

    parts: tuple[Part, ...]

    @property
    def traits(self) -> Traits:
        return self._codecs[0].traits

    @property
    def _codecs(self) -> list[SparseCodec]:
        return [part.codec for part in self.parts if isinstance(part.codec, SparseCodec)]

    @property
    def ragged(self) -> bool:
        return any(codec.ragged for codec in self._codecs)

    @property
    def sent_dtype(self) -> torch.dtype:
        return self._codecs[0].sent_dtype

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        found = []
        for codec, (_, name, start, stop) in zip(self._codecs, self.parts, strict=True):
            part = bucket.part(name, start, stop)
            found.append(codec.choose(buffer[start:stop], part).add_(start))
        return torch.cat(found)

    def most(self, numel: int) -> int:
        return sum(
            codec.most(part.stop - part.start)
            for codec, part in zip(self._codecs, self.parts, strict=True)
        )

    def taken(self, numel: int) -> int:
        return min(numel, sum(part.stop - part.start for part in self.parts))

    def bound(self, numel: int) -> Contraction:
        """Return δ = 0; each part keeps its codec's bound."""
        return Contraction(0.0)

    def __repr__(self) -> str:
        return f"PerParameter({self.parts[0].codec!r})"


def wire(most: int, numel: int, varies: Varies, dtype: torch.dtype = torch.float32) -> Wire:
    """Return the format of ``take``: ``most`` values of ``numel`` elements, or up to as many."""
    return (Field("values", dtype, most, varies), positions_field(most, numel, varies))


def positions_field(most: int, numel: int, varies: Varies) -> Field:
    """Return the format of ``most`` coded positions, or up to as many."""
    nbytes = elias_fano.coded_bytes(most, numel)
    if varies != "no":
        nbytes += 2  # of fewer positions each of two parts is rounded up to a byte
    return Field("positions", torch.uint8, nbytes, varies, "Elias-Fano, ascending")


def take(buffer: Tensor, indices: Tensor, dtype: torch.dtype | None = None) -> Payload:
    """Move elements out of ``buffer`` into (values, coded positions); the indices must ascend.

    With a narrower ``dtype`` for values, what rounding leaves of them stays in ``buffer``.
    """
    values = buffer[indices]  # (k,) buffer.dtype
    if dtype is None or dtype == buffer.dtype:
        buffer.index_fill_(0, indices, 0)
    else:
        whole, most = values, torch.finfo(dtype).max
        # What is finite must not become infinite by rounding up, step after step.
        values = torch.where(whole.isfinite(), whole.clamp(-most, most), whole).to(dtype)
        buffer[indices] = whole - values.to(buffer.dtype)
    return values, elias_fano.encode(indices, buffer.numel())


def places(payload: Payload, numel: int) -> tuple[Tensor, Tensor]:
    """Return positions in ``numel`` elements, ascending, and values, of what ``take`` has made.

    Raises:
        ValueError: positions outside the tensor or not ascending, or lengths that disagree.
    """
    values, coded = payload
    chosen = values.numel()
    payload_validation.lengths(payload, chosen, elias_fano.coded_bytes(chosen, numel))
    found = elias_fano.decode(coded, chosen, numel, payload_validation.on_host(coded))
    return payload_validation.positions(found, values, numel)


def among(positions: Tensor, others: Tensor) -> Tensor:
    """Return which of ``positions`` are among ``others``, which ascend: ``isin`` without waits."""
    if not others.numel():
        return torch.zeros_like(positions, dtype=torch.bool)
    at = torch.searchsorted(others, positions).clamp_(max=others.numel() - 1)
    return others[at] == positions


def add(payload: Payload, out: Tensor, scale: float) -> None:
    """Add ``scale`` times what ``take`` has made to ``out``; O(k), no dense intermediate.

    Raises:
        ValueError: positions outside ``out`` or not ascending, or lengths that disagree.
    """
    values, coded = payload
    indices, values = places((values.to(out.dtype), coded), out.numel())
    accumulate(out, indices, values, scale)
