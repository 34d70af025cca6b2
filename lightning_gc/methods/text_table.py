"""Format tables of text cells as Markdown or for a terminal."""

import itertools
import sys
import textwrap
from collections.abc import Collection, Sequence


def markdown(
    columns: Sequence[str], rows: Sequence[Sequence[str]], left: Collection[str] | None = None
) -> str:
    """Return a Markdown table.

    Args:
        columns: the headings.
        rows: one text per column each.
        left: headings of left-aligned columns; by default the first column.
    """
    left = columns[:1] if left is None else left
    rule = ["---" if column in left else "---:" for column in columns]
    return "".join(f"| {' | '.join(cells)} |\n" for cells in (columns, rule, *rows))


def plain(columns: Sequence[str], rows: Sequence[Sequence[str]], width: int) -> str:
    """Return a table with lines of at most ``width`` characters.

    An empty line is between rows if one of them has several lines.

    Args:
        columns: the headings. Headings and cells may have several lines.
        rows: one text per column each.
        width: maximal characters of a line. Cells are wrapped, in the widest columns first. Words
            are broken if necessary, except in the first column.
    """
    table = [columns, *rows]
    cells = ["\n".join(column) for column in zip(*table, strict=True)]
    widths = [max(map(len, text.split("\n"))) for text in cells]
    words = [max(map(len, text.split()), default=1) for text in cells]
    while sum(widths) + 2 * (len(widths) - 1) > max(width, words[0] + 3 * len(widths)):
        # Narrow the widest column that can break at spaces, otherwise one that must break words.
        narrow = [i for i, size in enumerate(widths) if size > words[i]] or range(1, len(widths))
        widths[max(narrow, key=lambda i: widths[i])] -= 1
    blocks = []
    for row in table:
        wrapped = [
            [part for line in cell.split("\n") for part in textwrap.wrap(line, size) or [""]]
            for cell, size in zip(row, widths, strict=True)
        ]
        lines = [
            "  ".join(part.ljust(size) for part, size in zip(parts, widths, strict=True)).rstrip()
            for parts in itertools.zip_longest(*wrapped, fillvalue="")
        ]
        blocks.append("\n".join(lines))
    head, rule, rows = blocks[0], "  ".join("-" * size for size in widths), blocks[1:]
    between = "\n\n" if any("\n" in block for block in rows) else "\n"
    return f"{head}\n{rule}\n{between.join(rows)}\n"


def print_line(text: str) -> None:
    """Print a line and flush."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
