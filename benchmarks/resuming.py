"""What resuming costs and what it keeps: loss after a resume, size of side files, time to save.

The first part trains the network of ``examples/vision.py``, with Top-k so sparse that much waits in
the errors, stops it, and goes on in five ways. The second part saves the error state of 4 simulated
workers of a model with 100 million parameters. Prints tables, writes a dated file and a plot.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import dated_page
import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins.io import TorchCheckpointIO

from lightning_gc import CompressedDDPStrategy, PerParameter, SizeSwitch, TopK
from lightning_gc.checkpoint.worker_state import CheckpointParts
from lightning_gc.engine import Engine
from lightning_gc.methods import plot_style

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))
from images import Photos, load
from shared import hush
from vision import Classifier, Settings

hush()
TOGETHER, BEFORE, AFTER = 48, 10, 8  # images a step in all; epochs before and after the stop
DENSITY, TENSORS, WORKERS = 0.005, 100, 4
# Name -> workers after the stop, and what becomes of the errors.
WAYS: dict[str, tuple[int, str]] = {
    "not interrupted": (2, "full"),
    "resumed, 2 workers": (2, "full"),
    "resumed, 3 workers": (3, "full"),
    "resumed, 1 worker": (1, "full"),
    "resumed, errors dropped": (2, "off"),
}


class Losses(pl.Callback):
    """Writes the mean loss over workers of every step into a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: pl.Trainer, _: Any, outputs: Any, *rest: Any) -> None:
        """Add a line."""
        loss = float(trainer.strategy.reduce(outputs["loss"].detach(), reduce_op="mean"))
        if trainer.is_global_zero:
            with self.path.open("a") as file:
                file.write(f"{loss!r}\n")


def train(folder: Path, workers: int, state: Any, epochs: int, resume: Path | None) -> list[float]:
    """Train, from the beginning or a checkpoint, and return the losses of its steps."""
    path = folder / f"{time.time_ns()}.txt"
    settings = Settings(
        workers=workers, batch=TOGETHER // workers, epochs=2 * (BEFORE + AFTER), learning_rate=0.03
    )
    data = Photos(load(None), workers, settings.batch, settings.seed)
    pl.seed_everything(0, verbose=False)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=workers,
        strategy=CompressedDDPStrategy(
            PerParameter(SizeSwitch(TopK(DENSITY))), state=state, start_method="spawn"
        ),
        callbacks=[Losses(path), ModelCheckpoint(folder, "{epoch}", save_on_train_epoch_end=True)],
        max_epochs=epochs,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        logger=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    trainer.fit(Classifier(data.images, settings), data, ckpt_path=resume)
    return [float(line) for line in path.read_text().split()]


def curves() -> dict[str, list[float]]:
    """Return the losses after the stop, for every way to go on."""
    with tempfile.TemporaryDirectory() as name:
        folders = {way: Path(name, way) for way in (*WAYS, "first")}
        for folder in folders.values():
            folder.mkdir()
        plain, *others = WAYS
        whole = train(folders[plain], 2, "full", BEFORE + AFTER, None)
        train(folders["first"], 2, "full", BEFORE, None)
        resume = folders["first"] / f"epoch={BEFORE - 1}.ckpt"
        found = {plain: whole[len(whole) * BEFORE // (BEFORE + AFTER) :]}
        for way in others:
            found[way] = train(folders[way], *WAYS[way], BEFORE + AFTER, resume)
        return found


def sizes() -> list[tuple[str, float, float, float]]:
    """Return, per way to store, MB per worker, and its median seconds to copy and to write."""
    rows = []
    names = [f"layer{i}.weight" for i in range(TENSORS)]
    shape = (1000, 100_000_000 // TENSORS // 1000)
    for dtype in (torch.float32, torch.bfloat16):
        copying, writing, sizes = [], [], []
        for worker in range(WORKERS):  # one after the other: all at once would measure the memory
            engine = Engine(TopK(DENSITY), worker=worker, workers=WORKERS)
            memory = {name: {"error": torch.randn(shape)} for name in names}
            state = {"memory": memory, "compressor": {}, "learning_rates": {}, "step": 1}
            engine.load_state_dict(state)
            del memory, state
            with tempfile.TemporaryDirectory() as folder:
                path = Path(folder, "side.pt")
                started = time.perf_counter()
                workers: Any = SimpleNamespace(engines=[engine])
                own = CheckpointParts(workers).worker_state({}).in_file(dtype)
                copied = time.perf_counter()
                TorchCheckpointIO().save_checkpoint(own, path)
                writing.append(time.perf_counter() - copied)
                copying.append(copied - started)
                sizes.append(path.stat().st_size / 1e6)
        name = str(dtype).removeprefix("torch.")
        middle = statistics.median
        rows.append((name, middle(sizes), middle(copying), middle(writing)))
    return rows


def plot(found: dict[str, list[float]], path: Path) -> None:
    """Draw the loss, smoothed over an epoch, from the stop on."""
    looks = {way: (plot_style.SERIES[i], "-") for i, way in enumerate(WAYS)}
    looks["not interrupted"] = (plot_style.DENSE, "-")
    looks["resumed, 2 workers"] = (plot_style.INK, ":")  # on the uninterrupted run's line

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        for way, losses in found.items():
            width = len(losses) // AFTER
            smooth = [statistics.mean(losses[i : i + width]) for i in range(len(losses) - width)]
            colour, dashes = looks[way]
            bold = 4 if way == "not interrupted" else 1.5
            axes.plot(smooth, dashes, label=way, color=colour, lw=bold)
        axes.set(xlabel="steps after the stop", ylabel="training loss, mean of an epoch")
        plot_style.legend(figure)

    path.write_bytes(plot_style.svg(draw, "resuming"))


def page(found: dict[str, list[float]], rows: list[tuple[str, float, float, float]]) -> str:
    """Return the dated file's text."""
    versions = dated_page.versions("lightning-gc", "torch", "pytorch-lightning")
    ours = found["not interrupted"]
    steps = (10, len(ours) // AFTER, len(ours))
    loss = "".join(
        f"| {way} | {' | '.join(f'{statistics.mean(row[:n]):.4f}' for n in steps)} "
        f"| {'yes' if row == ours else 'no'} |\n"
        for way, row in found.items()
    )
    size = "".join(f"| {n} | {mb:,.0f} | {c:.2f} | {w:.2f} |\n" for n, mb, c, w in rows)
    side_files = (
        f"""
## Side files

100 million parameters in {TENSORS} tensors, {WORKERS} simulated workers, one after the other;
seconds are medians of a worker's. A checkpoint of the same model with Adam's state has 1,200 MB.

| stored as | MB per worker | s to copy | s to write |
|---|---:|---:|---:|
{size}"""
        if rows
        else ""
    )
    return f"""{dated_page.title("Resuming")}

`python benchmarks/resuming.py{"" if rows else " --losses"}` with Python
{sys.version.split()[0]}, {versions}, {os.cpu_count()} CPUs.

The network of `examples/vision.py` on digits, {TOGETHER} images a step in all, `TopK({DENSITY})`,
learning rate constant after its warm-up. Stopped after {BEFORE} epochs with 2 workers, then
{AFTER} more.

| training loss, mean of the first | {steps[0]} steps | {steps[1]} | {steps[2]} | bit for bit |
|---|---:|---:|---:|---|
{loss}
Other numbers of workers see the images in other groups, so their losses differ a little at once.
{side_files}"""


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "--out", type=Path, default=dated_page.RESULTS, help="folder of the dated file"
    )
    parser.add_argument("--losses", action="store_true", help="leave the side files out")
    parser.add_argument(
        "--redraw", type=Path, metavar="JSON", help="draw these results' plot, run nothing"
    )
    options = parser.parse_args()
    if options.redraw:
        plot(json.loads(options.redraw.read_text()), options.redraw.with_suffix(".svg"))
        return
    found, rows = curves(), [] if options.losses else sizes()
    text = page(found, rows)
    sys.stdout.write(text)
    stem = dated_page.write(options.out, "resuming", text, found)
    plot(found, stem.with_suffix(".svg"))


if __name__ == "__main__":
    main()
