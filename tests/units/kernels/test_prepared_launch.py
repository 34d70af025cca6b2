"""Prepared launches give the driver what Triton gives it, and recorded exchanges call little.

They need no GPU, but a process of their own with ``TESTS_DRIVER_STUB=1``, gcc and Triton's
compiler: see ``test_kernel_interpreter``.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_gc.kernels.dispatch import SWITCH, WITHOUT
from tests.support import launch_cost
from tests.support.driver_stub import Stub
from tests.support.kernel_device import some, switched

pytestmark = pytest.mark.skipif(
    os.environ.get("TESTS_DRIVER_STUB") != "1", reason="needs TESTS_DRIVER_STUB=1"
)
CALLS = {
    "Identity()": (130, 40),
    "Cast()": (520, 50),
    "QSGD(4)": (720, 50),
    "EFSignSGD()": (800, 50),
    "RandomK(0.01)": (560, 50),
    "TopK(0.01)": (1230, 50),
    "ChunkedTopK()": (910, 50),
    "PowerSGD(2)": (990, 60),
    "Quantised(ChunkedTopK(), BinMeans(2))": (1240, 50),
}
"""Functions that one bucket calls at most, as it is written and recorded. These only fall."""
BY_DAY = ("Cast()", "QSGD(4)", "TopK(0.01)")
methods = pytest.mark.parametrize("name", some(CALLS, BY_DAY))


@pytest.fixture(scope="module", autouse=True)
def stub() -> Iterator[Stub]:
    made = launch_cost.prepare()
    with torch.no_grad():
        yield made


@methods
def test_calls_of_a_bucket(name: str) -> None:
    costs = []
    for way in launch_cost.WAYS[1:]:
        with way() as bucket_of:
            costs.append(launch_cost.cost(bucket_of(name)))
    written, recorded = costs
    assert written.launches == recorded.launches
    assert written.calls <= CALLS[name][0]
    assert recorded.calls <= CALLS[name][1]


HALF = {"Identity()": 30, "Cast()": 50, "QSGD(4)": 40, "EFSignSGD()": 40, "TopK(0.01)": 50}
"""Functions of ours that a recorded bucket of bfloat16 calls at most. These only fall."""


@pytest.mark.parametrize("name", some(HALF, ["QSGD(4)"]))
def test_calls_of_a_bucket_in_half_precision(name: str) -> None:
    with launch_cost.recorded() as bucket_of:
        bucket = bucket_of(name, dtype=torch.bfloat16)
        assert bucket.recorded is not None
        assert launch_cost.cost(bucket).ours <= HALF[name]


@methods
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_driver_is_given_the_same(name: str, device: str) -> None:
    """Grid, block, shared memory and each argument's bytes; on meta when recorded, too."""
    different, compared = launch_cost.differences(name, torch.device(device))
    assert not different
    assert compared or name == "Identity()"


def test_a_recorded_launch_is_given_the_step() -> None:
    with launch_cost.recorded() as bucket_of:
        recorded = bucket_of("QSGD(4)").recorded
    assert recorded is not None
    ((_, (memory, at)),) = recorded.exchange[0]._writes
    for step in (7, 70_000):
        recorded.exchange[0].start(step)
        assert struct.unpack_from("i", memory, at) == (step,)


def clean(flat: Tensor, numel: int) -> Any:
    """Start a small kernel; return how, or None if Triton did it."""
    from lightning_gc.kernels.gpu import prepared_launch
    from lightning_gc.kernels.gpu.segments import zero_non_finite

    arguments = zero_non_finite, (1,), (flat, numel), {"BLOCK": 2048}
    return prepared_launch.start(*arguments, may_prepare=True)


@pytest.mark.parametrize(("value", "prepared"), [("prepared", True), ("written", False)])
def test_the_switch(value: str, prepared: bool) -> None:
    from lightning_gc.kernels.gpu import prepared_launch

    flat = torch.ones(100)
    fresh = prepared_launch.PerThread()
    with switched(value), mock.patch.object(prepared_launch, "_mine", fresh):
        assert clean(flat, 20) is None, "the first launch of a variant is Triton's"
        assert (clean(flat, 20) is not None) == prepared


def test_threads_share_no_memory() -> None:
    """The driver reads a launch's arguments while another thread prepares its own."""
    from lightning_gc.kernels.gpu import prepared_launch

    flat, read = torch.ones(100), dict[str, int]()
    compiled, patched = threading.Barrier(3), threading.Barrier(3)
    first_is_called, second_has_ended = threading.Event(), threading.Event()

    def call(*arguments: Any) -> int:
        """Take the driver's place: read the kernel's second argument, its number."""
        name = threading.current_thread().name
        if name == "first":
            first_is_called.set()
            assert second_has_ended.wait(60)
        places = ctypes.cast(arguments[9], ctypes.POINTER(ctypes.c_void_p))
        read[name] = ctypes.c_int.from_address(places[1] or 0).value
        return 0

    def run(number: int) -> None:
        clean(flat, number)
        compiled.wait(60)
        patched.wait(60)
        if number == 36:
            assert first_is_called.wait(60)
        clean(flat, number)
        if number == 36:
            second_has_ended.set()

    threads = [
        threading.Thread(target=run, args=(number,), name=name)
        for name, number in (("first", 20), ("second", 36))
    ]
    for thread in threads:
        thread.start()
    compiled.wait(60)
    with mock.patch.object(prepared_launch, "driver_call", return_value=call):
        patched.wait(60)
        for thread in threads:
            thread.join()
    assert read == {"first": 20, "second": 36}


def test_an_empty_grid_starts_nothing(stub: Stub) -> None:
    from lightning_gc.kernels.gpu import prepared_launch
    from lightning_gc.kernels.gpu.segments import zero_non_finite

    flat = torch.ones(100)
    clean(flat, 20)
    before = stub.launches
    arguments = zero_non_finite, (0,), (flat, 20), {"BLOCK": 2048}
    assert prepared_launch.start(*arguments, may_prepare=True) is None
    assert stub.launches == before


def test_a_larger_number_is_another_variant() -> None:
    flat = torch.ones(100)
    clean(flat, 20)
    assert clean(flat, 20) is not None
    assert clean(flat, (1 << 40) + 1) is None


def test_another_result_is_not_trusted() -> None:
    from lightning_gc.kernels.gpu import prepared_launch

    triton = prepared_launch.by_triton

    def computes(program: Any, grid: Any, arguments: Any, constants: Any) -> Any:
        arguments[0].add_(1)  # which the stub does not do
        return triton(program, grid, arguments, constants)

    flat = torch.ones(100)
    with (
        mock.patch.object(prepared_launch, "by_triton", computes),
        mock.patch.object(prepared_launch, "_trusted", True),
        mock.patch.object(prepared_launch, "_mine", prepared_launch.PerThread()),
    ):
        with pytest.warns(UserWarning, match=f"zero_non_finite gave another result.*{SWITCH}"):
            assert clean(flat, 20) is None
        assert torch.equal(flat, torch.full((100,), 2.0)), "as Triton has it"
        assert clean(flat, 20) is None, "Triton starts all kernels now"
        assert torch.equal(flat, torch.full((100,), 3.0))


@pytest.mark.parametrize(
    "fails",
    [
        {"driver_call": mock.Mock(return_value=lambda *_: 201)},
        {"equal": mock.Mock(side_effect=torch.OutOfMemoryError)},
    ],
    ids=["the driver", "no memory"],
)
def test_a_trial_that_fails_leaves_a_kernel_to_triton(fails: dict[str, Any]) -> None:
    from lightning_gc.kernels.gpu import prepared_launch

    flat = torch.ones(100)
    with mock.patch.object(prepared_launch, "_mine", prepared_launch.PerThread()):
        with mock.patch.multiple(prepared_launch, **fails):
            assert clean(flat, 20) is None
        assert clean(flat, 20) is None


@pytest.mark.parametrize(
    "changed",
    [
        {"num_ctas": 2},
        {"launch_cooperative_grid": True},
        {"global_scratch_size": 8},
        {"profile_scratch_size": 8},
    ],
)
def test_what_only_triton_can_start(changed: dict[str, Any]) -> None:
    from lightning_gc.kernels.gpu import prepared_launch
    from lightning_gc.kernels.gpu.segments import zero_non_finite

    constants = {"BLOCK": 2048}
    compiled = prepared_launch.by_triton(zero_non_finite, (1,), (torch.ones(9), 9), constants)
    prepared_launch.Variant(compiled, zero_non_finite, constants)
    known = compiled.metadata
    if not known._fields or not set(changed) <= set(known._fields):
        pytest.skip("this version of Triton has no such kernels")
    with (
        mock.patch.object(compiled, "metadata", known._replace(**changed)),
        pytest.raises(prepared_launch.Unknown),
    ):
        prepared_launch.Variant(compiled, zero_non_finite, constants)


def test_a_profiler_is_told_of_every_launch() -> None:
    from lightning_gc.kernels.gpu import prepared_launch

    flat = torch.ones(100)
    clean(flat, 20)
    assert clean(flat, 20) is not None
    with mock.patch.object(prepared_launch, "hooked", return_value=True):
        assert clean(flat, 20) is None


def test_an_error_of_the_driver_is_raised() -> None:
    from lightning_gc.kernels.gpu import prepared_launch

    flat = torch.ones(100)
    clean(flat, 20)
    with (
        mock.patch.object(prepared_launch, "driver_call", return_value=lambda *arguments: 700),
        pytest.raises(RuntimeError, match=rf"CUDA error 700: stub\..*{SWITCH}=written.*{WITHOUT}"),
    ):
        clean(flat, 20)
