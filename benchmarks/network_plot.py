"""The picture of the home page: seconds per step on three links, of benchmarks/network.py.

Files for light and for dark pages, with transparent backgrounds: the panels beside each other, and
one below the other for narrow screens.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl

mpl.use("Agg")
mpl.rcParams |= {"svg.hashsalt": "network", "font.size": 10}  # the same files for the same figures
import matplotlib.pyplot as plt  # noqa: E402

HERE = Path(__file__).parent
IMAGES = HERE.parent / "docs" / "images"

LINKS = ("100 Mbit/s", "1 Gbit/s", "10 Gbit/s")
DDP, THEIRS, OURS = "#8c959f", "#6699cc", "#dd7722"
"""Colours that stand out from white and from black: plain DDP, torch's hooks, this library."""
METHODS = {
    "plain DDP": ("plain DDP", DDP),
    "torch fp16 hook": ("torch: fp16 hook", THEIRS),
    "torch PowerSGD hook": ("torch: PowerSGD hook, rank 2", THEIRS),
    "QSGD(4)": ("QSGD(4)", OURS),
    "PowerSGD(2)": ("PowerSGD(2)", OURS),
    "TopK(0.01), bfloat16": ("TopK(0.01), bfloat16", OURS),
}
"""Row of the results -> label and colour, from top to bottom."""
TEXT = {"light": "#1f2328", "dark": "#e6edf3"}


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


def draw(path: Path, found: dict[str, dict[str, float]], text: str, narrow: bool) -> None:
    """Write a panel per link, each with a scale of its own and the seconds beside the bars.

    Args:
        path: of the image.
        found: link -> row -> seconds per step.
        text: colour of everything that is written.
        narrow: one panel below the other.
    """
    if narrow:
        figure, panels = plt.subplots(len(LINKS), 1, figsize=(3.9, 5.4))
    else:
        figure, panels = plt.subplots(1, len(LINKS), figsize=(7.4, 2.3), sharey=True)
    places = range(len(METHODS))
    for axis, link in zip(panels, LINKS, strict=True):
        values = [found[link][method] for method in METHODS]
        bars = axis.barh(places, values, color=[colour for _, colour in METHODS.values()])
        axis.bar_label(bars, [f"{value:.2f} s" for value in values], padding=3, color=text)
        axis.set_title(link, color=text, fontsize=11)
        axis.set_xlim(0, 1.45 * max(values))
        axis.set_xticks([])
        axis.set_yticks(places, [label for label, _ in METHODS.values()], color=text)
        axis.spines[:].set_visible(False)
        axis.tick_params(axis="y", length=0)
        if narrow or axis is panels[0]:
            axis.invert_yaxis()
    figure.tight_layout(pad=0.3, w_pad=1.0)
    about = {"Date": None, "Description": in_words(found)}
    figure.savefig(path, transparent=True, metadata=about)
    plt.close(figure)


def main() -> None:
    """Draw all four files."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("results", type=Path, nargs="?", default=newest(), help="a JSON file")
    parser.add_argument("--out", type=Path, default=IMAGES, help="folder (default: docs/images)")
    options = parser.parse_args()
    for scheme, text in TEXT.items():
        for narrow, suffix in ((False, ""), (True, "_narrow")):
            path = options.out / f"network_{scheme}{suffix}.svg"
            draw(path, seconds(options.results), text, narrow)


if __name__ == "__main__":
    main()
