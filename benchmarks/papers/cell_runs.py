"""Run an experiment's cells that have no row yet, and append their rows to its JSONL file.

One after the other, or several at a time in processes of their own. A run that failed has a row
too, and is tried again the next time.
"""

from __future__ import annotations

import datetime
import fcntl
import json
import math
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TextIO

import torch
from rich.console import Console
from rich.progress import Progress, TimeRemainingColumn

Cell = dict[str, Any]
Row = dict[str, Any]  # a cell and its figures; a figure that is no number is None
Train = Callable[[Cell, Path | None], Row]
Before = Callable[[Cell], Sequence[Cell]]


def read(path: Path, cells: Sequence[Cell] | None = None) -> list[Row]:
    """Return the rows of these cells, in their order; of a cell that was run twice, the last.

    Without ``cells``, all that there are.
    """
    found = _lines(path)
    keys = list(found) if cells is None else [_key(cell) for cell in cells]
    rows = [found[key] for key in keys if key in found]
    return [{**row["cell"], **row["figures"], "cpu": row["cpu"]} for row in rows]


def versions(path: Path, cells: Sequence[Cell]) -> list[str]:
    """Return the versions of torch that these cells ran with, as far as their rows tell."""
    found = _lines(path)
    rows = [found[_key(cell)] for cell in cells if _key(cell) in found]
    return sorted({row["torch"] for row in rows if "torch" in row})


def run(
    train: Train,
    before: Before,
    cells: Sequence[Cell],
    path: Path,
    data: Path | None,
    jobs: int,
    since: str = "",
) -> None:
    """Run the cells that have no row, a failed one, or one that is too old.

    Args:
        train: runs one cell.
        before: returns the cells that a cell depends on, which are run before it.
        cells: all that are wanted.
        path: of the rows.
        data: what ``train`` reads.
        jobs: how many cells at a time.
        since: the date before which a row is too old; empty: none is.

    Raises:
        SystemExit: another command is at work on the same rows.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    console = Console(soft_wrap=True, highlight=False, markup=False)
    bar = (*Progress.get_default_columns()[:-1], TimeRemainingColumn(elapsed_when_finished=True))
    with path.open("a") as file, Progress(*bar, console=console) as progress:
        _alone(path, file)
        found = _lines(path)
        _drop_half_a_line(path)
        new = {key: row for key, row in found.items() if row.get("date", "") >= since}
        kept = {key for key, row in new.items() if "failed" not in row["figures"]}
        todo = [cell for cell in in_order(before, cells) if _key(cell) not in kept]
        began = time.monotonic()
        task = progress.add_task(path.stem, total=len(todo))
        rows = _rows(train, before, todo, path, data, jobs)
        for index, row in enumerate(rows, start=1):
            file.write(json.dumps(row) + "\n")
            file.flush()
            left = (time.monotonic() - began) / index * (len(todo) - index)
            shown = ", ".join(f"{name} {_short(value)}" for name, value in row["cell"].items())
            figures, cpu = row["figures"], row["cpu"]
            what = figures.get("failed") or _short(next(iter(figures.values())))
            console.print(
                f"{index}/{len(todo)}  {shown}: {what}, {cpu:.0f} s, {left / 60:.0f} min left"
            )
            progress.advance(task)


def in_order(before: Before, cells: Sequence[Cell]) -> list[Cell]:
    """Return the cells, each after those that it depends on."""
    groups = [(*before(cell), cell) for cell in cells]
    return list({_key(cell): cell for group in groups for cell in group}.values())


def _rows(
    train: Train, before: Before, todo: list[Cell], path: Path, data: Path | None, jobs: int
) -> Iterator[Row]:
    """Yield rows as they come; cells that depend on others wait for all that do not."""
    if jobs == 1:
        for cell in todo:
            yield _row(train, cell, before(cell), path, data)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of torch's threads can dead-lock
    free = [cell for cell in todo if not before(cell)]
    for wave in (free, [cell for cell in todo if cell not in free]):
        with ProcessPoolExecutor(jobs, spawn) as pool:
            runs = [pool.submit(_row, train, cell, before(cell), path, data) for cell in wave]
            for done in as_completed(runs):
                yield done.result()


def _row(train: Train, cell: Cell, first: Sequence[Cell], path: Path, data: Path | None) -> Row:
    """Run one cell, on one thread."""
    threads, started = torch.get_num_threads(), time.process_time()
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # saturated activations have gradients that take long
    try:
        figures = train(cell | _found(first, path), data)
    except Exception as error:  # one cell's failure does not take the others away
        figures = {"failed": f"{type(error).__name__}: {error}"}
    finally:
        torch.set_flush_denormal(False)
        torch.set_num_threads(threads)
    cpu = round(time.process_time() - started, 2)
    date = datetime.date.today().isoformat()
    row = {"cell": cell, "figures": _plain(figures), "cpu": cpu}
    return row | {"torch": torch.__version__, "date": date}


def _found(first: Sequence[Cell], path: Path) -> Cell:
    """Return the rows that a cell depends on, named as ``train`` reads them."""
    rows = read(path, first)  # run by now
    for other, row in zip(first, rows, strict=True):
        if "failed" in row:
            raise ValueError(f"{_key(other)}, on which this cell depends, failed; run it again.")
    return {"before": rows} if rows else {}


def _lines(path: Path) -> dict[str, Row]:
    text = path.read_text() if path.is_file() else ""
    lines = text.split("\n")[:-1]  # the last one ends without a newline while it is being written
    return {_key(row["cell"]): row for row in map(json.loads, lines)}


def _alone(path: Path, file: TextIO) -> None:
    """Lock the rows, as long as the file is open: two commands would run the same cells."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        text = f"Another command is at work on {path}; --jobs N runs several cells at a time."
        raise SystemExit(text) from None


def _drop_half_a_line(path: Path) -> None:
    """Remove what an interrupted run has left without a newline: its cell is run again."""
    text = path.read_bytes() if path.is_file() else b""
    rest = text[text.rfind(b"\n") + 1 :]
    if rest[:8] != b'{"cell":'[: len(rest)]:
        raise SystemExit(f"{path} does not end with half a row. Give a file of rows, or a new one.")
    os.truncate(path, len(text) - len(rest))


def _key(cell: Cell) -> str:
    return json.dumps(cell, sort_keys=True)


def _plain(figures: Row) -> Row:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in figures.items()
    }


def _short(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else str(value)
