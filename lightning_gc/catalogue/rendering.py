"""The catalogue as plain text for a terminal, and as Markdown for the documentation."""

from __future__ import annotations

import re

from lightning_gc import text_table
from lightning_gc.catalogue.rows import FAMILIES
from lightning_gc.registry import path_of

_FIGURES = ("waits", "wire")
"""Families of figures about compressors, whose own table says what each is."""

_CODE = re.compile(r"(`+[^`]*`+)")


def plain(family: str, width: int, all_columns: bool = False) -> str:
    """Return one family as a table of at most ``width`` characters a line.

    Args:
        family: one of ``FAMILIES``.
        width: see ``text_table.plain``.
        all_columns: a column for everything; else memory and scheme share one, class and name too,
            and there are no ranges to tune.
    """
    rows, table = FAMILIES[family](), []
    for row in rows:
        cells = dict(row.cells)
        if all_columns:
            cells = {"class": row.cls.__name__, "name": row.name, **cells, "what": row.what}
        else:
            cells = {"class\nname": f"{row.cls.__name__}\n{row.name}", **cells}
            cells.pop("tuned", None)
            if "scheme" in cells:
                cells["memory\nscheme"] = f"{cells.pop('memory')}\n{cells.pop('scheme')}"
            elif family not in _FIGURES:
                cells["what"] = row.what
        table.append({heading: text.replace("``", "") for heading, text in cells.items()})
    lines = text_table.plain(list(table[0]), [list(cells.values()) for cells in table], width)
    return f"{family.capitalize()}\n\n{lines}\n"


def markdown(family: str) -> str:
    """Return one family as a Markdown table. mkdocs-autorefs resolves its links on any page.

    Few columns, so that none is off the screen: what belongs together shares a cell.
    """
    table = []
    for row in FAMILIES[family]():
        cells = {heading: _on_page(text) for heading, text in row.cells.items()}
        cells.pop("tuned", None)
        what = " ".join(filter(None, [_on_page(row.what), _cited(cells.pop("reference", ""))]))
        if "scheme" in cells:
            cells["memory, scheme"] = f"{cells.pop('memory')},<br>{cells.pop('scheme')}"
        shown = {} if family in _FIGURES else {"what": what}
        link = f"[`{row.cls.__name__}`][{path_of(row.cls)}]<br>`{row.name}`"
        table.append({"class, name": link, **shown, **cells})
    columns = list(table[0])
    left = set(columns) - {"bits", "bytes"}
    return text_table.markdown(columns, [list(cells.values()) for cells in table], left)


def _cited(reference: str) -> str:
    return f"*{reference}*" if reference else ""


def _on_page(text: str) -> str:
    """Join lines; a bar outside of code would begin the next cell."""
    pieces = _CODE.split(" ".join(text.split()))
    return "".join(p if _CODE.fullmatch(p) else p.replace("|", "&#124;") for p in pieces)
