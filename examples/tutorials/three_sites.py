"""One of three sites that train together, though a link is down for a while; or the replay of all.

python examples/tutorials/three_sites.py --site 0               # once for each site
python examples/tutorials/three_sites.py --replay roll.jsonl
"""

import argparse
import os
import time
from typing import Any

import torch
from characters import CONTEXT, Characters, Text
from pytorch_lightning import Callback, Trainer, seed_everything
from rich.console import Console
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_gc import QSGD, Elastic, LocalStepsStrategy, SimulatedLocalStepsStrategy

STEPS, SECONDS = 480, 0.1  # optimizer steps, and what one of a larger model would take
ROUNDS: dict[str, Any] = {"compressor": QSGD(4), "every": 8, "min_numel": 0}  # all is gathered
say = Console(highlight=False, width=100).print


class Site(Characters):
    """Draws its batches by the site's number and the step, so that the run can be replayed."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds = seconds
        self.rows = Text().training.tensors[0]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        """Return the loss of this site's next batch."""
        strategy: Any = self.trainer.strategy
        draw = torch.Generator().manual_seed(100_000 * strategy.number + self.global_step)
        chosen = torch.randint(len(self.rows), (64,), generator=draw)
        time.sleep(self.seconds)
        return super().training_step([self.rows[chosen]], batch_idx)

    def train_dataloader(self) -> Any:
        """Return empty batches. The site draws others in their place."""
        return DataLoader(torch.zeros(10_000, CONTEXT), 1)  # type: ignore[arg-type]


class Membership(Callback):
    """Says who takes part, when that changes."""

    members: tuple[int, ...] = ()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Look at the last round."""
        roll = trainer.strategy.roll
        if len(roll) and roll[-1].members != self.members:
            self.members = roll[-1].members
            sites = ", ".join(map(str, self.members))
            say(f"site {trainer.strategy.number}: round {roll[-1].round} has sites {sites}")


def main() -> None:
    """Train as a site, or replay the run of all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--site", type=int, default=0)
    parser.add_argument("--replay", metavar="ROLL")
    options = parser.parse_args()
    seed_everything(0, verbose=False)
    if options.replay:
        strategy: Any = SimulatedLocalStepsStrategy(**ROUNDS, roll=options.replay)
    else:
        terms: dict[str, Any] = {"min_workers": 2, "grace": 2.0, "timeout": 5.0}
        terms |= {"secret": os.environ["SECRET"], "number": options.site}
        elastic = Elastic("10.77.2.10:29400", **terms)
        strategy = LocalStepsStrategy(**ROUNDS, elastic=elastic)
    site = Site(0.0 if options.replay else SECONDS)
    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        max_steps=STEPS,
        strategy=strategy,
        callbacks=[] if options.replay else [Membership()],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(site)
    name = "replay" if options.replay else f"site {strategy.number}"
    total = sum(float(weights.detach().double().sum()) for weights in site.parameters())
    say(f"{name}: {trainer.global_step} steps, weights sum to {total:.9f}")


if __name__ == "__main__":
    main()
