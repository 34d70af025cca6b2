"""A bucket starts a handful of operations on a GPU, whatever the number of its parameters."""

import pytest

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default
from tests.support.kernel_device import INTERPRETED, some
from tests.support.launches import Counts, launches, launches_among

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="counts need TRITON_INTERPRET=1")
LIMITS: dict[tuple[Compressor, int], tuple[int, float, int]] = {
    (gc.Identity(), 2): (2, 16, 0),
    (gc.Cast(), 2): (6, 33.8, 0),
    (gc.QSGD(4), 2): (6, 18.2, 0),
    (gc.QSGD(4), 4): (9, 24, 0),
    (gc.EFSignSGD(), 2): (7, 36.4, 0),
    (gc.EFSignSGD(), 4): (12, 41, 0),
    (gc.SignSGD(), 4): (11, 27, 0),
    (gc.TopK(0.01), 2): (14, 48.1, 0),
    (gc.TopK(0.01, "bfloat16", "sampled"), 2): (16, 66, 1),
    (gc.HardThreshold(0.03), 2): (12, 37.7, 1),
    (gc.RandomK(0.01), 2): (7, 27.3, 0),
    (gc.PowerSGD(2), 2): (12, 41.6, 0),
    (gc.ChunkedTopK(), 2): (9, 28.6, 0),
    (gc.Quantised(gc.ChunkedTopK(), gc.BinMeans(2)), 2): (12, 28.6, 0),
    (gc.Int8(), 2): (6, 28.6, 0),
    (gc.Int8(), 4): (10, 34, 0),
    (gc.BinMeans(2), 4): (10, 34, 0),
    (gc.DynamicTree(), 4): (10, 36, 0),
}
"""Method and W -> operations of a bucket, bytes per element, waits of the host."""
BY_DAY = {(gc.Cast(), 2), (gc.QSGD(4), 2), (gc.TopK(0.01), 2), (gc.Int8(), 2)}
LIMITED_BY_DAY = BY_DAY | {(gc.EFSignSGD(), 2), (gc.RandomK(0.01), 2), (gc.PowerSGD(2), 2)}
each = pytest.mark.parametrize("case", some(LIMITS, BY_DAY), ids=repr)


def counted(compressor: Compressor, workers: int, parameters: int, numel: int) -> Counts:
    """Count one bucket of ``numel`` elements, cut into parameters."""
    shapes = {f"p{i}": (16, numel // 16 // parameters) for i in range(parameters)}
    return launches(by_default(compressor, 0), [shapes], workers)


@pytest.mark.parametrize("case", some(LIMITS, LIMITED_BY_DAY), ids=repr)
def test_a_bucket_starts_no_more(case: tuple[Compressor, int]) -> None:
    most, nbytes, waits = LIMITS[case]
    found = counted(*case, 1, 1 << 14)
    assert found.total <= most, found.launches
    assert found.bytes_per_element <= nbytes
    assert found.waits <= waits


@each
@pytest.mark.parametrize("parameters", some((8, 64), (8,)))
def test_as_many_for_any_number_of_parameters(
    case: tuple[Compressor, int], parameters: int
) -> None:
    numel = 1 << (10 if case[1] > 2 else 11)  # every shard has programs of its own
    one, several = (counted(*case, number, numel) for number in (1, parameters))
    assert one.launches == several.launches
    assert one.waits == several.waits


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("compressor", "waits"), [(gc.TopK(1 / 16), 2), (gc.HardThreshold(1.0), 3)], ids=repr
)
@pytest.mark.parametrize("parameters", [8, 64])
def test_sparse_ranges_cost_no_operation_for_each_parameter(
    compressor: Compressor, waits: int, parameters: int
) -> None:
    one, several = (
        launches_among(
            by_default(compressor, 0),
            gc.SparseReduce(),
            {f"p{i}": (16, 64 // number) for i in range(number)},
            workers=3,
        )
        for number in (1, parameters)
    )
    # The low bits of coded positions depend on their number.
    assert abs(several.total - one.total) <= 20, several.launches
    assert several.total <= 413
    assert one.waits == several.waits == waits


def test_uncompressed_parameters_cost_no_operation_each() -> None:
    """Biases and norms are copied together."""
    counts = []
    for biases in (1, 32):
        shapes = {"weight": (64, 64), **{f"bias{i}": (16,) for i in range(biases)}}
        counts.append(launches(by_default(gc.QSGD(4)), [shapes], workers=2).total)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("cut", some((1, 8, 64), (8,)))
def test_matrices_of_any_shapes_cost_no_operation_each(cut: int) -> None:
    shapes = {f"p{i}": (12 + i, 2048 // cut) for i in range(cut)}
    assert launches(by_default(gc.PowerSGD(2), 0), [shapes], workers=2).total == 12


def test_a_loop_over_parameters_is_counted() -> None:
    """The count rises with every operation: else a limit could not be exceeded."""
    shapes = {f"p{i}": (16, 64) for i in range(4)}
    whole = launches(by_default(gc.Cast()), [shapes], workers=2)
    split = launches(by_default(gc.Cast()), [{n: s} for n, s in shapes.items()], workers=2)
    assert split.total == 4 * whole.total
    assert split.elements == whole.elements
