"""Kernels over pieces of parameters match torch's operations, parameter by parameter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_gc.core.segments import PIECE, Segments
from lightning_gc.kernels.dispatch import fused
from lightning_gc.kernels.segments import Idle, clean, peaks, silence
from tests.support.kernel_device import DEVICE, INTERPRETED, here, marks, same, some, tensors

pytestmark = marks
LAYOUTS = [
    [1],
    [3, 1, 700, 1024, 1025],
    [1] * 200,
    [PIECE, 5, PIECE + 1],
    [2 * PIECE + 17, 4096],
]


def layout(lengths: list[int]) -> Segments:
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    return Segments(spans, torch.device(DEVICE))


def per_parameter(x: Tensor, segments: Segments) -> Tensor:
    """Largest magnitude of each parameter; NaN if it has one."""
    return torch.stack([x[span].abs().max() for span in segments.spans])


@pytest.mark.parametrize("lengths", some(LAYOUTS, LAYOUTS[:4]), ids=lambda found: str(len(found)))
def test_peaks(lengths: list[int]) -> None:
    segments = layout(lengths)
    for name, x in tensors(sum(lengths)).items():
        assert fused(here(x), "segments")
        assert same(peaks(here(x), segments), per_parameter(x, segments)), name


@pytest.mark.parametrize("lengths", some(LAYOUTS, LAYOUTS[1:4]), ids=lambda found: str(len(found)))
@pytest.mark.parametrize("how", ["copy", "take", "add"])
def test_moves(how: str, lengths: list[int]) -> None:
    """Every third parameter is moved and no other, even if others are not finite."""
    segments, numel = layout(lengths), sum(lengths)
    found = torch.tensor([float(i % 3) for i in range(len(lengths))])
    for name in ("normal", "some of all", "tiny"):
        source, target = tensors(numel)[name], torch.arange(numel, dtype=torch.float32)
        wanted = target.clone(), source.clone()
        for span, peak in zip(segments.spans, found.tolist(), strict=True):
            if peak == 0:
                part = source[span]
                clean_part = part.nan_to_num(0.0, 0.0, 0.0)
                wanted[0][span] = target[span] + clean_part if how == "add" else part
                wanted[1][span] = 0.0 if how == "take" else part
        ours = here(target), here(source)
        Idle(here(found), segments).move(how, *ours)  # type: ignore[arg-type]
        assert all(same(a, b) for a, b in zip(ours, wanted, strict=True)), name


@pytest.mark.usefixtures("poisoned")
def test_a_message_ends_in_zeros() -> None:
    from lightning_gc.kernels.gpu import casts
    from lightning_gc.kernels.gpu.segments import sample

    numbers = here(torch.arange(1000.0))
    payload = casts.encode(numbers, torch.bfloat16, sample(numbers))
    assert payload.layout.padding == 12
    assert not payload.padding.any()


@pytest.mark.parametrize("numel", [2, 2048, 5000])
def test_silence_and_clean(numel: int) -> None:
    segments = layout([1, numel - 1])
    for name, x in tensors(numel).items():
        for peak, wanted in ((0.0, x), (float("nan"), 0 * x), (float("inf"), 0 * x)):
            flat = here(x)
            flag = silence(flat, here(torch.tensor([1.0, peak])), segments)
            assert flag.isnan().all() == (peak != 0)
            assert same(flat, wanted if peak == 0 else torch.zeros_like(x)), name
        flat = here(x)
        clean(flat)
        assert same(flat, x.nan_to_num(0.0, 0.0, 0.0)), name


@pytest.mark.skipif(not INTERPRETED, reason="reads no memory, which only the interpreter can")
@pytest.mark.parametrize("kernel", ["average_pieces", "put_pieces"])
def test_messages_may_lie_gigabytes_apart(kernel: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Places of a third worker's elements and flag do not fit into 32 bits."""
    from triton.runtime import interpreter

    from lightning_gc.kernels.gpu import casts, segments

    read = set[int]()
    load = interpreter.InterpreterBuilder.create_masked_load

    def recorded(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any) -> Any:
        read.update(pointers.data[mask.data].tolist())
        near = min(abs(int(p) - base) for p in pointers.data.flat for base in bases) < 1 << 20
        if not near:
            mask = interpreter.TensorHandle(mask.data & False, mask.dtype)
        return load(builder, pointers, mask, other, *rest)

    flat, apart = torch.zeros(16), 1 << 30
    flags, halves = torch.zeros(1), torch.zeros(16, dtype=torch.int16)
    table = torch.tensor([[0, 0, 16, 0]], dtype=torch.int32)
    starts = torch.zeros(1, dtype=torch.int64)
    bases = [t.data_ptr() for t in (flat, flags, halves, table, starts)]
    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_masked_load", recorded)
    out, rest = torch.zeros(16), (flags, apart, 3, starts, table)
    if kernel == "average_pieces":
        given = halves, apart, 3, 1 / 3, out, *rest
        casts.average_pieces[(1,)](*given, BFLOAT=True, ROW=16)
    else:
        given = flat, apart, 3, 1 / 3, out, *rest
        segments.put_pieces[(1,)](*given, BLOCK=16)
    assert given[0].data_ptr() + 2 * apart * given[0].element_size() in read
    assert flags.data_ptr() + 2 * apart * 4 in read
