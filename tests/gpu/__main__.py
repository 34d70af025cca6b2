"""Run what needs a GPU, each check with a time limit: `make gpu-check`.

    python -m tests.gpu                     # all, more than twenty minutes on one GPU
    python -m tests.gpu --only 1 5          # some
    python -m tests.gpu --loan 9            # in nine minutes: first what has never run on a GPU
    python -m tests.gpu --report gpu.txt    # another name for the file
    NCCL_MULTI_RANK_GPU_ENABLE=1 python -m tests.gpu    # four ranks may share one; NCCL >= 2.30

Each check ends in a line of result, and writes it to a file, which you can send with a report.
Without a GPU the checks that need one are skipped, and the others run on the CPU. The exit status
is 1 if a check failed.

With `--loan` a second call continues where the first one was ended: it repeats no result that the
file has from this machine. `--again 17 18` repeats those two, and `--again` all.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.gpu.machine import ROOT, machine, sources
from tests.support.accelerator import SHAREABLE

SANITIZED = ("tests/units/kernels/test_on_gpu.py",)
STREAMS = ("tests/gpu/test_streams.py",)
TRAINING = ("tests/processes/test_training.py", "tests/processes/test_resume.py")
SIMULATED = ("tests/units/strategies", "tests/units/test_monitor.py")
SHARDED = tuple(f"tests/processes/test_hsdp{x}.py" for x in ("", "_resume", "_watched"))
SHARDED += ("tests/processes/test_fsdp.py",)
LOCAL = tuple(f"tests/processes/test_local_steps{x}.py" for x in ("", "_resume"))
SEVERAL = "tests/gpu/test_several.py"
STEPS_OF_GPT2 = ("benchmarks/gpu_step.py", "--rounds", "1", "--steps", "12", "--buckets", "100")
LAST_LINE = r"^=*\s*(.*(?:passed|failed|skipped|error).* in [\d.]+s.*?)\s*=*$"  # of pytest
GRACE = 10.0
"""Seconds in which pytest may report what it has found by then, before it is killed."""
LEAST = 20.0
"""Seconds of a loan that must be left for a check to begin."""


@dataclass(frozen=True)
class Check:
    """One selection of tests, or a program, in a process of its own.

    Attributes:
        what: it shows, for the table.
        tests: files or folders, and further arguments of pytest.
        gpus: it needs; 0 runs on the CPU too.
        environment: variables beside ``TESTS_ACCELERATOR``.
        tool: of ``compute-sanitizer``, under which the tests run.
        at_once: processes of pytest; 0: its own, as a tool wants it.
        seconds: after which it is ended.
        program: arguments of Python in place of pytest, with ``{folder}`` for the report's. Its
            lines are results, and are shown at once.
    """

    what: str
    tests: tuple[str, ...] = ()
    gpus: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    at_once: int = 0
    tool: str = ""
    seconds: int = 600
    program: tuple[str, ...] = ()


CHECKS: dict[int, Check] = {
    1: Check("kernels against torch's own operations", ("tests/units/kernels",), 1),
    2: Check(
        "compressors as on the CPU; damaged payloads",
        ("tests/gpu/test_same_as_on_cpu.py",),
        at_once=4,
    ),
    3: Check("how often the host waits", ("tests/gpu/test_waits.py",), 1),
    4: Check("kernels: memory out of bounds", SANITIZED, 1, tool="memcheck"),
    5: Check("kernels: memory not written", SANITIZED, 1, tool="initcheck"),
    6: Check("kernels: races", SANITIZED, 1, tool="racecheck"),
    7: Check("delays and reuse of memory change no bit", STREAMS, 1, at_once=3),
    8: Check("nothing piles up; resuming elsewhere", ("tests/gpu/test_long_run.py",), 1, at_once=3),
    9: Check(
        "training and resuming over NCCL, precisions, ways of DDP",
        TRAINING,
        1,
        at_once=8,
        seconds=1800,
    ),
    10: Check("simulated workers, monitor", SIMULATED, 0),
    11: Check("torch.compile, CUDA graphs, deterministic", ("tests/gpu/test_compiled.py",), 1),
    12: Check("a device assert ends in a message", ("tests/gpu/test_device_assert.py",), 1),
    13: Check("several: replicas, failing workers, communicators", (SEVERAL,)),
    14: Check(
        "several: collectives that do not match",
        (SEVERAL, "-k", "replicas or identity"),
        2,
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_NCCL_DESYNC_DEBUG": "1"},
    ),
    15: Check("several: models in shards", SHARDED, 4, at_once=2, seconds=1800),
    16: Check("several: local steps", LOCAL, 2, at_once=2, seconds=1800),
    17: Check(
        "prepared launches: bits, threads, devices, profilers",
        ("tests/gpu/test_prepared_launches.py",),
        1,
        at_once=4,
    ),
    18: Check(
        "recorded exchanges: bits, streams, memory, no wait",
        ("tests/gpu/test_recorded_exchanges.py",),
        1,
        at_once=4,
    ),
    19: Check(
        "recorded exchanges in training over NCCL; number of buckets",
        ("tests/gpu/test_recorded_training.py",),
        1,
        at_once=4,
    ),
    20: Check(
        "milliseconds of the host for a bucket",
        gpus=1,
        program=("-m", "tests.gpu.host_per_bucket"),
        seconds=300,
    ),
    21: Check(
        "milliseconds of a step of GPT-2",
        gpus=1,
        program=(*STEPS_OF_GPT2, "--rows", "{folder}/gpu_step.jsonl", "--out", "{folder}"),
        seconds=900,
    ),
    22: Check(
        "recorded exchanges are proven, bit for bit",
        ("tests/gpu/test_recorded_exchanges.py", "-k", "proven"),
        1,
        at_once=8,
        seconds=120,
    ),
}
LOAN: dict[int, Check] = {
    22: CHECKS[22],
    17: replace(CHECKS[17], seconds=150),
    18: replace(CHECKS[18], seconds=150, at_once=8),
    20: CHECKS[20],
    19: replace(CHECKS[19], seconds=200),
    14: replace(CHECKS[14], seconds=200),
    3: replace(CHECKS[3], seconds=200, at_once=8),
    2: replace(CHECKS[2], gpus=1, seconds=200, at_once=8),
    21: CHECKS[21],
}
"""What to run on a GPU that is lent for a few minutes, in this order.

First what has never run on one. The first check compiles the kernels for all others.
"""


@dataclass(frozen=True)
class Outcome:
    """What a check came to.

    Attributes:
        verdict: passed, failed, skipped, out of time, or interrupted by the end of a loan.
        detail: the last line of pytest or of the program, or why it was skipped.
        output: all that was printed.
        seconds: it took.
        sources: that were checked.
    """

    verdict: str
    detail: str
    output: str = ""
    seconds: float = 0.0
    sources: str = field(default_factory=sources)


def command_of(check: Check, folder: Path) -> list[str]:
    """Return the command that runs a check."""
    if check.program:
        return [sys.executable, *(word.replace("{folder}", str(folder)) for word in check.program)]
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-m", "nightly or not nightly"]
    # Only these plugins, and warnings are none of ours, in whatever environment this is.
    command += ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-W", "default"]
    command += ["--tb=short", "--show-capture=no"]  # of all failures, not only of the last ones
    command += ["-n", str(check.at_once), *check.tests]
    if check.tool:
        tool = str(shutil.which("compute-sanitizer"))
        command = [tool, "--tool", check.tool, "--error-exitcode", "9", *command]
    return command


def run(
    check: Check,
    gpus: int,
    left: float = math.inf,
    folder: Path = Path(),
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Run one check, and end it and all that it has started after its time.

    Args:
        check: to be run.
        gpus: that there are.
        left: seconds of a loan.
        folder: for files that a program writes.
        say: is called with each line of a program.
    """
    if gpus < check.gpus:
        return Outcome("skipped", f"needs {check.gpus} GPU{'s'[: check.gpus > 1]}, found {gpus}")
    if check.tool and shutil.which("compute-sanitizer") is None:
        return Outcome("skipped", "compute-sanitizer is not on the PATH")
    device = "cuda" if gpus else "cpu"
    environment = {**os.environ, "TESTS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    started, aside = time.monotonic(), tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115
    process = subprocess.Popen(
        command_of(check, folder.absolute()),
        cwd=ROOT,
        env=environment | check.environment,
        stdout=subprocess.PIPE,
        stderr=aside if check.program else subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    late, lines, seconds = threading.Event(), list[str](), min(check.seconds, left)

    def end() -> None:
        late.set()
        process.send_signal(signal.SIGINT)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    timer = threading.Timer(seconds, end)
    timer.start()
    assert process.stdout is not None
    with process.stdout as printed:
        for line in printed:
            lines.append(line)
            if check.program:
                say(line.rstrip())
    process.wait()
    timer.cancel()
    timer.join()
    with aside:
        aside.seek(0)
        errors = aside.read()
    took, output = time.monotonic() - started, "".join(lines)
    verdict = "passed" if process.returncode == 0 else "failed"
    if late.is_set():
        verdict = "out of time" if seconds == check.seconds else "interrupted"
    ends = re.findall(LAST_LINE, output, re.M)
    said = output + errors if verdict == "failed" else output
    detail = ends[-1] if ends else said.strip().rsplit("\n", 1)[-1][:80]
    if late.is_set():
        detail = f"ended after {seconds:.0f} s; {detail}"
    return Outcome(verdict, detail, output if verdict == "passed" else output + errors, took)


def report(outcomes: Mapping[int, Outcome]) -> str:
    """Return the file to send: the machine, a line per check, and the output of what failed."""
    lines = [f"{datetime.datetime.now():%Y-%m-%d %H:%M}", *machine(), ""]
    for number, each in outcomes.items():
        found = f"{each.verdict:11}  {each.seconds:4.0f} s  {each.sources}"
        lines.append(f"{number:2}  {found}  {CHECKS[number].what}")
        lines.append(f"    {each.detail}")
    for number, each in outcomes.items():
        if each.output and (each.verdict != "passed" or CHECKS[number].program):
            lines += ["", f"==== {number}: {CHECKS[number].what}", each.output[-40_000:].rstrip()]
    return "\n".join(lines) + "\n"


RESULT = re.compile(r"^ ?(\d+)  (passed|failed|out of time) +(\d+) s  (\w+)  .*\n    (.*)$", re.M)


def results(text: str) -> dict[int, Outcome]:
    """Return the outcomes in a report, without checks that were skipped or interrupted.

    If it is from another machine there are none.
    """
    head, *parts = re.split(r"^==== (\d+): .*\n", text, flags=re.M)
    if "\n".join(machine()) not in head:
        return {}
    outputs = dict(zip(map(int, parts[::2]), parts[1::2], strict=True))
    return {
        int(number): Outcome(verdict, detail, outputs.get(int(number), ""), float(took), known)
        for number, verdict, took, known, detail in RESULT.findall(head)
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that were asked for; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--only", type=int, nargs="+", choices=CHECKS, help="numbers of checks")
    add("--loan", type=float, nargs="?", const=9.0, metavar="MINUTES", help="see above")
    add("--again", type=int, nargs="*", metavar="NUMBER", help="see above")
    add("--report", type=Path, default=Path("gpu-check.txt"))
    options = parser.parse_args(arguments)
    console, gpus = Console(soft_wrap=True), 4 if SHAREABLE else torch.cuda.device_count()
    console.print("\n".join(machine()), highlight=False)
    checks, end, outcomes = CHECKS, math.inf, dict[int, Outcome]()
    if options.loan is not None:
        checks, end = LOAN, time.monotonic() + 60 * options.loan - GRACE
        if options.report.exists() and options.again != []:
            outcomes = results(options.report.read_text())
        for number in options.again or ():
            outcomes.pop(number, None)
    for number, check in checks.items():
        if number in outcomes or (options.only is not None and number not in options.only):
            continue
        if end - time.monotonic() < LEAST:
            console.print(f"{number}: {check.what}: not begun")
            continue
        console.print(f"{number}: {check.what} … ", end="")
        say = partial(console.print, end="\n   ", highlight=False, markup=False)
        found = run(check, gpus, end - time.monotonic(), options.report.parent, say)
        outcomes[number] = found
        console.print(f"{found.verdict}, {found.detail}", markup=False)
        options.report.write_text(report(outcomes))
    table = Table("", "check", "", "seconds", "")
    for number, outcome in outcomes.items():
        row = (CHECKS[number].what, outcome.verdict, f"{outcome.seconds:.0f}", outcome.detail)
        table.add_row(str(number), *row)
    console.print(table)
    console.print(f"{options.report} is what to send with a report.")
    return int(any(o.verdict in ("failed", "out of time") for o in outcomes.values()))


if __name__ == "__main__":
    sys.exit(main())
