"""On a GPU every compressor gives what it gives on the CPU, and survives damaged payloads."""

import pytest
import torch

from lightning_gc.compressors import Compressor
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.decoder import with_liar
from tests.gpu.on_device import OnDevice
from tests.support.instances import ALL, schemes_for

pytestmark = pytest.mark.nightly
STEPS, WORKERS = 3, 3


def mean(lockstep: Lockstep) -> torch.Tensor:
    """Return a step's mean, largest magnitudes first: of equal ones any may be chosen."""
    return cases.flat(lockstep.step(cases.gradients(WORKERS, 0)).mean).abs().sort()[0]


@pytest.mark.parametrize("compressor", ALL, ids=cases.label)
def test_the_same_as_on_the_cpu(compressor: Compressor) -> None:
    """Where nothing is drawn at random; else it is finite."""
    for scheme in schemes_for(compressor):
        made = [(kind, seed) for kind in (Lockstep, OnDevice) for seed in (0, 1)]
        here, again, there, _ = (
            mean(kind(WORKERS, compressor, None, scheme, seed)) for kind, seed in made
        )
        assert there.isfinite().all()
        if torch.equal(here, again):
            gap = float((there - here).norm() / here.norm().clamp_min(1e-12))
            assert gap < 1e-3, (compressor, scheme, gap)


@pytest.mark.parametrize("compressor", ALL, ids=cases.label)
def test_nothing_is_lost(compressor: Compressor) -> None:
    if not compressor.traits.conserves:
        pytest.skip("sends no part of the gradient")
    for scheme in schemes_for(compressor):
        there = cases.lost(OnDevice(WORKERS, compressor, None, scheme), STEPS)
        here = cases.lost(Lockstep(WORKERS, compressor, None, scheme), STEPS)
        assert there < max(1e-5, 2 * here), (compressor, scheme, there, here)


@pytest.mark.parametrize("compressor", ALL, ids=cases.label)
def test_damaged_payloads_end_in_a_sentence(compressor: Compressor) -> None:
    """A device assert would end the process."""
    with_liar(compressor, lambda: OnDevice(3, compressor), 10)
