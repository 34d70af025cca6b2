"""Shows what benchmarks have found: pictures in the page's colours, and a table of all winners."""

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results" / "papers"
PICTURE = re.compile(r"<picture>.*?</picture>|<img [^>]*>", re.S)
ONE_FILE, TWO_FILES = re.compile(r'\.svg(?=")'), re.compile(r'_light\.png(?=")')
HIDDEN = "---\nsearch: {exclude: true}\nhide: [toc]\n---\n"


def on_files(files: Files, *, config: Any) -> Files:
    """Add ``equal-budgets.md``, a page with the table that ``make catalogue`` has written."""
    newest = max(RESULTS.glob("equal_budgets_2*.html"))  # their names end in a date
    _, _, body = newest.read_text().partition("<body>")
    table = re.sub(r"\n\s*\n", "\n", body.partition("</body>")[0])  # Markdown: HTML up to a gap
    title = "# All methods at equal tuning budgets\n\n"
    files.append(File.generated(config, "equal-budgets.md", content=f"{HIDDEN}{title}{table}\n"))
    return files


def on_page_content(html: str, **kwargs: Any) -> str:
    """Return the page with each picture twice: the theme shows the one of its colour scheme.

    An SVG has both schemes, a PNG has a file for each: ``x_light.png`` and ``x_dark.png``.
    """
    return PICTURE.sub(lambda found: _both(found.group()), html)


def _both(picture: str) -> str:
    one = ONE_FILE.sub(r".svg#only-light", TWO_FILES.sub(r"_light.png#only-light", picture))
    other = ONE_FILE.sub(r".svg#only-dark", TWO_FILES.sub(r"_dark.png#only-dark", picture))
    return picture if one == other else one + other
