"""Ours beside the code that was published with four papers: the same weights, step by step?

    python benchmarks/papers/published.py --ef21 DIR --stc DIR --powersgd DIR --sketched DIR

Each DIR is a checkout of yours: of GitHub's IgorSokoloff/ef21_experiments_source_code (NeurIPS
2021), felisat/federated-learning (STC) and epfml/powersgd (``paper-code``); in the last one are
two, dhroth/sketchedsgd and nikitaivkin/csh. Nothing of them is copied; their functions are called
where they are. Four workers with unlike data take steps of
gradient descent on a shared problem, once with their compression and once with ours, from the same
start, in float64. Shown is the largest difference between two weights, relative to the largest.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import dated_page
import numpy as np
import torch
import torch.distributed as dist
from published_problem import CLASSES, FEATURES, STEPS, WORKERS, Problem, descend, functions, ours
from torch import Tensor

import lightning_gc as gc
from lightning_gc.compressors.sparsifiers import sketched_sgd
from lightning_gc.core.text_table import markdown
from lightning_gc.testing import Lockstep


def ef21(folder: Path, problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """Begin with whole gradients, as their code does: one step of ours is uncompressed."""
    theirs = functions(
        folder / "Logistic regression" / "bdfg_distributed_stable.py", {"np": np, "sys": sys}
    )
    few = FEATURES // 8
    known = np.zeros((WORKERS, FEATURES))

    def gradients(_: Any, weights: Any, *__: Any) -> Any:
        return np.stack([g.numpy() for g in problem.logistic(torch.from_numpy(weights))])

    theirs.biased_diana_top_k_gd_estimator.__globals__["compute_full_grads"] = gradients
    seen = iter(range(STEPS))

    def step(weights: Tensor) -> Tensor:
        nonlocal known
        point = weights.numpy()
        if next(seen) == 0:
            known = gradients(None, point)
        else:
            estimator = theirs.biased_diana_top_k_gd_estimator
            known, _, _ = estimator(None, point, None, 0.0, few, known, WORKERS)
        return torch.from_numpy(known.mean(axis=0))

    lockstep = Lockstep(WORKERS, gc.TopK(few / FEATURES), gc.EF21())

    def before(number: int) -> None:
        for engine in lockstep.engines:
            engine.levels.set(None if number == 0 else few / FEATURES)

    start = torch.from_numpy(problem.start)
    return descend(start, 0.2, step), descend(start, 0.2, ours(problem.logistic, lockstep, before))


def stc(folder: Path, problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """Add up errors as their clients do; the mean of what they send is applied."""
    known = {"torch": torch, "np": np, "device": "cpu"}
    theirs = functions(folder / "compression_utils.py", known)
    share = 0.125  # of 40: 5
    errors = [torch.zeros(FEATURES) for _ in range(WORKERS)]

    def step(weights: Tensor) -> Tensor:
        sent = []
        for error, grad in zip(errors, problem.logistic(weights), strict=True):
            error += grad
            sent.append(theirs.stc(error, {"p": share, "approx": 1.0}))
            error -= sent[-1]
        return torch.stack(sent).mean(0)

    lockstep = Lockstep(WORKERS, gc.STC(share))
    start = torch.from_numpy(problem.start)
    return descend(start, 0.05, step), descend(start, 0.05, ours(problem.logistic, lockstep))


class Threads:
    """All-reduce between threads, in place of ``torch.distributed``'s."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(WORKERS, timeout=60)
        self._given: list[Tensor] = [torch.empty(0)] * WORKERS
        self.here = threading.local()

    def all_reduce(self, tensor: Tensor, *_: Any, **__: Any) -> Any:
        """Add up what all threads give."""
        self._given[self.here.worker] = tensor.clone()
        self._barrier.wait()
        total = torch.stack(self._given).sum(0)
        self._barrier.wait()
        tensor.copy_(total)
        return SimpleNamespace(wait=lambda: None)


@contextlib.contextmanager
def among(threads: Threads) -> Iterator[None]:
    """Let ``torch.distributed`` be these threads."""
    kept = dist.all_reduce, dist.get_world_size
    dist.all_reduce, dist.get_world_size = threads.all_reduce, lambda *_: WORKERS
    try:
        yield
    finally:
        dist.all_reduce, dist.get_world_size = kept


def powersgd(folder: Path, problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """The paper's reducer, from the same first Q; one worker in each thread.

    Of two matrices of one shape, which theirs takes one after the other and ours together. They
    have the same data, and other starts.
    """
    path, silent = folder / "paper-code" / "gradient_reducers.py", contextlib.nullcontext()
    theirs = functions(path, {"torch": torch, "np": np, "n_bits": lambda _: 0, "List": list})
    rank, rate = 2, 0.05
    first = torch.randn(FEATURES, rank, generator=torch.Generator().manual_seed(0))
    draw = torch.Generator().manual_seed(1)
    start = torch.stack(
        [torch.zeros(CLASSES, FEATURES), torch.randn(CLASSES, FEATURES, generator=draw)]
    )
    threads = Threads()
    courses: list[list[Tensor]] = [[] for _ in range(WORKERS)]

    def gradients(weights: Tensor) -> list[Tensor]:
        pairs = zip(*map(problem.squares, weights), strict=True)
        return [torch.stack(pair) for pair in pairs]

    def work(worker: int) -> None:
        threads.here.worker = worker
        reducer = theirs.RankKReducer.__new__(theirs.RankKReducer)  # its __init__ draws a gigabyte
        vars(reducer).update(n_workers=WORKERS, device="cpu", rank=rank, reuse_query=True)
        vars(reducer).update(p_memory=None, q_memory=None, timer=lambda *_, **__: silent)
        reducer.set_random = lambda vector: vector.copy_(first)
        error = torch.zeros(2, CLASSES, FEATURES)
        spare = torch.zeros(1)  # it expects a vector beside the matrices

        def step(weights: Tensor) -> Tensor:
            grads = [*(error + gradients(weights)[worker]), spare.clone()]
            out = [torch.zeros_like(grad) for grad in grads]
            reducer.reduce(grads, out, [*error, torch.zeros(1)])
            return torch.stack(out[:2])

        courses[worker] = descend(start, rate, step)

    with among(threads):
        each = [threading.Thread(target=work, args=(worker,)) for worker in range(WORKERS)]
        for thread in each:
            thread.start()
        for thread in each:
            thread.join()
    lockstep = Lockstep(WORKERS, gc.PowerSGD(rank))
    for engine in lockstep.engines:
        engine.compressor_state |= {name: {"q": first.clone()} for name in "01"}
    return courses[0], descend(start, rate, ours(gradients, lockstep))


@contextlib.contextmanager
def choosing(places: Tensor, signs: Tensor) -> Iterator[None]:
    """Let our sketches have these places and signs, ``(rows, numel)``, and their choice of equals.

    Elements that share a sum have equal estimates.
    """
    kept = sketched_sgd._hashed, sketched_sgd._largest

    def hashed(like: Tensor, seed: int, row: int, width: int) -> tuple[Tensor, Tensor]:
        return places[row] + row * width, signs[row].to(like.dtype, copy=True)

    def largest(numbers: Tensor, count: int) -> Tensor:
        return torch.topk(numbers**2, count, sorted=False).indices.sort().values

    sketched_sgd._hashed, sketched_sgd._largest = hashed, largest
    try:
        yield
    finally:
        sketched_sgd._hashed, sketched_sgd._largest = kept


def sketched(folder: Path, problem: Problem) -> tuple[list[Tensor], list[Tensor]]:
    """The paper's aggregation; our sketches have their hashes, which are the same in all steps."""
    torch.set_default_dtype(torch.float32)
    known = {"np": np, "torch": torch, "copy": copy, "LARGEPRIME": 2**61 - 1, "cache": {}}
    table = functions(folder / "csh" / "csvec" / "csvec.py", known)
    path = folder / "sketchedsgd" / "sketchedsgd" / "sketched_optimizer.py"
    theirs = functions(path, {"np": np, "torch": torch})
    numel, few, rate = CLASSES * FEATURES, 10, 0.02
    compressor = gc.SketchedSGD(few / numel)
    rows, columns = compressor.rows, compressor.columns * few
    server = theirs.SketchedSum.__new__(theirs.SketchedSum)  # its __init__ wants a model
    sketches = [table.CSVec(numel, columns, rows, device="cpu") for _ in range(WORKERS)]
    errors = [torch.zeros(numel) for _ in range(WORKERS)]
    settings = SimpleNamespace(k=few, p1=0, p2=compressor.candidates, doTransferHalf=False)
    vars(server).update(us=[torch.zeros(numel) for _ in range(WORKERS)], vs=errors, opt=settings)
    vars(server).update(numWorkers=WORKERS, workerSketches=sketches, _doSlowSketching=True)
    server.sketchMask = torch.ones(numel, dtype=torch.bool)

    def gradients(weights: Tensor) -> list[Tensor]:
        return [grad.float() for grad in problem.squares(weights.double())]

    def step(weights: Tensor) -> Tensor:
        for error, grad in zip(errors, gradients(weights), strict=True):
            error += grad.view(-1)
        total: Tensor = server._aggAndZeroSketched()
        return total.view_as(weights) / WORKERS

    start = torch.zeros(CLASSES, FEATURES)
    course = descend(start, rate, step)
    with choosing(sketches[0].buckets, sketches[0].signs):
        lockstep = Lockstep(WORKERS, compressor)
        return course, descend(start, rate, ours(gradients, lockstep))


METHODS = {
    "EF21, TopK": (
        "ef21",
        ef21,
        "They begin with the whole gradient; ours with an estimate of 0, unless the first step is "
        "sent uncompressed, as here.",
    ),
    "STC": (
        "stc",
        stc,
        "They round k up, we to the nearest whole number; here it is whole. Our mean magnitude is "
        "sent in float32. What the server sends back is compressed in neither.",
    ),
    "PowerSGD(2), two matrices": (
        "powersgd",
        powersgd,
        "Both take errors from the mean approximation. They orthonormalise P by Gram-Schmidt, with "
        "1e-8 added to norms, we P and Q by Householder. Without the 1e-8 the differences are "
        "1e-16, 8e-14 and 8e-3: the method amplifies what is rounded.",
    ),
    "SketchedSGD": (
        "sketched",
        sketched,
        "In float32, as their code is, without momentum. Ours has their hashes here, and chooses "
        "among equal estimates as they do; by itself it draws others in each step, and takes the "
        "first.",
    ),
}


def main() -> None:
    """Compare what there is a checkout of, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    for option, _, _ in METHODS.values():
        parser.add_argument(f"--{option}", type=Path, metavar="DIR", help="a checkout")
    parser.add_argument("--out", type=Path, default=dated_page.RESULTS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, (option, compare, words) in METHODS.items():
        if (folder := getattr(options, option)) is None:
            continue
        torch.set_default_dtype(torch.float64)  # of their buffers
        theirs, own = compare(folder, Problem())
        gaps = [
            float((a - b).abs().max() / a.abs().max()) for a, b in zip(theirs, own, strict=True)
        ]
        moved = float((theirs[-1] - theirs[0]).norm() / theirs[-1].norm())
        rows.append([name, *(f"{gaps[n - 1]:.1e}" for n in (1, 20, STEPS)), f"{moved:.2f}", words])
    if not rows:
        parser.error("give at least one checkout.")
    head = ("", "after 1 step", "20", str(STEPS), "the way they went", "what differs")
    table = markdown(head, rows, left=("", head[-1]))
    text = f"""{dated_page.title("Beside published code")}

`python benchmarks/papers/published.py` with checkouts of all, in float64 unless said: {WORKERS}
workers with unlike data, the largest difference between two weights of theirs and ours, relative
to the largest weight; and how far the weights have moved, relative to their norm.

{table}"""
    sys.stdout.write(text)
    dated_page.write(options.out, "published", text)


if __name__ == "__main__":
    main()
