"""Try the versions of combinations.toml, as far as they can be installed here: `make matrix`.

    python -m tests.matrix                              # all
    python -m tests.matrix --only py311-tested-pl       # some
    python -m tests.matrix --own                        # this Python, with the torch that it brings
    python -m tests.matrix --only NAME --tests tests/units
    python -m tests.matrix --strict                     # what cannot be had is a failure
    python -m tests.matrix --json                       # the names, for CI
    python -m tests.matrix --projects                   # projects of others, as each week
    python -m tests.matrix --only project-scvi          # one of them

For each an empty environment gets the wheel and one Lightning package, and `first_run.py` does what
a new user does first. With pytorch-lightning, tests follow. A project's environment gets the wheel,
the project and the tested versions, and its script in `projects` trains. The exit status is 1 if
one failed; what cannot be had is said.
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

from tests.matrix.combination import (
    Combination,
    NotHere,
    Project,
    combinations,
    projects,
    tested_torch,
)
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
    folder, log, installer = prepared(each.name, kind)
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
    chosen = [*tests, *each.tests]
    passed = run([installer.python, "-m", "pytest", "-q", "-n", "0", *chosen], log, ROOT, 3600)
    last = log.read_text().strip().splitlines()[-1].strip("= ")
    return [found, "passed", last if passed else f"FAILED: {last}"]


def prepared(name: str, kind: type[Installer]) -> tuple[Path, Path, Installer]:
    """Return an empty folder, its log, and what fills its environment."""
    folder = ROOT / "runs" / "matrix" / name
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "empty").mkdir(parents=True)
    log = folder / "log.txt"
    return folder, log, kind(folder / "environment", log)


def train(each: Project, wheel: Path, kind: type[Installer]) -> list[str]:
    """Return versions, whether a project's script succeeded, and where its log is."""
    folder, log, installer = prepared(each.name, kind)
    constraints = folder / "constraints.txt"
    constraints.write_text(each.constraints)
    try:
        installer.make(f"{sys.version_info.major}.{sys.version_info.minor}")
        for small in installer.torch(tested_torch()):
            installer.install(small)
        installer.install("-c", str(constraints), str(wheel), *each.requirements)
    except NotHere as why:
        return ["", "not here", str(why)]
    package = (each.requirements or ["torch"])[-1].partition("[")[0]
    asked = [installer.python, "-c", VERSIONS.format(package)]
    found = subprocess.run(asked, capture_output=True, text=True, check=False).stdout.strip()
    script = [installer.python, str(ROOT / "tests" / "matrix" / "projects" / each.script)]
    passed = run(script, log, folder / "empty", 2400)
    return [found, "passed" if passed else "FAILED", "" if passed else f"see {log}"]


def main() -> int:
    """Try them; print a table."""
    usage = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser("python -m tests.matrix", None, __doc__, formatter_class=usage)
    names, others = ([each.name for each in listed] for listed in (combinations(), projects()))
    parser.add_argument("--only", nargs="+", choices=names + others, metavar="NAME")
    parser.add_argument("--projects", action="store_true", help="projects, instead of versions")
    parser.add_argument("--own", action="store_true", help="this Python and its torch")
    parser.add_argument("--tests", nargs="+", default=list(TESTS), help="what pytest runs")
    parser.add_argument("--strict", action="store_true", help="everything must be had")
    parser.add_argument("--json", action="store_true", help="print the names")
    options = parser.parse_args()
    console = Console(highlight=False)
    only = options.only or (others if options.projects else names)
    if options.json:
        console.print(json.dumps(only), soft_wrap=True)
        return 0
    table = Table("name", "Python, torch, package", "first run", "tests", "minutes")
    every: list[Combination | Project] = [*combinations(), *projects()]
    chosen = [each for each in every if each.name in only]
    kind = Own if options.own else default()
    wheels = ROOT / "runs" / "matrix" / "wheel"
    shutil.rmtree(wheels, ignore_errors=True)
    wheel, failed = build(wheels), False
    for each in chosen:
        begun = time.monotonic()
        if isinstance(each, Project):
            row = train(each, wheel, kind)
        else:
            row = attempt(each, wheel, kind, options.tests)
        bad = ("FAILED", "not here") if options.strict else ("FAILED",)
        failed = failed or any(word in cell for word in bad for cell in row)
        table.add_row(each.name, *row, f"{(time.monotonic() - begun) / 60:.1f}")
        console.print(f"{each.name}: {', '.join(filter(None, row))}", soft_wrap=True)
    console.print(table)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
