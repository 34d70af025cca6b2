"""A new user's first minutes, with the installed wheel alone: import, fit, monitor, resume, CLI.

Run in an empty folder by ``tests.matrix``, with the Lightning package as the only argument.
"""

import importlib
import subprocess
import sys
from pathlib import Path

PACKAGE = {"pytorch-lightning": "pytorch_lightning", "lightning": "lightning.pytorch"}[sys.argv[1]]

pl = importlib.import_module(PACKAGE)
demo = importlib.import_module(f"{PACKAGE}.demos.boring_classes")

import lightning_gc  # noqa: E402 - Lightning first: of its package the strategy is chosen

CONFIG = f"""
model:
  class_path: {PACKAGE}.demos.boring_classes.DemoModel
  init_args: {{out_dim: 1024}}
data:
  class_path: {PACKAGE}.demos.boring_classes.BoringDataModule
trainer:
  accelerator: cpu
  max_epochs: 1
  logger: false
  enable_checkpointing: false
  strategy:
    class_path: lightning_gc.SimulatedDDPStrategy
    init_args: {{compressor: topk, workers: 2}}
"""


def fit(folder: str, epochs: int, resume: str | None = None) -> float:
    """Train with two workers; return the compression ratio that the monitor has counted."""
    saves = importlib.import_module(f"{PACKAGE}.callbacks").ModelCheckpoint(folder, save_last=True)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=lightning_gc.CompressedDDPStrategy("qsgd", start_method="fork"),
        callbacks=[lightning_gc.CompressionMonitor(), saves],
        max_epochs=epochs,
        enable_progress_bar=False,
        log_every_n_steps=4,
    )
    trainer.fit(demo.DemoModel(out_dim=1024), demo.BoringDataModule(), ckpt_path=resume)
    return float(trainer.callback_metrics["compression/total_ratio"])


def main() -> None:
    """Raise if anything a new user does first does not work."""
    assert "site-packages" in lightning_gc.__file__, lightning_gc.__file__
    other = {"pytorch_lightning", "lightning"} - {PACKAGE.partition(".")[0]}
    assert not other & set(sys.modules), f"{other} has been imported"
    assert fit("saved", 1) > 6
    assert fit("resumed", 2, "saved/last.ckpt") > 6
    assert list(Path().rglob("events.out.tfevents.*")), "TensorBoard got nothing"
    Path("train.yaml").write_text(CONFIG)
    for command in (["list"], ["schema"], ["fit", "train.yaml"]):
        subprocess.run(
            [sys.executable, "-I", "-m", "lightning_gc", *command], check=True, timeout=200
        )


if __name__ == "__main__":
    main()
