"""The catalogue as a terminal shows it, and as a page does."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lightning_gc.catalogue.rows import FAMILIES, Row

_NARROW, _WIDE = 120, 220
_CODE = re.compile(r"(`+[^`]*`+)")


def show(families: Iterable[str], wide: bool = False) -> None:
    """Print tables to the terminal.

    Args:
        families: of the catalogue's; all if empty.
        wide: a column for everything, however wide that is; else cells of several lines.
    """
    console = Console()
    if wide or not console.is_terminal:
        console = Console(width=max(console.width, _WIDE if wide else _NARROW))
    for family in families or FAMILIES:
        rows = FAMILIES[family]()
        console.print(_wide(family, rows) if wide else _narrow(family, rows))


def markdown(family: str) -> str:
    """Return one family as a Markdown table. mkdocs-autorefs resolves its links on any page."""
    rows = FAMILIES[family]()
    headings = [heading for heading in rows[0].cells if heading != "tuned"]
    table = [["class", "name", "what", *headings]]
    table.append(["---:" if heading == "bits" else "---" for heading in table[0]])
    for row in rows:
        home = row.cls.__module__.rpartition(".")[0]
        link = f"[`{row.cls.__name__}`][{home}.{row.cls.__name__}]"
        cells = [_on_page(row.cells[heading]) for heading in headings]
        table.append([link, f"`{row.name}`", _on_page(row.what), *cells])
    return "".join(f"| {' | '.join(cells)} |\n" for cells in table)


def _narrow(family: str, rows: Sequence[Row]) -> Table:
    """Return a table where memory and scheme share a column, as do class and name."""
    cited = "reference" in rows[0].cells  # else there is room for what it does
    headings = [heading for heading in rows[0].cells if heading not in ("tuned", "scheme")]
    table = _table(family)
    table.add_column("class\nname", no_wrap=True)
    for heading in headings:
        title = "memory\nscheme" if heading == "memory" else heading
        table.add_column(title, no_wrap=heading == "bits", overflow="fold")
    if not cited:
        table.add_column("what")
    for row in rows:
        both = {**row.cells, "memory": f"{row.cells.get('memory')}\n{row.cells.get('scheme')}"}
        cells = [escape(both[heading]) for heading in headings]
        cells += [] if cited else [_in_terminal(row.what)]
        table.add_row(f"[bold]{row.cls.__name__}[/]\n{row.name}", *cells)
    return table


def _wide(family: str, rows: Sequence[Row]) -> Table:
    """Return a table with a column for everything."""
    table = _table(family)
    for heading in ("class", "name", *rows[0].cells, "what"):
        table.add_column(heading, no_wrap=heading in ("class", "name"), overflow="fold")
    for row in rows:
        cells = [row.cls.__name__, row.name, *map(escape, row.cells.values())]
        table.add_row(*cells, _in_terminal(row.what))
    return table


def _table(family: str) -> Table:
    title = family.capitalize()
    return Table(
        title=title,
        title_justify="left",
        box=box.SIMPLE_HEAD,
        show_lines=True,
        padding=(0, 1, 0, 0),
    )


def _in_terminal(text: str) -> str:
    return escape(text.replace("``", ""))


def _on_page(text: str) -> str:
    """Join lines; a bar outside of code would begin the next cell."""
    pieces = _CODE.split(" ".join(text.split()))
    return "".join(p if _CODE.fullmatch(p) else p.replace("|", "&#124;") for p in pieces)
