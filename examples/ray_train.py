"""Train on a Ray cluster with compressed gradients; without a cluster, in two processes here.

python examples/ray_train.py --workers 2 --folder /shared/runs
"""

import argparse
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import ray.train
import torch
from lightning.pytorch.demos.boring_classes import BoringDataModule, DemoModel
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchConfig, TorchTrainer

from lightning_gc import TopK
from lightning_gc.lightning.for_lightning import CompressionMonitor
from lightning_gc.lightning.for_ray import CompressedRayStrategy


class Model(DemoModel):
    """Lightning's demo, with its loss and the compression ratio among the metrics for Ray."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        """Return the loss, and log it."""
        result: Any = super().training_step(batch, batch_idx)
        self.log("loss", result["loss"] if isinstance(result, dict) else result)
        return result


def train(settings: dict[str, Any]) -> None:
    """Run in each worker."""
    pl.seed_everything(0, verbose=False)
    # Ray stores what worker 0 has saved, so errors belong into the checkpoint itself.
    strategy = CompressedRayStrategy(TopK(0.01), state="mean")
    trainer = pl.Trainer(
        strategy=strategy,
        plugins=[RayLightningEnvironment()],
        accelerator=settings["accelerator"],
        devices="auto",
        max_epochs=settings["epochs"],
        callbacks=[CompressionMonitor(), RayTrainReportCallback()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer = prepare_trainer(trainer)
    stored = ray.train.get_checkpoint()  # after a failure, or of a run that was given
    model, data = Model(out_dim=1024), BoringDataModule()
    if stored is None:
        trainer.fit(model, data)
        return
    with stored.as_directory() as folder:
        file = str(Path(folder) / RayTrainReportCallback.CHECKPOINT_NAME)
        trainer.fit(model, data, ckpt_path=file)


def main(workers: int, epochs: int, folder: Path) -> Any:
    """Return Ray's result: the last metrics and the checkpoint."""
    cuda = torch.cuda.is_available()
    trainer = TorchTrainer(
        train,
        train_loop_config={"epochs": epochs, "accelerator": "cuda" if cuda else "cpu"},
        scaling_config=ray.train.ScalingConfig(num_workers=workers, use_gpu=cuda),
        torch_config=TorchConfig(backend="nccl" if cuda else "gloo"),
        run_config=ray.train.RunConfig(
            storage_path=str(folder.resolve()),
            failure_config=ray.train.FailureConfig(max_failures=1),
        ),
    )
    return trainer.fit()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--folder", type=Path, default=Path("runs/ray"))
    print(main(**vars(parser.parse_args())).metrics)  # noqa: T201
