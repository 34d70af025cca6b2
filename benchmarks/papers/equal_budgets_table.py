"""Winners at equal tuning budgets as an HTML table: a click on a heading sorts, a word filters."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from html import escape

from equal_budgets_points import Point

HEAD = ("model", "method", "kind", "ratio", "bytes per step", "loss", "deviation", "accuracy, %")
STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.4 system-ui, sans-serif; margin: 2em; }
table { border-collapse: collapse; } td, th { padding: .2em .7em; text-align: left; }
th { cursor: pointer; border-bottom: 2px solid; } tr:nth-child(even) td { background: #8881; }
thead th { position: sticky; top: 0; background: Canvas; }
.number { text-align: right; font-variant-numeric: tabular-nums; }
"""
SCRIPT = """
const body = document.querySelector("tbody"), rows = [...body.rows];
const model = document.querySelector("select"), word = document.querySelector("input[type=search]");
const front = document.querySelector("input[type=checkbox]");
function filter() {
  for (const row of rows)
    row.hidden = (model.value && row.cells[0].textContent !== model.value)
      || !row.textContent.includes(word.value) || (front.checked && !row.dataset.front);
}
for (const control of [model, word, front]) control.addEventListener("input", filter);
document.querySelectorAll("th").forEach((heading, column) => {
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
    """Return the file.

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
<title>Equal tuning budgets</title><style>{STYLE}</style>
<p>All methods at equal tuning budgets: the best draws of each, run with other seeds. The ratio is
to dense bytes, loss and accuracy are those of validation. A click on a heading sorts.
<select aria-label="model"><option value="">all models</option>{models}</select>
<input type="search" placeholder="method, kind or setting" aria-label="filter">
<label><input type="checkbox"> Pareto front only</label></p>
<table><thead><tr>{heads}</tr></thead>
<tbody>
{lines}</tbody></table>
<script>{SCRIPT}</script>
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
        f'<td class="number" data-value="{-1 if value is None else value}">'
        f"{'' if value is None else format(value, how)}</td>"
        for value, how in numbers
    )
    return f"{cells}<td>{escape(settings)}</td>"
