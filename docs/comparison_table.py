"""Adds the newest table of the comparison at equal tuning budgets to the site, in the build."""

from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "papers"


def on_files(files: Files, *, config: Any) -> Files:
    """Add ``equal-budgets.html``, which ``make catalogue`` has written."""
    newest = max(RESULTS.glob("equal_budgets_2*.html"))  # their names end in a date
    files.append(File.generated(config, "equal-budgets.html", abs_src_path=str(newest)))
    return files
