"""Time to a loss with workers of speeds 1 : 0.5 : 0.5: local steps of equal H against H by speed.

    python benchmarks/unequal_workers.py            # predicted, then real; writes a dated page
    python benchmarks/unequal_workers.py --only predicted

Three workers train the small transformer of ``papers/``. The target is the loss of equal H after
``ROUNDS`` rounds. The other arms get several shares of its time, each with a cosine of rates over
its own steps. The time to the target is where the line through their losses crosses it. Predicted:
simulated workers with ``speeds=``, and the seconds of their clock. Real: three processes over Gloo.
Two of them are slowed. Each step is padded by ``time.sleep``, to 0.3 s on worker 0 and to 0.6 s on
the others.
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import dated_page
import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.multiprocessing.spawn import spawn
from torch.utils.data import DataLoader

from lightning_gc import (
    QSGD,
    LocalStepsStrategy,
    NetworkModel,
    SimulatedLocalStepsStrategy,
    Unequal,
)
from lightning_gc.methods.text_table import markdown

sys.path.insert(0, str(Path(__file__).with_name("papers")))
import tasks  # noqa: F401 - sets the path
from shared import hush
from text import columns, load
from transformer import LENGTH, Transformer, validation

hush()
SPEEDS = (10.0, 5.0, 5.0)  # steps per second
EVERY, ROUNDS, BATCH, RATE = 8, 20, 4, 0.006
SEEDS = (0, 1, 2)
SHARES = (0.6, 0.75)
PADDED = 3.0  # a real step lasts so many times 1/speed, so that a loaded machine can keep it

NETWORKS = {
    "a network that costs nothing": NetworkModel(bandwidth_gbps=100.0),
    "10 Mbit/s, 40 ms": NetworkModel(bandwidth_gbps=0.01, latency_us=40_000, topology="ring"),
}
EQUAL = "equal H"
ARMS: dict[str, dict[str, Any]] = {
    EQUAL: {},
    "H by speed, equal weights": {"unequal": Unequal(weigh="equal")},
    "H by speed, weighted by steps": {"unequal": Unequal()},
    "H by speed, median clip": {"unequal": Unequal(median_clip=True)},
    "equal H, grace of 0.1 s": {"unequal": Unequal(pace="equal", grace=0.1)},
}
REAL = ("H by speed, weighted by steps",)
Run = tuple[float, float]
"""Seconds and validation loss at the end."""
Job = tuple[str, int, int]
"""Arm, rounds and seed."""


class Words(pl.LightningModule):
    """Predicts the next word; rates warm up over 5 % of the steps and fall to zero in a cosine.

    Args:
        words: how many there are.
        steps: of the run.
        seconds: of each step of this worker; 0: as it comes.
    """

    def __init__(self, words: int, steps: int, seconds: float = 0.0) -> None:
        super().__init__()
        self.net, self.steps, self.seconds = Transformer(words), steps, seconds
        self.began = self.step_began = self.lasted = 0.0

    def on_train_start(self) -> None:
        """Begin to count seconds."""
        self.began = time.monotonic()

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the mean cross-entropy of a word."""
        self.step_began = time.monotonic()
        loss: Tensor = self.net(batch[:, :-1], batch[:, 1:])
        return loss

    def on_after_backward(self) -> None:
        """Pad the step; one that is skipped has no backward pass."""
        time.sleep(max(0.0, self.step_began + self.seconds - time.monotonic()))

    def on_train_end(self) -> None:
        """Stop counting, after the last exchange."""
        self.lasted = time.monotonic() - self.began

    def configure_optimizers(self) -> Any:
        """AdamW."""
        adam = torch.optim.AdamW(self.parameters(), RATE)
        warm = max(self.steps // 20, 1)
        line = torch.optim.lr_scheduler.LambdaLR(
            adam,
            lambda step: min((step + 1) / warm, (1 + math.cos(math.pi * step / self.steps)) / 2),
        )
        return {"optimizer": adam, "lr_scheduler": {"scheduler": line, "interval": "step"}}


def task(rounds: int, seed: int) -> tuple[int, list[list[Tensor]], Tensor]:
    """Return the number of words, each worker's batches, and the text of validation."""
    corpus = load(None, rare=5)
    torch.manual_seed(seed)
    rows = columns(corpus.train, len(SPEEDS) * BATCH)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    starts = [step * LENGTH % (rows.shape[1] - LENGTH - 1) for step in range(EVERY * rounds)]
    shares = rows[order].split(BATCH)
    batches = [[share[:, s : s + LENGTH + 1] for s in starts] for share in shares]
    return len(corpus.words), batches, corpus.valid


def fit(strategy: Any, words: Words, batches: list[Tensor], devices: int) -> None:
    """Train on all batches; the module ends with the common weights."""
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=devices,
        strategy=strategy,
        max_epochs=1,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
    )
    trainer.fit(words, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]


def predicted(network: NetworkModel, arm: str, rounds: int, seed: int) -> Run:
    """Train with simulated workers."""
    number, shares, text = task(rounds, seed)
    words = Words(number, EVERY * rounds)
    together = [batch for batches in zip(*shares, strict=True) for batch in batches]
    options = {"every": EVERY, "speeds": SPEEDS, "network": network, **ARMS[arm]}
    strategy = SimulatedLocalStepsStrategy(QSGD(4), **options)
    fit(strategy, words, together, 1)
    assert strategy.clock is not None
    return strategy.clock.seconds, validation(words.net, text)


def real(jobs: list[Job]) -> dict[Job, Run]:
    """Train with three processes, one job after the other; return what worker 0 has seen."""
    with tempfile.TemporaryDirectory() as folder, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        path = Path(folder) / "runs.json"
        spawn(work, (jobs, str(path), port), len(SPEEDS))
        runs = json.loads(path.read_text())
    return {job: (seconds, loss) for job, (seconds, loss) in zip(jobs, runs, strict=True)}


def work(worker: int, jobs: list[Job], path: str, port: int) -> None:
    """Train as one of the processes."""
    workers = str(len(SPEEDS))
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(worker)}
    os.environ |= {"WORLD_SIZE": workers, "LOCAL_WORLD_SIZE": workers, "GROUP_RANK": "0"}
    os.environ |= {"LOCAL_RANK": str(worker), "TORCHELASTIC_RUN_ID": "unequal"}
    torch.set_num_threads(1)
    runs = []
    for arm, rounds, seed in jobs:
        number, shares, text = task(rounds, seed)
        words = Words(number, EVERY * rounds, PADDED / SPEEDS[worker])
        options: dict[str, Any] = {"every": EVERY, "process_group_backend": "gloo", **ARMS[arm]}
        fit(LocalStepsStrategy(QSGD(4), **options), words, shares[worker], len(SPEEDS))
        if worker == 0:
            runs.append((words.lasted, validation(words.net, text)))
            dated_page.say(f"{arm}, {rounds} rounds, seed {seed}: {runs[-1]}")
    if worker == 0:
        Path(path).write_text(json.dumps(runs))


def crossing(points: list[Run], target: float) -> float | None:
    """Return where the line through points of (seconds, loss) falls to the target, or None."""
    for (before, high), (after, low) in itertools.pairwise(points):
        if high > target >= low:
            return before + (after - before) * (high - target) / (high - low)
    return points[0][0] if points[0][1] <= target else None


def mean(runs: list[Run]) -> Run:
    """Return the means of seconds and losses."""
    return statistics.fmean(s for s, _ in runs), statistics.fmean(loss for _, loss in runs)


def rounds_of(arm: str, share: float) -> int:
    """Return how many rounds an arm makes in a share of the time of equal H."""
    return ROUNDS if arm == EQUAL else round(share * ROUNDS * max(SPEEDS) / min(SPEEDS))


def table(measure: Callable[[str, int, int], Run], arms: Sequence[str]) -> str:
    """Return a table of the time to the loss of equal H.

    Args:
        measure: trains with an arm for so many rounds with a seed.
        arms: besides equal H.
    """
    plain = [measure(EQUAL, ROUNDS, seed) for seed in SEEDS]
    whole, target = mean(plain)
    spread = max(loss for _, loss in plain) - min(loss for _, loss in plain)
    lines = [[EQUAL, *[""] * (len(SHARES) - 1), f"{target:.3f} in {whole:.1f} s", "1"]]
    for arm in arms:
        several = (
            [measure(arm, rounds_of(arm, share), seed) for seed in SEEDS] for share in SHARES
        )
        points = [mean(runs) for runs in several]
        found = crossing(points, target)
        said = [f"{loss:.3f} in {seconds:.1f} s" for seconds, loss in points]
        below = "at most " if found == points[0][0] else ""
        lines.append(
            [arm, *said, "not reached" if found is None else f"{below}{found / whole:.2f}"]
        )
        dated_page.say(" | ".join(lines[-1]))
    shorter, longer = SHARES
    head = ["rounds", f"loss at {shorter:g}", f"loss at {longer:g}", "time to the target"]
    return markdown(head, lines) + f"\nThe seeds of equal H differ by {spread:.3f}.\n"


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=["predicted", "real"], help="one part; prints, no page")
    options = parser.parse_args()
    torch.set_num_threads(1)
    parts: list[str] = []
    for name, network in NETWORKS.items() if options.only != "real" else ():
        arms = tuple(ARMS)[1:] if not parts else REAL
        simulate = functools.partial(predicted, network)
        parts.append(f"## Predicted, {name}\n\n{table(simulate, arms)}")
        dated_page.say(parts[-1])
    if options.only != "predicted":
        trained = [EQUAL, *(arm for arm in REAL for _ in SHARES)]
        lengths = [ROUNDS, *(rounds_of(arm, share) for arm in REAL for share in SHARES)]
        jobs = [(a, n, seed) for seed in SEEDS for a, n in zip(trained, lengths, strict=True)]
        runs = real(jobs)
        shown = table(lambda *job: runs[job], REAL)
        parts.append(f"## Real, three processes over Gloo\n\n{shown}")
        dated_page.say(parts[-1])
    if options.only is None:
        about = (__doc__ or "").partition("page\n")[2].partition("\n\n")[2]
        said = f"`python benchmarks/unequal_workers.py`, {dated_page.versions('torch')}."
        settings = f"H = {EVERY}, `QSGD(4)`, AdamW at {RATE:g}, {len(SEEDS)} seeds, mean losses."
        text = [dated_page.title("Unequal workers"), said, about.strip(), settings, *parts]
        dated_page.write(dated_page.RESULTS, "unequal_workers", "\n\n".join(text))


if __name__ == "__main__":
    main()
