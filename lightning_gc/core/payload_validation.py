"""Validate received payloads: check lengths, positions and codes before decoding.

On the CPU a check reads the values and raises. On an accelerator reading would make the host wait.
There, out-of-range positions are clamped and values become NaN. NaN reaches every worker's result,
so all workers skip the optimizer step. NaN and infinity among values are not errors, since they
occur in normal training.
"""

import contextlib
from collections.abc import Iterator, Sequence

from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.elias_fano import check_count
from lightning_gc.core.flow import Payload
from lightning_gc.core.wire import Wire

_NAN = float("nan")


@contextlib.contextmanager
def naming(compressor: object, bucket: Bucket, sender: int | None) -> Iterator[None]:
    """Add the compressor, parameters and sender to a decoder's ValueError.

    The sender is None for the mean of all payloads. The context must not span a ``yield``.
    """
    try:
        yield
    except ValueError as error:
        what = "the mean of all payloads" if sender is None else f"what worker {sender} sent"
        names = ", ".join(bucket.shapes)
        names = names if len(names) <= 80 else f"{names[:80]}..."
        raise ValueError(f"{compressor} cannot decode {what} for {names}. {error}") from error


def on_host(tensor: Tensor) -> bool:
    """Return whether the host can read ``tensor`` without waiting for an accelerator."""
    return tensor.device.type == "cpu"


def fields(payload: Payload, wire: Wire) -> None:
    """Raise ValueError if tensors are not flat or their lengths do not fit the wire format."""
    if len(payload) == len(wire):
        for tensor, field in zip(payload, wire, strict=True):
            found, fixed = tensor.numel(), field.varies == "no"
            if tensor.dim() != 1 or found > field.length or (fixed and found != field.length):
                break
        else:
            return
    expected = (f"{'' if f.varies == 'no' else 'at most '}{f.length:,} {f.name}" for f in wire)
    raise ValueError(_wrong_lengths(payload, f"({', '.join(expected)})"))


def lengths(payload: Sequence[Tensor], *expected: int) -> None:
    """Raise ValueError if tensors are not flat or do not have the ``expected`` lengths.

    Call it for lengths that depend on one another. Torch would broadcast a single element.
    """
    if [tensor.shape for tensor in payload] != [(n,) for n in expected]:
        raise ValueError(_wrong_lengths(payload, str(expected)))


def _wrong_lengths(payload: Sequence[Tensor], expected: str) -> str:
    found = tuple(tuple(tensor.shape) for tensor in payload)
    return (
        f"The payload's tensors have shapes {found}, but their lengths should be {expected}; its "
        f"sender has another configuration or another model."
    )


def positions(indices: Tensor, values: Tensor, numel: int) -> tuple[Tensor, Tensor]:
    """Return indices and values that can be added to a tensor of ``numel`` elements.

    Positions must ascend, so that none is repeated. A GPU adds repeated positions in any order, so
    workers could get different sums.

    Args:
        indices: ``(k,)``, non-negative, as ``unpack`` returns them.
        values: ``(k,)``, a floating dtype.
        numel: elements of the tensor.

    Raises:
        ValueError: more positions than elements. On the CPU also positions that are out of range or
            do not ascend.
    """
    count = indices.numel()
    check_count(count, numel)
    if not count:
        return indices, values
    before, after = indices[:-1], indices[1:]
    if on_host(indices):
        # The minimum of differences takes a quarter of a comparison's time.
        if int(indices[-1]) >= numel or (count > 1 and int((after - before).amin()) <= 0):
            raise ValueError(_wrong_position(indices, numel))
        return indices, values
    wrong = (indices[-1] >= numel) | (after <= before).any()
    return indices.clamp(max=numel - 1), values.masked_fill(wrong, _NAN)


def codes(found: Tensor, highest: int, scales: Tensor) -> Tensor:
    """Check that codes are in ``0..highest`` and return ``scales``, or NaN on an accelerator.

    Args:
        found: ``(n,)``, non-negative integers, as ``unpack`` returns them.
        highest: the highest code that the encoder makes.
        scales: factors of the codes, a floating dtype.

    Raises:
        ValueError: on the CPU, a code above ``highest``.
    """
    if not found.numel():
        return scales
    if not on_host(found):
        return scales.masked_fill(found.amax() > highest, _NAN)
    worst = int(found.max())
    if worst > highest:
        raise ValueError(
            f"The payload has code {worst:,}, but codes are 0..{highest:,}; it is damaged, or its "
            f"sender has another configuration."
        )
    return scales


def _wrong_position(indices: Tensor, numel: int) -> str:
    highest = int(indices.max())
    if highest >= numel:
        return (
            f"The payload names position {highest:,} of a tensor of {numel:,} elements, but "
            f"positions are 0..{numel - 1:,}; it is damaged, or its sender has another model."
        )
    at = int((indices[1:] <= indices[:-1]).nonzero()[0, 0])
    return (
        f"The payload names position {int(indices[at + 1]):,} after {int(indices[at]):,}, but "
        f"positions ascend; it is damaged."
    )
