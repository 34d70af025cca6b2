"""Train on several machines, started by srun or torchrun; goes on from the last checkpoint.

torchrun --nproc-per-node 2 examples/cluster.py --nodes 1 --devices 2 --folder runs/cluster
"""

import argparse
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.demos.boring_classes import BoringDataModule, DemoModel

from lightning_gc import CompressedDDPStrategy, CompressionMonitor, TopK

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--nodes", type=int, default=1)
parser.add_argument("--devices", type=int, default=2, help="GPUs, or processes, of each machine")
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--folder", type=Path, default=Path("runs/cluster"), help="a shared one")
options = parser.parse_args()

pl.seed_everything(0, verbose=False)
trainer = pl.Trainer(
    strategy=CompressedDDPStrategy(TopK(0.01)),
    accelerator="cuda" if torch.cuda.is_available() else "cpu",
    num_nodes=options.nodes,
    devices=options.devices,
    max_epochs=options.epochs,
    callbacks=[CompressionMonitor(), ModelCheckpoint(options.folder, save_last=True)],
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
last = options.folder / "last.ckpt"
trainer.fit(
    DemoModel(out_dim=1024), BoringDataModule(), ckpt_path=str(last) if last.exists() else None
)
ratio = float(trainer.callback_metrics["compression/total_ratio"])
if trainer.is_global_zero:  # "print" alone prints once a machine
    trainer.print(f"{trainer.world_size} workers; ratio {ratio:.1f}; step {trainer.global_step}")
