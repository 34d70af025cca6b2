"""What benchmarks do with what they find: say it at once, and write it into a dated page."""

from __future__ import annotations

import datetime
import json
import sys
from importlib.metadata import version
from pathlib import Path

RESULTS = Path(__file__).with_name("results")


def say(text: str) -> None:
    """Write a line at once."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def title(words: str) -> str:
    """Return a page's first line, with today's date."""
    return f"# {words}, {datetime.date.today()}"


def versions(*packages: str) -> str:
    """Return which versions of packages are installed, as a page says it."""
    return ", ".join(f"{package} {version(package)}" for package in packages)


def columns(*names: str) -> str:
    """Return the head of a Markdown table; all but the first column stand to the right."""
    return f"| {' | '.join(names)} |\n|---|{'---:|' * (len(names) - 1)}\n"


def stem(folder: Path, name: str) -> Path:
    """Return the path that today's files of a benchmark share, without their suffixes."""
    return folder / f"{name}_{datetime.date.today():%Y%m%d}"


def write(folder: Path, name: str, text: str, figures: object = None) -> Path:
    """Write a page, and its figures as JSON; return their ``stem``."""
    folder.mkdir(parents=True, exist_ok=True)
    shared = stem(folder, name)
    shared.with_suffix(".md").write_text(text)
    if figures is not None:
        shared.with_suffix(".json").write_text(json.dumps(figures, indent=1) + "\n")
    return shared
