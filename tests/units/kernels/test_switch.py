"""The switch takes away what its values say, and workers that differ in it may train together.

``test_recording`` and ``test_prepared_launch`` show the same of exchanges and launches.
"""

import importlib
import os
from dataclasses import asdict
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from lightning_gc import QSGD, EFSignSGD, PowerSGD, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.exchange.compression import Compression
from lightning_gc.exchange.kernel_compilation import compile_kernels
from lightning_gc.kernels import dispatch
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.kernel_device import INTERPRETED, switched

HOST, GPU = torch.device("cpu"), torch.device("cuda", 0)
TAKEN = {"auto": set(), "prepared": {"recorded"}, "written": {"recorded", "prepared"}}
TAKEN["torch"] = {"recorded", "prepared", "compiled"}
needs_numba = pytest.mark.skipif(
    find_spec("numba") is None or INTERPRETED, reason="needs numba, and no interpreter before it"
)
needs_triton = pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")


@pytest.mark.parametrize("value", ["", *TAKEN])
def test_what_a_value_takes_away(value: str) -> None:
    with switched(value):
        left = asdict(dispatch.allowed())
    assert left.pop("value") == (value or "auto")
    assert {name for name, stays in left.items() if not stays} == TAKEN[value or "auto"]


@pytest.mark.parametrize(
    ("value", "meant"),
    [("Torch", " (did you mean 'torch'?)"), ("wirtten", " (did you mean 'written'?)"), ("0", "")],
)
def test_a_wrong_value_is_refused_before_the_first_step(value: str, meant: str) -> None:
    """Also where a failing kernel would only be noted."""
    wanted = f"{dispatch.SWITCH}={value} is not a way to run kernels{meant}. Set it to one of auto,"
    with switched(value):
        for device in (HOST, GPU):
            with pytest.raises(ValueError, match="way to run kernels") as raised:
                agreed(TopK(0.1), device)
            assert str(raised.value).startswith(wanted)
        with pytest.raises(ValueError, match="way to run kernels"):
            dispatch.compiled(torch.ones(9), "segments")
        with pytest.raises(ValueError, match="way to run kernels"):
            dispatch._works_on_gpu("segments", GPU)


def agreed(compressor: Compressor, device: torch.device = HOST) -> dict[str, str]:
    return compile_kernels(Compression(compressor).configured("test"), device)


def trained(compressor: Compressor) -> list[torch.Tensor]:
    lockstep, found = Lockstep(2, compressor), []
    for step in range(3):
        done = lockstep.step(cases.gradients(2, step))
        found += [each.clone() for part in (done.mean, *done.errors) for each in part.values()]
    return found


@needs_numba
@pytest.mark.parametrize("compressor", [QSGD(4), TopK(0.1), EFSignSGD()], ids=repr)
def test_numba_is_left_out_and_the_bits_stay(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    with switched("torch"), dispatch.watched() as used, monkeypatch.context() as patch:
        patch.setattr(dispatch, "_load", lambda family: pytest.fail("loads a kernel"))
        patch.setattr(dispatch, "_make", lambda family: pytest.fail("compiles a kernel"))
        without = trained(compressor)
        agreed_without = agreed(compressor)
    for value in ("auto", "written"):
        with switched(value) as families:
            assert used
            assert all(map(families.works, used))
            ours = trained(compressor)
            assert all(torch.equal(*pair) for pair in zip(ours, without, strict=True))
            assert agreed(compressor) == agreed_without, "workers may differ in the switch"


@needs_numba
def test_where_the_last_bits_differ_workers_must_agree() -> None:
    found = []
    for value in TAKEN:
        with switched(value):
            found.append(agreed(PowerSGD(2))["numba"])
    assert found == ["low_rank", "low_rank", "low_rank", "not used"]


@needs_triton
def test_triton_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers may differ in what is recorded or prepared; torch may have other last bits."""
    gpu: Any = importlib.import_module("lightning_gc.kernels.gpu")
    monkeypatch.setattr(gpu, "self_test", lambda family, device: None)
    monkeypatch.setitem(os.environ, "TRITON_INTERPRET", "1")
    words = []
    for value in TAKEN:
        with switched(value):
            left = value != "torch"
            assert dispatch.on_gpu("signs", GPU) == left
            assert dispatch.fused(torch.ones(4), "signs") == left
            assert dispatch.may_compile(GPU) == left
            words.append(dispatch.in_words({"signs", "levels"}, GPU))
    assert words[0].startswith("Triton ")
    assert words == [words[0]] * 3 + ["torch"]


@needs_triton
def test_a_kernel_that_does_not_start_names_the_switch() -> None:
    """Of a variant that is compiled in a later step."""
    from lightning_gc.kernels.gpu import prepared_launch

    class DoesNotCompile:
        def __getitem__(self, grid: Any) -> Any:
            raise TypeError("unsupported on this architecture")

    with pytest.raises(TypeError, match="unsupported") as raised:
        prepared_launch.by_triton(DoesNotCompile(), (1,), (torch.ones(4),), {})
    (note,) = raised.value.__notes__
    assert dispatch.WITHOUT in note
