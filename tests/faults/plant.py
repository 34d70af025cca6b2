"""Plant deliberate faults in copies of the source tree, and report which test finds each.

That tests pass says little about them. Each fault in ``planted.toml`` is a small change that a
tired author could make, after which the program is wrong. For each, the tree is copied, the change
is made in the copy, and the tests that should see it are run there until one fails, those of the
night if none by day does. A fault that no test finds marks a hole in the tests.

Meant for nights, and for after code has moved: ``make faults``, with ``ARGS="--only ID ..."`` or
``ARGS=--list``. The exit status is 1 if a fault is not found, cannot be planted, or is found by a
test that fails without it as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal
from xml.etree import ElementTree

from tests.faults.fault import CannotPlant, Fault, changed_files, load

PACKAGE, TESTS = "lightning_gc", "tests"
ROOT = Path(__file__).resolve().parents[2]
LEFT_OUT = (".*", "__pycache__", "*.egg-info", "build", "dist", "mutants", "runs", "site")
"""Not copied: what is made from the sources, and everything hidden."""

KERNELS = Path("lightning_gc") / "kernels" / "host"
"""numba's kernels: compiling them would take most of a fault's time."""

LONGEST = 900.0
"""Seconds after which the tests of one fault are given up."""

HEAVY = ("torch", "torch.distributed", "pytorch_lightning", "optuna")
"""Modules that most tests import: imported once for all runs, which saves most of the time."""

NO_TESTS = 5
"""pytest's exit status: none is selected."""

HUNG = "+ Timeout +"
"""What pytest-timeout writes before it ends the process of a test."""

ELSEWHERE = 97
"""Exit status: the package, or a test, was imported from elsewhere than the copy."""

Status = Literal["found", "NOT FOUND", "CANNOT PLANT", "CANNOT RUN", "FAILS ANYWAY"]


@dataclass(frozen=True)
class Result:
    """The outcome for one fault: the test that found it, or why there is none."""

    fault: Fault
    status: Status
    found_by: str = ""
    said: str = ""
    seconds: float = 0.0

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for a JSON file."""
        files = [edit.file for edit in self.fault.edits]
        known = {"id": self.fault.id, "area": self.fault.area, "files": files}
        rest = {name: value for name, value in asdict(self).items() if name != "fault"}
        return known | {"wrong": self.fault.wrong} | rest | {"missed": self.fault.missed}


@contextlib.contextmanager
def copied(tree: Path) -> Iterator[Path]:
    """Yield a temporary copy of the tree, with every package where Python looks for it."""
    with tempfile.TemporaryDirectory(prefix="fault_") as folder:
        copy = Path(folder).resolve() / "tree"
        shutil.copytree(tree, copy, ignore=shutil.ignore_patterns(*LEFT_OUT), symlinks=True)
        setup = tomllib.loads((copy / "pyproject.toml").read_text(encoding="utf-8"))["tool"]
        # A folder that installing would put elsewhere is linked to: nothing is installed here.
        for name, place in setup.get("setuptools", {}).get("package-dir", {}).items():
            link = copy.joinpath(*name.split("."))
            if name and not link.exists():
                link.symlink_to(copy / place, target_is_directory=True)
        cache = tree / KERNELS / "__pycache__"
        for compiled in (*cache.glob("*.nb[ci]"), *cache.glob("*.compiled")):
            place = copy / compiled.relative_to(tree)
            place.parent.mkdir(exist_ok=True)
            shutil.copy2(compiled, place)
        yield copy


def run_tests(copy: Path, selections: Iterable[str], *options: str) -> tuple[int | None, Path]:
    """Run pytest in a copy; return its exit status, None if it took too long, and its report."""
    report = copy.parent / "report.xml"
    report.unlink(missing_ok=True)
    # A plugin of a library that is preloaded cannot rewrite its asserts, of which pytest warns.
    options = ("-q", "-W", "ignore::pytest.PytestAssertRewriteWarning", *options)
    options = ("-p", "no:cacheprovider", f"--junitxml={report}", *options)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(HEAVY))
    process = context.Process(target=_pytest, args=(copy, [*options, *selections]))
    process.start()
    assert process.pid is not None
    try:
        process.join(LONGEST)
        return process.exitcode, report
    finally:  # end the tests, and processes that they have left behind
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join()


def _pytest(copy: Path, command: list[str]) -> None:
    """Run pytest in the copy; the body of a process that has imported ``HEAVY`` already."""
    os.setsid()
    output = os.open(copy.parent / "output.txt", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for number, stream in enumerate((nothing, output, output)):
        os.dup2(stream, number)
    os.chdir(copy)
    # This process, and those that it starts, must import from the copy, not from the tree that
    # this module, and with it the package of tests, was imported from.
    os.environ |= {"PYTHONPATH": str(copy), "OMP_NUM_THREADS": "1"}
    sys.path.insert(0, str(copy))
    for name in [name for name in sys.modules if _is_copied(name)]:
        del sys.modules[name]
    import pytest

    code = int(pytest.main(command))
    ours = [module for name, module in sys.modules.items() if _is_copied(name)]
    files = [Path(file).resolve() for m in ours if (file := getattr(m, "__file__", None))]
    sys.stdout.flush()
    # At once: leaving by `sys.exit` waits for processes of the tests, which a fault may keep alive.
    os._exit(code if all(file.is_relative_to(copy) for file in files) else ELSEWHERE)


def _is_copied(module: str) -> bool:
    return module.partition(".")[0] in (PACKAGE, TESTS)


def failures(report: Path, copy: Path) -> Iterator[tuple[str, str]]:
    """Yield (test, first line of what it said) for each test that failed."""
    if not report.is_file():
        return
    for case in ElementTree.parse(report).iter("testcase"):
        for problem in (*case.findall("failure"), *case.findall("error")):
            # The file that it was collected from; an inherited test is written in another one.
            folders, within = case.get("classname", "").split("."), [case.get("name", "")]
            while folders and not copy.joinpath(*folders).with_suffix(".py").is_file():
                within.insert(0, folders.pop())
            said = problem.get("message", "").partition("\n")[0]
            yield "::".join(["/".join(folders) + ".py", *within]), said[:200]


def examine(fault: Fault, tree: Path, timeout: float) -> Result:
    """Plant one fault in a copy and run its tests until one fails."""
    started = time.monotonic()
    with copied(tree) as copy:
        try:
            for file, text in changed_files(fault, copy).items():
                (copy / file).write_text(text, encoding="utf-8")
                if (copy / file).is_relative_to(copy / KERNELS):  # numba asks for no callee's file
                    shutil.rmtree(copy / KERNELS / "__pycache__", ignore_errors=True)
        except CannotPlant as error:
            return Result(fault, "CANNOT PLANT", said=str(error))
        codes: list[int | None] = []
        for when in ("not nightly", "nightly"):
            code, report = run_tests(copy, fault.tests, "-x", "-m", when, f"--timeout={timeout:g}")
            codes.append(code)
            if code not in (0, NO_TESTS):
                break
        found_by, said = next(failures(report, copy), ("", ""))
        output = (copy.parent / "output.txt").read_text(errors="replace")
    seconds = round(time.monotonic() - started, 1)
    if 0 in codes and code in (0, NO_TESTS):
        return Result(fault, "NOT FOUND", seconds=seconds)
    hung = code is None or HUNG in output  # pytest was ended with the test, without a report
    if hung or (code == 1 and found_by):
        return Result(fault, "found", found_by or "(hangs)", said, seconds)
    if code == ELSEWHERE:
        raise SystemExit(f"The package, or a test, comes from elsewhere than the copy. {said}")
    last = [line for line in output.splitlines() if re.search("(?i)error|no tests|found", line)]
    return Result(fault, "CANNOT RUN", said=said or " ".join(last[-1:]), seconds=seconds)


def sound(results: Sequence[Result], tree: Path, timeout: float) -> list[Result]:
    """Run the tests that found faults without any fault: one that still fails has found nothing."""
    finders = sorted({r.found_by for r in results if "::" in r.found_by})
    if not finders:
        return list(results)
    with copied(tree) as copy:
        options = ("-m", "nightly or not nightly", f"--timeout={timeout:g}")
        code, report = run_tests(copy, finders, *options)
        if code == 4:  # the report changes some characters of names: run all cases of the test
            names = sorted({finder.partition("[")[0] for finder in finders})
            code, report = run_tests(copy, names, *options)
        if code not in (0, 1):
            raise SystemExit(
                f"The tests that found faults cannot be run again: pytest says {code}."
            )
        anyway = dict(failures(report, copy))
    return [
        replace(r, status="FAILS ANYWAY", said=anyway[r.found_by]) if r.found_by in anyway else r
        for r in results
    ]


def table(results: Sequence[Result]) -> str:
    """Return a line for each fault and, below, more about those that were not found."""
    rows = [("fault", "file", "found by", "seconds")]
    for r in results:
        by = r.found_by if r.status == "found" else f"{r.status} {r.said or r.found_by}".strip()
        rows.append((r.fault.id, r.fault.edits[0].file, by, f"{r.seconds:.0f}"))
    widths = [max(len(row[column]) for row in rows) for column in range(3)]
    rows.insert(1, ("-" * widths[0], "-" * widths[1], "-" * widths[2], "-------"))
    lines = [
        f"{a:{widths[0]}}  {b:{widths[1]}}  {c:{widths[2]}}  {d:>7}".rstrip() for a, b, c, d in rows
    ]
    bad = [r for r in results if r.status != "found"]
    lines += ["", f"{len(results) - len(bad)} of {len(results)} faults are found."]
    for r in bad:
        lines += ["", f"{r.fault.id}: {r.fault.wrong}"]
        lines += [f"  {r.fault.missed}"] if r.fault.missed else []
    return "\n".join(lines) + "\n"


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="ID", help="these faults, or whole areas")
    parser.add_argument("--list", action="store_true", help="show what would be planted, and end")
    parser.add_argument("--json", type=Path, metavar="OUT", help="write results there as well")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time (1)")
    parser.add_argument("--timeout", type=float, default=100.0, help="seconds for one test (100)")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the tree to copy (this one)")
    return parser.parse_args(given)


def main(given: Sequence[str] | None = None) -> int:
    """Plant, test, show; return the exit status."""
    options = arguments(given)
    faults = load()
    if options.only:
        unknown = set(options.only) - {f.id for f in faults} - {f.area for f in faults}
        if unknown:
            raise SystemExit(f"No fault and no area is called {', '.join(sorted(unknown))}.")
        faults = [f for f in faults if {f.id, f.area} & set(options.only)]
    if options.list:
        for f in faults:
            sys.stdout.write(f"{f.area:14}  {f.id:32}  {f.edits[0].file}\n    {f.wrong}\n")
        return 0
    tree = options.tree.resolve()
    results = []
    with ThreadPoolExecutor(max_workers=options.jobs) as pool:
        each = map if options.jobs == 1 else pool.map  # Ctrl-C is heard where there is no thread
        for result in each(lambda fault: examine(fault, tree, options.timeout), faults):
            results.append(result)
            sys.stderr.write(
                f"{result.fault.id}: {result.status} {result.found_by or result.said}\n"
            )
    results = sound(results, tree, options.timeout)
    sys.stdout.write(table(results))
    if options.json:
        rows = [result.as_dict() for result in results]
        options.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")
    return int(any(result.status != "found" for result in results))


if __name__ == "__main__":
    sys.exit(main())
