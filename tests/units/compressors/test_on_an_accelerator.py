"""Searches that look seldom, as beside the host, find what those find that look at every step."""

import pytest
import torch

from lightning_gc import GaussianK, RedSync, SIDCo, TopK, VarianceSparsifier
from lightning_gc.compressors import SparseCodec
from lightning_gc.testing.contracts import cases
from tests.support.counted_waits import Accelerator, on_device
from tests.units.compressors.test_estimated_thresholds import KINDS

each_kind = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "constant"])


@each_kind
@pytest.mark.parametrize(
    "codec",
    [
        *(RedSync(0.01), RedSync(0.1, tolerance=0.2), GaussianK(0.01), SIDCo(0.01)),
        *(SIDCo(0.1, "pareto", 2), SIDCo(0.1, "gamma", 1), TopK(0.1, selection="sampled")),
    ],
    ids=cases.label,
)
def test_the_same_elements(codec: SparseCodec, kind: str) -> None:
    """All but the last of equal ones, which a sort may exchange; not of sums in another order."""
    x = KINDS[kind]
    wanted = codec.choose(x, cases.bucket_of(x))
    with Accelerator() as counting, torch.no_grad():
        there = on_device(x)
        found = codec.choose(there, cases.bucket_of(there))
    waits = codec.waits
    assert waits.least <= len(counting.waits) <= waits.limit
    assert torch.equal(x.abs()[found.held].sort().values, x.abs()[wanted].sort().values)  # type: ignore[attr-defined]


@each_kind
@pytest.mark.parametrize("epsilon", [0.01, 1.0, 30.0])
def test_the_same_probabilities(kind: str, epsilon: float) -> None:
    codec, x = VarianceSparsifier(epsilon), KINDS[kind]
    with Accelerator() as counting, torch.no_grad():
        found = codec.magnitude(on_device(x))
    assert len(counting.waits) <= 2  # eight passes
    torch.testing.assert_close(found.held, codec.magnitude(x), rtol=1e-6, atol=0)  # type: ignore[attr-defined]


def test_a_sample_that_misleads_costs_no_further_wait() -> None:
    x = torch.zeros(20_000)
    x[::40] = 1.0
    codec = TopK(0.1, selection="sampled")
    with Accelerator() as counting, torch.no_grad():
        there = on_device(x)
        found = codec.choose(there, cases.bucket_of(there))
    assert len(counting.waits) == codec.waits.limit == 1
    assert found.held.tolist() == list(range(0, 20_000, 40))  # type: ignore[attr-defined]
