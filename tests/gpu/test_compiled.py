"""``torch.compile`` with and without CUDA graphs, and ``Trainer(deterministic=True)``."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import PerParameter, TopK
from tests.support.accelerator import DEVICE, WORKERS
from tests.support.fitting import ddp, fit
from tests.support.models import Plain, own_batches
from tests.support.processes import run_in_processes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.processes,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU"),
    pytest.mark.timeout(300),
]


def trained(worker: int, mode: str | None, deterministic: bool) -> Any:
    def module() -> Any:
        made = Plain()
        return torch.compile(made, mode=mode) if mode else made

    return fit(
        ddp(PerParameter(TopK(0.1))),
        module,
        own_batches(worker, 8),
        devices=WORKERS,
        use_distributed_sampler=False,
        deterministic=deterministic,
    )["parameters"]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_compiled_is_close_to_eager(mode: str) -> None:
    eager, compiled = (
        run_in_processes(trained, WORKERS, each, False, timeout=250)[0] for each in (None, mode)
    )
    for ours, theirs in zip(compiled, eager, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def test_deterministic() -> None:
    first, again = (run_in_processes(trained, WORKERS, None, True)[0] for _ in range(2))
    assert all(np.array_equal(a, b) for a, b in zip(first, again, strict=True))
