"""litgpt: pre-training of a small GPT by its own loop, on Fabric."""

import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from comparison import WORKERS, compare
from lightning.fabric.strategies.ddp import DDPStrategy
from litgpt import pretrain
from litgpt.args import EvalArgs, TrainArgs
from litgpt.config import Config
from litgpt.data import DataModule
from torch import nn
from torch.utils.data import DataLoader

from lightning_gc import CompressedFabricStrategy
from lightning_gc.compressors import Compressor

LENGTH, STEPS, MICRO_BATCHES, SHARE = 32, 8, 2, 4


class Fabric(lightning.Fabric):
    """Keeps the network that litgpt trains, which its ``main`` does not return."""

    network: nn.Module

    def setup(self, module: Any, *others: Any, **options: Any) -> Any:
        """Keep the module, and set it up."""
        self.network = module
        return super().setup(module, *others, **options)


class Loader(DataLoader[torch.Tensor]):
    """litgpt saves a loader's state; this one begins each epoch with the first batch."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing, as a checkpoint is written at the end of an epoch."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load nothing."""


class Counting(DataModule):  # type: ignore[misc]
    """Sequences that count in threes; an epoch is half of the steps."""

    def connect(self, tokenizer: Any = None, batch_size: int = 1, **given: Any) -> None:
        """Take the number of sequences of a worker's micro-batch."""
        self.batch_size = batch_size

    def train_dataloader(self) -> Any:
        """Return batches in order."""
        number = STEPS // 2 * MICRO_BATCHES * self.batch_size * WORKERS
        tokens = (torch.arange(number)[:, None] + 3 * torch.arange(LENGTH + 1)) % 64
        return Loader(tokens, batch_size=self.batch_size)  # type: ignore[arg-type]

    val_dataloader = train_dataloader


def fit(compressor: Compressor | None, folder: Path, stop: bool, resume: bool) -> nn.Module:
    """Train for all steps: litgpt's rates know the end. A checkpoint is written half-way."""
    torch.compiler.reset()  # torch compiles a function for eight models at most
    options: Any = {"process_group_backend": "gloo"}
    strategy: Any = DDPStrategy(**options)
    if compressor is not None:
        strategy = CompressedFabricStrategy(compressor, **options)
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy=strategy)
    fabric.launch()
    # litgpt reads the command line again for the file of settings that it puts beside checkpoints.
    sys.argv[1:] = ["pretrain", "pythia-14m"]
    batch = MICRO_BATCHES * SHARE * WORKERS
    pretrain.main(
        fabric=fabric,
        devices=WORKERS,
        seed=0,
        initial_checkpoint_dir=None,
        resume=folder / f"step-{STEPS // 2:08}" / "lit_model.pth" if resume else False,
        config=Config(
            block_size=LENGTH, vocab_size=64, padding_multiple=64, n_layer=2, n_embd=64, n_head=2
        ),
        data=Counting(),
        out_dir=folder,
        tokenizer_dir=None,
        tokenizer=None,
        train=TrainArgs(
            save_interval=STEPS // 2,
            global_batch_size=batch,
            micro_batch_size=SHARE,
            lr_warmup_steps=2,
            max_tokens=STEPS * batch * LENGTH,
            max_norm=1.0,
        ),
        eval=EvalArgs(interval=STEPS // 2, max_iters=1),
        optimizer="AdamW",
    )
    return fabric.network


if __name__ == "__main__":
    compare(fit)
