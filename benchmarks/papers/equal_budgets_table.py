"""Winners at equal tuning budgets as an HTML table: a click on a heading sorts, a word filters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape

from equal_budgets_points import Point

HEAD = ("model", "method", "kind", "ratio", "bytes per step", "loss", "deviation", "accuracy, %")
STYLE = """
.winners th { cursor: pointer; }
.winners tr[hidden] { display: none !important; }
.winners :is(select, input) {
  background: transparent; border: 1px solid; border-radius: 0.2em; color: inherit; font: inherit;
  max-width: 100%; padding: 0.1em 0.4em; -webkit-appearance: auto; appearance: auto;
}
.winners option { background: Canvas; color: CanvasText; }
.winners td:nth-child(n + 4):nth-child(-n + 8) { font-variant-numeric: tabular-nums; }
.winners table:not([data-rows]) :is(th, td):nth-child(n + 4):nth-child(-n + 8) {
  text-align: right;
}
"""
ALONE = """
:root { color-scheme: light dark; }
body { font: 15px/1.4 system-ui, sans-serif; margin: 1em; }
.winners { overflow-x: auto; }
table { border-collapse: collapse; } td, th { padding: .2em .7em; text-align: left; }
th { border-bottom: 2px solid; } tr:nth-child(even) td { background: #8881; }
"""
"""Where the file is opened by itself, not as a page of the documentation."""
SCRIPT = """
const part = document.querySelector(".winners"), body = part.querySelector("tbody");
const model = part.querySelector("select"), word = part.querySelector("input[type=search]");
const front = part.querySelector("input[type=checkbox]"), rows = [...body.rows];
function filter() {
  for (const row of rows)
    row.hidden = (model.value && row.cells[0].textContent !== model.value)
      || !row.textContent.includes(word.value) || (front.checked && !row.dataset.front);
}
for (const control of [model, word, front]) control.addEventListener("input", filter);
front.checked = window.innerWidth < 600;
filter();
part.querySelectorAll("th").forEach((heading, column) => {
  let up = false;
  heading.addEventListener("click", () => {
    up = !up;
    const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
    const compare = (a, b) => (isNaN(a) || isNaN(b) ? String(a).localeCompare(b) : a - b);
    rows.sort((a, b) => (up ? 1 : -1) * compare(key(a), key(b)));
    body.append(...rows);
  });
});
"""


def html(some: Sequence[Point], on_front: Sequence[bool], written: Callable[[Point], str]) -> str:
    """Return the file. Its body is also a page of the documentation.

    Args:
        some: the winners.
        on_front: whether each is on its model's Pareto front.
        written: returns a winner's settings as text.
    """
    models = "".join(f"<option>{name}</option>" for name in dict.fromkeys(p.model for p in some))
    heads = "".join(f"<th>{name}</th>" for name in (*HEAD, "settings"))
    lines = "".join(
        f"<tr{' data-front=1' * best}>{line(p, written(p))}</tr>\n"
        for p, best in zip(some, on_front, strict=True)
    )
    return f"""<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Equal tuning budgets</title><style>{ALONE}</style>
<body>
<div class="winners"><style>{STYLE}</style>
<p>All methods at equal tuning budgets: the best draws of each, run with other seeds. The ratio is
how many times fewer bytes than dense a method sends. Loss and accuracy are on the validation data.
A click on a heading sorts.</p>
<p><select aria-label="model"><option value="">all models</option>{models}</select>
<input type="search" placeholder="method, kind or setting" aria-label="filter">
<label><input type="checkbox"> Pareto front only</label></p>
<table><thead><tr>{heads}</tr></thead>
<tbody>
{lines}</tbody></table>
<script>{SCRIPT}</script>
</div>
</body>
</html>
"""


def line(point: Point, settings: str) -> str:
    """Return a row's cells; numbers are sorted by their value."""
    deviation = statistics.stdev(point.losses.values()) if len(point.losses) > 1 else None
    accuracy = None if point.accuracy is None else 100 * point.accuracy
    numbers = (
        (point.ratio, ",.1f"),
        (point.bytes, ",.0f"),
        (point.loss, ".4f"),
        (deviation, ".4f"),
        (accuracy, ".1f"),
    )
    cells = "".join(f"<td>{escape(text)}</td>" for text in (point.model, point.method, point.kind))
    cells += "".join(
        f'<td data-value="{-1 if value is None else value}">'
        f"{'' if value is None else format(value, how)}</td>"
        for value, how in numbers
    )
    return f"{cells}<td>{escape(settings)}</td>"
