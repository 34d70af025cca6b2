"""Seconds until plain DDP's loss is reached, by the clock: real processes over shaped links.

    python benchmarks/papers/time_to_loss.py --data wikitext-2/
    python benchmarks/papers/time_to_loss.py --data wikitext-2/ --only mbit=0    # the rates alone

Needs Linux, root and iproute2. It measures time: run nothing else, or say so on the page.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import frame
import tasks  # noqa: F401 - sets the path
import torch
import torch.distributed as dist
import tuned_rate
from frame import Cell, Experiment, Row, interval, spread, table, values
from matplotlib.figure import Figure
from namespaces import Link, check_privileges, launch, network
from network_methods import LIMIT, fit, make_strategy
from pytorch_lightning import Callback, LightningModule
from text import columns, load
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_gc.bench.baselines import FP16, PLAIN
from lightning_gc.kernels import dispatch
from lightning_gc.methods import plot_style

WORKERS, BATCH, LENGTH, WIDTH = 2, 8, 32, 96
STEPS, GOAL, WARM, WINDOW, POINT = 2_000, 0.8, 100, 100, 10
RATES = (0.00075, 0.0015, 0.003)
LINKS = (100, 1_000)
PLAIN_LINE, HOOK_LINE = (PLAIN, 0.9), (FP16, 0.9)
LINES = (
    *(PLAIN_LINE, HOOK_LINE, ("QSGD(4)", 0.9), ("TopK(0.01)", 0.9), ("PowerSGD(2)", 0.9)),
    *((FP16, 0.0), ("TopK(0.01)", 0.0), ("PowerSGD(2)", 0.0)),
)
"""Method and AdamW's β₁."""
Line = tuple[str, float]
TUNING = 100  # a seed


class Words(LightningModule):
    """A transformer of two blocks that predicts words; AdamW, warmed up, then at one rate."""

    def __init__(self, words: int, rate: float, beta1: float) -> None:
        super().__init__()
        self.rate, self.betas = rate, (beta1, 0.999)
        self.embedding = nn.Embedding(words, WIDTH)
        self.places = nn.Parameter(torch.zeros(LENGTH, WIDTH))
        nn.init.normal_(self.embedding.weight, std=0.02)
        block = nn.TransformerEncoderLayer(
            WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, 2, nn.LayerNorm(WIDTH), enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """Return the mean cross-entropy of the words that follow."""
        words, following = batch[:, :-1], batch[:, 1:]
        hidden = self.blocks(self.embedding(words) + self.places, mask=self.mask, is_causal=True)
        logits = hidden @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())

    def configure_optimizers(self) -> Any:
        """Return AdamW, and its warm-up."""
        optimizer = torch.optim.AdamW(self.parameters(), self.rate, self.betas)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 1 / WARM, total_iters=WARM)
        return [optimizer], [{"scheduler": warm, "interval": "step"}]


class Watch(Callback):
    """Notes loss and seconds after each step, from the first step's beginning on."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds: list[float] = []

    def on_train_start(self, *_: Any) -> None:
        """Wait until kernels are compiled, and all workers are there; start the clock."""
        dispatch.host.wait()
        dist.barrier()
        self.began = time.perf_counter()

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
        """Note them."""
        self.losses.append(float(outputs["loss"]))
        self.seconds.append(time.perf_counter() - self.began)


def work(options: argparse.Namespace) -> dict[str, list[float]]:
    """Train once, as one worker."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    corpus = load(options.data, rare=20)
    torch.manual_seed(options.seed)
    module = Words(len(corpus.words), options.rate, options.beta1)
    text = columns(corpus.train, WORKERS * BATCH)
    draw = torch.Generator().manual_seed(options.seed)
    own = text[torch.randperm(len(text), generator=draw)[dist.get_rank() :: WORKERS]]
    starts = torch.randint(text.shape[1] - LENGTH - 1, (options.steps,), generator=draw).tolist()
    cut: Any = [own[:, at : at + LENGTH + 1] for at in starts]
    batches: DataLoader[Tensor] = DataLoader(cut, batch_size=None)
    watch = Watch()
    fit(make_strategy(options.method), module, batches, options.steps, [watch])
    dist.destroy_process_group()
    return {"losses": watch.losses, "seconds": watch.seconds}


def cells(seeds: int) -> list[Cell]:
    """Return the runs that choose rates, over a link as fast as the machine; then the timed."""
    kinds = [{"method": method, "beta1": beta1, "steps": STEPS} for method, beta1 in LINES]
    study = [{**k, "mbit": 0, "rate": r, "seed": TUNING} for k in kinds for r in RATES]
    return study + [
        {**kind, "mbit": mbit, "rate": tuned_rate.TUNED, "seed": seed}
        for mbit in LINKS
        for seed in range(seeds)
        for kind in kinds
    ]


def before(cell: Cell) -> list[Cell]:
    """Return the runs that choose a cell's rate."""
    trials = tuned_rate.trials({**cell, "mbit": 0}, RATES)
    return [{**trial, "seed": TUNING} for trial in trials]


def train(cell: Cell, data: Path | None) -> Row:
    """Train once; of losses and seconds every tenth is kept, losses as means over ``WINDOW``."""
    given = {name: cell[name] for name in ("method", "beta1", "steps", "seed")}
    given |= {"data": data, "rate": tuned_rate.rate(cell)}
    with network(WORKERS, Link(cell["mbit"])) as spaces:
        words = [f"--{name}={value}" for name, value in given.items()]
        answers = launch(__file__, ["--worker", *words], spaces, timeout=7200)
    losses = [statistics.mean(pair) for pair in zip(*(a["losses"] for a in answers), strict=True)]
    at = range(WINDOW, len(losses) + 1, POINT)
    means = [statistics.mean(losses[stop - WINDOW : stop]) for stop in at]
    seconds = [max(answer["seconds"][stop - 1] for answer in answers) for stop in at]
    return {"loss": means[-1], "losses": means, "seconds": seconds}


class Reached(NamedTuple):
    """When a run's loss is first at the goal."""

    steps: int
    seconds: float


def reached(row: Row, target: float) -> Reached | None:
    """Return when a run's loss is at the target, if it is."""
    at = range(WINDOW, row["steps"] + 1, POINT)
    times = zip(map(Reached, at, row["seconds"]), row["losses"], strict=True)
    return next((time for time, loss in times if loss <= target), None)


def page(rows: list[Row]) -> str:
    """Return the hours, and a table for each link."""
    hours = sum(row["seconds"][-1] for row in rows) / 3600
    text = f"The workers trained for {hours:.1f} hours by the clock, and kept two cores busy for\n"
    text += "a part of them. CPU minutes are those of the program that starts them.\n\n"
    for mbit in LINKS:
        found = {line: timed(rows, line, mbit) for line in LINES}
        goals = {
            row["seed"]: row["losses"][(round(GOAL * row["steps"]) - WINDOW) // POINT]
            for row in found[PLAIN_LINE]
        }
        times: dict[Line, dict[int, Reached | None]] = {
            line: {r["seed"]: reached(r, goals[r["seed"]]) for r in each if r["seed"] in goals}
            for line, each in found.items()
        }
        lines = []
        for line, own in times.items():
            study = frame.where(rows, **kind(line), mbit=0)
            if not own or not study:
                continue
            best = min(study, key=lambda row: math.inf if row["loss"] is None else row["loss"])
            edge = " (edge)" if tuned_rate.is_edge(best, RATES) else ""
            done = [time for time in own.values() if time is not None]
            steps = [1000 * row["seconds"][-1] / row["steps"] for row in found[line]]
            cells = [
                *(label(line), f"{best['rate']:g}{edge}", spread(steps, ".0f")),
                spread(values(found[line], "loss"), ".3f"),
            ]
            if len(done) < len(own):
                lines.append([*cells, f"by {len(done)} of {len(own)}", "", "", "", ""])
                continue
            cells.append(spread([time.steps for time in done], ",.0f"))
            cells.append(spread([time.seconds for time in done], ".0f"))
            others = (PLAIN_LINE, HOOK_LINE, (FP16, line[1]))
            lines.append([*cells, *(_faster(times[other], own) for other in others)])
        text += f"## {Link(mbit)}\n\n"
        head = ["", "rate", "ms a step", f"loss after {STEPS:,} steps", "steps to the goal"]
        head += ["seconds", "times as fast as plain DDP", "as the fp16 hook"]
        text += table([*head, "as the hook with the same β₁"], lines) + "\n"
    return text


def kind(line: Line) -> Cell:
    """Return what the cells of a line have in common."""
    return dict(zip(("method", "beta1"), line, strict=True))


def label(line: Line) -> str:
    """Return a line's name."""
    method, beta1 = line
    return method if beta1 else f"{method}, β₁ = 0"


def timed(rows: list[Row], line: Line, mbit: int) -> list[Row]:
    """Return a line's runs over a link, one a seed."""
    return frame.where(rows, **kind(line), mbit=mbit, rate=tuned_rate.TUNED)


def _faster(other: dict[int, Reached | None], own: dict[int, Reached | None]) -> str:
    """Return how many times as fast, with its interval over seeds."""
    pairs = [(other.get(seed), mine) for seed, mine in own.items()]
    ratios = [theirs.seconds / mine.seconds for theirs, mine in pairs if theirs and mine]
    if len(ratios) < 2:
        return "–"
    low, high = interval(ratios)
    return f"{statistics.mean(ratios):.2f} ({low:.2f} to {high:.2f})"


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw loss against seconds, a panel for each link, seed 0."""
    panels = figure.subplots(1, len(LINKS), sharey=True, squeeze=False)[0]
    palette = (plot_style.DENSE, plot_style.PEER, *plot_style.SERIES)
    methods = dict.fromkeys(method for method, _ in LINES)
    colors = dict(zip(methods, palette, strict=False))
    for axes, mbit in zip(panels, LINKS, strict=True):
        for line in LINES:
            for row in timed(rows, line, mbit)[:1]:
                style = {"color": colors[line[0]], "ls": "-" if line[1] else "--"}
                axes.plot(row["seconds"], row["losses"], label=label(line), **style)
        plot_style.plain_log(axes.xaxis)
        axes.set(title=str(Link(mbit)), xlabel="seconds")
    panels[0].set_ylabel(f"training loss, mean of {WINDOW} steps")
    plot_style.legend(figure)


OPTIONS = {"method": str, "beta1": float, "steps": int, "seed": int, "rate": float}


def main(arguments: Sequence[str] = sys.argv[1:]) -> int:
    """Run the experiment, or be one of its workers."""
    if "--worker" not in arguments:
        check_privileges("Time to loss")
        return frame.main(EXPERIMENT)
    parser = argparse.ArgumentParser()
    for name, of in OPTIONS.items():
        parser.add_argument(f"--{name}", type=of)
    for name in ("data", "out"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--worker", action="store_true")
    options = parser.parse_args(arguments)
    options.out.write_text(json.dumps(work(options)))
    return 0


EXPERIMENT = Experiment(
    name="time_to_loss",
    about=f"""Two processes train a transformer of 1.04 million parameters on WikiText-2, whose rare
words are one. Each is in a network namespace, and a shaped link joins them. AdamW takes {STEPS:,}
steps of {BATCH} rows of {LENGTH} words a worker, at a rate that is constant after {WARM} steps.
*Loss* is the training loss, a mean over {WINDOW} steps and both workers. The *goal* is that of
plain DDP after {GOAL * STEPS:,.0f} steps, with the same seed; a run arrives when its loss is first
there. Seconds are the clock's, from the first step's beginning on, without compiling kernels. ± is
the standard deviation of three seeds, brackets are the 95 % interval of the mean ratio, paired by
seed (Student's t). The picture has the first seed.

β₁ is 0.9 unless a line says 0, which is what this library advises for sparsifiers and PowerSGD.
Each line has the best of the rates {", ".join(map(str, RATES))}, by the last loss of
another seed over a link as fast as the machine.

While most runs over 100 Mbit/s were timed, programs at idle priority used what the workers left of
the two cores. In a run of TopK this made steps about 5 % longer, in one of plain DDP at most 3 %;
other lines were not checked. Over 1 Gbit/s nothing else ran: eight runs beside such a program were
dropped and repeated, and had taken 1.01 to 1.18 times as long.""",
    cells=cells,
    train=train,
    page=page,
    claims=lambda rows: [],
    draw=draw,
    data="the folder of WikiText-2",
    before=before,
)

if __name__ == "__main__":
    sys.exit(main())
