"""Payloads of chosen elements of a bucket, which Triton's kernels encode, average and add."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from lightning_gc.core import elias_fano
from lightning_gc.core.message import Packed, evenly, reserve, storage_of
from lightning_gc.core.segments import Pending
from lightning_gc.kernels.gpu import positions as coding
from lightning_gc.kernels.gpu import selection as selecting
from lightning_gc.kernels.gpu.casts import from_half
from lightning_gc.kernels.gpu.launch import kernel, launch
from lightning_gc.kernels.gpu.positions import code as code  # as in ``kernels.host.sparse``
from lightning_gc.kernels.gpu.segments import ROW, arrived, flags_of, piece_of, sample
from lightning_gc.kernels.gpu.selection import Counts, Source, field
from lightning_gc.kernels.sparse import Row, Selection

PAYLOAD_BLOCK = 512
"""Elements of a payload that one program of ``add`` adds."""


@kernel()
def scatter_add(out, positions, values, scale, chosen, numel, BLOCK: tl.constexpr):
    """Add BLOCK elements of the payload. Positions outside ``out`` are skipped: not trusted."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < chosen
    place = tl.load(positions + at, mask=inside, other=0)
    inside = inside & (place >= 0) & (place < numel)
    added = tl.load(values + at, mask=inside, other=0.0).to(tl.float32) * scale
    kept = tl.load(out + place, mask=inside, other=0.0)
    tl.store(out + place, kept + added, mask=inside)


def add(out: Tensor, positions: Tensor, values: Tensor, scale: float) -> None:
    """Add ``scale · values`` to ``out``; see ``kernels.accumulate``."""
    chosen = positions.numel()
    if chosen:
        launch(
            scatter_add,
            (triton.cdiv(chosen, PAYLOAD_BLOCK),),
            *(out, positions, values, float(scale), chosen, out.numel()),
            BLOCK=PAYLOAD_BLOCK,
        )


@kernel()
def add_all(
    values, apart, counts, counts_apart,
    positions, most, wrong,
    workers, share, out,
    flags, flags_apart, senders, starts, pieces, table,
    BFLOAT: tl.constexpr, ROW: tl.constexpr,
):  # fmt: skip
    """Write a piece of the mean: zeros, and each worker's elements, in the workers' order."""
    part, start, stop, _ = piece_of(pieces, tl.program_id(0))
    at = start
    while at < stop:
        here = at + tl.arange(0, ROW)
        tl.store(out + here, tl.zeros([ROW], tl.float32), mask=here < stop)
        at += ROW
    mine = positions
    theirs = values
    bad = 0
    worker = 0
    while worker < workers:
        tl.debug_barrier()  # other threads have added the elements of the worker before
        chosen = tl.load(counts + worker * counts_apart)
        bad += tl.load(wrong + worker)
        low = chosen * 0
        high = chosen
        while low < high:  # the first position from ``start`` on
            middle = (low + high) // 2
            after = tl.load(mine + middle) >= start
            low = tl.where(after, low, middle + 1)
            high = tl.where(after, middle, high)
        more = low < chosen
        while more:
            i = low + tl.arange(0, ROW)
            place = tl.load(mine + i, mask=i < chosen, other=2147483647)
            inside = place < stop
            value = tl.load(theirs + i, mask=inside, other=0)
            if BFLOAT:
                value = from_half(value, BFLOAT)
            kept = tl.load(out + place, mask=inside, other=0.0)
            tl.store(out + place, kept + value * share, mask=inside)
            low += ROW
            more = tl.sum(tl.where(inside, 1, 0), axis=0) == ROW
        mine += most
        theirs += apart
        worker += 1
    tl.debug_barrier()
    if bad > 0:
        at = start
        while at < stop:
            here = at + tl.arange(0, ROW)
            tl.store(out + here, tl.zeros([ROW], tl.float32) + float("nan"), mask=here < stop)
            at += ROW
    elif start == tl.load(starts + field(table, part, 0)):
        tl.store(out + start, tl.load(out + start) + arrived(flags, flags_apart, senders))


def encode(
    buffer: Tensor, selection: Selection, dtype: torch.dtype, pending: Pending | None
) -> Packed:
    """Return the payload (values, coded positions) of the elements to send.

    Args:
        buffer: of the whole bucket; the unsent part remains, as ``core.segments.Pending`` says.
        selection: of the rule ``"largest"`` or ``"chunks"``.
        dtype: of the values, float32 or bfloat16; for ``"chunks"`` float32.
        pending: the engine's work, or None.
    """
    number = selection.most
    fields = [(dtype, number), (torch.uint8, elias_fano.coded_bytes(number, buffer.numel()))]
    payload = pending.reserve(fields) if pending else reserve(fields, buffer.device)
    take(buffer, selection, payload[0], payload[1], payload, pending)
    return payload.first(2)


def take(
    buffer: Tensor,
    selection: Selection,
    values: Tensor,
    coded: Tensor,
    payload: Packed,
    pending: Pending | None,
) -> Tensor:
    """Move the elements to send out of ``buffer``, and return their positions, ``(k,)`` int32.

    Args:
        buffer: as for ``encode``.
        selection: as there.
        values: ``(k,)`` float32 or bfloat16; overwritten.
        coded: of the coded positions; overwritten.
        payload: its flag and padding are written.
        pending: as for ``encode``.
    """
    source = Source(buffer, selection, pending)
    flagged = pending is not None and pending.flagged
    counts = selecting.count(source, 0)
    return _move(source, counts, values, coded, payload, payload.flag if flagged else None)


def move(
    buffer: Tensor, selection: Selection, dtype: torch.dtype, step: int
) -> tuple[Tensor, Tensor]:
    """Move the elements to send out of ``buffer``: ascending positions, int64, and values.

    Values have ``dtype``, and ``step`` moves the sample. The host waits for the number of elements
    if it is not fixed.
    """
    source = Source(buffer, selection, None)
    counts = selecting.count(source, step)
    number = selection.most if selection.rule in ("largest", "chunks") else int(counts.head[0])
    fields = [(dtype, number), (torch.uint8, elias_fano.coded_bytes(number, buffer.numel()))]
    payload = reserve(fields, buffer.device)
    values, coded = payload
    return _move(source, counts, values, coded, payload).long(), values


def _move(
    source: Source,
    counts: Counts,
    values: Tensor,
    coded: Tensor,
    payload: Packed,
    flag: Tensor | None = None,
) -> Tensor:
    """Fill values, coded positions and the payload's end, and return the positions, int32."""
    numel, flag = source.buffer.numel(), counts.sent_flag if flag is None else flag
    _, map_at = elias_fano.layout(values.numel(), numel)
    found = selecting.move(source, counts, values, coded[map_at:], payload, flag)
    coding.write(found, coded, numel)
    return found


@dataclass(frozen=True, eq=False)
class Counted:
    """Elements that have been counted on the device and not been moved yet.

    Attributes:
        number: the payload (number of elements,), int32. It carries the guard's flag if that is
            asked for.
    """

    number: Packed
    _source: Source
    _counts: Counts
    _dtype: torch.dtype

    def encode(self, lengths: tuple[int, int]) -> Packed:
        """Return the payload (values, coded positions).

        Args:
            lengths: of the payload.
        """
        dtypes, device = (self._dtype, torch.uint8), self._source.buffer.device
        payload = reserve(list(zip(dtypes, lengths, strict=True)), device, sealed=lengths)
        values, coded = payload
        _move(self._source, self._counts, values, coded, payload)
        return payload


def count(
    buffer: Tensor, selection: Selection, dtype: torch.dtype, step: int, pending: Pending
) -> Counted:
    """Count the elements to send, of the rules ``"sampled"`` and ``"reaching"``.

    Values have ``dtype``, and ``step`` moves the sample. The host does not wait.
    """
    source = Source(buffer, selection, pending)
    counts = selecting.count(source, step)
    return Counted(counts.announced.first(1), source, counts, dtype)


def average(
    payloads: Sequence[Sequence[Tensor]],
    counts: Tensor | None,
    out: Tensor,
    selection: Selection,
    pending: Pending,
) -> None:
    """Write the mean of all workers' payloads (values, coded positions) to the parts of ``out``.

    All elements become NaN if positions do not ascend, are out of range or not as many as values.

    Args:
        payloads: of all workers, with lengths that fit the numbers of elements.
        counts: all workers' numbers of elements on the device, ``(W,)`` int32; None if all are
            ``selection.most``.
        out: of the whole bucket.
        selection: has the places of the parts.
        pending: the engine's work.
    """
    pieces, table, _, most = selection.on(out.device)
    numbers = [payload[0].numel() for payload in payloads]
    values, apart, _ = _rows([payload[0] for payload in payloads], numbers, 0)
    width = values.element_size()
    coded, coded_apart, slope = _rows([payload[1] for payload in payloads], numbers, width)
    workers, numel, longest = len(payloads), out.numel(), max(numbers)
    length = max(elias_fano.map_bits(number, numel) for number in numbers)
    counted = (most, 0) if counts is None else (counts, 1)
    positions = out.new_empty(workers, longest, dtype=torch.int32)
    wrong = coding.read(coded, (coded_apart, slope), counted, length, numel, positions)
    bfloat = values.dtype == torch.bfloat16
    launch(
        add_all,
        (len(pieces),),
        *(values.view(torch.int16) if bfloat else values, apart, *counted),
        *(positions, longest, wrong, workers, 1 / workers, out),
        *(*flags_of(pending, out), pending.segments.starts, pieces, table),
        BFLOAT=bfloat,
        ROW=ROW,
    )


def _rows(tensors: Sequence[Tensor], numbers: Sequence[int], slope: int) -> tuple[Tensor, int, int]:
    """Return the first tensor, and how far from it the others are, in elements.

    Tensor w is at ``apart·w + slope·(numbers[w] − numbers[0])``, as in messages that have arrived
    together. Others are copied, and the slope is 0.
    """
    first = tensors[0]
    if len(set(numbers)) == 1:
        return *evenly(tensors), 0
    width, addresses = first.element_size(), [tensor.data_ptr() for tensor in tensors]
    places = [
        address - width * slope * (number - numbers[0])
        for address, number in zip(addresses, numbers, strict=True)
    ]
    apart, rest = divmod(places[1] - places[0], width)
    together = all(place == places[0] + apart * width * w for w, place in enumerate(places))
    same = len({storage_of(tensor) for tensor in tensors}) == 1
    if together and same and not rest and all(numbers):  # an empty tensor has no address
        return first, apart, slope
    padded = torch.nn.utils.rnn.pad_sequence(list(tensors), batch_first=True)
    return padded, padded.shape[1], 0


def _attempt(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    x = 0.5 * numbers + numbers.flip(0)
    rows = [Row(0, 0, 500, 25, 3, 8, 20, 0x3E800000), Row(1, 500, 1000, 25, 3, 8, 20, 0x3E800000)]
    limit = x[1:500:3].abs().sort(descending=True).values[7]
    largest = x[:500].abs().sort(descending=True).values[24]
    few = torch.arange(500, 525, device=numbers.device)  # of the idle parameter the first
    for rule, reach in (("largest", largest), ("sampled", limit), ("reaching", 0.25)):
        chosen = (x[:500].abs() >= reach).nonzero().view(-1)
        chosen = torch.cat([chosen, few]) if rule == "largest" else chosen[:500]
        selection = Selection(rule, tuple(rows))  # type: ignore[arg-type]
        pending, left, out = sample(numbers), numbers.clone(), numbers.clone()
        if rule == "largest":
            payload = encode(left, selection, torch.bfloat16, pending)
            counts = None
        else:
            counted = count(left, selection, torch.float32, 1, pending)
            yield counted.number[0].long(), counted.number[0].new_full((1,), len(chosen)).long()
            lengths = (len(chosen), elias_fano.coded_bytes(len(chosen), 1000))
            payload, counts = counted.encode(lengths), counted.number[0].repeat(2)
        sent = torch.where(torch.arange(1000, device=x.device) < 500, x, 0.0)[chosen]
        sent = sent.to(payload[0].dtype).float()
        yield payload[0].float(), sent
        yield payload[1].float(), elias_fano.encode(chosen, 1000).float()
        yield left, x.index_add(0, chosen, sent, alpha=-1)
        average([payload, payload], counts, out, selection, pending)
        yield out, torch.zeros_like(x).index_add(0, chosen, sent)


def _add(numbers: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    out, values = numbers.clone(), numbers[::3].contiguous()
    places = torch.arange(0, numbers.numel(), 3, device=numbers.device)
    add(out, places, values, 0.5)
    yield out, numbers.index_add(0, places, values, alpha=0.5)


ATTEMPTS = {"sparse": _attempt, "accumulate": _add}
