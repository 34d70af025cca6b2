"""``auto`` beside DDP in 32 and in 16 bits and each method that it may choose, on shaped links.

    python benchmarks/auto.py                      # needs Linux, root and iproute2

Each worker is a process in a network namespace; the links are shaped. A cell is a link with a model
and a number of workers. There ``auto`` trains twice with each word, until it has decided.
The cost of looking is a figure by itself. It has the seconds of weighing, and what steps of trials
took longer than those before.

Then one run takes plain DDP, twice, torch's fp16 hook and all choices in turns of a few steps: a
machine's speed moves by 10 % within minutes, and what is measured seconds apart shares it.

All workers share this machine's cores: ratios within a cell are what counts. Every cell goes to
``auto_cells.json`` as soon as it is there; with equal options it is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from models import MODELS, build
from namespaces import Link, check_privileges, launch, network
from network_methods import LIMIT, fit
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import CompressedDDPStrategy, attach
from lightning_gc.bench.baselines import FP16, PLAIN, baseline_strategy
from lightning_gc.bench.method_run import StepTimer
from lightning_gc.controllers import Auto
from lightning_gc.exchange.automatic import menu_of
from lightning_gc.methods.text_table import markdown

WORDS = ("rounding", "feedback")
ROUNDING = menu_of("rounding")[0].names
FIXED = menu_of("feedback")[0].names
SETTINGS: dict[str, Any] = {
    "process_group_backend": "gloo",
    "timeout": LIMIT,
    "gradient_as_bucket_view": True,
}
LOOKED = 90
"""Most steps of a run of ``auto``, which needs at most 66 to decide."""
RUNS = 2
"""Runs of ``auto`` with each word; all of their choices count."""
TURN, EARLY, HOPELESS = 5, 2, 1.3
"""Steps of a turn, whose first one settles. Rounds with all choices; later ones leave out choices
that took so many times the fastest's seconds."""
UNCOMPRESSED = "uncompressed"
TWIN = "plain DDP, its twin"
"""A second copy of plain DDP: what it differs by is what no other difference can be told from."""


def strategy_of(arm: str) -> Any:
    """Return a new strategy: one of torch's, a method that is fixed, or ``auto`` with a word."""
    if arm in (PLAIN, FP16):
        return baseline_strategy(arm, **SETTINGS)
    if arm in WORDS:
        return CompressedDDPStrategy("auto", controller=Auto(allow=arm), **SETTINGS)
    menu, memory = menu_of("rounding" if arm in ROUNDING else "feedback")
    return CompressedDDPStrategy(menu.at(menu.names.index(arm) + 1), memory, **SETTINGS)


class Course(StepTimer):
    """Times steps of ``auto``, and ends the run some steps after the decision."""

    def __init__(self) -> None:
        super().__init__(lambda _: 0)
        self.decided: int | None = None
        self.state: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        """Read the controller's state, which this batch's decision has changed."""
        self.state = trainer.strategy.control_loop.state
        if self.decided is None and self.state.get("phase") == "watch":
            self.decided = len(self.seconds)
            self.steps = self.decided + TURN
        super().on_train_batch_start(trainer, *rest)


def look(word: str, model: str) -> dict[str, Any]:
    """Let ``auto`` decide; return its choice, its seconds after that, and what looking has cost."""
    torch.manual_seed(0)
    module, loader = build(model, LOOKED, dist.get_rank() + 1)
    course = Course()
    fit(strategy_of(word), module, loader, LOOKED, [course], clip=module.clip)
    after = LOOKED - TURN if course.decided is None else course.decided
    spent, name = course.state["spent"], course.state["name"]
    taken = statistics.median(course.seconds[after + 1 :])
    return {"chosen": name, "seconds": taken, "spent": spent, "at": after}


class Loss(nn.Module):
    """The loss of a module's training step as a forward pass, which DDP can wrap."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, batch: Any) -> Tensor:
        """Return the loss."""
        loss: Tensor = self.module.training_step(batch, 0)
        return loss


class Loop:
    """A plain loop over a model in DDP."""

    def __init__(self, model: str) -> None:
        torch.manual_seed(0)
        self.module, loader = build(model, 2 * TURN, dist.get_rank() + 1)
        self.batches = itertools.cycle(list(loader))
        self.ddp = DistributedDataParallel(Loss(self.module), gradient_as_bucket_view=True)
        self.optimizer = self.module.configure_optimizers()

    def turn(self) -> float:
        """Make some steps; return the median of their seconds, without the first."""
        taken = []
        for _ in range(TURN):
            batch = next(self.batches)
            dist.barrier()
            start = time.perf_counter()
            self.ddp(batch).backward()
            if self.module.clip is not None:
                nn.utils.clip_grad_norm_(self.ddp.parameters(), self.module.clip)
            self.optimizer.step()
            self.optimizer.zero_grad()
            taken.append(time.perf_counter() - start)
        return statistics.median(taken[1:])


def in_turns(word: str, model: str, rounds: int) -> dict[str, list[float]]:
    """Return the seconds of a step with each choice and with plain DDP, turn by turn."""
    menu, memory = menu_of(word)
    plain, ours = {name: Loop(model) for name in (PLAIN, TWIN, FP16)}, Loop(model)
    plain[FP16].ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    handle = attach(ours.ddp, menu, memory, optimizers=ours.optimizer, timeout=LIMIT)
    levels = dict(zip(menu.names, itertools.count(1.0))) | {UNCOMPRESSED: None}
    found: dict[str, list[float]] = {name: [] for name in (*levels, *plain)}
    for number in range(rounds + 1):
        names = [[name for name in found if number <= EARLY or _near(found[name], found)]]
        dist.broadcast_object_list(names)
        start = number % len(names[0])  # each round begins with another one
        for name in names[0][start:] + names[0][:start]:
            if name in plain:
                taken = plain[name].turn()
            else:
                handle.set_levels(levels[name])
                taken = ours.turn()
            if number:  # buckets are rebuilt and kernels are read in the first round
                found[name].append(taken)
    handle.close()
    return found


def _near(taken: list[float], others: dict[str, list[float]]) -> bool:
    return min(taken) <= HOPELESS * min(map(min, others.values()))


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure a cell, as one of the workers."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    (model,) = options.model
    found = {
        "auto": {word: [look(word, model) for _ in range(RUNS)] for word in WORDS},
        "turns": {word: in_turns(word, model, options.rounds) for word in WORDS},
    }
    dist.destroy_process_group()
    return found


def measure(workers: int, mbit: float, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return what worker 0 has found in a cell."""
    arguments = ["--worker", f"--rounds={options.rounds}"]
    with network(workers, Link(mbit)) as spaces:
        words = [*arguments, f"--mbit={mbit}", "--model", model]
        answers = launch(__file__, words, spaces, timeout=6000)
    found: dict[str, Any] = answers[0]
    return found


def row_of(cell: dict[str, Any], word: str) -> dict[str, Any]:
    """Return what a word gives in a cell, beside plain DDP and the fastest of its methods.

    The lower quartile of the turns counts, since other work on the machine only adds seconds.
    """
    turns = cell["turns"][word]
    took = {name: sorted(taken)[len(taken) // 4] for name, taken in turns.items()}
    twins = sorted((took[PLAIN], took.pop(TWIN)))
    took[PLAIN] = statistics.mean(twins)
    half = took.pop(FP16)
    runs = cell["auto"][word]
    seconds = statistics.mean(took[each["chosen"]] for each in runs)
    best = min(took, key=lambda name: took[name])
    looking = statistics.median(each["spent"] for each in runs)
    return {
        "chosen": ", ".join(dict.fromkeys(each["chosen"] for each in runs)),
        "seconds": seconds,
        "own": min(each["seconds"] for each in runs),
        "ddp": took[PLAIN],
        "half": half,
        "twins": twins[1] / twins[0] - 1,
        "best": best,
        "best_seconds": took[best],
        "share": looking / (2000 * seconds),
        "decided": max(each["at"] for each in runs),
    }


def page(cells: list[dict[str, Any]]) -> str:
    """Return the table of all cells, and how many meet what is wanted."""
    rows, near, slower = [], 0, 0
    for cell in cells:
        for word in WORDS:
            row = row_of(cell, word)
            of_best, of_ddp = row["seconds"] / row["best_seconds"], row["seconds"] / row["ddp"]
            near, slower = near + (of_best <= 1.05), slower + (of_ddp > 1.03)
            rows.append(
                [
                    f"{cell['model']}, {cell['workers']} workers, {Link(cell['mbit'])}",
                    *(word, row["chosen"]),
                    *(f"{row[each]:.3f}" for each in ("ddp", "half", "seconds", "own")),
                    f"{row['best']}, {row['best_seconds']:.3f}",
                    *(f"{of_best:.2f}", f"{of_ddp:.2f}", f"{row['twins']:.1%}"),
                    *(f"{row['share']:.2%}", str(row["decided"])),
                ]
            )
    head = ["cell", "permitted", "chosen", "plain DDP", FP16, "auto's choice", "in auto's run"]
    head += [
        "fastest fixed method",
        "auto / fastest",
        "auto / DDP",
        "twins differ by",
        "looking, of 2,000 steps",
        "decided after",
    ]
    return (
        f"{markdown(head, rows)}\nWithin 5 % of the fastest: {near} of {len(rows)}. More than 3 % "
        f"above plain DDP: {slower}.\n"
    )


def parse() -> argparse.Namespace:
    """Return the command line; ``--worker`` is for workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--workers", type=int, nargs="+", default=[2, 4], help="how many, one number or several")
    add("--mbit", type=float, nargs="+", default=[100, 1000, 10_000, 0], help="0: unlimited")
    add("--model", nargs="+", choices=MODELS, default=["lstm8", "gpt", "resnet18"])
    add("--rounds", type=int, default=8, help="turns of each choice")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder of the dated files")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Measure what is missing, print, write."""
    options = parse()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("The benchmark of auto")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / "auto_cells.json"
    known: list[dict[str, Any]] = json.loads(path.read_text()) if path.exists() else []
    wanted = []
    for workers, model, mbit in itertools.product(options.workers, options.model, options.mbit):
        cell = {"workers": workers, "mbit": mbit, "model": model}
        cell |= {"rounds": options.rounds}
        found = next((each for each in known if cell.items() <= each.items()), None)
        if found is None:
            found = cell | measure(workers, mbit, model, options)
            known.append(found)
            path.write_text(json.dumps(known))
            dated_page.say(page([found]))
        wanted.append(found)
    heading = dated_page.title("auto beside plain DDP, torch's fp16 hook and fixed methods")
    packages = dated_page.versions("torch", "pytorch-lightning")
    dated_page.write(options.out, "auto", f"{heading}\n\n{packages}\n\n{page(wanted)}")


if __name__ == "__main__":
    main()
