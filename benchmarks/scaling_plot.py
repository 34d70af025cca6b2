"""The plot of the scaling model: how many times faster than dense, over the number of workers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

from lightning_gc.methods import plot_style

DASHES = ("-", "--", ":", "-.")


def draw(
    path: Path,
    workers: Sequence[int],
    links: Mapping[str, Mapping[tuple[str, str], Sequence[float]]],
    colours: Mapping[str, str],
) -> None:
    """Write a panel per link.

    Args:
        path: of the SVG.
        workers: W of the points.
        links: by link, then by (compressor, scheme): how many times faster than dense.
        colours: of the compressors.
    """
    names = [key for lines in links.values() for key in lines]
    dashes = dict(zip(dict.fromkeys(s for _, s in names), DASHES, strict=False))

    def panels(figure: Figure) -> None:
        figure.set_size_inches(plot_style.WIDTH, 1.2 + 2.6 * len(links))
        axes = figure.subplots(len(links), sharex=True, squeeze=False)[:, 0]
        for axis, (link, lines) in zip(axes, links.items(), strict=True):
            every = [value for values in lines.values() for value in values]
            low, high = max(min(every) * 0.8, 1e-3), max(max(every) * 1.3, 1.5)
            axis.axhspan(low, 1, color=plot_style.SHADE, zorder=0)
            place = {"transform": axis.transAxes, "color": plot_style.MUTED}
            axis.text(0.02, 0.05, "slower than dense", **place)
            for (compressor, scheme), values in lines.items():
                axis.plot(workers, values, dashes[scheme], color=colours[compressor], lw=1.6)
            plot_style.plain_log(axis.yaxis)
            axis.set(xscale="log", ylim=(low, high), title=link, ylabel="times faster")
            axis.set_xticks([2, 8, 32, 128, 512], ["2", "8", "32", "128", "512"])
            axis.minorticks_off()
        axes[-1].set_xlabel("workers")
        for name in dict.fromkeys(compressor for compressor, _ in names):
            axes[0].plot([], [], color=colours[name], lw=3, label=name)
        for name, style in dashes.items():
            axes[0].plot([], [], style, color=plot_style.INK, label=name)
        plot_style.legend(figure)

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plot_style.svg(panels, "scaling"))
