"""Kernels of whole buckets give the bits of torch's operations, parameter by parameter.

On a GPU and in the interpreter these are Triton's kernels, elsewhere numba's.
"""

from importlib.util import find_spec

import pytest

import lightning_gc as gc
from lightning_gc import ErrorFeedback, NoMemory
from lightning_gc.compressors import Compressor
from tests.support.bucket_kernels import KINDS, LAYOUTS, assert_same_bits
from tests.support.kernel_device import DEVICE, INTERPRETED, marks_anywhere, some

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
    *(gc.EFSignSGD(), gc.OneBitSGD()),
    *(gc.RandomK(0.1), gc.UnbiasedRandomK(0.3)),
]
BY_DAY = [
    *(gc.Cast(), gc.QSGD(4), gc.Uniform(9, block_size=64)),
    *(gc.TopK(0.05, "bfloat16"), gc.HardThreshold(1.0), gc.EFSignSGD(), gc.RandomK(0.1)),
]
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
    for memory in (NoMemory(), ErrorFeedback(decay=0.5, gain=0.25)):
        assert_same_bits(compressor, "idle", "some", memory=memory)


@pytest.mark.parametrize("kind", some(KINDS, ("idle", "not finite")))
@pytest.mark.parametrize(
    "compressor",
    some(METHODS[2:], [gc.QSGD(4), gc.Uniform(16, block_size=3000)]),
    ids=repr,
)
def test_shards(compressor: Compressor, kind: str) -> None:
    """The second encoding's error is booked as without kernels."""
    for memory in (NoMemory(), ErrorFeedback(decay=0.5)):
        assert_same_bits(compressor, kind, "few", workers=3, memory=memory, scheme=gc.TwoShot())


@methods
@pytest.mark.parametrize("workers", [2, 3])
def test_with_uncompressed_parameters(compressor: Compressor, workers: int) -> None:
    if not compressor.traits.elementwise:
        assert_same_bits(compressor, "idle", "some", workers=workers, min_numel=1000)
