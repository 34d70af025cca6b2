"""The picture of the home page: seconds per step on three links, of benchmarks/network.py.

The panels beside each other, and one below the other for narrow screens.
"""

from __future__ import annotations

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lightning_gc.methods import plot_style
from lightning_gc.methods.plot_style import DENSE, FAMILIES, INK, PEER

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"

LINKS = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s")
CEILING = "no synchronisation"
"""Row of the step without a network: no method can be faster."""
OURS = {
    "QSGD(4)": ("QSGD(4)", FAMILIES["quantiser"]),
    "PowerSGD(2)": ("PowerSGD(2)", FAMILIES["low rank"]),
    "TopK(0.01), bfloat16": ("TopK(0.01), bfloat16", FAMILIES["sparsifier"]),
}
METHODS = {
    "plain DDP": ("plain DDP", DENSE),
    "torch fp16 hook": ("torch: fp16 hook", PEER),
    "torch PowerSGD hook": ("torch: PowerSGD hook, rank 2", PEER),
    **OURS,
    CEILING: ("no network", "none"),
}
"""Row of the results -> label and colour, from top to bottom."""


def newest() -> Path:
    """Return the newest results."""
    return max((HERE / "results").glob("network_*.json"))


def seconds(results: Path) -> dict[str, dict[str, float]]:
    """Return link -> row -> seconds per step, of two workers and the LSTM with batches of 8."""
    parts: list[dict[str, Any]] = json.loads(results.read_text())
    rows = {
        part["link"]: part["rows"]
        for part in parts
        if part["workers"] == 2 and part["model"] == "lstm8"
    }
    return {link: {name: row["seconds"] for name, row in rows[link].items()} for link in LINKS}


def in_words(found: dict[str, dict[str, float]]) -> str:
    """Return what the picture shows, for those who cannot see it and for tests."""
    shown = {
        link: ", ".join(f"{METHODS[m][0]} {found[link][m]:.2f} s" for m in METHODS)
        for link in found
    }
    return "; ".join(f"{link}: {text}" for link, text in shown.items())


def draw(found: dict[str, dict[str, float]], narrow: bool, figure: Figure) -> None:
    """Draw a panel per link on one scale, with the seconds beside the bars.

    Args:
        found: link -> row -> seconds per step.
        narrow: one panel below the other.
        figure: is drawn on.
    """
    figure.set_size_inches((plot_style.WIDTH, 6.6) if narrow else (7.6, 2.9))
    shape = (len(LINKS), 1) if narrow else (1, len(LINKS))
    panels = figure.subplots(*shape, sharey=True, sharex=True).flatten()
    figure.suptitle("Seconds per training step: an LSTM on two workers", x=0, ha="left")
    places = range(len(METHODS))
    for axis, link in zip(panels, LINKS, strict=True):
        values = [found[link][method] for method in METHODS]
        bars = axis.barh(places, values, color=[colour for _, colour in METHODS.values()])
        bars[-1].set(edgecolor=INK, linestyle="--")
        axis.axvline(found[link][CEILING], color=INK, linestyle="--", linewidth=0.8)
        axis.bar_label(bars, [f"{value:.2f} s" for value in values], padding=4)
        axis.set_title(link)
        axis.set_xticks([])
        axis.set_yticks(places, [label for label, _ in METHODS.values()])
        axis.spines[:].set_visible(False)
        axis.tick_params(axis="y", length=0)
        axis.grid(visible=False)
    panels[0].set_xlim(0, 1.35 * max(found[link][method] for link in LINKS for method in METHODS))
    panels[0].invert_yaxis()


def main() -> None:
    """Draw both files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="?", default=newest(), help="a JSON file")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder (default: docs/images)")
    options = parser.parse_args()
    found = seconds(options.results)
    for narrow, name in ((False, "network"), (True, "network_narrow")):
        image = plot_style.svg(partial(draw, found, narrow), name, in_words(found))
        (options.out / f"{name}.svg").write_bytes(image)


if __name__ == "__main__":
    main()
