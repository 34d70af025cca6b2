"""SparseCodec: base class of sparsifiers that send values and coded positions."""

from __future__ import annotations

import abc
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.joint import (
    CodecScheme,
    JointCodec,
    Part,
    WholeCodec,
    absorbed,
    joint_of,
    limits_of,
)
from lightning_gc.core import (
    Bucket,
    Field,
    Flow,
    Gather,
    Payload,
    Wire,
    elias_fano,
    payload_validation,
)
from lightning_gc.kernels.accumulate import accumulate
from lightning_gc.kernels.dispatch import MAX_NUMEL, compiled, family, fused
from lightning_gc.kernels.sparse import Selection

Varies = Literal["no", "step", "worker"]
_INT32 = torch.iinfo(torch.int32).max


def counts(numel: int) -> torch.dtype:
    """Return the type in which ``numel`` elements can be counted; int32 takes half the memory."""
    return torch.int32 if numel <= _INT32 else torch.int64


class SparseCodec(Codec):
    """Send the elements that ``choose`` names, as values and Elias-Fano coded positions.

    Positions take at most ``2 + log2(numel/k)`` bits each, and a byte or two in all. Schemes may
    split the chosen elements: see ``SparseReduce``.

    Parameters of a bucket share a payload, so a class with another payload or another ``flow``
    derives from ``Codec``.
    """

    @property
    def ragged(self) -> bool:
        """Whether the number of elements depends on values, and so differs between workers."""
        return True

    @property
    def sent_dtype(self) -> torch.dtype:
        """The dtype of sent values; the rounding error stays in the error."""
        return torch.float32

    @property
    def whole(self) -> WholeCodec:
        return WholeSelection(self, kind=(SparseCodec, self.sent_dtype), joint=JointSelection)

    @abc.abstractmethod
    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Return the ascending positions of the elements to send, ``(k,)`` int64.

        Arguments are as for ``encode``, but ``buffer`` is not changed.
        """

    def most(self, numel: int) -> int:
        """Return how many of ``numel`` elements are sent at most; if not ``ragged``, always."""
        return numel

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        return take(buffer, self.choose(buffer, bucket), self.sent_dtype)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        add(payload, out, scale)

    def wire(self, numel: int) -> Wire:
        return wire(self.most(numel), numel, "worker" if self.ragged else "no", self.sent_dtype)

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()


class WholeSelection(WholeCodec):
    """A sparsifier as ``SparseReduce`` uses it too."""

    @functools.cached_property
    def sent_dtype(self) -> torch.dtype:
        """Dtype of the values that are sent."""
        dtype: torch.dtype = self.codec.sent_dtype
        return dtype

    def bounds(self, buffer: Tensor) -> Tensor:
        """Return first element and end of each parameter, ``(n, 2)`` int64, on the device."""
        # From the device's own numbers, or the host would wait for a copy.
        return torch.arange(2, device=buffer.device).mul_(buffer.numel()).view(1, 2)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        """Do as ``SparseCodec.choose``."""
        chosen: Tensor = self.codec.choose(buffer, bucket)
        return chosen

    def move(self, buffer: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Choose elements and move them out of ``buffer``.

        Returns:
            Ascending positions, ``(k,)`` int64, and values as they are sent, ``(k,)``.
        """
        chosen = self.choose(buffer, bucket)
        return chosen, taken(buffer, chosen, self.sent_dtype)


class Counted(Protocol):
    """Chosen elements whose number is known, to the device if not to the host.

    Attributes:
        number: the payload (number of elements,), int32; int64 if the bucket has more elements.
    """

    @property
    def number(self) -> Payload: ...

    def encode(self, lengths: tuple[int, int]) -> Payload:
        """Return the payload (values, coded positions), of these lengths."""


class Encoded(NamedTuple):
    """A payload of ``numel`` elements, encoded before the other workers' lengths were known."""

    payload: Payload
    numel: int

    @property
    def number(self) -> Payload:
        device = self.payload[0].device
        # From pinned memory, or the host would wait for a GPU.
        number = torch.tensor(
            [self.payload[0].numel()],
            dtype=counts(self.numel),
            device="cpu",
            pin_memory=device.type == "cuda",
        )
        return (number.to(device, non_blocking=True),)

    def encode(self, lengths: tuple[int, int]) -> Payload:
        return self.payload


class JointSelection(JointCodec, WholeSelection):
    """Choose elements in each part by the part's codec, and send one payload for all parts.

    The elements and their mean are the same as with separate payloads. Coding, checking and adding
    cost once per bucket, not once per parameter. If the number of elements depends on values,
    workers gather it first. The lengths of all payloads then are known, and are not sent.

    Args:
        codec: of the first part.
        parts: ascending; other elements of the bucket are not changed.
    """

    @functools.cached_property
    def ragged(self) -> bool:
        """Whether the number of elements depends on values."""
        return any(part.codec.ragged for part in self.parts)

    @property
    def in_rows(self) -> bool:
        return True

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        if not self.ragged or joint_of(bucket, scheme) != "parts":
            yield from super().flow(bucket, buffer, out, scheme)
            return
        counted, numel = self.count(buffer, bucket), buffer.numel()
        replies = yield Gather(counted.number)
        counts = torch.cat([reply[0] for reply in replies])
        numbers = self._read(counts, bucket)
        lengths = [(number, elias_fano.coded_bytes(number, numel)) for number in numbers]
        payload = counted.encode(lengths[bucket.worker])
        if bucket.pending is not None:  # else it has been noted
            self.note(payload, numel, bucket)
        payloads = yield Gather(payload, limits_of(self, numel), lengths)
        if bucket.wanted:
            self.receive_counted(payloads, counts, out, bucket)

    def count(self, buffer: Tensor, bucket: Bucket) -> Counted:
        """Choose the elements, and return their number; they may still be in ``buffer``."""
        return Encoded(self.send(buffer, bucket), buffer.numel())

    def receive_counted(
        self, payloads: Sequence[Payload], counts: Tensor | None, out: Tensor, bucket: Bucket
    ) -> None:
        """Do as ``receive_all``; ``counts`` are all numbers of elements, ``(W,)``."""
        self.receive_all(payloads, out, bucket)

    def _read(self, counts: Tensor, bucket: Bucket) -> list[int]:
        """Return all workers' numbers of elements. The host waits once."""
        numbers: list[int] = counts.tolist()
        most = self.most
        for sender, number in enumerate(numbers):
            if not 0 <= number <= most:
                with payload_validation.naming(self, bucket, sender):
                    raise ValueError(
                        f"It announces {number:,} elements, but at most {most:,} are possible; it "
                        f"is damaged, or its sender has another configuration."
                    )
        return numbers

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        return take(buffer, self.choose(buffer, bucket), self.sent_dtype)

    def decode(self, payload: Payload, out: Tensor, scale: float, bucket: Bucket) -> None:
        add(payload, out, scale)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        found = []
        for part in self.parts:
            inner = bucket.part(part.name, part.start, part.stop)
            chosen = part.codec.choose(buffer[part.start : part.stop], inner)
            found.append(chosen.add_(part.start))
        return torch.cat(found)

    @functools.cached_property
    def most(self) -> int:
        """How many elements are sent at most; if not ``ragged``, always."""
        return sum(part.codec.most(part.numel) for part in self.parts)

    def bounds(self, buffer: Tensor) -> Tensor:
        return self._bounds(buffer.device)

    @functools.cached_property
    def _bounds(self) -> Callable[[torch.device], Tensor]:
        spans = [(part.start, part.stop) for part in self.parts]
        return functools.cache(lambda device: torch.tensor(spans, dtype=torch.int64, device=device))

    def sent(self, payload: Payload, numel: int) -> int:
        return payload[0].numel()

    def wire(self, numel: int) -> Wire:
        varies: Varies = "worker" if self.ragged else "no"
        return wire(self.most, numel, varies, self.sent_dtype)


@dataclass(frozen=True, eq=False)
class TableSelection(JointSelection):
    """Choose elements by kernels of whole buckets; without kernels as ``JointSelection`` does.

    On a GPU with a ragged payload, workers gather their numbers of elements first. All are read at
    once, so the host waits once per bucket.

    Args:
        codec: as there.
        parts: as there.
        selection: with a row for each part.
    """

    selection: Selection

    def absorbs(self, bucket: Bucket, buffer: Tensor, scheme: CodecScheme | None) -> bool:
        return absorbed(bucket, buffer, scheme, "sparse")

    def count(self, buffer: Tensor, bucket: Bucket) -> Counted:
        if bucket.pending is None:
            return super().count(buffer, bucket)
        from lightning_gc.kernels.gpu import sparse

        of = self.selection, self.sent_dtype, bucket.step, bucket.pending
        return sparse.count(buffer, *of)

    def choose(self, buffer: Tensor, bucket: Bucket) -> Tensor:
        if compiled(buffer, "sparse"):
            from lightning_gc.kernels.host import sparse

            return sparse.choose(buffer, self.selection, bucket.step)
        return super().choose(buffer, bucket)

    def move(self, buffer: Tensor, bucket: Bucket) -> tuple[Tensor, Tensor]:
        if not fused(buffer, "sparse"):
            return super().move(buffer, bucket)
        from lightning_gc.kernels.gpu import sparse

        return sparse.move(buffer, self.selection, self.sent_dtype, bucket.step)

    def encode(self, buffer: Tensor, bucket: Bucket) -> Payload:
        if fused(buffer, "sparse") and not self.ragged:
            from lightning_gc.kernels.gpu import sparse

            return sparse.encode(buffer, self.selection, self.sent_dtype, bucket.pending)
        if compiled(buffer, "sparse") and self.sent_dtype == buffer.dtype:
            from lightning_gc.kernels.host import sparse as host

            return host.encode(buffer, self.selection, bucket.step)
        return super().encode(buffer, bucket)

    def receive_all(
        self, payloads: Sequence[Payload], out: Tensor, bucket: Bucket, *, averaged: bool = False
    ) -> None:
        if bucket.pending is None:
            super().receive_all(payloads, out, bucket, averaged=averaged)
        else:
            self.receive_counted(payloads, None, out, bucket)

    def receive_counted(
        self, payloads: Sequence[Payload], counts: Tensor | None, out: Tensor, bucket: Bucket
    ) -> None:
        if bucket.pending is None:
            super().receive_counted(payloads, counts, out, bucket)
            return
        from lightning_gc.kernels.gpu import sparse

        self.check(payloads, bucket)
        sparse.average(payloads, counts, out, self.selection, bucket.pending)


def by_table(
    cls: type[SparseCodec], table: Callable[[tuple[Part, ...]], Selection]
) -> Callable[[Any, tuple[Part, ...]], JointSelection]:
    """Return ``joint`` of a class whose choice kernels make; its subclasses may choose otherwise.

    Args:
        cls: of codecs.
        table: the choice in parts with such codecs.
    """

    def joint(codec: Any, parts: tuple[Part, ...]) -> JointSelection:
        if any(type(part.codec) is not cls for part in parts):
            return JointSelection(codec, parts)
        return TableSelection(codec, parts, table(parts))

    return joint


def wire(most: int, numel: int, varies: Varies, dtype: torch.dtype = torch.float32) -> Wire:
    """Return the format of ``take``: ``most`` of ``numel`` elements, or fewer if it varies."""
    return (Field("values", dtype, most, varies), positions_field(most, numel, varies))


def positions_field(most: int, numel: int, varies: Varies) -> Field:
    """Return the format of ``most`` coded positions, or fewer if the number varies."""
    nbytes = elias_fano.coded_bytes(most, numel)
    if varies != "no":
        nbytes += 2  # of fewer positions each of two parts is rounded up to a byte
    return Field("positions", torch.uint8, nbytes, varies, "Elias-Fano, ascending")


def take(buffer: Tensor, indices: Tensor, dtype: torch.dtype = torch.float32) -> Payload:
    """Move elements out of ``buffer`` into (values, coded positions); the indices must ascend.

    See ``taken`` for ``dtype``.
    """
    return taken(buffer, indices, dtype), code(indices, buffer.numel(), buffer)


def taken(buffer: Tensor, indices: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Move elements out of ``buffer``; return values, ``(k,)``.

    With a dtype of 16 bits for values, what rounding leaves of them stays in ``buffer``. With
    float32 they keep the buffer's dtype.
    """
    narrow = dtype not in (torch.float32, buffer.dtype)
    if compiled(buffer, "sparse"):
        from lightning_gc.kernels.host import sparse

        values = sparse.take(buffer, indices)  # (k,) buffer.dtype
        if narrow:
            values, left = _narrowed(values, dtype)
            sparse.put(buffer, indices, left)
        return values
    values = buffer[indices]
    if narrow:
        values, buffer[indices] = _narrowed(values, dtype)
    else:
        buffer.index_fill_(0, indices, 0)
    return values


def code(indices: Tensor, numel: int, like: Tensor) -> Tensor:
    """Return ascending positions below ``numel``, coded; ``like`` has elements on their device."""
    if fused(like, "sparse") or compiled(like, "sparse"):
        coded: Tensor = family("sparse", like).code(indices, numel)
        return coded
    return elias_fano.encode(indices, numel)


def _narrowed(whole: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return values in fewer bits, and what rounding leaves."""
    most = torch.finfo(dtype).max
    # A finite value must not become infinite by rounding up, step after step.
    values = torch.where(whole.isfinite(), whole.clamp(-most, most), whole).to(dtype)
    return values, whole - values.to(whole.dtype)


def places(payload: Payload, numel: int) -> tuple[Tensor, Tensor]:
    """Return ascending positions in ``numel`` elements, and values, of a payload of ``take``.

    Raises:
        ValueError: positions outside the tensor or not ascending, or lengths that disagree.
    """
    values, coded = payload
    chosen = values.numel()
    payload_validation.lengths(payload, chosen, elias_fano.coded_bytes(chosen, numel))
    if compiled(values, "sparse"):
        from lightning_gc.kernels.host import sparse

        positions = sparse.places(coded, chosen, numel)
        if positions is not None:
            return positions, values
    on_gpu = chosen and numel < MAX_NUMEL and not payload_validation.on_host(values)
    if on_gpu and fused(values, "sparse"):
        from lightning_gc.kernels.gpu import positions as gpu

        elias_fano.check_count(chosen, numel)
        found, wrong = gpu.places(coded, chosen, numel)
        return found, values.masked_fill(wrong, float("nan"))
    found = elias_fano.decode(coded, chosen, numel, payload_validation.on_host(coded))
    return payload_validation.positions(found, values, numel)


def among(positions: Tensor, others: Tensor) -> Tensor:
    """Return a mask of ``positions`` in ascending ``others``: ``isin`` without waits."""
    if not others.numel():
        return torch.zeros_like(positions, dtype=torch.bool)
    at = torch.searchsorted(others, positions).clamp_(max=others.numel() - 1)
    return others[at] == positions


def add(payload: Payload, out: Tensor, scale: float) -> None:
    """Add ``scale`` times a payload of ``take`` to ``out``, in O(k), without a dense tensor.

    Raises:
        ValueError: positions outside ``out`` or not ascending, or lengths that disagree.
    """
    values, coded = payload
    indices, values = places((values.to(out.dtype), coded), out.numel())
    accumulate(out, indices, values, scale)
