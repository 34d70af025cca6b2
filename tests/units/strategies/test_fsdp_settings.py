"""What CompressedFSDPStrategy refuses when it is made, its names, and shapes as FSDP2 pads them."""

import math
from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import StrategyRegistry

import lightning_gc
from lightning_gc import (
    COMPRESSORS,
    QSGD,
    NarrowResidual,
    NoMemory,
    PowerSGD,
    SignSGD,
    SizeSwitch,
    TopK,
    Uniform,
    WeightDifferences,
)
from lightning_gc.controllers import (
    Accordion,
    BandwidthAware,
    Fixed,
    LayerBudget,
    Observation,
    Plan,
    Schedule,
)
from lightning_gc.lightning.for_pytorch_lightning import CompressedFSDPStrategy
from lightning_gc.sharded.sharded_workers import Cut, shard_shape, stacked
from lightning_gc.sharded.unit_gathers import UnitGather, weights_of
from lightning_gc.sharded.unit_scatters import UnitScatter
from lightning_gc.sharded.weights_controller import BothKnobs

EIGHT = Uniform(8)
TRACED = BandwidthAware((8, 4), 0.1, trace="trace.jsonl")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"gradients": TopK(0.1)}, r"memory='none' drops the errors"),
        ({"gradients": TopK(0.1)}, r"on every rank, 4 bytes for each parameter"),
        ({"gradients": PowerSGD(2)}, "a payload must be for one worker"),
        ({"gradients": SignSGD()}, "is a vote"),
        ({"controller": LayerBudget()}, "compresses full gradients"),
        ({"weights": TopK(0.1)}, "every weight must arrive"),
        ({"weights": "powersgd"}, "every weight must arrive"),
        ({"weights": QSGD(4)}, "may lose .* squared norm in each gather"),
        ({"weights": WeightDifferences(QSGD(2))}, "copies of the weights would not follow"),
        ({"weights": WeightDifferences(TopK(0.1))}, "every weight must arrive"),
        ({"weights": EIGHT, "weights_controller": Fixed}, r"weights_controller=Fixed\): .* class"),
        (
            {"weights": EIGHT, "weights_controller": Accordion(16, 8)},
            "it measures gradients",
        ),
        ({"weights": EIGHT, "weights_controller": Schedule((9, 7))}, "level 7 is .* bits, 8 to 16"),
        ({"hops": 3}, "use 1, or 2"),
        ({"state": "all"}, "use 'full', 'mean' or 'off'"),
        ({"data_parallel_size": 2}, "all ranks share the model"),
        ({"tensor_parallel_size": "auto"}, "give the number of ranks that have each layer"),
        ({"find_unused_parameters": True}, "unknown argument"),
        ({"compressor": QSGD(8)}, "unknown argument; it has two: write gradients="),
        ({"seed": 0.5}, "the seed is a whole number"),
        ({"verify": 1}, "so no two ranks can compare. Give 'payload'"),
        ({"verify": True}, "verify=True"),
        ({"verify": None}, "verify=None"),
    ],
    ids=str,
)
def test_what_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompressedFSDPStrategy(**{"gradients": QSGD(8)} | arguments)


def test_errors_in_8_bits_are_kept_at_a_price() -> None:
    strategy = CompressedFSDPStrategy(TopK(0.1), memory=NarrowResidual("int8"))
    assert strategy.memory == NarrowResidual("int8")
    with pytest.raises(ValueError, match=r"4 bytes .*NarrowResidual\('int8'\) to pay 1\.03"):
        CompressedFSDPStrategy(TopK(0.1))


def test_weights_alone_leave_gradients_uncompressed() -> None:
    strategy = CompressedFSDPStrategy(weights="int8", min_numel=10)
    assert strategy.compressor.traits.exact
    assert CompressedFSDPStrategy(QSGD(4), weights=WeightDifferences()).hops == 1


@pytest.mark.parametrize(
    ("weights", "levels"),
    [
        (EIGHT, (8, 16)),
        (Uniform(8, block_size=64), (6, 16)),
        (QSGD(8), (8, 16)),
        (WeightDifferences(Uniform(4)), (2, 16)),
        (WeightDifferences(QSGD(6)), (5, 16)),
    ],
    ids=repr,
)
def test_levels_of_weights_lose_little(weights: Any, levels: tuple[int, int]) -> None:
    """At most 2 % of a tensor's squared norm, and of differences less than all of it."""
    knob = weights_of("a test", weights, 0, 1024).knob
    assert knob is not None
    assert (knob.low, knob.high) == levels


def test_two_controllers_decide_together() -> None:
    """The weights' sees their sizes, between epochs only."""
    both = BothKnobs(Plan({"a": 4}), Plan({"b": 8}))
    seen = Observation(0, sizes={"a": 10}, weight_sizes={"a": 10, "b": 100}, ended=True)
    decision, state = both.decide(seen, both.init())
    found: Any = decision.level, decision.levels, decision.weights
    assert found == (None, {"a": 4}, (None, {"b": 8}))
    assert decision.reason.count("As planned, 1 of") == 2
    within, _ = both.decide(Observation(0, sizes={"a": 10}, ended=False), state)
    assert (within.levels, within.weights) == ({"a": 4}, None)
    alone, _ = BothKnobs(None, Fixed(8)).decide(seen, BothKnobs(None, Fixed(8)).init())
    assert (alone.keeps_levels, alone.weights) == (True, (8, {}))


def test_a_parameters_state_is_padded_and_cut() -> None:
    for shape, dim in (((5, 3), 0), ((5, 4), 1), ((1,), 0)):
        whole = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
        cut = Cut(shape, dim, 2)
        assert cut.stack(whole).shape == cut.stacked
        assert torch.equal(cut.unstack(cut.stack(whole)), whole)
        assert cut.padding == cut.stack(whole).numel() - whole.numel()
        assert torch.equal(cut.stack(whole)[: cut.stacked[0] // 2].flatten(), _first(whole, dim))


def _first(whole: torch.Tensor, dim: int) -> torch.Tensor:
    """Return the first of two shards."""
    return whole.chunk(2, dim)[0].flatten()


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
    scatter, gather = UnitScatter(None, {}, print), UnitGather("", [], None)  # type: ignore[arg-type]
    for comm in (scatter, gather):
        made = comm.allocate((6,), dtype=torch.bfloat16, device=torch.device("cpu"))
        assert (made.shape, made.dtype) == ((6,), torch.bfloat16)
