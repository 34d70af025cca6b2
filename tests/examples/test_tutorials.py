"""The tutorials' programs print what their pages show: the same words, the same counts of bytes.

Losses and seconds are those of one run on one machine; they are not compared.
"""

import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.support.processes import run_in_processes, without_others

ROOT = Path(__file__).parents[2]
PROGRAMS = ROOT / "examples" / "tutorials"
PAGES = ROOT / "docs"
TEXT = re.compile(r'^```{\.text title="([^"]+)"}\n(.*?)^```', re.S | re.M)
BYTES = re.compile(r"\d+(?:,\d{3})+")
NUMBER = re.compile(r"\d[\d.,]*")

pytestmark = pytest.mark.processes


def shown(page: str, program: str) -> list[str]:
    """The lines that a page says a program prints."""
    (text,) = (t for name, t in TEXT.findall((PAGES / page).read_text()) if name == program)
    return text.splitlines()


def words(line: str) -> str:
    return " ".join(NUMBER.sub("#", line).split())


def run_program(worker: int, folder: str, name: str, *options: str) -> str:
    """Be the process in which a user runs a program; return what it has printed."""
    without_others()
    os.chdir(folder)
    sys.path.insert(0, str(PROGRAMS))
    sys.argv = [name, *options]
    with Path("out").open("w") as out:
        sys.stdout = out
        runpy.run_path(str(PROGRAMS / name), run_name="__main__")
    return Path("out").read_text()


def printed(folder: Path, name: str, *options: str) -> list[str]:
    (text,) = run_in_processes(run_program, 1, str(folder), name, *options)
    return [line for line in text.splitlines() if line]


def assert_as_shown(page: str, program: str, lines: list[str]) -> None:
    """Of what is printed, the lines that the page shows have its words and counts of bytes."""
    expected = shown(page, program)
    lines = [line for line in lines if words(line) in set(map(words, expected))]
    assert list(map(words, lines)) == list(map(words, expected))
    assert list(map(BYTES.findall, lines)) == list(map(BYTES.findall, expected))


def test_slow_link(tmp_path: Path) -> None:
    """With a fifth of the text: bytes per step are the same."""
    printed_lines = printed(tmp_path, "slow_link.py", "--rows", "1280")
    assert_as_shown("tutorials/slow-link.md", "slow_link.py", printed_lines)


@pytest.mark.nightly
def test_controller(tmp_path: Path) -> None:
    """All of it: levels, bytes, and the reasons on TensorBoard's page, which the page quotes."""
    expected = shown("controllers.md", "controller.py")
    lines = printed(tmp_path, "controller.py")
    lines = [line for line in lines if words(line) in set(map(words, expected))]
    levels = [(line.split()[1], BYTES.findall(line)) for line in lines]
    assert levels == [(line.split()[1], BYTES.findall(line)) for line in expected]
    (log,) = tmp_path.rglob("events.*")
    events = EventAccumulator(str(log), {"tensors": 0}).Reload()
    page = (PAGES / "controllers.md").read_text()
    for decision in events.Tensors("compression/decision/text_summary"):
        reason, *_ = decision.tensor_proto.string_val[0].decode().splitlines()
        assert reason.partition(" (checked")[0] in page, reason


def test_controller_in_short(tmp_path: Path) -> None:
    header, first, *_ = shown("controllers.md", "controller.py")
    lines = printed(tmp_path, "controller.py", "--rows", "256")
    lines = [line for line in lines if words(line) in {words(header), words(first)}]
    assert len(lines) == 13
    assert BYTES.findall(lines[1]) == BYTES.findall(first)


with_namespaces = pytest.mark.skipif(
    not hasattr(os, "geteuid")
    or os.geteuid() != 0
    or not all(map(shutil.which, ("ip", "tc", "torchrun"))),
    reason="makes network namespaces: needs Linux, root, iproute2 and torchrun on the path",
)


@pytest.mark.nightly
@pytest.mark.timeout(400)
@with_namespaces
def test_three_sites() -> None:
    """Rounds have other numbers, and sites are heard in another order; weights are equal."""
    done = subprocess.run(
        ["bash", str(PROGRAMS / "three_sites.sh")],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=380,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    expected = set(map(words, shown("tutorials/three-sites.md", "three_sites.sh")))
    assert expected == {words(line) for line in done.stdout.splitlines()} & expected
    sums = re.findall(r"weights sum to (\S+)", done.stdout)
    assert len(sums) == 4
    assert len(set(sums)) == 1


@pytest.mark.nightly
@pytest.mark.timeout(900)
@with_namespaces
@pytest.mark.parametrize(
    ("title", "settings"),
    [
        ("slow_link.sh", {}),
        ("slow_link.sh with two_sites.py", {"RATE": "10mbit", "PROGRAM": "two_sites.py"}),
    ],
)
def test_slow_link_for_real(title: str, settings: dict[str, str]) -> None:
    expected = shown("tutorials/slow-link.md", title)
    names = [line.partition(":")[0] for line in expected]
    done = subprocess.run(
        ["bash", str(PROGRAMS / "slow_link.sh"), *names],
        env=os.environ | settings,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_as_shown("tutorials/slow-link.md", title, done.stdout.splitlines())


@pytest.mark.nightly
def test_two_sites(tmp_path: Path) -> None:
    assert_as_shown("tutorials/slow-link.md", "two_sites.py", printed(tmp_path, "two_sites.py"))


@pytest.mark.nightly
def test_which_compressor(tmp_path: Path) -> None:
    """With one trial and one seed for each method: their bytes and ratios are the same."""
    text = (PROGRAMS / "compare.yaml").read_text().replace("[0, 1, 2]", "[0]")
    (tmp_path / "compare.yaml").write_text(text.replace("trials: 10", "trials: 1"))
    shutil.copy(PROGRAMS / "characters.py", tmp_path)
    storage = ("--storage", "compare.journal")
    for command in (
        ("tune", "compare.yaml", *storage),
        ("report", *storage, "--out", "report"),
    ):
        subprocess.run(
            [sys.executable, "-m", "lightning_gc", *command],
            cwd=tmp_path,
            env=os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))},
            timeout=220,
            check=True,
        )
    page = (PAGES / "reports.md").read_text()
    table = page.partition("<!-- report -->\n")[2].partition("<!-- /report -->")[0]
    expected = [line.split("|") for line in table.splitlines()]
    assert len(expected) == 7
    report = (tmp_path / "report" / "report.md").read_text().splitlines()
    first = report.index("## Results")  # later tables begin with the same words
    rows = [line.split("|") for line in report[first:] if line.startswith("| ")]
    for row, found in zip(expected, rows, strict=False):
        assert [found[1], *found[6:8]] == [row[1], *row[6:8]]  # method, ratio and wire bytes


@pytest.mark.parametrize(
    "page", ["tutorials/slow-link.md", "controllers.md", "tune.md", "reports.md"]
)
def test_pages_say_that_losses_depend_on_the_python_version(page: str) -> None:
    """The text that the programs train on is the documentation that comes with Python."""
    assert "Python version" in " ".join((PAGES / page).read_text().split())
