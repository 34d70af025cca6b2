"""Draw plots with one set of colours, as an SVG for light and dark pages and for telephones."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # matplotlib comes with the extras that draw
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

INK, MUTED, GRID, SHADE = "#1f2328", "#66707b", "#dce1e6", "#eff1f4"
"""Text; axes and lines that compare; the grid; areas behind the data."""
DENSE, PEER = "#7d8791", "#274a52"
"""Dense gradients or plain DDP; other libraries, such as torch's hooks."""
FAMILIES = {
    "sparsifier": "#d4620c",
    "quantiser": "#1a52b8",
    "low rank": "#16a062",
    "sign": "#c64bb5",
    "dense": DENSE,
}
"""``Traits.kind`` -> colour. ``sign`` is the quantisers with one bit for each element."""
SERIES = (
    *(FAMILIES[name] for name in ("quantiser", "sparsifier", "low rank", "sign")),
    *(PEER, DENSE, "#9c7a00", "#2f9fd0"),
)
"""Colours of series that are not families. The last two need a marker or a label as well."""
PHASES = {
    **{"computation": DENSE, "forward": DENSE, "backward": PEER, "optimizer": MUTED},
    **{"compression": "#9c7a00", "communication": "#2f9fd0"},
}
"""Parts of a step -> colour."""
MARKERS = "osD^vPX*"
"""A marker for each colour of ``SERIES``."""
ON_DARK = {
    **{INK: "#e6edf3", MUTED: "#98a2ad", GRID: "#3a4150", SHADE: "#2a2f3a"},
    **{"#d4620c": "#f08c3c", "#1a52b8": "#5b8def", "#16a062": "#3fd98a", "#c64bb5": "#f2a8e6"},
    **{DENSE: "#7f8994", PEER: "#b4d9e0", "#9c7a00": "#d9bb3a", "#2f9fd0": "#8fd3f7"},
}
"""Colour on white -> the same on a dark page. Data have a contrast of at least 3 on either."""
WIDTH = 5.3
"""Inches. A page of 390 pixels shows the text of 10 points at no less than 9 pixels."""

_SIGN = ("sign", "one_bit", "onebit")


def colour_of(kind: str, name: str = "") -> str:
    """Return the colour of a method's family.

    Args:
        kind: its compressor's ``Traits.kind``.
        name: its name, which distinguishes signs from other quantisers.

    Example:
        >>> colour_of("quantiser", "qsgd"), colour_of("quantiser", "ef_sign_sgd")
        ('#1a52b8', '#c64bb5')
    """
    is_sign = kind == "quantiser" and any(part in name.lower() for part in (*_SIGN, "signum"))
    return FAMILIES["sign" if is_sign else kind]


def plain_log(axis: Axis) -> None:
    """Make an axis logarithmic, with labels such as 0.003 and 20k instead of small exponents."""
    from matplotlib.ticker import EngFormatter, Locator, LogLocator, NullLocator

    name = "y" if axis is axis.axes.yaxis else "x"

    class Round(Locator):
        """Round numbers, as many of each power of ten as have room."""

        def __call__(self) -> Any:
            low, high = axis.get_view_interval()
            return self.tick_values(low, high)

        def tick_values(self, vmin: float, vmax: float) -> Any:
            decades = math.log10(vmax / vmin) / (2 if name == "y" else 1)
            of_each: tuple[float, ...] = (1.0,)
            if decades < 3.2:
                of_each = (1.0, 3.0)
            if decades < 1.6:
                of_each = (1.0, 2.0, 5.0)
            if decades < (0.3 if name == "y" else 0.6):
                of_each = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
            return LogLocator(subs=of_each, numticks=12).tick_values(vmin, vmax)

    class Numbers(EngFormatter):
        def __call__(self, x: float, pos: int | None = None) -> str:
            return f"{x:g}" if x < 1000 else super().__call__(x, pos)

    axis.axes.set(**{f"{name}scale": "log"})
    axis.set_major_locator(Round())
    axis.set_major_formatter(Numbers(sep=""))
    axis.set_minor_locator(NullLocator())


def legend(of: Figure | Axes, columns: int = 2) -> None:
    """Name the series below a figure's panels, each once, or below one panel.

    Args:
        of: has labelled series.
        columns: of the names.
    """
    panels = getattr(of, "axes", None)
    if not isinstance(panels, list):
        of.legend(loc="upper left", bbox_to_anchor=(0, -0.2), ncols=columns)
        return
    pairs = [zip(*axes.get_legend_handles_labels(), strict=True) for axes in panels]
    found = {label: handle for some in pairs for handle, label in some}
    of.legend(found.values(), found.keys(), loc="outside lower left", ncols=columns)


def svg(draw: Callable[[Figure], None], name: str, about: str = "") -> bytes:
    """Return what a function draws on an empty figure, as an SVG with a transparent background.

    Its colours follow the reader's colour scheme. ``file.svg#only-light`` and
    ``file.svg#only-dark`` fix the scheme.

    Args:
        draw: draws; may change the figure's size, which is ``WIDTH`` by 3.6 inches.
        name: of the plot; the same name and data give the same bytes.
        about: what the plot shows, in words.

    Raises:
        ImportError: without matplotlib.
    """
    import matplotlib as mpl
    from cycler import cycler
    from matplotlib.figure import Figure

    settings: dict[Any, Any] = {
        **{"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 10},
        **dict.fromkeys(("axes.labelsize", "legend.fontsize", "axes.titlesize"), 10),
        **dict.fromkeys(("xtick.labelsize", "ytick.labelsize", "figure.titlesize"), 10),
        **{"figure.labelsize": 10, "boxplot.flierprops.markeredgecolor": MUTED},
        **dict.fromkeys(("text.color", "axes.labelcolor", "axes.titlecolor"), INK),
        **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), INK),
        **dict.fromkeys(("xtick.color", "ytick.color", "axes.edgecolor"), MUTED),
        **dict.fromkeys(("boxplot.boxprops.color", "boxplot.whiskerprops.color"), MUTED),
        **dict.fromkeys(("boxplot.capprops.color",), MUTED),
        **dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False),
        **{"axes.grid": True, "grid.color": GRID, "grid.linewidth": 0.6, "axes.axisbelow": True},
        **{"axes.titlelocation": "left", "axes.titleweight": "bold"},
        "boxplot.medianprops.color": INK,
        "axes.prop_cycle": cycler(color=SERIES),
    }
    file = io.BytesIO()
    with mpl.rc_context(settings):
        figure = Figure(figsize=(WIDTH, 3.6), layout="constrained")
        draw(figure)
        metadata = {"Date": None} | ({"Description": about} if about else {})
        figure.savefig(file, format="svg", transparent=True, metadata=metadata)
    text = file.getvalue().decode()
    for old, new in (
        ("<svg ", '<svg id="only-dark" '),
        ('<g id="figure_1">', '<g id="only-light">'),
        ('<style type="text/css">', f'<style type="text/css">{_scheme(text)}'),
    ):
        text = text.replace(old, new, 1)
    return text.encode()


def _scheme(text: str) -> str:
    """Return rules that replace colours, of the scheme that the reader or the address chooses."""
    found = {colour: dark for colour, dark in ON_DARK.items() if colour in text}
    light = "".join(f"--{colour[1:]}:{colour};" for colour in found)
    dark = "".join(f"--{colour[1:]}:{other};" for colour, other in found.items())
    rules = [
        f'[style*="{what}: {colour}"]{{{what}:var(--{colour[1:]})!important}}'
        for colour in found
        for what in ("fill", "stroke")
        if f"{what}: {colour}" in text
    ]
    rules += [f":root,#only-light:target{{{light}}}"]
    rules += [f"@media(prefers-color-scheme:dark){{:root{{{dark}}}}}", f":root:target{{{dark}}}"]
    return "\n".join(["", *rules, ""])
