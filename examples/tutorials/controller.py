"""Train while Accordion moves the density of TopK; everything goes to TensorBoard."""

import argparse

from characters import Characters, Text
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.loggers import TensorBoardLogger
from rich.console import Console

from lightning_gc import CompressionMonitor, SimulatedDDPStrategy, TopK
from lightning_gc.controllers import Accordion

say = Console(highlight=False, width=100).print


class Levels(Callback):
    """Prints an epoch's median density, its bytes and its loss."""

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Read what `CompressionMonitor`, which comes before, has left."""
        figures = trainer.callback_metrics
        say(
            f"{trainer.current_epoch:5} {figures['compression_epoch/level']:8.3f} "
            f"{figures['compression_epoch/wire_bytes']:12,.0f} {figures['loss']:8.3f}"
        )


def main() -> None:
    """Print a row for each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=12_800, help="to train on")
    options = parser.parse_args()
    seed_everything(0)
    accordion = Accordion(low=0.1, high=0.01, interval=1, threshold=0.2)
    trainer = Trainer(
        accelerator="cpu",
        strategy=SimulatedDDPStrategy(TopK(0.1), controller=accordion, workers=2),
        callbacks=[CompressionMonitor(), Levels()],
        logger=TensorBoardLogger("runs", "tutorial"),
        max_epochs=12,
        log_every_n_steps=5,
        num_sanity_val_steps=0,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    say("epoch  density   bytes/step     loss")
    trainer.fit(Characters(0.1, decay=9), Text(options.rows))


if __name__ == "__main__":
    main()
