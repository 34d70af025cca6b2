"""Workers that do not end alike fail within the timeout, where plain DDP fails, and say why."""

import functools
import time
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_gc import Identity, PerParameter, TopK
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.support.fitting import ddp, fit
from tests.support.models import own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
TIMEOUT = timedelta(seconds=4)
COMPRESSORS = {"plain DDP": None, "identity": Identity(), "topk": PerParameter(TopK(0.1))}


class Uneven(pl.LightningModule):
    """Stops, skips or not, as it is told."""

    def __init__(self, skips: tuple[int, ...] = (), stops: tuple[int, int] = (-1, -1)) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 40)
        self.skips, self.stops, self.made = skips, stops, 0

    def noted(self) -> dict[str, Any]:
        return {"made": self.made}

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if (self.global_rank, batch_idx) == self.stops:
            self.trainer.should_stop = True
        if batch_idx in self.skips:
            return None
        self.made += 1
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(
    worker: int,
    name: str,
    batches: tuple[int, int],
    trainer: dict[str, Any],
    module: dict[str, Any],
) -> tuple[Any, Any]:
    """Return digest and steps, or the error and after how many seconds it came."""
    compressor = COMPRESSORS[name]
    started = time.monotonic()
    try:
        result = fit(
            ddp(compressor, timeout=TIMEOUT),
            functools.partial(Uneven, **module),
            own_batches(worker, batches[worker]),
            devices=2,
            callbacks=[] if compressor is None else [CompressionMonitor()],
            max_epochs=2,
            use_distributed_sampler=False,
            **trainer,
        )
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return result["digest"], result["made"]


def run(
    name: str,
    batches: tuple[int, int] = (6, 6),
    trainer: dict[str, Any] | None = None,
    **module: Any,
) -> Any:
    return run_in_processes(train, 2, name, batches, trainer or {}, module, timeout=60)


OURS = [name for name in COMPRESSORS if name != "plain DDP"]


def test_limited_batches() -> None:
    ends = {name: run(name, trainer={"limit_train_batches": 3}) for name in COMPRESSORS}
    assert ends["identity"] == ends["plain DDP"]
    assert all(first == second and first[1] == 6 for first, second in ends.values())


def test_a_step_without_a_loss_is_refused_by_lightning() -> None:
    plain = run("plain DDP", skips=(2,))
    for name in OURS:
        for (message, _), (expected, _) in zip(run(name, skips=(2,)), plain, strict=True):
            assert message == expected
            assert "returning None in distributed training is not supported" in message


@pytest.mark.parametrize(
    "uneven",
    [{"batches": (6, 4)}, pytest.param({"stops": (0, 2)}, marks=pytest.mark.nightly)],
    ids=str,
)
def test_a_worker_that_ends_early(uneven: dict[str, Any]) -> None:
    """Plain DDP fails where training goes on; ours on both, within the timeout, and says why."""
    assert any("RuntimeError" in message for message, _ in run("plain DDP", **uneven))
    for name in OURS:
        ends = run(name, **uneven)
        assert all("Error: " in message and seconds < 30 for message, seconds in ends)
        peers = [message for message, _ in ends if message.startswith("PeerError")]
        assert peers
        assert all("has fewer batches, has stopped earlier" in message for message in peers)
        operation = "all-reduce" if name == "identity" else "all-gather"
        assert any(operation in message for message in peers)
