"""What benchmarks/catalogue.py found, as a page and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dated_page
from matplotlib.figure import Figure

from lightning_gc.methods import plot_style

Row = dict[str, Any]


def lost(row: Row) -> bool:
    """Return whether a run has nothing to show: it has failed or diverged."""
    return "failed" in row or bool(row["diverged"])


def outcome(row: Row) -> str:
    """Return a run's result in a word."""
    if "failed" in row:
        return "failed"
    return "diverged" if row["diverged"] else f"{row['perplexity']:.2f}"


def pairs(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Return the runs of each method, in the order in which they came."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["name"], []).append(row)
    return found


def best(runs: Sequence[Row]) -> Row | None:
    """Return the run of lowest perplexity, or None where all are lost."""
    return min((r for r in runs if not lost(r)), key=lambda r: float(r["perplexity"]), default=None)


def page(rows: Sequence[Row], machine: str, plot: str) -> str:
    """Return the dated file's text.

    Args:
        rows: of all runs, the dense baseline's first.
        machine: what it ran with.
        plot: the plot's file, beside this one.
    """
    first, seconds = rows[0], sum(row["seconds"] for row in rows) / len(rows)
    columns = ["method", "rates", "perplexity at each", "best", "bytes per step", "ratio"]
    lines = [[*columns, "memory", "diverged"]]
    lines.append(["---", *["---:"] * (len(columns) - 1), "---", "---"])
    for runs in pairs(rows).values():
        found = best(runs)
        shown = found or next((r for r in runs if "bytes" in r), {})
        how = [outcome(r) for r in runs if lost(r)]
        lines.append(
            [
                f"`{runs[0]['compressor']}`",
                " / ".join(f"{r['rate']:g}" for r in runs),
                " / ".join(map(outcome, runs)),
                outcome(found) if found else "none",
                f"{shown['bytes']:,.0f}" if shown else "",
                f"{shown['ratio']:.1f}" if shown else "",
                f"`{shown['memory']}`" if shown else "",
                f"yes: {', '.join(how)}" if how else "no",
            ]
        )
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    failed = "".join(
        f"- {r['name']} at {r['rate']:g}: {r['failed']}\n" for r in rows if "failed" in r
    )
    limit = f", at most {first['steps']} steps each" if first["steps"] else ""
    return f"""{dated_page.title("Catalogue")}

`python benchmarks/catalogue.py` with {machine}.

The language model of `make demo` ({first["hidden"]} units) on Python's own documentation:
{first["workers"]} simulated workers, {first["epochs"]} epochs{limit}, seed {first["seed"]},
{seconds:.0f} s a run. Learning rates fall in a straight line to zero; gradients are clipped at a
norm of 0.25, but not where the result is a direction, whose rates are much smaller. The perplexity
is that of the validation text after the last epoch, and *best* is the better of the two, so none
is an unbiased estimate; nothing else was tuned, and one seed tells no difference of a few percent.
Bytes are one worker's, means over all steps of the better run. *Diverged* is a run whose loss was
no number, or at the end no lower than at the start, on the training or the validation text.

{table}

![Perplexity against bytes per step]({plot})
{f"{chr(10)}Failed:{chr(10)}{chr(10)}{failed}" if failed else ""}"""


def draw(rows: Sequence[Row], path: Path) -> None:
    """Write the plot: a row per method, by bytes, with its better run's perplexity."""
    found = [run for runs in pairs(rows).values() if (run := best(runs)) is not None]
    found.sort(key=lambda run: (-run["bytes"], run["perplexity"]))

    def panels(figure: Figure) -> None:
        figure.set_size_inches(plot_style.WIDTH, 1.4 + 0.19 * len(found))
        left, right = figure.subplots(1, 2, sharey=True)
        for place, run in enumerate(found):
            colour = plot_style.colour_of(run["kind"], run["name"])
            left.plot(run["ratio"], place, "o", color=colour)
            right.plot(run["perplexity"], place, "o", color=colour)
        dense = next((run["perplexity"] for run in found if run["kind"] == "dense"), None)
        if dense is not None:
            right.axvline(dense, color=plot_style.MUTED, lw=1, ls="--")
        for kind, colour in plot_style.FAMILIES.items():
            left.plot([], [], "o", color=colour, label=kind)
        plot_style.plain_log(left.xaxis)
        plot_style.plain_log(right.xaxis)
        left.set(title="Times fewer bytes")
        right.set(title="Perplexity")
        left.set_yticks(range(len(found)), [run["name"] for run in found])
        left.invert_yaxis()
        left.margins(y=0.02)
        plot_style.legend(figure, 3)

    path.write_bytes(plot_style.svg(panels, "catalogue"))
