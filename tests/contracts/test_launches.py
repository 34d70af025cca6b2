"""A bucket starts a handful of operations on a GPU, whatever the number of its parameters."""

import pytest

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.engine.compatibility import by_default
from tests.support.kernel_device import INTERPRETED
from tests.support.launches import Counts, launches

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="counts need TRITON_INTERPRET=1")
NUMEL = 1 << 14
LIMITS: dict[Compressor, tuple[int, float, int]] = {
    gc.Identity(): (2, 16, 0),
    gc.Cast(): (6, 33.8, 0),
    gc.QSGD(4): (6, 18.2, 0),
    gc.EFSignSGD(): (7, 36.4, 0),
    gc.TopK(0.01): (14, 48.1, 0),
    gc.TopK(0.01, "bfloat16", "sampled"): (15, 66, 1),
    gc.HardThreshold(0.03): (12, 37.7, 1),
}
"""Method -> operations of a bucket, bytes per element, waits of the host; W = 2."""


def counted(compressor: Compressor, parameters: int) -> Counts:
    """Count one bucket of ``NUMEL`` elements, cut into parameters."""
    shapes = {f"p{i}": (16, NUMEL // 16 // parameters) for i in range(parameters)}
    return launches(by_default(compressor, 0), [shapes], workers=2)


@pytest.mark.parametrize("compressor", LIMITS, ids=repr)
def test_a_bucket_starts_as_many_for_any_number_of_parameters(compressor: Compressor) -> None:
    most, nbytes, waits = LIMITS[compressor]
    counts = {parameters: counted(compressor, parameters) for parameters in (1, 8, 64)}
    for parameters, found in counts.items():
        assert found.total <= most, (parameters, found.launches)
        assert found.bytes_per_element <= nbytes, parameters
        assert found.waits <= waits, parameters
    assert counts[1].launches == counts[8].launches == counts[64].launches


def test_uncompressed_parameters_cost_no_operation_each() -> None:
    """Biases and norms are copied together."""
    counts = []
    for biases in (1, 32):
        shapes = {"weight": (64, 64), **{f"bias{i}": (16,) for i in range(biases)}}
        counts.append(launches(by_default(gc.QSGD(4)), [shapes], workers=2).total)
    assert counts[0] == counts[1]


def test_a_loop_over_parameters_is_counted() -> None:
    """The count rises with every operation: else a limit could not be exceeded."""
    shapes = {f"p{i}": (16, 64) for i in range(8)}
    whole = launches(by_default(gc.TopK(0.01)), [shapes], workers=2)
    split = launches(by_default(gc.TopK(0.01)), [{n: s} for n, s in shapes.items()], workers=2)
    assert split.total >= 4 * whole.total
    assert split.elements == whole.elements
