"""Does the loss of compression grow with the model, or as training goes on?

    python benchmarks/papers/gap.py --data wikitext-2/
    python benchmarks/papers/gap.py --data wikitext-2/ --only size=0.5    # the smallest model

One dense trunk a model. Each method leaves it at three places, on the trunk's own data.
"""

from __future__ import annotations

import math
import statistics
import sys
from pathlib import Path

import frame
import tasks  # noqa: F401 - sets the path
import torch
from frame import Cell, Claim, Experiment, Row, interval, table
from matplotlib.figure import Figure
from scipy import stats  # type: ignore[import-untyped]
from text import columns, load
from torch import Tensor, nn
from transformer_runs import Exchanged, flat, give

from lightning_gc import QSGD, BinMeans, Cast, ChunkedTopK, PowerSGD, Quantised, TopK, TwoShot
from lightning_gc.compressors import Compressor
from lightning_gc.methods import plot_style
from lightning_gc.schemes import Scheme

SIZES = {0.5: (48, 2, 0.004), 2: (144, 3, 0.002), 9: (320, 5, 0.001)}
"""Million parameters -> width, blocks, learning rate."""
WORKERS, LENGTH, STEPS, PLACES, BRANCH = 16, 64, 1_500, (0.05, 0.3, 0.8), 0.1
WARM, FALL, DENSE, RECOMMENDED = 0.02, 0.9, "dense", "QSGD, 4 bits"
METHODS: dict[str, tuple[Compressor, Scheme | None]] = {
    "16 bits": (Cast("bfloat16"), None),
    RECOMMENDED: (QSGD(4), TwoShot()),
    "PowerSGD, rank 2": (PowerSGD(2), None),
    "Top-k 1 %": (TopK(0.01), None),
    "chunks and bins": (Quantised(ChunkedTopK(), BinMeans(2)), None),
}
RUNS = Path(__file__).parents[2] / "runs" / "gap"
ABOUT = f"""
Transformers of 0.5, 2 and 9 million parameters predict the words of WikiText-2; {WORKERS} simulated
workers take a row of {LENGTH} words each in a step, {STEPS:,} steps of AdamW with β₁ = 0.9, clipped
at 1. The rate climbs for {WARM:.0%} of the steps, stays, and falls to zero in the last tenth.

A method leaves the dense run after {", ".join(f"{place:.0%}" for place in PLACES)} of its steps,
with its weights and AdamW's moments. It trains for {BRANCH:.0%} of the run on the same batches, at
the trunk's rate. Its errors begin at zero. *Gap*: its training loss above the trunk's on the same
batches, a mean over the last half of the branch. A *slope* with the model's size is that of lines
through all branches, a parallel line for each place; a slope with the place has a line for each
size. Its 95 % interval is by Student's t, as if branches of one trunk were independent.
"""


class Words(nn.Module):
    """Pre-norm blocks, learnt positions, the embedding tied."""

    def __init__(self, words: int, width: int, blocks: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.places = nn.Parameter(torch.zeros(LENGTH, width))
        nn.init.normal_(self.embedding.weight, std=0.02)
        block = nn.TransformerEncoderLayer(
            width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        self.blocks = nn.TransformerEncoder(
            block, blocks, nn.LayerNorm(width), enable_nested_tensor=False
        )
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def forward(self, row: Tensor) -> Tensor:
        """Return the mean cross-entropy of the words that follow, of rows of ``LENGTH + 1``."""
        hidden = self.embedding(row[:, :-1]) + self.places
        hidden = self.blocks(hidden, self.mask, is_causal=True)
        logits = hidden @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), row[:, 1:].flatten())


class Run:
    """A model in training, from a step on.

    Args:
        cell: its size, seed and steps.
        data: the text.
    """

    def __init__(self, cell: Cell, data: Path | None) -> None:
        corpus = load(data, rare=20)
        torch.manual_seed(cell["seed"])
        width, blocks, self.rate = SIZES[cell["size"]]
        self.model, self.steps, self.step = (
            Words(len(corpus.words), width, blocks),
            cell["steps"],
            0,
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), self.rate)
        rows = columns(corpus.train, WORKERS)
        order = torch.randperm(WORKERS, generator=torch.Generator().manual_seed(cell["seed"]))
        self.text = rows[order]

    def train(self, exchange: Exchanged | None, steps: int) -> list[float]:
        """Make so many steps; return their losses, means over workers."""
        losses = []
        for _ in range(steps):
            start = self.step * LENGTH % (self.text.shape[1] - LENGTH - 1)
            piece = self.text[:, start : start + LENGTH + 1]
            if exchange is None:  # all rows at once, which is the mean over workers
                self.optimizer.zero_grad()
                loss = self.model(piece)
                loss.backward()
                losses.append(float(loss))
            else:
                own, flats = [], []
                for row in piece.split(1):
                    self.optimizer.zero_grad()
                    loss = self.model(row)
                    loss.backward()
                    own.append(float(loss))
                    flats.append(flat(self.model))
                give(self.model, exchange(self.step, flats))
                losses.append(statistics.fmean(own))
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            done = (self.step + 1) / self.steps
            for group in self.optimizer.param_groups:
                group["lr"] = self.rate * min(done / WARM, 1.0, max(1 - done, 0.0) / (1 - FALL))
            self.optimizer.step()
            self.step += 1
        return losses

    def exchange(self, method: str, seed: int) -> Exchanged:
        """Return simulated workers of a method, without errors yet."""
        shapes = {name: tuple(p.shape) for name, p in self.model.named_parameters()}
        compressor, scheme = METHODS[method]
        return Exchanged(compressor, None, scheme, shapes, WORKERS, seed)

    def save(self, path: Path) -> None:
        """Keep weights and moments."""
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save(whole, path)

    def restore(self, path: Path, step: int) -> None:
        """Take them up again."""
        whole = torch.load(path, weights_only=True)
        self.model.load_state_dict(whole["model"])
        self.optimizer.load_state_dict(whole["optimizer"])
        self.step = step


def _place(cell: Cell, at: float) -> tuple[Path, int]:
    name = f"{cell['size']}_{cell['steps']}_{cell['seed']}_{at}.pt"
    return RUNS / name, round(at * cell["steps"])


def cells(seeds: int) -> list[Cell]:
    """Return trunks, then branches, then complete runs of the recommended method."""
    found: list[Cell] = []
    for size in SIZES:
        for seed in range(seeds if size < max(SIZES) else 1):  # the largest takes hours
            kind = {"size": size, "steps": STEPS, "seed": seed}
            found.append({**kind, "method": DENSE, "at": 0.0})
            found += [{**kind, "method": m, "at": at} for at in PLACES for m in METHODS]
    kind = {"steps": STEPS, "seed": 0, "method": RECOMMENDED, "at": 0.0}
    return found + [{**kind, "size": size} for size in SIZES if size < max(SIZES)]


def before(cell: Cell) -> list[Cell]:
    """Return the trunk of a branch."""
    return [] if cell["method"] == DENSE else [{**cell, "method": DENSE, "at": 0.0}]


def train(cell: Cell, data: Path | None) -> Row:
    """Train a trunk, a branch, or a complete run; return its losses, by fiftieths of the run."""
    run, seed = Run(cell, data), cell["seed"]
    if cell["method"] == DENSE:
        losses: list[float] = []
        for at in PLACES:
            path, step = _place(cell, at)
            losses += run.train(None, step - run.step)
            run.save(path)
        losses += run.train(None, run.steps - run.step)
        return {"loss": statistics.fmean(losses[-run.steps // 50 :]), "losses": _rounded(losses)}
    exchange, steps = run.exchange(cell["method"], seed), run.steps
    if cell["at"]:
        run.restore(*_place(cell, cell["at"]))
        steps = round(BRANCH * run.steps)
    start = run.step
    losses = run.train(exchange, steps)
    trunk = cell["before"][0]["losses"][start : start + steps]
    apart = [a - b for a, b in zip(losses, trunk, strict=True)][
        steps // 2 if cell["at"] else -steps // 50 :
    ]
    return {"loss": statistics.fmean(apart), "losses": _rounded(losses)}


def _rounded(losses: list[float]) -> list[float]:
    return [round(loss, 4) for loss in losses]


def gaps(rows: list[Row], method: str, **kind: float) -> list[float]:
    """Return the gaps of a method's branches, one a seed."""
    return [row["loss"] for row in frame.where(rows, method=method, **kind)]


Point = tuple[float, float, float]
"""Place on an axis, gap, and the group whose line it belongs to."""


def _slope(points: list[Point]) -> tuple[float, float, float]:
    """Return the slope of parallel lines, one a group, and its 95 % interval."""
    groups: dict[float, list[tuple[float, float]]] = {}
    for x, y, group in points:
        groups.setdefault(group, []).append((x, y))
    apart = []  # from the mean of each group
    for each in groups.values():
        at, gap = (statistics.fmean(values) for values in zip(*each, strict=True))
        apart += [(x - at, y - gap) for x, y in each]
    square = sum(x * x for x, _ in apart)
    slope = sum(x * y for x, y in apart) / square
    free = len(points) - len(groups) - 1
    error = math.sqrt(sum((y - slope * x) ** 2 for x, y in apart) / free / square)
    reach = float(stats.t.ppf(0.975, free)) * error
    return slope, slope - reach, slope + reach


def _points(rows: list[Row], method: str, by: str) -> list[Point]:
    branches = [row for row in frame.where(rows, method=method) if row["at"]]
    if by == "size":
        return [(math.log2(row["size"]), row["loss"], row["at"]) for row in branches]
    return [(row["at"], row["loss"], row["size"]) for row in branches]


def page(rows: list[Row]) -> str:
    """Return the gaps by size and place, and their slopes."""
    lines = []
    for method in METHODS:
        cells = []
        for size in SIZES:
            for at in PLACES:
                found = gaps(rows, method, size=size, at=at)
                cells.append(_of(found))
        lines.append([method, *cells])
    head = ["gap, nats", *(f"{size} M, {at:.0%}" for size in SIZES for at in PLACES)]
    text = table(head, lines) + "\n"
    lines = []
    for method in METHODS:
        line = [method]
        for by, unit in (("size", 1.0), ("at", 0.1)):
            points = _points(rows, method, by)
            if len({x for x, *_ in points}) > 2:
                slope, low, high = (unit * each for each in _slope(points))
                line.append(f"{slope:+.4f} ({low:+.4f} to {high:+.4f})")
            else:
                line.append("–")
        lines.append(line)
    text += table(["slope", "nats for twice the size", "nats for a tenth of the run"], lines) + "\n"
    full = {size: gaps(rows, RECOMMENDED, size=size, at=0.0) for size in SIZES}
    lines = [[f"{size} M", f"{found[0]:+.4f}"] for size, found in full.items() if found]
    return text + table([f"{RECOMMENDED}, from the first step to the end", "gap"], lines) + "\n"


def _of(found: list[float]) -> str:
    if len(found) < 2:
        return f"{found[0]:+.3f}" if found else "–"
    low, high = interval(found)
    return f"{statistics.fmean(found):+.3f} ({low:+.3f} to {high:+.3f})"


def claims(rows: list[Row]) -> list[Claim]:
    """Say whether a gap grows with the model, and as training goes on."""
    found = []
    for method in METHODS:
        for by, what in (("size", "a larger model"), ("at", "later in training")):
            points = _points(rows, method, by)
            if len({x for x, *_ in points}) > 2:
                slope, low, high = _slope(points)
                said = "grows" if low > 0 else "shrinks" if high < 0 else "cannot be told"
                text = f"{method}: the gap with {what}"
                found.append(Claim(text, "", f"{slope:+.4f} ({low:+.4f} to {high:+.4f})", said))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw gaps by size, and by place."""
    left, right = figure.subplots(1, 2, sharey=True)
    for color, method in zip(plot_style.SERIES, METHODS, strict=False):
        for axes, by, values in ((left, "size", tuple(SIZES)), (right, "at", PLACES)):
            branches = [row for row in frame.where(rows, method=method) if row["at"]]
            mean = {
                x: statistics.fmean(own)
                for x in values
                if (own := [row["loss"] for row in branches if row[by] == x])
            }
            label = method if axes is left else None
            axes.plot(list(mean), list(mean.values()), "o-", color=color, label=label)
    left.set(xlabel="million parameters", ylabel="gap to dense, nats", xscale="log")
    left.set_xticks(list(SIZES), [str(size) for size in SIZES])
    left.minorticks_off()
    right.set(xlabel="share of the run")
    plot_style.legend(figure)


EXPERIMENT = Experiment(
    name="gap",
    about=ABOUT,
    cells=cells,
    train=train,
    page=page,
    claims=claims,
    draw=draw,
    data="the folder of WikiText-2",
    before=before,
)

if __name__ == "__main__":
    sys.exit(frame.main(EXPERIMENT))
