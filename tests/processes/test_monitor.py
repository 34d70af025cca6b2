"""CompressionMonitor logs the bytes that the transport counted, to every logger."""

import csv
import logging
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import DataLoader

from lightning_gc import QSGD
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor, LocalStepsStrategy
from tests.support.accelerator import BACKEND
from tests.support.fitting import ddp, fit
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes

FIGURES = {
    "wire_bytes",
    "dense_bytes",
    "ratio",
    "density",
    "compressed_density",
    "bits_per_element",
    "relative_error",
    "error_norm",
    "compress_seconds",
    "communicate_seconds",
    "decode_seconds",
    "step_seconds",
    "level",
}


class Small(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(100, 50)  # 5,000 compressed, 50 dense

    def training_step(self, batch, batch_idx):
        return self.layer(batch).square().mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


class Count(pl.Callback):
    """Asks the transport, beside the monitor, how much it has sent."""

    sent = 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.sent -= trainer.strategy.recording.sent_bytes

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.sent += trainer.strategy.recording.sent_bytes


def train(worker: int, folder: str, kind: str, accumulate: int = 1) -> dict[str, Any]:
    logger: Any = {"csv": CSVLogger, "tensorboard": TensorBoardLogger}.get(kind)
    rows = torch.randn(12 * 8, 100, generator=torch.Generator().manual_seed(worker))
    strategy: Any = ddp("topk")
    monitor, count = CompressionMonitor(), Count()
    result = fit(
        strategy,
        Small,
        DataLoader(rows, batch_size=8),  # type: ignore[arg-type]
        devices=2,
        max_epochs=2,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=3,
        logger=logger(folder, name="", version="") if logger else False,
        callbacks=[monitor, count],
        use_distributed_sampler=False,
    )
    assert strategy._attached is None, "the thread is stopped after the fit"
    return result | {"counted": count.sent, "state": monitor.state_dict()}


# Per step and worker at W = 2: a message of 50 values of 4 bytes and 50 coded positions, of which
# 6 bits are stored as they are and the rest in a bitmap, the 50 biases and the guard's flag, padded
# to 16 bytes.
CODED = -(-50 * 6 // 8) + -(-(50 + (4999 >> 6) + 1) // 8)
WIRE = -(-(50 * 4 + CODED + (50 + 1) * 4) // 16) * 16


class SlowStart(Small):
    """Needs 1,000 seconds for each of its first two steps, by the hand of the clock."""

    ahead = 0.0

    def training_step(self, batch, batch_idx):
        if self.trainer.global_step < 2:
            type(self).ahead += 1000.0
        return super().training_step(batch, batch_idx)


def started(worker: int, every: int | None) -> dict[str, Any]:
    clock = time.perf_counter
    time.perf_counter = lambda: clock() + SlowStart.ahead  # type: ignore[assignment]
    rows = torch.randn(16 * 8, 100, generator=torch.Generator().manual_seed(worker))
    strategy: Any = ddp("topk")
    if every is not None:
        strategy = LocalStepsStrategy(QSGD(4), every=every, process_group_backend=BACKEND)
    return fit(
        strategy,
        SlowStart,
        DataLoader(rows, batch_size=8),  # type: ignore[arg-type]
        devices=2,
        callbacks=[CompressionMonitor()],
        use_distributed_sampler=False,
    )["seconds"]  # type: ignore[no-any-return]


@pytest.mark.parametrize("every", [None, 4])
def test_the_start_up_of_a_fit_is_no_step(every: int | None) -> None:
    for seconds in run_in_processes(started, 2, every):
        assert 0 < seconds["compression_epoch/step_seconds"] < 50
        shares = [value for name, value in seconds.items() if name.endswith("_share")]
        assert len(shares) == 3
        assert sum(shares) <= 1 + 1e-9


def test_csv_and_callback_metrics(tmp_path: Path) -> None:
    results = run_in_processes(train, 2, str(tmp_path), "csv")
    metrics = results[0]["metrics"]
    steps = 24
    assert metrics["compression/total_wire_bytes"] == sum(r["counted"] for r in results) / 2
    assert metrics["compression/total_dense_bytes"] == steps * 5050 * 4
    assert metrics["compression_epoch/wire_bytes"] == WIRE
    assert metrics["compression_epoch/density"] == (50 + 50) / 5050  # with the biases
    assert metrics["compression_epoch/compressed_density"] == 0.01
    assert metrics["compression/total_ratio"] == pytest.approx(
        metrics["compression/total_dense_bytes"] / metrics["compression/total_wire_bytes"]
    )
    assert 0 < metrics["compression_epoch/relative_error"] <= 1
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    logged = [int(row["step"]) for row in rows if row.get("compression/ratio")]
    assert logged == [2, 5, 8, 11, 14, 17, 20, 23]
    assert {f"compression/{name}" for name in FIGURES} <= set(rows[0])
    assert {f"compression_epoch/{name}" for name in FIGURES} <= set(rows[0])


def test_accumulation_logs_each_step_once(tmp_path: Path) -> None:
    run_in_processes(train, 2, str(tmp_path), "csv", 2)
    with (tmp_path / "metrics.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row.get("compression/wire_bytes")]
    assert [int(row["step"]) for row in rows] == [2, 5, 8, 11]
    assert len({row["compression/wire_bytes"] for row in rows}) == 1


def test_tensorboard_layout_and_hparams(tmp_path: Path) -> None:
    run_in_processes(train, 2, str(tmp_path), "tensorboard")
    events = EventAccumulator(str(tmp_path)).Reload()
    tags = events.Tags()
    assert {f"~compression/{name}" for name in FIGURES} <= set(tags["scalars"])
    assert "custom_scalars__config__" in tags["tensors"]
    assert any("hparams" in plugin for plugin in events.summary_metadata) or tags["scalars"]
    assert "gc/compressor: TopK(0.01)" in (tmp_path / "hparams.yaml").read_text()


def test_without_a_logger_the_totals_are_still_there(tmp_path: Path) -> None:
    metrics = run_in_processes(train, 2, str(tmp_path), "none")[0]["metrics"]
    assert metrics["compression/total_ratio"] > 10


def heard(worker: int, folder: str) -> list[str]:
    """Return what the monitor says on this worker."""
    said: list[str] = []
    ear = logging.Handler()
    ear.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("pytorch_lightning").addHandler(ear)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(worker, folder, "none")
    said += [str(each.message) for each in caught]
    return [text for text in said if "ompression" in text]


def test_worker_0_alone_says_what_was_saved_and_warns(tmp_path: Path) -> None:
    said, silence = run_in_processes(heard, 2, str(tmp_path))
    assert silence == []
    line, warning = said
    dense, sent = 24 * 5050 * 4, 24 * WIRE
    assert line.startswith(
        f"Compression: TopK(0.01) sent {sent / 1e3:.3g} kB instead of {dense / 1e3:.3g} kB per "
        f"worker in 24 steps, {dense / sent:.0f} times less ({dense / sent / 2:.0f} times less "
        "than in 16 bits). Compressing took "
    )
    assert warning.startswith("CompressionMonitor has no logger")


def test_totals_go_on_after_a_resume(tmp_path: Path) -> None:
    state = run_in_processes(train, 2, str(tmp_path), "none")[0]["state"]
    monitor = CompressionMonitor()
    monitor.load_state_dict(state)
    assert monitor.state_dict() == state
    assert state["total"]["steps"] == 24
