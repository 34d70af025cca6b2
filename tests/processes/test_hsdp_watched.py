"""Controllers and the monitor see whole parameters, as if each replica were one process.

Four ranks of two replicas are compared with two ranks that have the batches of both ranks of a
node. The compressor treats elements one by one, so shards make no difference to it.
"""

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor

from lightning_gc import HardThreshold, PerParameter
from lightning_gc.controllers import Fixed
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.processes.test_controllers_in_training import Spy
from tests.support.accelerator import DEVICE, needs_four, spread
from tests.support.hsdp import Sharded, batches_of, hsdp, left_by
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_four]
STEPS, EPOCHS = 4, 2


class First(pl.Callback):
    """Notes what is logged of the first step, on every rank."""

    def __init__(self) -> None:
        self.figures: dict[str, float] = {}

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        self.figures = trainer.strategy.figures()


def watched(rank: int, shards: int, folder: str) -> dict[str, Any]:
    """Train on ``2 · shards`` ranks with the same data for each replica."""
    of_node = [batches_of(2 * rank + i, STEPS) for i in range(2)]
    mine = batches_of(rank, STEPS) if shards == 2 else [torch.cat(b) for b in zip(*of_node)]  # noqa: B905
    strategy = hsdp(PerParameter(HardThreshold(0.005)), controller=Spy(Fixed(0.01)))
    first = First()
    trainer = pl.Trainer(
        accelerator=DEVICE,
        **spread(2 * shards),
        strategy=strategy,
        max_epochs=EPOCHS,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        logger=CSVLogger(folder, name="", version=""),
        log_every_n_steps=1,
        callbacks=[CompressionMonitor(), first],
    )
    torch.manual_seed(0)
    module = Sharded()
    data: Any = torch.utils.data.DataLoader(mine, batch_size=None)  # type: ignore[arg-type]
    trainer.fit(module, data)
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    state = strategy.control_loop.state if strategy.control_loop is not None else {}
    rows = []
    if rank == 0:
        log = Path(folder, "metrics.csv").read_text().splitlines()
        rows = [row for row in csv.DictReader(log) if row.get("compression/relative_error")]
    return left_by(trainer, module) | {
        "metrics": metrics,
        "seen": state["seen"],
        "rows": rows,
        "figures": first.figures,
        "numel": sum(p.numel() for p in module.parameters() if p.requires_grad),
    }


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Any]:
    """Return what four ranks have left, and two."""
    folders = [str(tmp_path_factory.mktemp(name)) for name in ("four", "two")]
    four = run_in_processes(watched, 4, 2, folders[0])
    two = run_in_processes(watched, 2, 1, folders[1])
    return four, two


def close(ours: Any, theirs: Any) -> None:
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-7)


def test_a_controller_sees_whole_parameters(both: tuple[Any, Any]) -> None:
    four, two = both
    assert len({str(rank["seen"]) for rank in four}) == 1, "one decision on all ranks"
    assert len(four[0]["seen"]) == EPOCHS
    for ours, theirs in zip(four[0]["seen"], two[0]["seen"], strict=True):
        for name in ("gradient_norms", "error_norms", "sizes"):
            assert ours[name].keys() == theirs[name].keys()
            close(list(ours[name].values()), list(theirs[name].values()))
        for name in (
            *("total_error", "total_error_update", "gradient_squared", "gradient_noise"),
            *("gradient_dissimilarity", "num_elements", "num_compressed", "sent_elements"),
            *("steps", "dense_bytes"),
        ):
            close(ours[name], theirs[name])
    last = four[0]["seen"][-1]
    assert last["num_elements"] == four[0]["numel"]
    assert last["gradient_norms"].keys() == last["error_norms"].keys()
    assert all(norm > 0 for norm in last["gradient_norms"].values())
    assert 0 < last["wire_bytes"] < 1.3 * two[0]["seen"][-1]["wire_bytes"]


def test_the_monitor_sees_whole_gradients(both: tuple[Any, Any]) -> None:
    four, two = both
    for name in ("relative_error", "error_norm", "density"):
        name = f"compression_epoch/{name}"
        close(four[0]["metrics"][name], two[0]["metrics"][name])
    for ours, theirs in zip(four[0]["rows"], two[0]["rows"], strict=True):
        close(
            float(ours["compression/relative_error"]), float(theirs["compression/relative_error"])
        )
    assert len(four[0]["rows"]) == EPOCHS * STEPS


def test_bytes_of_both_legs(both: tuple[Any, Any]) -> None:
    """Between nodes a rank sends its shard; within the node the reduce-scatter is dense."""
    four, two = both
    dense = "compression/total_dense_bytes"
    close(2 * four[0]["metrics"][dense], two[0]["metrics"][dense])
    padded = 4 * sum(
        -(-shape[0] // 2) * int(np.prod(shape[1:]))
        for name, shape in shapes_of(four[0]).items()
        if name not in ("frozen.weight", "frozen.bias", "body.1.bias")
    )
    assert four[0]["figures"] == {"node_bytes": padded}
    assert two[0]["figures"] == {"node_bytes": 0}
    assert float(four[0]["rows"][0]["compression/node_bytes"]) == padded


def shapes_of(rank: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    whole: dict[str, Tensor] = rank["whole"]
    return {name: tuple(value.shape) for name, value in whole.items()}
