"""Train with two simulated workers; estimate what a step would take on links of three speeds."""

import argparse
from dataclasses import replace

from characters import Characters, Text
from pytorch_lightning import Trainer, seed_everything
from rich.console import Console

from lightning_gc import (
    QSGD,
    Cast,
    CompressionMonitor,
    Identity,
    NetworkModel,
    SimulatedDDPStrategy,
    TopK,
)
from lightning_gc.compressors import Compressor

LINK = NetworkModel(latency_us=100, topology="ring")
SPEEDS = (0.1, 1, 10)  # Gbit/s


def train(compressor: Compressor, rows: int) -> dict[str, float]:
    """Return what was logged in the last epoch."""
    seed_everything(0)
    trainer = Trainer(
        accelerator="cpu",
        strategy=SimulatedDDPStrategy(compressor, workers=2, network=LINK),
        callbacks=[CompressionMonitor()],
        max_epochs=4,
        log_every_n_steps=5,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Characters(), Text(rows))
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def main() -> None:
    """Print a row for each compressor."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12_800, help="to train on")
    options = parser.parse_args()
    say = Console(highlight=False, width=100).print
    say("compressor      bytes/step    loss  work, s  and on 0.1, 1, 10 Gbit/s")
    for compressor in (Identity(), Cast(), QSGD(4), TopK(0.01)):
        metrics = train(compressor, options.rows)
        step = {name.removeprefix("compression_epoch/"): n for name, n in metrics.items()}
        work = step["compute_seconds"] + step["compress_seconds"] + step["decode_seconds"]
        links = [replace(LINK, bandwidth_gbps=speed) for speed in SPEEDS]
        seconds = [work + link.seconds(2, wire_bytes=step["wire_bytes"]) for link in links]
        say(
            f"{type(compressor).__name__:12} {step['wire_bytes']:13,.0f} {metrics['loss']:7.3f} "
            f"{work:8.3f}  {seconds[0]:6.3f} {seconds[1]:6.3f} {seconds[2]:6.3f}"
        )


if __name__ == "__main__":
    main()
