"""Every Python block in README and documentation runs.

Titled blocks are files, the other blocks of a page make one file, one after the other.
"""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.processes import run_in_processes, without_others

ROOT = Path(__file__).parents[2]
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


def run_script(worker: int, folder: str, name: str, workers: int) -> None:
    """Be a process in which a user runs a file, or one of those that Lightning would start."""
    if workers == 1:
        without_others()
    os.chdir(folder)
    sys.path.insert(0, folder)
    sys.argv = [name]
    if name.startswith("test_"):
        assert pytest.main(["-q", "-p", "no:cacheprovider", name]) == pytest.ExitCode.OK
    else:
        runpy.run_path(name, run_name="__main__")


def written(page: Path, folder: Path) -> dict[str, str]:
    found = scripts(page)
    for name, code in found.items():
        (folder / name).write_text(code)
    return found


WITH_CODE = [p for p in PAGES if scripts(p)]
LONG = ("write-a-compressor.md",)  # all contracts; test_new_compressor.py has such a method by day
each_page = pytest.mark.parametrize("page", WITH_CODE, ids=lambda p: p.name)


@pytest.mark.processes
@pytest.mark.parametrize(
    "page",
    [pytest.param(p, marks=pytest.mark.nightly if p.name in LONG else ()) for p in WITH_CODE],
    ids=lambda p: p.name,
)
def test_code_on_pages_runs(page: Path, tmp_path: Path) -> None:
    """In processes that have imported torch before; those of two workers are started together."""
    for name, code in written(page, tmp_path).items():
        workers = 2 if "__main__" in code and "devices=2" in code else 1
        run_in_processes(run_script, workers, str(tmp_path), name, workers)


@pytest.mark.nightly
@pytest.mark.processes
@each_page
def test_code_on_pages_runs_as_a_user_starts_it(page: Path, tmp_path: Path) -> None:
    for name in written(page, tmp_path):
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
