"""What CompressedFSDPStrategy refuses when it is made, its names, and shapes as FSDP2 pads them."""

from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import StrategyRegistry

import lightning_gc
from lightning_gc import COMPRESSORS, QSGD, NoMemory, PowerSGD, SignSGD, SizeSwitch, TopK
from lightning_gc.lightning.for_pytorch_lightning import CompressedFSDPStrategy
from lightning_gc.sharded.sharded_workers import shard_shape, stacked
from lightning_gc.sharded.unit_scatters import UnitScatter


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"compressor": TopK(0.1)}, r"memory='none' drops the errors"),
        ({"compressor": TopK(0.1)}, r"on every rank, 4 bytes for each parameter"),
        ({"memory": "residual"}, r"memory=ErrorFeedback\(.*\): it would keep errors of full"),
        ({"compressor": PowerSGD(2)}, "a payload must be for one worker"),
        ({"compressor": SignSGD()}, "is a vote"),
        ({"controller": 3}, "unknown argument"),
        ({"data_parallel_size": 2}, "all ranks share the model"),
        ({"tensor_parallel_size": 2}, "tensor parallelism has not been tried"),
        ({"find_unused_parameters": True}, "unknown argument"),
        ({"seed": 0.5}, "the seed is a whole number"),
        ({"verify": 1}, "so no two ranks can compare. Give 'payload'"),
        ({"verify": True}, "verify=True"),
        ({"verify": None}, "verify=None"),
    ],
    ids=str,
)
def test_what_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompressedFSDPStrategy(**{"compressor": QSGD(8)} | arguments)


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gc.sharded.fsdp_units.has_custom_scatters", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.9 or later"):
        CompressedFSDPStrategy(QSGD(8))


def test_errors_may_be_dropped_knowingly() -> None:
    assert CompressedFSDPStrategy(TopK(0.1), memory="none").memory == NoMemory()
    assert lightning_gc.CompressedFSDPStrategy(QSGD(8)).memory == NoMemory()


def test_names() -> None:
    """All that need no memory; the others are refused with what to do."""
    traits = {name: cls().traits for name, cls in COMPRESSORS.items()}
    unbiased = {name for name, each in traits.items() if each.unbiased and not each.default_memory}
    assert len(unbiased) > 8
    for name in unbiased - {"integer_qsgd"}:  # which has rounds of its own
        made = StrategyRegistry.get(f"compressed_fsdp_{name}")
        assert made.compressor.method == COMPRESSORS[name]().method
    for name in ("topk", "cast", "powersgd", "sign_sgd", "ecqsgd", "absolute_rounding"):
        with pytest.raises(ValueError, match=r"QSGD\(8\)"):
            StrategyRegistry.get(f"compressed_fsdp_{name}")
    assert StrategyRegistry.get("compressed_fsdp").compressor.method == QSGD(8)


def test_limits_of_size_are_of_whole_parameters() -> None:
    """As padded: 33 rows on two ranks count as 34."""
    whole = stacked(shard_shape((33, 37), 0, 2), 2)
    assert whole == (34, 37)
    assert SizeSwitch(QSGD(8)).compresses(whole)
    assert stacked(shard_shape((5, 4), 1, 2), 2) == (10, 2)


def test_memory_is_what_fsdp2_asks_for() -> None:
    scatter = UnitScatter(None, {}, print)  # type: ignore[arg-type]
    made = scatter.allocate((6,), dtype=torch.bfloat16, device=torch.device("cpu"))
    assert (made.shape, made.dtype) == ((6,), torch.bfloat16)
