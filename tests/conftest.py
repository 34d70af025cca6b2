"""What holds for all tests: one thread each, the same random numbers in every run, Ctrl-C."""

import atexit
import gc
import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import settings

from tests.support.processes import standing
from tests.support.seconds import Clock, Report, TwoPools

# Before torch: two processes run tests, some of which start two more. Threads beside those would
# wait for cores in loops that take the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# A shell that runs pytest in the background has it ignore Ctrl-C, and so would all that it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

pytest.register_assert_rewrite("lightning_gc.testing.contracts")

# The same examples in every run, whatever the machine is busy with.
settings.register_profile("repeatable", derandomize=True, database=None, deadline=None)
settings.load_profile("repeatable")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--record-seconds", action="store_true", help="write tests/seconds.json")


def pytest_configure(config: pytest.Config) -> None:
    runs_tests = hasattr(config, "workerinput") or not config.getoption("numprocesses")
    config.pluginmanager.register(Clock() if runs_tests else Report(config))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Thousands of tests are made and kept: looking through them for garbage finds none."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # else nanobind tells of leaks


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> TwoPools | None:
    return TwoPools(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws does not depend on those that ran before it in the same process."""
    import torch

    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope="module")
def ungrouped() -> Iterator[None]:
    """Lightning leaves a process group behind, in which other tests would communicate."""
    yield
    standing.close()
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def fused_once() -> Iterator[None]:
    """Triton's interpreter rounds a fused multiply-add once, as a GPU does, and not twice."""
    if os.environ.get("TRITON_INTERPRET") != "1":
        yield
        return
    import numpy as np
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    def fma(self: InterpreterBuilder, x: TensorHandle, y: TensorHandle, z: TensorHandle) -> object:
        wide = [np.asarray(each.data, np.float64) for each in (x, y, z)]
        return TensorHandle((wide[0] * wide[1] + wide[2]).astype(z.data.dtype), z.dtype)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(InterpreterBuilder, "create_fma", fma)
        yield


@pytest.fixture(scope="module")
def poisoned() -> Iterator[None]:
    """Memory that nothing has been written to holds NaN and the largest integers, not zeros."""
    import torch

    torch.use_deterministic_algorithms(True)
    assert torch.empty(9).isnan().all()
    yield
    torch.use_deterministic_algorithms(False)
