"""What benchmarks/catalogue.py found, as a page and as a plot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dated_page
import matplotlib as mpl

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "catalogue"  # the same file for the same figures
import matplotlib.pyplot as plt  # noqa: E402

Row = dict[str, Any]
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee")


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
    """Write the plot: each method's better run, lower left is better."""
    found = [run for runs in pairs(rows).values() if (run := best(runs)) is not None]
    kinds = dict(zip(dict.fromkeys(r["kind"] for r in rows if "kind" in r), COLOURS, strict=False))
    figure, axes = plt.subplots(figsize=(9, 6.5), layout="constrained")
    for kind, colour in kinds.items():
        of_kind = [run for run in found if run["kind"] == kind]
        points = [run["bytes"] for run in of_kind], [run["perplexity"] for run in of_kind]
        axes.scatter(*points, s=36, color=colour, label=kind, zorder=3)
    axes.set(xscale="log", yscale="log", title="Better of two learning rates")
    axes.set(xlabel="bytes per step and worker", ylabel="validation perplexity")
    axes.minorticks_off()
    axes.yaxis.set_major_locator(
        mpl.ticker.LogLocator(base=10, subs=(1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8, 9))
    )
    axes.yaxis.set_major_formatter(mpl.ticker.ScalarFormatter())
    axes.margins(0.12)
    axes.grid(color="0.85", lw=0.6)
    axes.legend(frameon=False)
    _label(figure, axes, found)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _label(figure: Any, axes: Any, found: Sequence[Row]) -> None:
    """Write names beside points, each moved up until it lies on no other name or point."""
    figure.draw_without_rendering()
    ordered = sorted(found, key=lambda run: (run["perplexity"], run["bytes"]))
    at = [(run["bytes"], run["perplexity"]) for run in ordered]
    places = [axes.transData.transform(point) * 72 / figure.dpi for point in at]  # in points
    taken = [(x - 4, x + 4, y - 4) for x, y in places]  # left, right, bottom
    for run, point, (x, y) in zip(ordered, at, places, strict=True):
        left, right, bottom = x + 5, x + 5 + 5 * len(run["name"]), y - 3
        while any(a < right and left < b and abs(c - bottom) < 9 for a, b, c in taken):
            bottom += 1
        taken.append((left, right, bottom))
        axes.annotate(
            run["name"],
            point,
            xytext=(left - x, bottom - y),
            textcoords="offset points",
            fontsize=8,
            bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.3},  # over grid and lines
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "0.5", "zorder": 1}
            if bottom > y
            else None,
        )
