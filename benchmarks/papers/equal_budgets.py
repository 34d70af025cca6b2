"""Compare all methods at equal tuning budgets: as many random draws of each one's own settings.

    python benchmarks/papers/equal_budgets.py --jobs 8
    python benchmarks/papers/equal_budgets.py --only model=lstm method=topk method=qsgd
    python benchmarks/papers/equal_budgets.py --draws 2 --seeds 1    # all methods, quickly

Interrupt it at will: the same command goes on with what is missing. Writes rows, page and plot as
the other experiments do, and an HTML table that sorts and filters.

Cost: the ResNet took 165 CPU minutes, the LSTM 245 and the transformer 200: for each 496 draws, and
some 420 winners' runs that are not those of a lower ratio. A run of the LSTM takes 9 CPU seconds
dense, 10 to 13 with PowerSGD, TopK and QSGD, and 50 to 64 with CodedQSGD and AQSGD, the slowest.
"""

from __future__ import annotations

import argparse
import functools
import math
import sys
from pathlib import Path
from typing import Any

import equal_budgets_models as models
import equal_budgets_page as page
import frame
from equal_budgets_methods import METHODS, build, drawn
from equal_budgets_models import MODELS
from equal_budgets_points import BEST, TARGETS, chosen, label
from frame import Cell, Experiment, Row

SEARCH = 0  # the seed of all draws; winners are run with later ones
DRAWS = 8
KEPT = ("loss", "accuracy", "train_loss", "diverged", "ratio", "bytes", "steps_done")
ABOUT = """
Every compressor, with its default memory, and the memories that are no compressor's default, on
three small models with four simulated workers. For each model each method has a study of its own:
eight random draws (or `--draws`) of its own settings, with one seed. These are the learning rate,
what compressor and memory declare worth tuning, levels among it, momentum of the transformer's
optimizer (0.9 or 0; the ResNet's is 0.9, the LSTM's 0) unless the memory has one, which is then
drawn, and whether small tensors are compressed too. The draws cover each range evenly.

More bytes mostly mean less loss, so a study has several winners: for each ratio, the draw of the
lowest validation loss among those that send that many times fewer bytes than dense. Winners are run
with other seeds, and losses are those of these runs only, of the validation data, at the end. Eight
draws are few: a method with many settings is found less well than one that has a learning rate
only, and a draw is judged by one seed, whose noise may be as large as what good draws differ by.
Runs are short, so this tells first what learns fast.
"""


def cells(seeds: int, draws: int = DRAWS) -> list[Cell]:
    """Return the draws of all methods, then their winners, a seed after the other."""
    found = []
    steps: list[tuple[Any, int | None, int]] = [(draw, None, SEARCH) for draw in range(draws)]
    steps += [(BEST, target, SEARCH + 1 + i) for i in range(seeds) for target in TARGETS]
    for draw, target, seed in steps:
        for method in METHODS:
            for name, model in MODELS.items():
                cell = {"model": name, "method": method, "draw": draw, "target": target}
                cell |= {"draws": draws, "workers": 4, "width": model.width}
                found.append(cell | {"epochs": model.epochs, "steps": None, "seed": seed})
    return found


def before(cell: Cell) -> list[Cell]:
    """Return the draws among which a winner is chosen."""
    if cell["draw"] != BEST:
        return []
    one = {**cell, "target": None, "seed": SEARCH}
    return [{**one, "draw": draw} for draw in range(cell["draws"])]


def train(cell: Cell, data: Path | None) -> Row:
    """Run a draw, or a winner with its seed."""
    if cell["draw"] != BEST:
        return run(cell, drawn(cell["method"], cell["model"], cell["draw"], cell["draws"]))
    pick = chosen(cell["before"], cell["target"])
    if pick is None:  # nothing that it drew sends so little
        return {"run": "no draw sends so little", "pick": None, "as": None, "loss": math.nan}
    less = [t for t in TARGETS if t < cell["target"] and chosen(cell["before"], t) == pick]
    if less:  # has been run for that ratio
        what = {"run": f"that of {label(less[0])}", "pick": pick["draw"], "as": less[0]}
        return what | {"loss": math.nan}
    return run(cell, pick["settings"]) | {"pick": pick["draw"], "as": None}


def run(cell: Cell, settings: dict[str, Any]) -> Row:
    """Train once with these settings; a run that ends in an error has lost, and says why."""
    method = build(cell["method"], settings)
    row = {"loss": math.inf, "kind": method.compressor.traits.kind, "settings": settings}
    try:
        found = models.train(cell, settings, method)
    except (ArithmeticError, RuntimeError, ValueError) as error:
        return row | {"ratio": math.nan, "error": f"{type(error).__name__}: {error}"}
    return row | {name: found[name] for name in KEPT if name in found}


def main() -> int:
    """Run what is missing, write page, plot and table."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--draws", type=int, default=DRAWS)
    options, sys.argv[1:] = parser.parse_known_args()
    if options.draws < 1:
        parser.error("--draws must be at least 1.")
    all_cells = functools.partial(cells, draws=options.draws)
    return frame.main(
        Experiment(
            "equal_budgets",
            ABOUT,
            all_cells,
            train,
            page.page,
            page.claims,
            page.draw,
            before=before,
            after=page.write_html,
        )
    )


if __name__ == "__main__":
    sys.exit(main())
