"""Kernels of whole buckets give the bits of torch's operations, parameter by parameter.

On a GPU and in the interpreter these are Triton's kernels, elsewhere numba's.
"""

from importlib.util import find_spec

import pytest
import torch

import lightning_gc as gc
from lightning_gc import ErrorFeedback, NoMemory
from lightning_gc.compressors import Compressor
from lightning_gc.core import elias_fano
from lightning_gc.kernels.sparse import Row, Selection
from lightning_gc.memories import Memory
from tests.support.bucket_kernels import KINDS, LAYOUTS, assert_same_bits
from tests.support.kernel_device import (
    DEVICE,
    INTERPRETED,
    here,
    marks_anywhere,
    needs_kernels,
    some,
)

pytestmark = [
    *marks_anywhere,
    pytest.mark.skipif(
        find_spec("numba") is None and not INTERPRETED and DEVICE == "cpu",
        reason="no kernels run here",
    ),
]
METHODS: list[Compressor] = [
    *(gc.Cast(), gc.Cast("float16")),
    *(gc.QSGD(4), gc.QSGD(3, 7), gc.Uniform(9, block_size=64), gc.Uniform(16, block_size=3000)),
    *(gc.TopK(0.05), gc.TopK(0.05, "bfloat16"), gc.TopK(0.05, "bfloat16", "sampled")),
    *(gc.HardThreshold(1.0), gc.HardThreshold(0.0)),
    *(gc.EFSignSGD(), gc.OneBitSGD(), gc.SignSGD()),
    *(gc.RandomK(0.1), gc.RandomK(0.3, unbiased=True)),
    *(gc.ChunkedTopK(0.1, 64), gc.ChunkedTopK(0.3, 7), gc.ChunkedTopK(0.05, 20_000)),
    *(gc.Quantised(gc.ChunkedTopK(0.1, 256), gc.BinMeans(2, 16)), gc.Quantised(gc.TopK(0.1))),
    *(gc.BinMeans(1), gc.BinMeans(4, 8), gc.BinMeans(3, 7), gc.Int8(), gc.DynamicTree(64)),
    *(gc.Float8(), gc.Float8("e5m2", 4096), gc.Float8("1-3-4"), gc.Float4(), gc.Float4("e3m0")),
]
BY_DAY = [gc.Cast(), gc.QSGD(4), gc.TopK(0.05, "bfloat16"), gc.HardThreshold(1.0), gc.EFSignSGD()]
methods = pytest.mark.parametrize("compressor", some(METHODS, BY_DAY), ids=repr)


@methods
@pytest.mark.parametrize("kind", some(KINDS, KINDS))
def test_same_bits(compressor: Compressor, kind: str) -> None:
    assert_same_bits(compressor, kind, "some")


@methods
@pytest.mark.parametrize("layout", some(LAYOUTS, ("one", "several")))
def test_layouts(compressor: Compressor, layout: str) -> None:
    for kind in ("normal", "idle"):
        assert_same_bits(compressor, kind, layout)


@methods
@pytest.mark.parametrize("workers", some((1, 3, 4, 8), (1, 3)))
def test_workers(compressor: Compressor, workers: int) -> None:
    assert_same_bits(compressor, "not finite", "some", workers=workers, scheme=gc.AllGather())


@methods
def test_memories(compressor: Compressor) -> None:
    for memory in (NoMemory(), kept(compressor, gain=0.25)):
        assert_same_bits(compressor, "idle", "some", memory=memory)


@pytest.mark.parametrize("workers", [2, 3])
def test_a_number_that_rounds_to_infinity_leaves_no_error(workers: int) -> None:
    assert_same_bits(gc.Cast(), "largest", "few", workers=workers)


def kept(compressor: Compressor, *, gain: float = 1.0) -> Memory:
    """Return a memory for the compressor; votes leave no error."""
    return ErrorFeedback(0.5, gain=gain) if compressor.traits.conserves else gc.LocalMomentum()


@pytest.mark.parametrize("kind", some(KINDS, ("idle", "not finite")))
@pytest.mark.parametrize(
    "compressor",
    some(METHODS, [gc.Cast(), gc.QSGD(4), gc.Uniform(16, block_size=3000), gc.BinMeans(4, 8)]),
    ids=repr,
)
def test_shards(compressor: Compressor, kind: str) -> None:
    """The second encoding's error is booked as without kernels."""
    for memory in (NoMemory(), kept(compressor)):
        assert_same_bits(compressor, kind, "few", workers=3, memory=memory, scheme=gc.TwoShot())


@pytest.mark.parametrize(
    "compressor",
    [
        *(gc.TopK(0.05), gc.TopK(0.05, selection="sampled"), gc.HardThreshold(1.0)),
        *(gc.ChunkedTopK(0.1, 64), gc.ChunkedTopK(0.3, 7)),
    ],
    ids=repr,
)
def test_sparse_reduce(compressor: Compressor) -> None:
    assert_same_bits(compressor, "idle", "few", workers=3, scheme=gc.SparseReduce())


@methods
@pytest.mark.parametrize("workers", [2, 3])
def test_with_uncompressed_parameters(compressor: Compressor, workers: int) -> None:
    if not compressor.traits.elementwise and compressor.traits.conserves:
        assert_same_bits(compressor, "idle", "some", workers=workers, min_numel=1000)


@needs_kernels
@pytest.mark.parametrize("positions", [[5, 5, 9], [5, 9, 1000], [5, 9]])
def test_impossible_positions_make_all_nan(positions: list[int]) -> None:
    """They repeat, leave the bucket, or are too few; whoever sent them, nothing else is written."""
    from lightning_gc.kernels.gpu import segments, sparse

    out = here(torch.ones(1000))
    pending = segments.sample(out)
    selection = Selection("largest", (Row(0, 0, 500, 2), Row(1, 600, 1000, 1)))
    numel = max(*positions, 999) + 1  # the low bits are as many as in 1000 elements
    coded = elias_fano.encode(torch.tensor(positions), numel)
    size = elias_fano.coded_bytes(3, 1000)
    damaged = torch.nn.functional.pad(coded, (0, size - len(coded)))
    honest = elias_fano.encode(torch.tensor([1, 2, 700]), 1000)
    payloads = [(here(torch.ones(3)), here(each)) for each in (honest, damaged)]
    sparse.average(payloads, None, out, selection, pending)
    assert bool(out[:500].isnan().all())
    assert bool(out[600:].isnan().all())
    assert out[500:600].tolist() == [1.0] * 100
