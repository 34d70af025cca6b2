"""The plot of the scaling model: how many times faster than dense, over the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib as mpl

mpl.use("Agg")
mpl.rcParams["svg.hashsalt"] = "scaling"  # the same file for the same figures
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.lines import Line2D  # noqa: E402

COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#aa3377", "#66ccee")
DASHES = ("-", "--", ":", "-.")


def draw(
    path: Path,
    workers: Sequence[int],
    links: Mapping[str, Mapping[tuple[str, str], Sequence[float]]],
) -> None:
    """Write a panel per link.

    Args:
        path: of the image.
        workers: W of the points.
        links: by link, then by (compressor, scheme): how many times faster than dense.
    """
    names = list(dict.fromkeys(key for lines in links.values() for key in lines))
    colours = dict(zip(dict.fromkeys(c for c, _ in names), COLOURS, strict=False))
    dashes = dict(zip(dict.fromkeys(s for _, s in names), DASHES, strict=False))
    figure, _ = plt.subplots(1, len(links), figsize=(3.7 * len(links), 4.4), sharey=True)
    for axis, (link, lines) in zip(figure.axes, links.items(), strict=True):
        axis.axhspan(1e-4, 1, color="0.93", zorder=0)
        for (compressor, scheme), values in lines.items():
            axis.plot(workers, values, dashes[scheme], color=colours[compressor], lw=1.6)
        axis.set(xscale="log", yscale="log", title=link, xlabel="workers")
        axis.set_xticks([2, 8, 32, 128, 512], ["2", "8", "32", "128", "512"])
        axis.set_yticks([0.01, 0.1, 1, 10, 100], ["0.01", "0.1", "1", "10", "100"])
        axis.minorticks_off()
        axis.grid(color="0.85", lw=0.6)
        every = [value for values in lines.values() for value in values]
        axis.set_ylim(max(min(every) * 0.8, 1e-3), max(max(every) * 1.3, 1.5))
    figure.axes[0].set_ylabel("exchange: times faster than dense\n(grey: it does not pay)")
    handles = [Line2D([], [], color=c, lw=2, label=name) for name, c in colours.items()]
    handles += [Line2D([], [], color="0.3", ls=d, label=name) for name, d in dashes.items()]
    figure.legend(handles=handles, loc="lower center", ncols=4, frameon=False, fontsize=9)
    figure.tight_layout(rect=(0, 0.13, 1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)
    plt.close(figure)
