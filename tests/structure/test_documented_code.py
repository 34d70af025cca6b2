"""What the pages show runs: titled blocks as files, the others of a page one after the other."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```python([^\n]*)\n(.*?)^```", re.S | re.M)


def scripts(page: Path) -> dict[str, str]:
    """File name -> code. Helpers that a later file imports come first, as on the page."""
    found: dict[str, str] = {}
    for info, code in BLOCK.findall(page.read_text()):
        title = re.search(r'title="([^"]+)"', info)
        name = title.group(1) if title else "train.py" if "__main__" in code else "page.py"
        found[name] = found.get(name, "") + code
    return found


@pytest.mark.processes
@pytest.mark.parametrize("page", [p for p in PAGES if scripts(p)], ids=lambda p: p.name)
def test_code_on_pages_runs(page: Path, tmp_path: Path) -> None:
    for name, code in scripts(page).items():
        (tmp_path / name).write_text(code)
    for name in scripts(page):
        tool = ["-m", "pytest", "-q", "-p", "no:cacheprovider"] if name.startswith("test_") else []
        done = subprocess.run(
            [sys.executable, *tool, name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
        assert done.returncode == 0, f"{name}\n{done.stdout}\n{done.stderr}"
