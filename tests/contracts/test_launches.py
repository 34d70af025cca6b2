"""A bucket starts no more operations on a GPU than it did, by method and number of parameters."""

import pytest

import lightning_gc as gc
from lightning_gc.compressors import Compressor
from lightning_gc.engine.compatibility import by_default
from tests.support.launches import launches

PARAMETERS = 8
LIMITS: dict[Compressor, tuple[int, int, float, int]] = {
    gc.Identity(): (2, 2, 16, 0),
    gc.Cast(): (21, 21, 82, 0),
    gc.QSGD(4): (20, 76, 53, 0),
    gc.EFSignSGD(): (7, 7, 29, 0),
    gc.RandomK(0.01): (7, 7, 21, 0),
    gc.TopK(0.01): (126, 159, 77, 0),
    gc.HardThreshold(0.03): (94, 119, 78, 9),
    gc.PowerSGD(2): (52, 105, 90, 0),
}
"""Method -> launches with one and with 8 parameters, bytes per element, waits: as counted."""


@pytest.mark.parametrize("compressor", LIMITS, ids=lambda compressor: type(compressor).__name__)
def test_a_bucket_starts_no_more_than_it_did(compressor: Compressor) -> None:
    """Lower the limits where the counts have fallen: the table says what a bucket costs today."""
    one, several, nbytes, waits = LIMITS[compressor]
    for parameters, most in ((1, one), (PARAMETERS, several)):
        shapes = {f"p{i}": (16, (1 << 12) // parameters) for i in range(parameters)}
        counts = launches(by_default(compressor, 0), [shapes], workers=2)
        assert counts.total <= most, counts.launches
        assert counts.bytes_per_element <= 1.1 * nbytes
        assert counts.waits <= waits


def test_uncompressed_parameters_cost_no_operation_each() -> None:
    """Biases and norms are copied together."""
    counts = []
    for biases in (1, 32):
        shapes = {"weight": (64, 64), **{f"bias{i}": (16,) for i in range(biases)}}
        counts.append(launches(by_default(gc.QSGD(4)), [shapes], workers=2).total)
    assert counts[0] == counts[1]


def test_a_loop_over_parameters_is_counted() -> None:
    """The count rises with every operation: else a limit could not be exceeded."""
    shapes = {f"p{i}": (16, 64) for i in range(PARAMETERS)}
    whole = launches(by_default(gc.TopK(0.01)), [shapes], workers=2)
    split = launches(by_default(gc.TopK(0.01)), [{n: s} for n, s in shapes.items()], workers=2)
    assert split.total >= 4 * whole.total
    assert split.elements == whole.elements
