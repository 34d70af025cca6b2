"""Try the versions of combinations.toml, as far as they can be installed here: `make matrix`.

    python -m tests.matrix                              # all
    python -m tests.matrix --only py311-tested-pl       # some
    python -m tests.matrix --own                        # this Python, with the torch that it brings
    python -m tests.matrix --only NAME --tests tests/units
    python -m tests.matrix --strict                     # what cannot be had is a failure
    python -m tests.matrix --json                       # the names, for CI

For each an empty environment gets the wheel and one Lightning package, and `first_run.py` does what
a new user does first. With pytorch-lightning, tests follow. The exit status is 1 if one failed;
what cannot be had is said.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from tests.matrix.combination import Combination, NotHere, combinations
from tests.matrix.installers import ROOT, Installer, Own, default, run

TESTS = (
    "tests/structure/test_imports.py",
    "tests/units/test_engine.py",
    "tests/processes/test_training.py",
    "tests/processes/test_monitor.py",
    "tests/processes/test_resume.py",
    "tests/processes/test_attach.py",
    "tests/processes/test_fabric.py",
)
VERSIONS = (
    "import platform, torch, importlib.metadata as m; "
    "print(platform.python_version(), torch.__version__, m.version({!r}))"
)


def build(folder: Path) -> Path:
    """Build the wheel of this tree."""
    tool = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(ROOT)]
    subprocess.run(tool, check=True)
    (wheel,) = folder.glob("*.whl")
    return wheel


def attempt(each: Combination, wheel: Path, kind: type[Installer], tests: list[str]) -> list[str]:
    """Return versions, what the first run said, what the tests said."""
    folder = ROOT / "runs" / "matrix" / each.name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "empty").mkdir(parents=True)
    log = folder / "log.txt"
    installer = kind(folder / "environment", log)
    try:
        installer.make(each.python)
        for small in installer.torch(each.torch_version):
            installer.install(small)
        installer.install(f"{wheel}[tune]", *each.requirements)
    except NotHere as why:
        return ["", "not here", str(why)]
    if each.package == "lightning":  # it depends on the other one, but must not need it
        installer.uninstall("pytorch-lightning")
    asked = [installer.python, "-c", VERSIONS.format(each.package)]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    first = [installer.python, "-I", str(ROOT / "tests" / "matrix" / "first_run.py"), each.package]
    if not run(first, log, folder / "empty", 600):
        return [found, "FAILED", f"see {log}"]
    if each.package == "lightning":
        return [found, "passed", ""]
    try:
        installer.install(
            f"{wheel}[testing]",
            "pytest-timeout",
            "pytest-xdist",
            "scikit-learn",
            "build",
            "setuptools",
        )
    except NotHere as why:
        return [found, "passed", str(why)]
    passed = run([installer.python, "-m", "pytest", "-q", "-n", "0", *tests], log, ROOT, 3600)
    last = log.read_text().strip().splitlines()[-1].strip("= ")
    return [found, "passed", last if passed else f"FAILED: {last}"]


def main() -> int:
    """Try them; print a table."""
    usage = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.matrix", None, __doc__, formatter_class=usage)
    names = [each.name for each in combinations()]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument("--own", action="store_true", help="this Python and its torch")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="what pytest runs")
    parser.add_argument("--strict", action="store_true", help="everything must be had")
    parser.add_argument("--json", action="store_true", help="print the names")
    options = parser.parse_args()
    console = Console(highlight=False)
    if options.json:
        console.print(json.dumps(names), soft_wrap=True)
        return 0
    table = Table("combination", "Python, torch, Lightning", "first run", "tests", "minutes")
    chosen = [each for each in combinations() if each.name in options.only]
    kind = Own if options.own else default()
    wheels = ROOT / "runs" / "matrix" / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    wheel, failed = build(wheels), False
    for each in chosen:
        begun = time.monotonic()
        row = attempt(each, wheel, kind, options.tests)
        bad = ("FAILED", "not here") if options.strict else ("FAILED",)
        failed = failed or any(word in cell for word in bad for cell in row)
        table.add_row(each.name, *row, f"{(time.monotonic() - begun) / 60:.1f}")
        console.print(f"{each.name}: {', '.join(filter(None, row))}", soft_wrap=True)
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
