"""Whether one mask for all workers sends more of what matters than ``TopK``, at equal bytes.

    python benchmarks/papers/shared_mask.py

Eight workers, an AdamW with and without momentum, and Muon. The method is not a part of the
library: it is defined here, and its page says whether it should be.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path

import frame
import optimizers
import torch
import tuned_rate
from frame import Cell, Claim, Experiment, Row, spread, table, values
from matplotlib.figure import Figure
from torch import Tensor
from transformer_runs import Arm, run

from lightning_gc import Identity, TopK
from lightning_gc.compressors.base import Collective, Contraction
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.compressors.sparsifiers.topk_selection import DensitySparsifier
from lightning_gc.core import Bucket, Field, Flow, Gather, Mean, Wire, elias_fano
from lightning_gc.methods import plot_style

WORKERS, DENSE = 8, "dense"
BY_MOMENT = "SharedTopK(0.044), by moment"


@dataclass(frozen=True)
class SharedTopK(DensitySparsifier, Collective):
    """Average k elements under one mask, to which each worker contributes a share.

    A tensor is cut into W shards of equal length. The owner of a shard takes its k/W elements of
    greatest magnitude, by its own gradient and error. All positions are gathered, and the values of
    all workers at all positions are averaged by an all-reduce. Owners rotate by step, so that each
    worker's view decides on each shard once in W steps. What is outside of the mask stays as error.

    Args:
        density: k over the number of elements.
        by_moment: an owner takes the greatest of its running means of gradients, m ← β·m + (1−β)·g
            with β = 0.9, in place of those of gradient and error; as SCAPE does, without its delay.

    Communication pattern:
        One all-gather of k/W coded positions, then one all-reduce of k values.
    """

    by_moment: bool = False

    def rounds(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange positions, then values."""
        numel, workers = buffer.numel(), bucket.workers
        k = self.count(numel)
        cuts = [numel * i // workers for i in range(workers + 1)]
        sizes = [b - a for a, b in itertools.pairwise(cuts)]
        shares = [min(k * (i + 1) // workers - k * i // workers, sizes[i]) for i in range(workers)]
        owned = [(worker + bucket.step) % workers for worker in range(workers)]
        mine = owned[bucket.worker]
        scores = self._moment(bucket) if self.by_moment else buffer
        chosen = topk_selection.largest(scores[cuts[mine] : cuts[mine + 1]], shares[mine])
        code = elias_fano.encode(chosen, sizes[mine])
        lengths = [[elias_fano.coded_bytes(shares[i], sizes[i])] for i in owned]
        most = max(length for (length,) in lengths)
        arrived = yield Gather((code,), (most,), lengths)
        places = [
            cuts[i] + self._decoded(payload[0], shares[i], sizes[i])
            for i, payload in zip(owned, arrived, strict=True)
            if shares[i]
        ]
        mask = torch.cat(places) if places else chosen
        sent = buffer[mask]
        buffer[mask] = 0
        bucket.tally.count(numel, mask.numel(), (sent, code))
        (mean,) = yield Mean((sent,))
        out.zero_()
        out[mask] = mean.to(out.dtype)

    def _moment(self, bucket: Bucket) -> Tensor:
        (state,) = bucket.state.values()
        kept = state.get("moment")
        moment: Tensor = bucket.grad.clone() if kept is None else kept.lerp(bucket.grad, 0.1)
        state["moment"] = moment
        return moment

    def _decoded(self, code: Tensor, count: int, size: int) -> Tensor:
        return elias_fano.decode(code, count, size)

    def bound(self, numel: int) -> Contraction:
        """Return the weakest bound: owners do not see what is large elsewhere."""
        return Contraction(0.0)

    def wire(self, numel: int) -> Wire:
        """Return positions of a shard, and the values of all."""
        k = self.count(numel)
        most = elias_fano.most_bytes(numel)
        positions = Field("positions", torch.uint8, most, "step", "Elias-Fano, of a shard")
        return positions, Field("values", torch.float32, k)


@dataclass(frozen=True)
class DecodedOnce(SharedTopK):
    """``SharedTopK`` of simulated workers that decode a message once among them."""

    def _decoded(self, code: Tensor, count: int, size: int) -> Tensor:
        return _decode(code.numpy().tobytes(), count, size)


@functools.lru_cache(maxsize=4096)
def _decode(code: bytes, count: int, size: int) -> Tensor:
    return elias_fano.decode(torch.frombuffer(bytearray(code), dtype=torch.uint8), count, size)


ARMS = {
    DENSE: Arm(Identity()),
    "TopK(0.01)": Arm(TopK(0.01)),
    "TopK(0.003)": Arm(TopK(0.003)),
    "SharedTopK(0.044)": Arm(DecodedOnce(0.044)),
    "SharedTopK(0.013)": Arm(DecodedOnce(0.013)),
    BY_MOMENT: Arm(DecodedOnce(0.044, by_moment=True)),
}
PAIRS = {"TopK(0.01)": "SharedTopK(0.044)", "TopK(0.003)": "SharedTopK(0.013)"}
"""Methods with about equal bytes among eight workers."""
RIVALS = {shared: topk for topk, shared in PAIRS.items()} | {BY_MOMENT: "TopK(0.01)"}
OPTIMIZERS = {"AdamW, β₁ = 0.9": 0.9, "AdamW, β₁ = 0": 0.0, "Muon": None}
RATES = (0.0015, 0.003, 0.006, 0.012)
ABOUT = """
Eight workers train the transformer of the page on Adam for 640 steps. `TopK` sends its own k
elements to seven others. `SharedTopK` cuts each parameter into eight shards. The owner of a shard,
another one in each step, takes its greatest elements; all workers average their values under the
common mask. *By moment*, with one seed: owners take the greatest of their running means of
gradients (β = 0.9). *Gap*: the mean loss less that of dense gradients with the same optimizer;
*share*: the gap over that of `TopK` with about as many bytes. Every line is at its own learning
rate, the best of four with the first seed.
"""


def cells(seeds: int) -> list[Cell]:
    """Return all arms under each optimizer; of masks by moments one seed."""
    found = []
    for arm in ARMS:
        kinds = [{"arm": arm, "workers": WORKERS, "optimizer": each} for each in OPTIMIZERS]
        found += tuned_rate.cells(kinds, RATES, 1 if arm == BY_MOMENT else seeds)
    return found


def train(cell: Cell, data: Path | None) -> Row:
    """Run one cell."""
    momentum = OPTIMIZERS[cell["optimizer"]]
    arm = ARMS[cell["arm"]]
    if momentum is None:
        arm = dataclasses.replace(arm, make=functools.partial(optimizers.muon, 0.95))
    else:
        arm = dataclasses.replace(arm, momentum=momentum)
    rate, steps, seed = tuned_rate.rate(cell), cell["steps"], cell["seed"]
    return run(arm, cell["workers"], rate=rate, steps=steps, seed=seed)


def _kinds(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    found = {
        (optimizer, arm): tuned_rate.runs(rows, optimizer=optimizer, arm=arm)
        for optimizer in OPTIMIZERS
        for arm in ARMS
    }
    return {kind: runs for kind, runs in found.items() if runs}


def _gap(
    kinds: dict[tuple[str, str], list[Row]], optimizer: str, arm: str, seeds: int = 3
) -> float:
    """Return the mean loss of the first seeds above that of dense gradients."""
    dense, ours = (values(kinds[optimizer, each], "loss")[:seeds] for each in (DENSE, arm))
    return statistics.fmean(ours) - statistics.fmean(dense)


def page(rows: list[Row]) -> str:
    """Return losses and gaps."""
    kinds, lines = _kinds(rows), []
    for (optimizer, arm), runs in kinds.items():
        dense = kinds.get((optimizer, DENSE))
        if dense is None:
            continue
        other = RIVALS.get(arm)
        share = ""
        if other is not None and (optimizer, other) in kinds:
            both = [_gap(kinds, optimizer, each, len(runs)) for each in (arm, other)]
            share = f"{both[0] / both[1]:.0%}"
        edge = " (edge)" if tuned_rate.is_edge(runs[0], RATES) else ""
        gap = "" if arm == DENSE else f"{_gap(kinds, optimizer, arm, len(runs)):+.3f}"
        losses = spread(values(runs, "loss"), ".3f")
        ratio = f"{dense[0]['bytes'] / runs[0]['bytes']:.1f}"
        lines.append([optimizer, arm, losses, f"{runs[0]['rate']:g}{edge}", ratio, gap, share])
    head = ["optimizer", "sent", "loss", "best rate", "times fewer bytes", "gap", "share"]
    return table(head, lines)


def claims(rows: list[Row]) -> list[Claim]:
    """Hold the method to three quarters of TopK's gap."""
    kinds, found = _kinds(rows), []
    for optimizer in OPTIMIZERS:
        for topk, shared in PAIRS.items():
            if {(optimizer, arm) for arm in (DENSE, topk, shared)} <= set(kinds):
                gaps = [_gap(kinds, optimizer, arm) for arm in (shared, topk)]
                said = f"{gaps[0]:+.3f} against {gaps[1]:+.3f}"
                text = f"{optimizer}: {shared} has at most 75 % of the gap of {topk}"
                found.append(Claim(text, "", said, "yes" if gaps[0] <= 0.75 * gaps[1] else "no"))
    return found


def draw(rows: list[Row], figure: Figure) -> None:
    """Draw the gap of each method by its bytes."""
    kinds = _kinds(rows)
    for place, optimizer in enumerate(OPTIMIZERS):
        axes = figure.add_subplot(1, len(OPTIMIZERS), place + 1)
        for mark, arms, name in (("o", PAIRS, "TopK"), ("s", PAIRS.values(), "SharedTopK")):
            known = [arm for arm in arms if {(optimizer, arm), (optimizer, DENSE)} <= set(kinds)]
            ratios = [
                kinds[optimizer, DENSE][0]["bytes"] / kinds[optimizer, arm][0]["bytes"]
                for arm in known
            ]
            gaps = [_gap(kinds, optimizer, arm) for arm in known]
            axes.plot(ratios, gaps, f"{mark}-", label=name if not place else None)
        axes.set(title=optimizer, xlabel="times fewer bytes", ylabel="loss above dense")
    plot_style.legend(figure)


if __name__ == "__main__":
    before = functools.partial(tuned_rate.trials, rates=RATES)
    sys.exit(
        frame.main(
            Experiment("shared_mask", ABOUT, cells, train, page, claims, draw, before=before)
        )
    )
