"""Train with two workers in real processes; print what a step has taken.

torchrun --nproc-per-node 2 examples/tutorials/two_workers.py qsgd
"""

import argparse

from characters import Characters, Text
from pytorch_lightning import Trainer, seed_everything
from rich.console import Console

from lightning_gc import CompressedDDPStrategy, CompressionMonitor

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("compressor", help="a name, such as identity, cast, qsgd, topk")
parser.add_argument("--nodes", type=int, default=1)
options = parser.parse_args()

seed_everything(0)
trainer = Trainer(
    accelerator="cpu",
    devices=2 // options.nodes,
    num_nodes=options.nodes,
    strategy=CompressedDDPStrategy(options.compressor),
    callbacks=[CompressionMonitor()],
    max_epochs=1,
    log_every_n_steps=5,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(Characters(), Text())
step = {name.partition("/")[2]: float(value) for name, value in trainer.callback_metrics.items()}
if trainer.is_global_zero:
    Console(highlight=False, width=100).print(
        f"{options.compressor}: {step['wire_bytes']:,.0f} bytes a step, "
        f"{step['communicate_seconds']:.3f} s to send them"
    )
