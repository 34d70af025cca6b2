"""All kernel tests pass in Triton's interpreter, and torch takes over where kernels fail."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from lightning_gc.kernels import dispatch

ROOT = Path(__file__).parents[2]


def interpreted(*arguments: str) -> None:
    """Run tests in Triton's interpreter, which must be chosen before triton is imported."""
    run_with("TRITON_INTERPRET", *arguments)


def run_with(variable: str, *arguments: str) -> None:
    """Run tests in a process of their own, in which a variable is 1."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, "-q", "-p", "no:cacheprovider"],
        cwd=ROOT,
        env=os.environ | {variable: "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert " passed" in done.stdout


NIGHTLY = pytest.mark.nightly
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


WITH_TORCH = [
    "the_switch",
    "without_memory",
    "random_sequences",
    "made_anew",
    "code_of_others",
    "now_and_then",
    "lie_elsewhere",
    "makes_too_much",
    "end_of_a_fit",
    "choice",
]


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_launches_in_the_interpreter() -> None:
    interpreted("tests/contracts/test_launches.py")


@needs_triton
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_recorded_exchanges_in_the_interpreter() -> None:
    """By day without those that show the same with torch's operations."""
    interpreted("tests/units/kernels/test_recording.py", "-k", f"not ({' or '.join(WITH_TORCH)})")


@needs_triton
@pytest.mark.skipif(shutil.which("gcc") is None, reason="gcc is not on the PATH")
@pytest.mark.timeout(400)
@pytest.mark.parametrize("choice", ["not nightly", pytest.param("nightly", marks=NIGHTLY)])
def test_prepared_launches_without_a_gpu(choice: str) -> None:
    run_with("TESTS_DRIVER_STUB", "tests/units/kernels/test_prepared_launch.py", "-m", choice)


KERNELS = Path("tests/units/kernels")
# They use no interpreter.
ELSEWHERE = {"cold_start", "compiled_before_the_first_step", "compiles", "numba", "on_gpu"}
ELSEWHERE |= {"prepared_launch"}
FILES = {path.stem.removeprefix("test_"): path for path in (ROOT / KERNELS).glob("test_*.py")}
LONG = ("buckets", "recording")  # so each test is apart
SELECTED = [f"test_{name}.py" for name in sorted(FILES.keys() - ELSEWHERE - {*LONG})]
for name in LONG:
    tests = re.findall(r"^def (test_\w+)", FILES[name].read_text(), re.M)
    SELECTED += [f"test_{name}.py::{test}" for test in tests]


@needs_triton
@pytest.mark.timeout(3600)
@pytest.mark.nightly
@pytest.mark.parametrize("selected", SELECTED)
def test_kernels_in_the_interpreter(selected: str) -> None:
    interpreted(f"{KERNELS}/{selected}", "-m", "nightly or not nightly")


def test_torch_runs_where_a_first_kernel_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A GPU that is too old, no compiler; here, no GPU at all. Each cause is said once."""
    if torch.cuda.is_available():
        pytest.skip("kernels run here")
    trial = dispatch._works_on_gpu.__wrapped__
    if find_spec("triton") is not None:
        monkeypatch.setattr(dispatch, "_told", set())
        monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
        said = rf"do not run on cuda.*Torch's operations are used.*files in {tmp_path}.*delete"
        said += f".*{dispatch.WITHOUT}"
        with pytest.warns(UserWarning, match=said):
            assert not trial("levels", torch.device("cuda"))
        assert not trial("levels", torch.device("cuda"))  # a warning would be an error
    monkeypatch.setattr(dispatch, "find_spec", lambda name: None)
    assert not trial("levels", torch.device("cuda"))
