"""``auto`` beside plain DDP and each method that it may choose, on links of a given speed.

    python benchmarks/auto.py                      # needs Linux, root and iproute2

Each worker is a process in a network namespace; the links are shaped. In every cell, a link with
a model and a number of workers, one run takes all arms by turns, several times over: plain DDP;
each method of the menus, fixed; ``auto`` with each word. What ``auto`` takes counts from its
decision on. What looking has cost is its own figure, in seconds that it would not have needed
otherwise: weighing, and steps of trials that took longer than those before.

All workers share this machine's cores: ratios within a cell are what counts. Every cell goes to
``auto_cells.json`` as soon as it is there; with equal options it is not measured again.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from models import MODELS, build
from namespaces import Link, check_privileges, launch, network
from network_methods import LIMIT, fit

from lightning_gc import CompressedDDPStrategy
from lightning_gc.bench.baselines import PLAIN, baseline_strategy
from lightning_gc.bench.method_run import WARMUP_STEPS, StepTimer
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
"""Most steps of a turn of ``auto``, which needs at most 66 to decide."""
SLOW = 100
"""10⁶ bits per second up to which a step of plain DDP takes seconds, all alike."""
AFTER = 15
"""Steps of a turn of ``auto`` that are measured after it has decided."""
HOPELESS = 1.3
"""A method that took this many times the fastest's seconds has no further turn."""


def strategy_of(arm: str) -> Any:
    """Return a new strategy: plain PLAIN, a method that is fixed, or ``auto`` with a word."""
    if arm == PLAIN:
        return baseline_strategy(PLAIN, **SETTINGS)
    if arm in WORDS:
        return CompressedDDPStrategy("auto", controller=Auto(allow=arm), **SETTINGS)
    menu, memory = menu_of("rounding" if arm in ROUNDING else "feedback")
    return CompressedDDPStrategy(menu.at(menu.names.index(arm) + 1), memory, **SETTINGS)


class Course(StepTimer):
    """Times steps; of ``auto`` also notes in which it had decided, and what looking has cost."""

    def __init__(self) -> None:
        super().__init__(lambda _: 0)
        self.decided: int | None = None
        self.state: dict[str, Any] = {}

    def on_train_batch_start(self, trainer: Any, *rest: Any) -> None:
        """Read the controller's state, which this batch's decision has changed."""
        control = getattr(trainer.strategy, "control_loop", None)
        if control is not None:
            self.state = control.state
            if self.decided is None and control.state.get("phase") == "watch":
                self.decided = len(self.seconds)
                self.steps = self.decided + 2 + AFTER  # of which two settle
        super().on_train_batch_start(trainer, *rest)


def turn(arm: str, model: str, steps: int) -> dict[str, Any]:
    """Train with an arm, as one of the workers; return seconds of steps, and what was chosen."""
    torch.manual_seed(0)
    module, loader = build(model, steps, dist.get_rank() + 1)
    course = Course()
    fit(strategy_of(arm), module, loader, steps, [course], clip=module.clip)
    if arm not in WORDS:
        return {"seconds": course.seconds[WARMUP_STEPS:]}
    after = steps if course.decided is None else course.decided + 2
    spent, name = course.state["spent"], course.state["name"]
    return {"seconds": course.seconds[after:], "chosen": name, "spent": spent, "at": after - 2}


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all arms by turns, in one worker; of plain DDP on a slow link, fewer steps."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    found: dict[str, list[Any]] = {arm: [] for arm in (PLAIN, *FIXED, *WORDS)}
    for _ in range(options.rounds):
        chosen = [worth_a_turn(found)]
        dist.broadcast_object_list(chosen)
        for arm in chosen[0]:
            slow = arm == PLAIN and 0 < options.mbit[0] <= SLOW
            measured = min(options.steps, 4) if slow else options.steps
            steps = LOOKED if arm in WORDS else WARMUP_STEPS + measured
            found[arm].append(turn(arm, options.model[0], steps))
    dist.destroy_process_group()
    return found


def worth_a_turn(turns: dict[str, list[Any]]) -> list[str]:
    """Return the arms of the next round: all at first, then what may be a word's fastest."""
    if not turns[PLAIN]:
        return list(turns)
    took = seconds_of(turns)
    near = {
        arm
        for word in WORDS
        for arm in candidates(word)
        if took[arm] <= HOPELESS * min(took[each] for each in candidates(word))
    }
    return [arm for arm in turns if arm in near or arm in WORDS]


def measure(workers: int, mbit: float, model: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return worker 0's turns of every arm in a cell."""
    arguments = ["--worker", f"--rounds={options.rounds}", f"--steps={options.steps}"]
    with network(workers, Link(mbit)) as spaces:
        words = [*arguments, f"--mbit={mbit}", "--model", model]
        answers = launch(__file__, words, spaces, timeout=3000)
    turns: dict[str, Any] = answers[0]
    return turns


def candidates(word: str) -> list[str]:
    """Return the arms of which a word may choose one."""
    return [PLAIN, *(arm for arm in FIXED if word == "feedback" or arm in ROUNDING)]


def seconds_of(turns: dict[str, list[Any]]) -> dict[str, float]:
    """Return each arm's seconds per step: the median of its quietest turn.

    What else the machine does only ever adds seconds.
    """
    return {
        arm: min(statistics.median(each["seconds"]) for each in all_turns)
        for arm, all_turns in turns.items()
    }


def row_of(cell: dict[str, Any], word: str) -> dict[str, Any]:
    """Return what a word gives in a cell, beside plain DDP and the fastest of its methods."""
    took = seconds_of(cell["turns"])
    best = min(candidates(word), key=lambda arm: took[arm])
    own = cell["turns"][word]
    looking = statistics.median(each["spent"] for each in own)
    return {
        "chosen": ", ".join(dict.fromkeys(each["chosen"] for each in own)),
        "seconds": took[word],
        "ddp": took[PLAIN],
        "best": best,
        "best_seconds": took[best],
        "share": looking / (2000 * took[word]),
        "decided": max(each["at"] for each in own),
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
                    *(f"{row[each]:.3f}" for each in ("ddp", "seconds")),
                    f"{row['best']}, {row['best_seconds']:.3f}",
                    *(f"{of_best:.2f}", f"{of_ddp:.2f}"),
                    *(f"{row['share']:.2%}", str(row["decided"])),
                ]
            )
    head = ["cell", "permitted", "chosen", "plain DDP", "auto", "fastest fixed method"]
    head += ["auto / fastest", "auto / DDP", "looking, of 2,000 steps", "decided after"]
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
    add("--rounds", type=int, default=3, help="turns of each arm")
    add("--steps", type=int, default=10, help="measured steps of a turn")
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
        cell |= {"rounds": options.rounds, "steps": options.steps}
        found = next((each for each in known if cell.items() <= each.items()), None)
        if found is None:
            found = cell | {"turns": measure(workers, mbit, model, options)}
            known.append(found)
            path.write_text(json.dumps(known))
            dated_page.say(page([found]))
        wanted.append(found)
    heading = dated_page.title("auto beside plain DDP and fixed methods")
    packages = dated_page.versions("torch", "pytorch-lightning")
    dated_page.write(options.out, "auto", f"{heading}\n\n{packages}\n\n{page(wanted)}")


if __name__ == "__main__":
    main()
