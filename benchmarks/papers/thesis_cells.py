"""One table of the thesis's experiment across sizes of the model and numbers of workers.

    python benchmarks/papers/thesis_cells.py runs/tune/thesis_ptb_h*_w*

Reads the tables of reports that `examples/tune_language_model.py configs/thesis.yaml` has written,
one for each size and number of workers, and prints Markdown: test perplexity (Figures 5.2 to 5.4
of the thesis) and CPU seconds per epoch (5.6). benchmarks/papers/thesis.py is the same in small.
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from pathlib import Path

DENSE = "dense"


def read(folder: Path, table: str) -> list[dict[str, str]]:
    """Return the rows of a report's table."""
    path = folder / "tables" / f"{table}.csv"
    if not path.is_file():
        sys.exit(
            f"{path}: not there; give folders of reports, such as runs/tune/thesis_ptb_h300_w1."
        )
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def perplexities(folder: Path) -> dict[str, str]:
    """Return dense's test perplexity, and by how many percent the other methods are above it."""
    found = {row["method"]: row["test"] for row in read(folder, "results")}
    dense = number(found.get(DENSE, ""))
    shown = {}
    for method, text in found.items():
        value = number(text)
        if value is None or dense is None:
            shown[method] = text or "–"
        else:
            shown[method] = (
                f"{value:.1f}" if method == DENSE else f"{100 * (value / dense - 1):+.1f} %"
            )
    return shown


def seconds(folder: Path) -> dict[str, str]:
    """Return the mean CPU seconds of an epoch over each method's best trials."""
    found: dict[str, list[float]] = {}
    for row in read(folder, "cpu_seconds"):
        found.setdefault(row["method"], []).append(float(row["cpu_seconds"]))
    return {method: f"{statistics.fmean(values):.2f}" for method, values in found.items()}


def number(text: str) -> float | None:
    """Return a cell as a number; None where a run has diverged or is not there."""
    try:
        return float(text)
    except ValueError:
        return None


def across(columns: dict[str, dict[str, str]]) -> str:
    """Return a table of methods against cells."""
    methods = list(dict.fromkeys(method for column in columns.values() for method in column))
    lines = [f"| | {' | '.join(columns)} |", "|---|" + "---:|" * len(columns)]
    for method in methods:
        cells = (column.get(method, "–") for column in columns.values())
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+", help="folders of reports")
    folders = parser.parse_args().folders
    text = "Test perplexity of dense, and how far the others are above it:\n\n"
    text += across({folder.name: perplexities(folder) for folder in folders})
    text += "\nCPU seconds per epoch and worker, the best eight trials:\n\n"
    text += across({folder.name: seconds(folder) for folder in folders})
    sys.stdout.write(text)


if __name__ == "__main__":
    main()
