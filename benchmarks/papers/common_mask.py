"""Masks that many workers agree on by something small, beside random masks and beside quantisers.

    python benchmarks/papers/common_mask.py
    python benchmarks/papers/common_mask.py --only optimizer="AdamW, β₁ = 0.9" --only workers=16

At equal bytes, with controls: a random mask, and the mask of the true mean, which nobody can build.
"""

from __future__ import annotations

import functools
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import frame
import optimizers
import torch
import transformer_runs
import tuned_rate
from frame import Cell, Claim, Experiment, Row, interval, spread, table, values
from matplotlib.figure import Figure
from text import columns
from torch import Tensor, nn
from transformer import Transformer, Worker

from lightning_gc import (
    QSGD,
    BinMeans,
    ChunkedTopK,
    PowerSGD,
    Quantised,
    RandomMask,
    SparseReduce,
    TopK,
    TwoShot,
)
from lightning_gc.advice import traces
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.core import elias_fano
from lightning_gc.methods import plot_style
from lightning_gc.schemes import Scheme

ROWS, STEPS, LONG, CHUNK, DENSE = 64, 160, 640, 64, "dense"
RATES = (0.0015, 0.003, 0.006, 0.012, 0.024)
HIGHER = (*(4 * rate for rate in RATES), 8 * RATES[-1])  # of the LSTM, and of Muon
SIZES, SHARES, USUAL = (8, 16, 64), (8, 16, 32), 16


class Recurrent(nn.Module):
    """An LSTM of 128 units that predicts words; the embedding is tied."""

    def __init__(self, words: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, 128)
        self.lstm = nn.LSTM(128, 128, batch_first=True)
        nn.init.normal_(self.embedding.weight, std=0.05)

    def forward(self, words: Tensor, following: Tensor) -> Tensor:
        """Return the mean cross-entropy of the words that follow."""
        hidden, _ = self.lstm(self.embedding(words))
        logits = hidden @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), following.flatten())


Exchange = Callable[[int, Sequence[Tensor]], Tensor]
MODELS: dict[str, Callable[[int], nn.Module]] = {"transformer": Transformer, "lstm": Recurrent}
OPTIMIZERS = {"AdamW, β₁ = 0.9": 0.9, "AdamW, β₁ = 0": 0.0, "Muon": None}


def rates(cell: Cell) -> tuple[float, ...]:
    """Return the learning rates that a cell's model and optimizer are tried with."""
    usual = cell["model"] == "transformer" and OPTIMIZERS[cell["optimizer"]] is not None
    return RATES if usual else HIGHER


@dataclass(frozen=True)
class Step:
    """What a mask is chosen from.

    Attributes:
        summed: gradients and errors of all workers in one tensor, ``(W, numel)``.
        leader: of this tensor and step.
        shape: of the tensor.
        count: elements to choose.
        generator: the same for all workers.
    """

    summed: Tensor
    leader: int
    shape: tuple[int, ...]
    count: int
    generator: torch.Generator


def _random(step: Step) -> Tensor:
    return torch.randperm(step.summed.shape[1], generator=step.generator)[: step.count]


def _leader(step: Step) -> Tensor:
    return step.summed[step.leader].abs().topk(step.count).indices


def _owners(step: Step) -> Tensor:
    """Each worker chooses chunks of 64 elements in its own part, by their energies."""
    workers, numel = step.summed.shape
    pieces = math.ceil(numel / CHUNK)
    padded = nn.functional.pad(step.summed, (0, pieces * CHUNK - numel))
    energies = padded.view(workers, pieces, CHUNK).square().sum(2)
    owner = (torch.arange(pieces) * workers // pieces + step.leader) % workers
    seen = energies.gather(0, owner[None])[0]
    chosen = seen.topk(max(1, round(step.count / CHUNK))).indices
    places = (chosen[:, None] * CHUNK + torch.arange(CHUNK)).flatten()
    return places[places < numel]


def _rows(step: Step) -> Tensor:
    """Rows with the largest of an all-reduced random sketch, one number a row and worker."""
    rows = step.shape[0]
    width = step.summed.shape[1] // rows
    signs = torch.randn(width, generator=step.generator)
    sketch = (step.summed.mean(0).view(rows, width) @ signs).abs()
    chosen = sketch.topk(max(1, round(step.count / width))).indices
    return (chosen[:, None] * width + torch.arange(width)).flatten()


def _oracle(step: Step) -> Tensor:
    return step.summed.mean(0).abs().topk(step.count).indices


def _positions(chosen: int, numel: int, shape: tuple[int, ...]) -> float:
    return elias_fano.coded_bytes(chosen, numel)


def _of_chunks(chosen: int, numel: int, shape: tuple[int, ...]) -> float:
    return elias_fano.coded_bytes(max(1, chosen // CHUNK), math.ceil(numel / CHUNK))


def _sketch(chosen: int, numel: int, shape: tuple[int, ...]) -> float:
    return 2 * 4.0 * shape[0]  # in an all-reduce


def _nothing(chosen: int, numel: int, shape: tuple[int, ...]) -> float:
    return 0.0


@dataclass(frozen=True)
class Mask:
    """A mask that all workers have, and how values under it travel.

    Attributes:
        choose: the positions.
        agree: bytes that a worker receives until all have the mask.
        value_bits: 32, 16 (rounded to bfloat16 before and after the sum) or 4 (QSGD, two-shot).
        momentum: of gradients, before they are compressed, beside the optimizer's own; positions
            that were sent are masked in it, as Deep Gradient Compression does.
        decay: what stays of an error in a step.
        dense: share of the steps, at the beginning, that are not compressed.
    """

    choose: Callable[[Step], Tensor]
    agree: Callable[[int, int, tuple[int, ...]], float]
    value_bits: int = 16
    momentum: float = 0.0
    decay: float = 1.0
    dense: float = 0.0

    def bytes(self, density: float, shapes: traces.Shapes, workers: int) -> float:
        """Return bytes that a worker receives in a step."""
        ring, total = 2 * (workers - 1) / workers, 0.0
        for shape in shapes.values():
            numel = math.prod(shape)
            if not _is_compressed(shape):
                total += ring * 4 * numel
                continue
            chosen = max(1, round(density * numel))
            total += ring * chosen * self.value_bits / 8 + self.agree(chosen, numel, shape)
        return total


LEADER = Mask(_leader, _positions)
MASKS = {
    "random mask, 32 bits": Mask(_random, _nothing, 32),
    "random mask, 16 bits": Mask(_random, _nothing),
    "one leader, 16 bits": LEADER,
    "one leader, 4 bits": replace(LEADER, value_bits=4),
    "owners by chunks, 16 bits": Mask(_owners, _of_chunks),
    "rows by a sketch, 16 bits": Mask(_rows, _sketch),
    "mask of the mean, 16 bits": Mask(_oracle, _positions),
}
RECIPES = {
    "leader, momentum before": replace(LEADER, momentum=0.9),
    "leader, errors decay": replace(LEADER, decay=0.9),
    "leader, dense for 20 %": replace(LEADER, dense=0.2),
}
LATE = ", β₁ = 0.9 from the half on"
"""Ends the name of an arm under AdamW, whose β₁ is 0 before."""
LATER = (DENSE, "one leader, 16 bits", "TopK", "chunks and bins", "PowerSGD", "QSGD, two-shot")
PRODUCTS: dict[str, tuple[Compressor, Scheme | None]] = {
    "QSGD, two-shot": (QSGD(4), TwoShot()),
    "TopK": (TopK(0.01), None),
    "TopK, SparseReduce": (TopK(0.01), SparseReduce()),
    "chunks and bins": (Quantised(ChunkedTopK(), BinMeans(2)), None),
    "PowerSGD": (PowerSGD(2), None),
    "RandomMask": (RandomMask(0.1), None),
}
ABOUT = f"""
Simulated workers train a transformer (two layers, 64 wide) and an LSTM (128 units) on Python's
documentation, with {ROWS} rows a step in all, so that dense training is the same for any number of
workers. {STEPS} steps ({LONG} where a table says so), clipped at 1. The rate is warmed up over 5 %
and falls to zero in a cosine.

A table is for *1/8*, *1/16* or *1/32* of the bytes that a worker receives in a dense all-reduce of
32 bits: a quarter, an eighth and a sixteenth of 16 bits. Each line has the highest level that fits,
or its lowest one; *of the share* is what it receives. Masks
are common to all workers, and values under them are averaged; what is outside stays as each
worker's error. A *leader*, another worker for each tensor and step, chooses its largest elements
(CLT-k of ScaleCom). *Owners* choose chunks of {CHUNK} elements, each in its part. *Rows* have the
largest numbers in an all-reduced random sketch (after ARC-Top-K). *The mask of the mean* cannot be
built without its bytes: a bound. Values are rounded before and after the sum; to 4 bits at random.
Methods of the library run as they are.

Each line has the best rate of {", ".join(map(str, RATES))} with the first seed, by {USUAL} workers.
The LSTM and Muon have {", ".join(map(str, HIGHER))}.
*Gap*: the loss above that of dense training, with the 95 % interval (Student's t, paired by seed).
"""


def _is_compressed(shape: tuple[int, ...]) -> bool:
    return len(shape) > 1 and math.prod(shape) >= MIN_NUMEL


@functools.cache
def _shapes(model: str) -> dict[str, tuple[int, ...]]:
    made = MODELS[model](len(transformer_runs._corpus().words))
    return {name: tuple(param.shape) for name, param in made.named_parameters()}


def _bisect(fits: Callable[[float], bool], low: float, high: float, whole: bool) -> float:
    """Return the highest level that fits, or the lowest."""
    for _ in range(14):
        middle = (low + high) / 2 if whole else (low * high) ** 0.5
        middle = round(middle) if whole else middle
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _most(model: str, workers: int, share: int) -> float:
    """Return a share of the bytes that a worker receives in a dense all-reduce."""
    numel = sum(map(math.prod, _shapes(model).values()))
    return 2 * (workers - 1) / workers * 4 * numel / share


@functools.cache
def received(arm: str, model: str, workers: int, at: float) -> float:
    """Return the bytes that a worker receives in a step at a density, bits or rank."""
    arm, shapes = arm.removesuffix(LATE), _shapes(model)
    if (mask := (MASKS | RECIPES).get(arm)) is not None:
        return mask.bytes(at, shapes, workers)
    compressor, scheme = PRODUCTS[arm]
    whole = compressor.knob is not None and compressor.knob.integer
    return traces.trace(
        compressor.at(round(at) if whole else at), scheme, shapes, workers, 1
    ).nbytes


@functools.cache
def level(arm: str, model: str, workers: int, share: int) -> float:
    """Return the highest density, bits or rank that fits a share of dense bytes, or the lowest."""

    def fits(at: float) -> bool:
        return received(arm, model, workers, at) <= 1.02 * _most(model, workers, share)

    if arm in MASKS | RECIPES:
        return _bisect(fits, 1e-4, 1.0, whole=False)
    knob = PRODUCTS[arm][0].knob
    assert knob is not None
    return _bisect(fits, float(knob.low), float(knob.high), whole=bool(knob.integer))


FEW = ("random mask, 16 bits", "one leader, 16 bits", "mask of the mean, 16 bits")
QUICK = ("PowerSGD", "chunks and bins")


def cells(seeds: int) -> list[Cell]:
    """Return what decides first: AdamW as users have it, by the usual number of workers."""
    adam, *others = OPTIMIZERS
    kinds: list[tuple[str, int, int, str, str, int]] = []

    def add(arms: Iterable[str], workers: int, shares: tuple[int, ...], *given: str) -> None:
        for optimizer, share, model, arm in itertools.product(given, shares, MODELS, arms):
            kinds.append((arm, workers, share, model, optimizer, STEPS))

    add([DENSE], USUAL, (1,), *OPTIMIZERS)
    add([*MASKS, *PRODUCTS], USUAL, (16, 8), adam)
    add([*RECIPES, *(arm + LATE for arm in LATER)], USUAL, (16,), adam)
    at_usual = len(kinds)
    for workers in (size for size in SIZES if size != USUAL):  # at the usual number's rates
        add([*FEW, "rows by a sketch, 16 bits", *QUICK], workers, (8, 16), adam)
    add(["QSGD, two-shot"], min(SIZES), (8,), adam)
    kinds.append(("QSGD, two-shot", max(SIZES), 8, "transformer", adam, STEPS))  # slow, simulated
    others_at_usual = len(kinds)
    add([*FEW, *QUICK, "QSGD, two-shot"], USUAL, (8, 16), *others)
    for arm, share in ((DENSE, 1), *((each, 16) for each in FEW), ("QSGD, two-shot", 8)):
        kinds.append((arm, USUAL, share, "transformer", adam, LONG))
    fitting = (arm for arm in PRODUCTS if arm != "QSGD, two-shot")  # 2 bits are twice too much
    add([*MASKS, *fitting], USUAL, (32,), adam)
    names = ("arm", "workers", "share", "model", "optimizer", "steps")
    found = []
    for number, kind in enumerate(kinds):
        cell = dict(zip(names, kind, strict=True))
        tuned = at_usual <= number < others_at_usual
        for seed in range(seeds):
            tried = (tuned_rate.TUNED,) if seed or tuned else rates(cell)
            found += [{**cell, "rate": rate, "seed": seed} for rate in tried]
    return found


def before(cell: Cell) -> list[Cell]:
    """Return the runs that choose a cell's rate."""
    return tuned_rate.trials({**cell, "workers": USUAL}, rates(cell))


def train(cell: Cell, data: Path | None) -> Row:
    """Train once."""
    corpus, model, workers = transformer_runs._corpus(), cell["model"], cell["workers"]
    torch.manual_seed(cell["seed"])
    net = MODELS[model](len(corpus.words))
    beta, make = OPTIMIZERS[cell["optimizer"]], None
    if beta is None:
        make = functools.partial(optimizers.muon, 0.95)
    rows = columns(corpus.train, ROWS)
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(cell["seed"]))
    steps = cell["steps"]
    worker = Worker(net, tuned_rate.rate(cell), steps, rows, beta or 0.0, make)  # type: ignore[arg-type]
    shares = rows[order].split(ROWS // workers)
    at = None
    exchange: Exchange = lambda step, own: torch.stack(list(own)).mean(0)  # noqa: E731
    arm, late = cell["arm"].removesuffix(LATE), cell["arm"].endswith(LATE)
    if arm != DENSE:
        at = level(arm, model, workers, cell["share"])
        exchange = (_Masked if arm in MASKS | RECIPES else _product)({**cell, "arm": arm}, at)
    for step in range(steps):
        gradients = []
        for worker.text in shares:
            worker.backward(step)
            gradients.append(transformer_runs.flat(net))
        transformer_runs.give(net, exchange(step, gradients))
        if late:
            for group in worker.optimizer.param_groups:
                group["betas"] = (0.0 if step < steps / 2 else 0.9, 0.999)
        worker.step()
    return {"loss": worker.evaluate(corpus.valid), "at": at}


def _product(cell: Cell, at: float) -> Exchange:
    compressor, scheme = PRODUCTS[cell["arm"]]
    at = round(at) if compressor.knob is not None and compressor.knob.integer else at
    shapes, workers = _shapes(cell["model"]), cell["workers"]
    return transformer_runs.Exchanged(
        compressor.at(at), None, scheme, shapes, workers, cell["seed"]
    )


class _Masked:
    """Averages values under a common mask; the rest stays as errors of the workers."""

    def __init__(self, cell: Cell, density: float) -> None:
        self._mask, self._density = (MASKS | RECIPES)[cell["arm"]], density
        self._shapes, self._steps = _shapes(cell["model"]), cell["steps"]
        self._generator = torch.Generator().manual_seed(cell["seed"])
        self._errors: Tensor | None = None
        self._moments: Tensor | None = None

    def __call__(self, step: int, gradients: Sequence[Tensor]) -> Tensor:
        mask, own = self._mask, torch.stack(list(gradients))
        if step < mask.dense * self._steps:
            return own.mean(0)
        if self._errors is None:
            self._errors, self._moments = torch.zeros_like(own), torch.zeros_like(own)
        assert self._moments is not None
        if mask.momentum:
            self._moments.mul_(mask.momentum).add_(own)
            own = self._moments.clone()
        own = own + self._errors
        mean, start = own.mean(0), 0
        for index, shape in enumerate(self._shapes.values()):
            numel = math.prod(shape)
            here, start = slice(start, start + numel), start + numel
            part = own[:, here]
            if not _is_compressed(shape):
                part.zero_()
                continue
            count, leader = max(1, round(self._density * numel)), (index + step) % len(own)
            places = mask.choose(Step(part, leader, shape, count, self._generator))
            sent = self._rounded(part[:, places])
            common = sent.mean(0)
            mean[here] = 0
            mean[here][places] = self._rounded(common[None])[0]
            part[:, places] -= sent
            if mask.momentum:
                self._moments[:, here][:, places] = 0
        self._errors = own * mask.decay
        return mean

    def _rounded(self, part: Tensor) -> Tensor:
        """Return what arrives of values."""
        bits = self._mask.value_bits
        if bits == 16:
            return part.bfloat16().float()
        if bits == 32:
            return part
        largest, steps = part.abs().amax(1, keepdim=True), 2 ** (bits - 1) - 1
        unit = (largest / steps).clamp_min(1e-30)
        noise = torch.rand(part.shape, generator=self._generator)
        return (part / unit + noise).floor().clamp(-steps, steps) * unit


def _lines(rows: list[Row]) -> dict[tuple[str, str, int, int, int], dict[str, list[Row]]]:
    """Return (model, optimizer, workers, share, steps) -> arm -> runs at its rate."""
    found: dict[tuple[str, str, int, int, int], dict[str, list[Row]]] = {}
    for model, optimizer, workers, share, steps in itertools.product(
        MODELS, OPTIMIZERS, SIZES, SHARES, (STEPS, LONG)
    ):
        kind = {"model": model, "optimizer": optimizer, "workers": workers, "share": share}
        kind["steps"] = steps
        runs = {
            arm: tuned_rate.runs(rows, arm=arm, **kind)
            if workers == USUAL
            else frame.where(rows, arm=arm, rate=tuned_rate.TUNED, **kind)
            for arm in (*MASKS, *PRODUCTS, *RECIPES, *(each + LATE for each in LATER))
        }
        if kept := {arm: each for arm, each in runs.items() if each}:
            found[model, optimizer, workers, share, steps] = kept
    return found


def _dense(rows: list[Row], model: str, optimizer: str, steps: int = STEPS) -> list[Row]:
    return tuned_rate.runs(rows, model=model, optimizer=optimizer, arm=DENSE, steps=steps)


def _apart(runs: list[Row], others: list[Row]) -> list[float]:
    """Return the differences of the losses of those seeds that both have."""
    known = {row["seed"]: row["loss"] for row in others}
    both = [(row["loss"], known.get(row["seed"])) for row in runs]
    return [a - b for a, b in both if a is not None and b is not None]


def _interval(apart: list[float]) -> str:
    if len(apart) < 2:
        return f"{apart[0]:+.3f}, one seed" if apart else "diverged"
    low, high = interval(apart)
    return f"{statistics.fmean(apart):+.3f} ({low:+.3f} to {high:+.3f})"


def page(rows: list[Row]) -> str:
    """Return a table for each model, optimizer, number of workers and share of the bytes."""
    text = ""
    for (model, optimizer, workers, share, steps), arms in _lines(rows).items():
        dense = _dense(rows, model, optimizer, steps)
        if not dense:
            continue
        lines = [[DENSE, spread(values(dense, "loss"), ".3f"), "", _rate(dense[0]), "–", ""]]
        for arm, runs in arms.items():
            gap = _interval(_apart(runs, dense))
            at = of = "–"
            if (found := runs[0]["at"]) is not None:
                at = f"{found:.3g}"
                of = f"{received(arm, model, workers, found) / _most(model, workers, share):.2f}"
            if arm.endswith(LATE):  # beside dense training with the same β₁
                control = arms.get(DENSE + LATE, [])
                gap += f", beside the same β₁ {_interval(_apart(runs, control))}"
            loss = spread(values(runs, "loss"), ".3f")
            lines.append([arm, loss, gap, _rate(runs[0]), at, of])
        head = ["exchange", "loss", "gap (95 %)", "rate", "level", "of the share"]
        text += (
            f"**{model}, {optimizer}, W = {workers}, {steps} steps, 1/{share} of dense bytes**\n\n"
        )
        text += f"{table(head, lines)}\n"
    return text


def _rate(run: Row) -> str:
    if run["rate"] == tuned_rate.TUNED:
        return f"as W = {USUAL}"
    edge = " (edge)" if tuned_rate.is_edge(run, rates(run)) else ""
    return f"{run['rate']}{edge}"


def claims(rows: list[Row]) -> list[Claim]:
    """Hold a leader's mask to QSGD at twice its bytes, and to random masks at its own."""
    found, lines = [], _lines(rows)
    for (model, optimizer, workers, share, steps), arms in lines.items():
        leader, bound = (arms.get(each) for each in FEW[1:])
        rivals = {
            "QSGD at twice the bytes": (share // 2, "QSGD, two-shot"),
            "a random mask": (share, "random mask, 16 bits"),
        }
        for name, (rival_share, rival) in rivals.items():
            other = lines.get((model, optimizer, workers, rival_share, steps), {}).get(rival)
            for ours, runs in (("a leader", leader), ("the mean's mask", bound)):
                if runs and other and len(apart := _apart(runs, other)) > 1:
                    low, high = interval(apart)
                    verdict = "yes" if high < 0 else "no" if low > 0 else "cannot be told"
                    text = f"{model}, {optimizer}, W = {workers}, {steps} steps: {ours}"
                    text += f" at 1/{share} before {name}"
                    found.append(Claim(text, "", _interval(apart), verdict))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw loss against bytes, a line a method, for each model and number of workers."""
    lines, optimizer = _lines(rows), next(iter(OPTIMIZERS))
    figure.set_size_inches(plot_style.WIDTH, 6.6)
    panels = figure.subplots(len(MODELS), len(SIZES), sharex=True, sharey="row", squeeze=False)
    looks = list(zip(plot_style.SERIES, plot_style.MARKERS, strict=True))
    for (model, size), axes in zip(itertools.product(MODELS, SIZES), panels.flat, strict=True):
        for number, arm in enumerate((*MASKS, *PRODUCTS)):
            known = {s: lines.get((model, optimizer, size, s, STEPS), {}).get(arm) for s in SHARES}
            losses = {s: statistics.fmean(values(r, "loss")) for s, r in known.items() if r}
            color, marker = looks[number % len(looks)]
            style = {"color": color, "marker": marker, "ms": 4, "lw": 1}
            style["ls"] = "-" if number < len(looks) else ":"
            if losses:
                axes.plot(list(losses), list(losses.values()), label=arm, **style)
        if dense := _dense(rows, model, optimizer):
            axes.axhline(statistics.fmean(values(dense, "loss")), color=plot_style.DENSE, lw=0.8)
        axes.set_title(f"{model}, W = {size}", fontsize=9)
        axes.set_xscale("log", base=2)
        axes.set_xticks(SHARES, [str(share) for share in SHARES])
    for row in panels:
        row[0].set_ylabel("loss")
    for axes in panels[-1]:
        axes.set_xlabel("times fewer bytes")
    plot_style.legend(figure)


if __name__ == "__main__":
    sys.exit(
        frame.main(
            Experiment("common_mask", ABOUT, cells, train, page, claims, draw, before=before)
        )
    )
