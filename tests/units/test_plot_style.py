"""Colours of plots can be told from the page and from each other, on light and on dark pages."""

import re

from matplotlib.figure import Figure

from lightning_gc.methods import plot_style


def luminance(colour: str) -> float:
    """Return the relative luminance as WCAG 2 defines it."""
    channels = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_colours_stand_out_from_both_pages() -> None:
    data = {*plot_style.SERIES, *plot_style.FAMILIES.values(), *plot_style.PHASES.values()}
    for colour in (*data, plot_style.INK, plot_style.MUTED):
        least = 4.5 if colour in (plot_style.INK, plot_style.MUTED) else 2.9
        assert contrast(colour, "#ffffff") >= least, colour
        assert contrast(plot_style.ON_DARK[colour], "#1e2129") >= least, colour


def test_signs_have_a_colour_apart_from_other_quantisers() -> None:
    signs = ("sign_sgd", "ef_sign_sgd", "signum", "one_bit_sgd", "SignSGD")
    assert {plot_style.colour_of("quantiser", name) for name in signs} == {"#c64bb5"}
    assert plot_style.colour_of("quantiser", "qsgd") != "#c64bb5"


def picture() -> str:
    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.plot([1, 2, 3e6], color=plot_style.DENSE, label="dense")
        plot_style.plain_log(axes.yaxis)
        plot_style.legend(figure)

    return plot_style.svg(draw, "tried", "dense: 1").decode()


def test_one_file_has_both_schemes_and_no_background() -> None:
    text = picture()
    assert text == picture()
    assert "dense: 1" in text
    assert "fill: #ffffff" not in text
    dark = plot_style.ON_DARK[plot_style.DENSE]
    assert (
        f":root:target{{--1f2328:#e6edf3;--66707b:#98a2ad;--dce1e6:#3a4150;--7d8791:{dark};}}"
        in text
    )
    assert 'id="only-dark"' in text
    assert 'id="only-light"' in text


def test_labels_of_a_logarithmic_axis_are_words_of_one_size() -> None:
    text = picture()
    assert {"1", "1k", "1M"} <= set(re.findall(r"<text [^>]*>([^<]*)</text>", text))
    assert set(re.findall(r"font(?:-size)?: ([\d.]+)px", text)) == {"10"}
