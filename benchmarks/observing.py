"""What a controller's declarations cost: CPU time of observing in a step, and at an epoch's end.

One worker trains real models under ``CompressedDDPStrategy``; the calls that observe are timed by
their own thread's CPU clock, so a busy machine does not count. "nothing" is a controller that
declares nothing, as ``Fixed``. Shares are of the CPU time of a whole step: forward and backward
pass, compression, optimizer and Trainer.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import dated_page
import pytorch_lightning as pl
import torch
from models import MODELS, build

from lightning_gc import CompressedDDPStrategy, TopK
from lightning_gc.control.control_loop import ControlLoop
from lightning_gc.controllers import Controller, Decision, Needs, Observation
from lightning_gc.controllers.base import State
from lightning_gc.engine.statistics import EpochStatistics
from lightning_gc.methods.text_table import markdown
from lightning_gc.transports.accounting import Recording

DECLARED = {
    "nothing": Needs(),
    "gradients, epoch sum": Needs(gradients="epoch sum"),
    "moments": Needs(moments=True),
    "errors": Needs(errors=True),
    "scale": Needs(scale=True),
    "curves of six levels": Needs(curves=(0.001, 0.002, 0.005, 0.01, 0.02, 0.05)),
    "seconds": Needs(seconds=True),
    "link": Needs(link=True),
}
EPOCHS = 3  # the first warms up
STEP = ((EpochStatistics, "see_gradient"), (EpochStatistics, "see_error"), (Recording, "_note"))
COLUMNS = ("", "declared", "ms a step", "of a step", "ms an epoch's end")


@dataclass(frozen=True)
class Declares(Controller):
    """Leaves levels as they are, and is told what ``needs`` says."""

    wanted: Needs = Needs()  # noqa: RUF009 - frozen

    @property
    def needs(self) -> Needs:
        """What was asked for."""
        return self.wanted

    def init(self) -> State:
        """Return the state, which there is none of."""
        return {}

    def decide(self, observation: Observation, state: State) -> tuple[Decision, State]:
        """Keep all levels."""
        return Decision(None, keeps_levels=True, reason="measured"), state


class Clocks(pl.Callback):
    """CPU seconds of steps, of observing in steps, and of decisions, after the first epoch."""

    def __init__(self) -> None:
        self.seconds = self.steps = self.observing = self.deciding = self.decisions = 0.0
        self._counts = False
        self._began = 0.0

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        """Begin to count with the second epoch."""
        self._counts = trainer.current_epoch > 0
        self._began = time.process_time()

    def on_train_batch_end(self, *_: Any) -> None:
        """Add a step."""
        if self._counts:
            self.seconds += time.process_time() - self._began
            self.steps += 1

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Time the calls that observe."""
        patches = [patch.object(owner, name, self._timed(owner, name)) for owner, name in STEP]
        patches.append(patch.object(ControlLoop, "decide", self._timed_decision()))
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def _timed(self, owner: type, name: str) -> Callable[..., Any]:
        inner = getattr(owner, name)

        def call(*arguments: Any) -> Any:
            began = time.thread_time()
            found = inner(*arguments)
            if self._counts:
                self.observing += time.thread_time() - began
            return found

        return call

    def _timed_decision(self) -> Callable[..., Any]:
        inner = ControlLoop.decide

        def decide(loop: ControlLoop, *arguments: Any) -> None:
            before, began = loop.decision, time.thread_time()
            inner(loop, *arguments)
            took = time.thread_time() - began
            if loop.decision is not before:
                self.deciding += took * self._counts
                self.decisions += self._counts
            elif self._counts:
                self.observing += took

        return decide


def measure(model: str, needs: Needs, steps: int) -> list[str]:
    """Train, and return a row's figures."""
    pl.seed_everything(0, verbose=False)
    module, batches = build(model, steps, seed=1)
    clocks = Clocks()
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        strategy=CompressedDDPStrategy(TopK(0.01), controller=Declares(needs)),
        callbacks=[clocks],
        max_epochs=EPOCHS,
        gradient_clip_val=module.clip,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
    )
    with clocks.watching():
        trainer.fit(module, batches)
    step, own = clocks.seconds / clocks.steps, clocks.observing / clocks.steps
    end = clocks.deciding / clocks.decisions
    return [f"{1e3 * own:.3f}", f"{own / step:.3%}", f"{1e3 * end:.1f}"]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--models", nargs="+", choices=MODELS, default=["lstm8", "gpt", "resnet18", "mlp"])
    add("--steps", type=int, default=20, help="of an epoch (default: %(default)s)")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for model in options.models:
        for name, needs in DECLARED.items():
            rows.append([MODELS[model], name, *measure(model, needs, options.steps)])
            dated_page.say(" | ".join(rows[-1]))
    text = f"""{dated_page.title("What observing costs")}

`python benchmarks/observing.py {" ".join(sys.argv[1:])}`, {dated_page.versions("torch")},
{os.cpu_count()} CPUs; `TopK(0.01)`, one worker of one thread, {EPOCHS - 1} epochs of
{options.steps} steps.

{markdown(COLUMNS, rows, left=COLUMNS[1:2])}"""
    dated_page.say(f"\n{text}\n{dated_page.write(options.out, 'observing', text)}.md")


if __name__ == "__main__":
    main()
