"""Every compressor continues from its saved state, bit for bit.

A fit that is resumed in new processes (``tests/processes/test_resume.py``) takes long; whether all
of a compressor's state is in what the engine saves shows here too, in any number of steps.
"""

import dataclasses
import io
from typing import Any

import torch

from lightning_gc.compressors import Compressor
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.instances import each_instance

WORKERS = 2
STEPS = 2  # before, and as many after
SMALL = ("matrix", "prime")


def small(step: int) -> list[cases.Named]:
    return [{name: g[name] for name in g if name in SMALL} for g in cases.gradients(WORKERS, step)]


def through_a_file(state: Any) -> Any:
    """The way that a checkpoint takes."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@each_instance
def test_a_compressor_goes_on_from_its_state(compressor: Compressor) -> None:
    straight = Lockstep(WORKERS, compressor)
    for step in range(STEPS):
        straight.step(small(step))
    # Made anew of its configuration: what it may have put aside in itself does not count.
    resumed = Lockstep(WORKERS, dataclasses.replace(compressor))  # type: ignore[type-var]
    for old, new in zip(straight.engines, resumed.engines, strict=True):
        new.load_state_dict(through_a_file(old.state_dict()))
    for step in range(STEPS, 2 * STEPS):
        ours, theirs = straight.step(small(step)), resumed.step(small(step))
        assert ours.wire_bytes == theirs.wire_bytes
        for one, other in zip(
            (ours.mean, *ours.errors), (theirs.mean, *theirs.errors), strict=True
        ):
            assert all(torch.equal(one[name], other[name]) for name in SMALL)
