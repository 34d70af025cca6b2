"""Table of a comparison: seconds, speed-up, bytes and loss per method."""

from __future__ import annotations

import datetime
import json
import math
import platform
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Any

from lightning_gc.bench.baselines import NONE, PLAIN
from lightning_gc.bench.method_run import BenchSetup
from lightning_gc.core.text_table import markdown
from lightning_gc.methods.lightning_flavour import pl

Rows = Mapping[str, Mapping[str, Any]]
COLUMNS = ("", "s per step", "times faster than DDP", "times the limit", "bytes per step", "loss")
FOOTNOTE = "* computed; the others are counted"


def cells(rows: Rows) -> list[list[str]]:
    """Return the texts of each row.

    Args:
        rows: by method ``seconds`` and ``bytes``; where known ``low`` and ``high``, the quartiles
            of the seconds, ``source``, ``"computed"`` if bytes are not counted, and ``loss``.
    """
    plain, limit = (rows.get(name, {}).get("seconds", math.nan) for name in (PLAIN, NONE))
    found = []
    for method, row in rows.items():
        spread = f" ({row['low']:.4f}-{row['high']:.4f})" if "low" in row else ""
        star = "*" if row.get("source") == "computed" else ""
        found.append(
            [
                method,
                f"{row['seconds']:.4f}{spread}",
                f"{plain / row['seconds']:.2f}",
                f"{row['seconds'] / limit:.2f}",
                f"{row['bytes']:,.0f}{star}",
                f"{row['loss']:.3f}" if "loss" in row else "",
            ]
        )
    return found


_READ = """Seconds are the median over all workers and steps, with the quartiles in brackets:
forward and backward pass, exchange and optimizer, without the time in which data are fetched.
Bytes are what one worker sends per step for gradients. Those of ours are counted by the transport,
with indices, scales and lengths; those of DDP and torch's hooks (*) are computed, for a ring
all-reduce of what they send. Neither has the network's headers. The loss is the mean over workers
of the last quarter of a round's steps, each method from the same weights."""


def write(
    folder: Path, config: Path, setup: BenchSetup, rounds: int, rows: Rows
) -> tuple[Path, Path]:
    """Write ``<config>.md`` and ``<config>.json`` and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    about = _about(config, setup, rounds)
    notes = [_READ]
    if setup.backend == "gloo":
        notes.append("PowerSGD's hook has one bucket: with several it can dead-lock over Gloo.")
    facts = "\n".join(f"- {name}: {value}" for name, value in about.items())
    text = f"# {config.stem}, {about['date']}\n\n{markdown(COLUMNS, cells(rows))}\n{facts}\n\n"
    page, data = folder / f"{config.stem}.md", folder / f"{config.stem}.json"
    page.write_text(text + "\n\n".join(notes) + "\n", encoding="utf-8")
    data.write_text(json.dumps({**about, "rows": _finite(rows)}, indent=1) + "\n")
    return page, data


def _about(config: Path, setup: BenchSetup, rounds: int) -> dict[str, Any]:
    worker, packages = setup.worker, ("torch", pl.__name__.partition(".")[0])
    versions = [f"Python {platform.python_version()}", *(f"{p} {version(p)}" for p in packages)]
    return {
        "date": str(datetime.date.today()),
        "config": config.name,
        "workers": worker.world_size,
        "machines": worker.world_size // worker.local_world_size,
        "device": f"{setup.accelerator}, {setup.backend}",
        "rounds": rounds,
        "steps": setup.steps,
        "versions": ", ".join(versions),
    }


def _finite(value: Any) -> Any:
    """Replace floats that JSON does not have, by strings such as "nan"."""
    if isinstance(value, Mapping):
        return {name: _finite(each) for name, each in value.items()}
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
