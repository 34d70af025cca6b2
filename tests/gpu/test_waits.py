"""How often the host waits for the GPU in a step, by torch's own account."""

import contextlib
import os
import warnings
from collections.abc import Iterator

import pytest
import torch

from lightning_gc.compressors import Compressor
from lightning_gc.testing.contracts import cases
from tests.gpu.on_device import OnDevice
from tests.support.instances import ALL, schemes_for

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
WORKERS = 2


@contextlib.contextmanager
def counted(found: list[str]) -> Iterator[None]:
    """Collect a line for each wait."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            yield
        finally:
            torch.cuda.set_sync_debug_mode("default")
    found += [f"{w.filename}:{w.lineno}" for w in seen if "synchronizing" in str(w.message)]


@pytest.mark.parametrize("compressor", ALL, ids=cases.label)
def test_waits(compressor: Compressor) -> None:
    for scheme in schemes_for(compressor):
        found: list[str] = []
        lockstep = OnDevice(WORKERS, compressor, None, scheme, 0, around=lambda: counted(found))  # noqa: B023
        lockstep.step(cases.gradients(WORKERS, 0))  # compiles, and lays out
        lockstep.step(cases.gradients(WORKERS, 2))
        found.clear()
        lockstep.step(cases.gradients(WORKERS, 4))
        places = {at.rsplit("/", 1)[-1]: found.count(at) for at in found}
        with open(os.environ.get("GPU_WAITS", os.devnull), "a") as file:
            file.write(f"{compressor} {scheme}: {len(found)} {places}\n")
