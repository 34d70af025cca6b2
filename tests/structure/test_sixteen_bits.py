"""No table compares with 32 bits alone: torch's DDP has 16 bits too, for nothing."""

import re
from itertools import groupby
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *(ROOT / "docs").glob("*.md"),
    *(ROOT / "docs" / "tutorials").glob("*.md"),
]
HEADLINES = ["README", "advise", "auto", "evidence", "first-speedup", "measurements"]
"""Pages that have a table of seconds or bytes beside plain DDP."""
WITHOUT_LINKS = {"gpus.md": "operations of a GPU, and nothing is sent"}
DENSE = re.compile(r"plain DDP|ddp|FSDP2|FSDP2, float32|torch's HSDP")
SIXTEEN = re.compile(r"(torch'?s? |ddp_)?(fp16|bf16|16-bit)[ _]hook|(FSDP2|torch's HSDP), bfloat16")


def tables(text: str) -> list[list[list[str]]]:
    """Return rows of cells: of Markdown, and of programs' output, where two spaces part cells."""
    lines = text.splitlines()
    marked = [list(found) for is_row, found in groupby(lines, lambda s: s[:1] == "|") if is_row]
    blocks = re.findall(r"^```([^\n]*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    printed = [
        [line for line in block.splitlines() if "  " in line]
        for kind, block in blocks
        if kind in ("", "text")
    ]
    cut = [[re.split(r"\s*\|\s*", row.strip("|")) for row in rows] for rows in marked]
    cut += [[re.split(r" {2,}", row) for row in rows] for rows in printed]
    return [[[cell.strip(" `*") for cell in row] for row in rows] for rows in cut if rows]


def names(table: list[list[str]]) -> set[str]:
    """Return what a table compares: its head, and the first cell of each row."""
    return {*table[0], *(row[0] for row in table)}


def compares(table: list[list[str]]) -> bool:
    """Whether it has seconds or bytes of a dense exchange."""
    figures = any(re.match(r"\d", cell) for row in table[1:] for cell in row[1:])
    losses = any("validation loss" in name for name in table[0])
    return figures and not losses and any(DENSE.fullmatch(name) for name in names(table))


def lacking(text: str) -> list[list[str]]:
    """Return the heads of tables that compare with 32 bits only."""
    found = [table for table in tables(text) if compares(table)]
    return [t[0] for t in found if not any(SIXTEEN.fullmatch(name) for name in names(t))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_where_32_bits_are_a_row_16_are_too(page: Path) -> None:
    if page.name not in WITHOUT_LINKS:
        assert lacking(page.read_text()) == []


@pytest.mark.parametrize("name", HEADLINES)
def test_tables_are_found(name: str) -> None:
    (page,) = (page for page in PAGES if page.stem == name)
    assert any(map(compares, tables(page.read_text())))


@pytest.mark.parametrize(
    "text",
    [
        "| s | 1 Gbit/s |\n|---|---:|\n| plain DDP | 0.27 |\n| `TopK(0.01)` | 0.14 |\n",
        "| model | plain DDP | `QSGD(4)` |\n|---|---:|---:|\n| LSTM | 1.6 | 0.3 |\n",
        "| | s |\n|---|---:|\n| FSDP2, float32 | 6.05 |\n| `QSGD(4)` | 3.34 |\n",
        "```text\nstrategy      s/step\nddp           1.006\ncompressed    0.283\n```\n",
    ],
)
def test_a_table_without_them_is_found(text: str) -> None:
    assert len(lacking(text)) == 1
    for dense, half in (
        ("plain DDP | 0.27 |", "torch's fp16 hook | 0.2 |"),
        ("FSDP2, float32 | 6.05 |", "FSDP2, bfloat16 | 3.09 |"),
    ):
        text = text.replace(f"| {dense}", f"| {dense}\n| {half}")
    text = text.replace("| plain DDP | `Q", "| plain DDP | fp16 hook | `Q")
    text = text.replace("ddp           1", "ddp_fp16_hook  0.6\nddp           1")
    assert lacking(text) == []


def test_bytes_are_given_against_both() -> None:
    glossary = (ROOT / "docs" / "concepts.md").read_text()
    (row,) = re.findall(r"^\| ratio \| (.*) \|$", glossary, re.MULTILINE)
    assert "in 32 bits" in row
    assert "16-bit hooks" in row
