"""Delays and early reuse of memory change no bit: streams wait for each other where they must.

Exchanges are recorded after the first steps, but for one kind of run.
"""

import os
import threading
from typing import Any

import pytest
import torch

from lightning_gc import QSGD, HardThreshold, PerParameter, PowerSGD, StepAhead, TopK
from lightning_gc.engine.recorded_exchange import RecordedLayout
from lightning_gc.transports.accounting import Recording
from tests.support.accelerator import DEVICE, WORKERS
from tests.support.fitting import ddp, fit
from tests.support.models import Plain, own_batches
from tests.support.processes import run_in_processes

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.processes,
    pytest.mark.skipif(DEVICE != "cuda", reason="needs a GPU"),
]
CYCLES = 3_000_000  # about 2 ms
METHODS: dict[str, tuple[Any, dict[str, Any]]] = {
    "topk": (PerParameter(TopK(0.1)), {}),
    "step ahead": (PerParameter(TopK(0.1)), {"memory": StepAhead()}),
    "threshold": (PerParameter(HardThreshold(0.01)), {}),
    "qsgd": (PerParameter(QSGD(4)), {}),
    "powersgd": (PowerSGD(1), {}),
    "verified": (PerParameter(TopK(0.1)), {"verify": 1}),
}


class Slow(Plain):
    """Every gradient is late, on the stream on which it is copied into its bucket."""

    def on_fit_start(self) -> None:
        for param in self.parameters():
            param.register_hook(late)


def late(grad: torch.Tensor) -> torch.Tensor:
    torch.cuda._sleep(CYCLES)
    return grad


def trained(worker: int, method: str, kind: str) -> str:
    """Return the digest of the weights after a dozen steps."""
    if kind == "blocking":
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"
    if kind == "uncached":
        os.environ["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    stop = threading.Event()

    def reuse() -> None:
        """Take and fill, on the default stream, whatever memory is free."""
        while not stop.is_set():
            torch.full((40 * 40,), 7.0, device="cuda")

    if kind == "delayed":
        run = Recording.run

        def delayed(self: Recording, flow: Any, device: torch.device) -> None:
            torch.cuda._sleep(CYCLES)
            run(self, flow, device)
            torch.cuda._sleep(CYCLES)

        Recording.run = delayed  # type: ignore[method-assign]
    if kind == "as written":
        RecordedLayout.is_due = lambda self, grad: False  # type: ignore[method-assign]
    compressor, options = METHODS[method]
    if kind == "reusing":
        threading.Thread(target=reuse, daemon=True).start()
    try:
        found = fit(
            ddp(compressor, bucket_cap_mb=0.005, **options),
            Slow if kind == "delayed" else Plain,
            own_batches(worker, 12),
            devices=WORKERS,
            use_distributed_sampler=False,
        )
    finally:
        stop.set()
    return str(found["digest"])


@pytest.mark.parametrize("method", METHODS)
def test_delays_change_nothing(method: str) -> None:
    kinds = ("as written", "blocking", "plain", "delayed", "uncached", "reusing")
    digests = {kind: run_in_processes(trained, WORKERS, method, kind) for kind in kinds}
    assert len({digest for every in digests.values() for digest in every}) == 1, digests
