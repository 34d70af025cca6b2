"""Run what needs a GPU, each check with a time limit: `make gpu-check`.

    python -m tests.gpu                     # all, about twenty minutes on one GPU
    python -m tests.gpu --only 1 5          # some
    python -m tests.gpu --report gpu.txt    # another name for the file
    NCCL_MULTI_RANK_GPU_ENABLE=1 python -m tests.gpu    # four ranks may share one; NCCL >= 2.30

A table ends it, and a file to send with a report. Without a GPU the checks that need one are
skipped, and the others run on the CPU. The exit status is 1 if a check failed.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from tests.support.accelerator import SHAREABLE

ROOT = Path(__file__).parents[2]
SANITIZED = ("tests/units/kernels/test_on_gpu.py",)
STREAMS = ("tests/gpu/test_streams.py",)
TRAINING = ("tests/processes/test_training.py", "tests/processes/test_resume.py")
SIMULATED = ("tests/units/strategies", "tests/units/test_monitor.py")
SHARDED = tuple(f"tests/processes/test_hsdp{x}.py" for x in ("", "_resume", "_watched"))
SHARDED += ("tests/processes/test_fsdp.py",)
LOCAL = tuple(f"tests/processes/test_local_steps{x}.py" for x in ("", "_resume"))
LAST_LINE = r"^=*\s*(.*(?:passed|failed|skipped|error).* in [\d.]+s.*?)\s*=*$"  # of pytest
PACKAGES = ("lightning-gc", "torch", "triton", "pytorch-lightning", "nvidia-nccl-cu13", "numpy")


@dataclass(frozen=True)
class Check:
    """One selection of tests in a process of its own.

    Attributes:
        what: it shows, for the table.
        tests: files or folders, and further arguments of pytest.
        gpus: it needs; 0 runs on the CPU too.
        environment: variables beside ``TESTS_ACCELERATOR``.
        tool: of ``compute-sanitizer``, under which the tests run.
        at_once: processes of pytest; 0: its own, as a tool wants it.
        seconds: after which it is ended.
    """

    what: str
    tests: tuple[str, ...]
    gpus: int = 0
    environment: dict[str, str] = field(default_factory=dict)
    at_once: int = 0
    tool: str = ""
    seconds: int = 600


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
    13: Check("several: replicas, failing workers, communicators", ("tests/gpu/test_several.py",)),
    14: Check(
        "several: collectives that do not match",
        ("tests/gpu/test_several.py", "-k", "replicas or identity"),
        2,
        {"TORCH_DISTRIBUTED_DEBUG": "DETAIL", "TORCH_NCCL_DESYNC_DEBUG": "1"},
    ),
    15: Check("several: models in shards", SHARDED, 4, at_once=2, seconds=1800),
    16: Check("several: local steps", LOCAL, 2, at_once=2, seconds=1800),
}


@dataclass(frozen=True)
class Outcome:
    """What a check came to.

    Attributes:
        verdict: passed, failed, skipped, or out of time.
        detail: pytest's last line, or why it was skipped.
        output: all that was printed.
        seconds: it took.
    """

    verdict: str
    detail: str
    output: str = ""
    seconds: float = 0.0


def run(check: Check, gpus: int) -> Outcome:
    """Run one check, and end it and all that it has started after its time."""
    sanitizer = shutil.which("compute-sanitizer")
    if gpus < check.gpus:
        return Outcome("skipped", f"needs {check.gpus} GPU{'s'[: check.gpus > 1]}, found {gpus}")
    if check.tool and sanitizer is None:
        return Outcome("skipped", "compute-sanitizer is not on the PATH")
    command = [sys.executable, "-m", "pytest", "-q", "-ra", "-m", "nightly or not nightly"]
    # Only these plugins, and warnings are none of ours, in whatever environment this is.
    command += ["-p", "xdist", "-p", "pytest_timeout", "-p", "no:cacheprovider", "-W", "default"]
    command += ["--tb=short", "--show-capture=no"]  # of all failures, not only of the last ones
    command += ["-n", str(check.at_once), *check.tests]
    if check.tool:
        command = [str(sanitizer), "--tool", check.tool, "--error-exitcode", "9", *command]
    device = "cuda" if gpus else "cpu"
    environment = {**os.environ, "TESTS_ACCELERATOR": device, "OMP_NUM_THREADS": "1"}
    environment["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"
    started = time.monotonic()
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment | check.environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=check.seconds)
        late = False
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        output, _ = process.communicate()
        late = True
    took = time.monotonic() - started
    ends = re.findall(LAST_LINE, output, re.M)
    detail = ends[-1] if ends else output.strip().rsplit("\n", 1)[-1][:80]
    if late:
        return Outcome("out of time", f"ended after {check.seconds} s; {detail}", output, took)
    verdict = "passed" if process.returncode == 0 else "failed"
    return Outcome(verdict, detail, output, took)


def machine() -> str:
    """Return what a reader of a report wants to know of the machine."""
    lines = [f"{datetime.datetime.now():%Y-%m-%d %H:%M}, Python {platform.python_version()}"]
    for package in PACKAGES:
        try:
            lines.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            lines.append(f"{package} is not installed")
    lines.append(f"CUDA {torch.version.cuda}, ROCm {torch.version.hip}")
    for index in range(torch.cuda.device_count()):
        gpu = torch.cuda.get_device_properties(index)
        lines.append(f"GPU {index}: {gpu.name}, {gpu.multi_processor_count} multiprocessors")
    return "\n".join(lines)


def report(outcomes: dict[int, Outcome]) -> str:
    """Return the file to send: the machine, a line per check, and the output of what failed."""
    lines = [machine(), ""]
    for number, outcome in outcomes.items():
        what = CHECKS[number].what
        lines.append(f"{number:2}  {outcome.verdict:11}  {outcome.seconds:4.0f} s  {what}")
        lines.append(f"    {outcome.detail}")
    for number, outcome in outcomes.items():
        if outcome.verdict in ("failed", "out of time"):
            lines += ["", f"==== {number}: {CHECKS[number].what}", outcome.output[-40_000:]]
    return "\n".join(lines) + "\n"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks that were asked for; return 1 if one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--only", type=int, nargs="+", choices=CHECKS, default=list(CHECKS))
    parser.add_argument("--report", type=Path, default=Path("gpu-check.txt"))
    options = parser.parse_args(arguments)
    console, gpus = Console(soft_wrap=True), 4 if SHAREABLE else torch.cuda.device_count()
    console.print(machine(), highlight=False)
    outcomes: dict[int, Outcome] = {}
    for number in options.only:
        console.print(f"{number}: {CHECKS[number].what} …")
        outcomes[number] = run(CHECKS[number], gpus)
        console.print(f"   {outcomes[number].verdict}, {outcomes[number].detail}")
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
