"""Two sites on a link of 10 Mbit/s: exchange at every step, or every H, simulated or for real.

python examples/tutorials/two_sites.py                 # all, simulated in this process
torchrun ... two_sites.py qsgd-32 --nodes 2            # one of them, as one of two workers
"""

import argparse
from datetime import timedelta
from typing import Any

from characters import Characters, Text
from pytorch_lightning import Trainer, seed_everything
from pytorch_lightning.callbacks import Timer
from rich.console import Console

from lightning_gc import (
    QSGD,
    CompressedDDPStrategy,
    CompressionMonitor,
    Identity,
    LocalStepsStrategy,
    NetworkModel,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
    TopK,
)
from lightning_gc.compressors import Compressor

LINK = NetworkModel(bandwidth_gbps=0.01, latency_us=20_000, topology="ring")
METHODS: dict[str, tuple[Compressor, int]] = {
    "ddp": (Identity(), 1),
    "topk": (TopK(0.01), 1),
    "dense-8": (Identity(), 8),
    "qsgd-8": (QSGD(4), 8),
    "qsgd-32": (QSGD(4), 32),
    "topk-8": (TopK(0.03), 8),
}
"""What is sent, and H; 1: gradients, at every step."""


def strategy(name: str, simulated: bool) -> Any:
    """Return the strategy of a method, for real workers or for two in this process."""
    compressor, every = METHODS[name]
    if simulated:
        if every == 1:
            return SimulatedDDPStrategy(compressor, workers=2)
        return SimulatedLocalStepsStrategy(compressor, workers=2, every=every)
    if every == 1:
        return CompressedDDPStrategy(compressor, timeout=timedelta(minutes=2))
    return LocalStepsStrategy(compressor, every=every, timeout=timedelta(minutes=2))


def train(name: str, epochs: int, rows: int, nodes: int) -> tuple[Trainer, float, float]:
    """Return the trainer, the bytes that a worker has sent, and the seconds that it took."""
    seed_everything(0)
    timer = Timer()
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=nodes,
        strategy=strategy(name, simulated=nodes == 1),
        callbacks=[CompressionMonitor(), timer],
        max_epochs=epochs,
        log_every_n_steps=1,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Characters(), Text(rows))
    sent = float(trainer.callback_metrics["compression/total_wire_bytes"])
    return trainer, sent, timer.time_elapsed("train")


def main() -> None:
    """Print a row for each method, or train as one of two workers and print one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("method", nargs="?", choices=METHODS)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--rows", type=int, default=12_800, help="to train on")
    options = parser.parse_args()
    say = Console(highlight=False, width=100).print
    if options.method:
        trainer, sent, seconds = train(options.method, 1, options.rows, options.nodes)
        if trainer.is_global_zero:
            steps = trainer.global_step
            say(f"{options.method}: {sent / steps:,.0f} bytes and {seconds / steps:.3f} s a step")
        return
    say("method       H  bytes/step    loss  on the link, s a step")
    for name, (_, every) in METHODS.items():
        trainer, sent, _ = train(name, 4, options.rows, 1)
        nbytes, loss = sent / trainer.global_step, float(trainer.callback_metrics["loss"])
        link = LINK.seconds(2, wire_bytes=nbytes * every) / every
        say(f"{name:8} {every:5} {nbytes:11,.0f} {loss:7.3f} {link:8.3f}")


if __name__ == "__main__":
    main()
