"""The example of a model in shards trains, and goes on on another mesh, as its page says."""

import contextlib
import io
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.support.fitting import unwarned
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, pytest.mark.nightly, pytest.mark.timeout(700)]
ROOT = Path(__file__).parents[2]
EXAMPLE, PAGE = ROOT / "examples" / "sharded.py", ROOT / "docs" / "hsdp.md"
COMMAND = re.compile(r"^torchrun --nproc-per-node (\d) examples/sharded.py (.*)$", re.M)
PRINTED = re.compile(r"^step (\d+); loss ([\d.]+); .*: 1/([\d.]+) of", re.M)


def run(rank: int, options: list[str]) -> str:
    """Run the example as torchrun would; return what it prints."""
    sys.argv = ["sharded.py", *options]
    with contextlib.redirect_stdout(io.StringIO()) as out, unwarned():
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return out.getvalue()


def test_it_trains_and_goes_on(tmp_path: Path) -> None:
    """Steps and bytes are those of the page; losses are one machine's, and fall."""
    page = PAGE.read_text()
    expected, found = PRINTED.findall(page), []
    for ranks, options in COMMAND.findall(page):
        given = [*options.split(), "--folder", str(tmp_path / "runs")]
        first, *others = run_in_processes(run, int(ranks), given, timeout=200)
        assert others == [""] * (int(ranks) - 1)
        found += PRINTED.findall(first)
    assert [(steps, ratio) for steps, _, ratio in found] == [(s, r) for s, _, r in expected]
    losses = [float(loss) for _, loss, _ in found]
    assert losses == sorted(losses, reverse=True)
