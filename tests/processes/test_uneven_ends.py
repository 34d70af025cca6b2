"""Workers that do not end alike: as with plain DDP, which stands beside in every test."""

import time
from datetime import timedelta
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor

from lightning_gc import Identity, PerParameter, TopK
from lightning_gc.strategies.for_pytorch_lightning import CompressedDDPStrategy, CompressionMonitor
from tests.fits import data, digest
from tests.processes import spread

pytestmark = pytest.mark.processes
TIMEOUT = timedelta(seconds=4)
COMPRESSORS = {"plain DDP": None, "identity": Identity(), "topk": PerParameter(TopK(0.1))}


class Plain(pl.LightningModule):
    """Stops, skips or not, as it is told."""

    def __init__(self, skips: tuple[int, ...] = (), stops: tuple[int, int] = (-1, -1)) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 40)
        self.skips, self.stops, self.steps = skips, stops, 0

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor | None:
        if (self.global_rank, batch_idx) == self.stops:
            self.trainer.should_stop = True
        if batch_idx in self.skips:
            return None
        self.steps += 1
        return self.net(batch).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), 0.1)


def fit(worker: int, name: str, batches: tuple[int, int], options: Any, **module: Any) -> Any:
    torch.manual_seed(0)
    compressor = COMPRESSORS[name]
    settings: dict[str, Any] = {"process_group_backend": "gloo", "timeout": TIMEOUT}
    strategy: Any = DDPStrategy(**settings)
    callbacks: list[Any] = []
    if compressor is not None:
        strategy = CompressedDDPStrategy(compressor, **settings)
        callbacks = [CompressionMonitor()]
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=callbacks,
        max_epochs=2,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **options,
    )
    model = Plain(**module)
    started = time.monotonic()
    try:
        trainer.fit(model, data(worker, batches[worker]))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - started
    return digest(model), model.steps


def run(name: str, batches: tuple[int, int] = (6, 6), **module: Any) -> Any:
    options = module.pop("options", {})
    return spread(call, 2, (name, batches, options), module, timeout=60)


def call(worker: int, args: Any, module: dict[str, Any]) -> Any:
    return fit(worker, *args, **module)


OURS = [name for name in COMPRESSORS if name != "plain DDP"]


def test_limited_batches() -> None:
    ends = {name: run(name, options={"limit_train_batches": 3}) for name in COMPRESSORS}
    assert ends["identity"] == ends["plain DDP"]
    assert all(first == second and first[1] == 6 for first, second in ends.values())


def test_a_step_without_a_loss_is_refused_by_lightning() -> None:
    plain = run("plain DDP", skips=(2,))
    for name in OURS:
        for (message, _), (expected, _) in zip(run(name, skips=(2,)), plain, strict=True):
            assert message == expected
            assert "returning None in distributed training is not supported" in message


@pytest.mark.parametrize("uneven", [{"batches": (6, 4)}, {"stops": (0, 2)}], ids=str)
def test_a_worker_that_ends_early(uneven: dict[str, Any]) -> None:
    """Plain DDP fails where training goes on; ours on both, within the timeout, and says why."""
    assert any("RuntimeError" in message for message, _ in run("plain DDP", **uneven))
    for name in OURS:
        ends = run(name, **uneven)
        assert all("Error: " in message and seconds < 30 for message, seconds in ends)
        (peers,) = [message for message, _ in ends if message.startswith("PeerError")]
        assert "has fewer batches or has stopped earlier" in peers
        assert ("all-reduce" if name == "identity" else "all-gather") in peers
