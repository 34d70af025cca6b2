"""Every strategy that the page "From YAML" names trains from a file that says no more than needed.

LightningCLI gives each class all of its arguments, defaults too, so a schema that fits is no proof.
"""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import yaml
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.utils.data import DataLoader

from lightning_gc import cli
from tests.support.processes import standing

pytestmark = pytest.mark.processes

TOPK = {"class_path": "lightning_gc.TopK", "init_args": {"density": 0.05}}
SAID: dict[str, Any] = {
    "DDP": ("CompressedDDPStrategy", {"compressor": TOPK}),
    "DDP's own": (
        "CompressedDDPStrategy",
        {"compressor": TOPK, "find_unused_parameters": True, "bucket_cap_mb": 50},
    ),
    "local steps": ("LocalStepsStrategy", {"compressor": TOPK, "every": 32}),
    "outer step": (
        "LocalStepsStrategy",
        {
            "compressor": "qsgd",
            "every": 32,
            "outer": {
                "class_path": "lightning_gc.OuterSGD",
                "init_args": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
            },
        },
    ),
    "growing rounds": (
        "LocalStepsStrategy",
        {
            "compressor": "qsgd",
            "every": {"class_path": "lightning_gc.GrowingRounds", "init_args": {"alpha": 0.1}},
        },
    ),
    "HSDP": ("CompressedHSDPStrategy", {"compressor": TOPK, "replicas": 2}),
    "FSDP": ("CompressedFSDPStrategy", {"gradients": "qsgd", "weights": "int8"}),
}
ALONE: dict[str, Any] = {
    "menu": (
        "SimulatedDDPStrategy",
        {
            "compressor": {
                "class_path": "lightning_gc.Menu",
                "init_args": {
                    "compressors": {"dense": {"class_path": "lightning_gc.Identity"}, "topk": TOPK},
                    "choice": "topk",
                },
            },
            "workers": 2,
        },
    ),
    "auto": (
        "SimulatedDDPStrategy",
        {
            "compressor": "auto",
            "controller": {
                "class_path": "lightning_gc.controllers.Auto",
                "init_args": {"allow": "feedback"},
            },
            "workers": 2,
        },
    ),
    "budget": (
        "SimulatedLocalStepsStrategy",
        {
            "compressor": "cast",
            "every": {
                "class_path": "lightning_gc.controllers.Budget",
                "init_args": {"share": 0.2},
            },
            "workers": 2,
        },
    ),
    "simulated DDP": ("SimulatedDDPStrategy", {"compressor": TOPK, "workers": 4}),
    "simulated local steps": (
        "SimulatedLocalStepsStrategy",
        {"compressor": TOPK, "workers": 4, "every": 8},
    ),
}
NAMED = {
    "compressed_ddp_auto": "CompressedDDPStrategy",
    "compressed_ddp_qsgd": "CompressedDDPStrategy",
    "local_steps": "LocalStepsStrategy",
    "compressed_hsdp": "CompressedHSDPStrategy",
    "compressed_fsdp": "CompressedFSDPStrategy",
}


class Regression(pl.LightningModule):
    """A layer that is compressed; in units of FSDP2 where the strategy has a mesh."""

    def __init__(self, learning_rate: float = 0.1) -> None:
        super().__init__()
        self.layer, self.learning_rate = nn.Linear(64, 32), learning_rate

    def configure_model(self) -> None:
        if self.device_mesh is not None and not isinstance(self.layer, FSDPModule):
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss: Tensor = self.layer(batch).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), self.learning_rate)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.ones(64, 64), 2)  # type: ignore[arg-type]

    def on_train_end(self) -> None:
        said = f"{self.trainer.global_step} steps by {type(self.trainer.strategy).__name__}"
        Path(f"rank{self.trainer.global_rank}.txt").write_text(said)


def write(folder: Path, strategy: Any, devices: int) -> None:
    trainer = {
        "accelerator": "cpu",
        "devices": devices,
        "max_steps": 2,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "strategy": strategy,
    }
    model = {"class_path": f"{__name__}.Regression", "init_args": {"learning_rate": 0.01}}
    (folder / "fit.yaml").write_text(yaml.safe_dump({"model": model, "trainer": trainer}))


def of_class(name: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {"class_path": f"lightning_gc.{name}", "init_args": arguments}


def fit(worker: int, folder: str) -> tuple[int, str]:
    os.chdir(folder)
    with contextlib.redirect_stderr(io.StringIO()) as errors:
        code = cli.main(["fit", "fit.yaml"])
    return code, errors.getvalue()


def trained(folder: Path, strategy: Any, workers: int) -> list[str]:
    """Return what each worker has done."""
    write(folder, strategy, workers)
    for code, errors in standing.run(fit, workers, str(folder)):
        assert code == cli.OK, errors
    return [(folder / f"rank{worker}.txt").read_text() for worker in range(workers)]


@pytest.mark.parametrize("case", SAID)
def test_two_workers(case: str, tmp_path: Path) -> None:
    name, arguments = SAID[case]
    assert trained(tmp_path, of_class(name, arguments), 2) == [f"2 steps by {name}"] * 2


@pytest.mark.parametrize("case", ALONE)
def test_simulated(case: str, tmp_path: Path) -> None:
    name, arguments = ALONE[case]
    assert trained(tmp_path, of_class(name, arguments), 1) == [f"2 steps by {name}"]


@pytest.mark.parametrize("name", NAMED)
def test_by_name(name: str, tmp_path: Path) -> None:
    assert trained(tmp_path, name, 2) == [f"2 steps by {NAMED[name]}"] * 2


@pytest.mark.parametrize(
    ("name", "arguments", "said"),
    [
        ("LocalStepsStrategy", {"find_unused_parameters": True}, "is for DistributedDataParallel"),
        ("CompressedHSDPStrategy", {"data_parallel_size": 2}, "it follows from replicas"),
        ("CompressedFSDPStrategy", {"tensor_parallel_size": 0}, "at least 1"),
    ],
)
def test_what_is_not_a_default_is_refused(
    name: str, arguments: dict[str, Any], said: str, tmp_path: Path
) -> None:
    first = "gradients" if name == "CompressedFSDPStrategy" else "compressor"
    write(tmp_path, of_class(name, {first: "qsgd"} | arguments), 1)
    ((code, errors),) = standing.run(fit, 1, str(tmp_path))
    assert code != cli.OK
    assert said in errors
