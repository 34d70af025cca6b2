"""What CompressedHSDPStrategy refuses when it is made, its names, and sizes of shards."""

from typing import Any

import pytest
from pytorch_lightning.strategies import StrategyRegistry

from lightning_gc import COMPRESSORS, QSGD, Cast, PerParameter, SizeSwitch, TopK
from lightning_gc.compressors.wrappers.size_switch import for_shards
from lightning_gc.controllers import LayerBudget
from lightning_gc.exchange import Compression
from lightning_gc.lightning.for_pytorch_lightning import CompressedHSDPStrategy
from lightning_gc.lightning.sharded import replicas_of
from lightning_gc.sharded.sharded_workers import ShardedWorkers, seed_of_shard, shard_shape


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"replicas": 0}, r"replicas=0\): give the number of replicas"),
        ({"replicas": True}, "replicas=True"),
        ({"replicas": "two"}, "'auto', one per node"),
        ({"bucket_cap_mb": 0}, "more than 0"),
        ({"compressor": QSGD(4), "controller": LayerBudget()}, "a rank has shards"),
        ({"bucket_cap_mb": None}, "bucket_cap_mb=None"),
        ({"data_parallel_size": 2}, "follows from replicas"),
        ({"tensor_parallel_size": "auto"}, "give the number of ranks that have each layer"),
        ({"find_unused_parameters": True}, "unknown argument"),
        ({"replica": 2}, "did you mean 'replicas'"),
        ({"state": "all"}, "use 'full', 'mean' or 'off'"),
        ({"verify": -1}, r"CompressedHSDPStrategy\(verify=-1\): give n to compare"),
    ],
    ids=str,
)
def test_what_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        CompressedHSDPStrategy(**{"compressor": TopK(0.1)} | arguments)


def test_an_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_gc.sharded.fsdp_units.has_hooks", lambda: False)
    with pytest.raises(RuntimeError, match=r"needs torch 2\.7 or later"):
        CompressedHSDPStrategy(TopK(0.1))


def test_replicas_divide_the_ranks() -> None:
    assert replicas_of("S", "auto", 16, 4) == 4
    assert replicas_of("S", 2, 16, 4) == 2
    with pytest.raises(ValueError, match=r"6 ranks cannot be .* use one of 1, 2, 3, 6"):
        replicas_of("S", 4, 6, 2)


def test_names() -> None:
    made = {name: StrategyRegistry.get(f"compressed_hsdp_{name}") for name in COMPRESSORS}
    assert all(isinstance(each, CompressedHSDPStrategy) for each in made.values())
    assert made["topk"].compressor.method == TopK()
    assert isinstance(StrategyRegistry.get("compressed_hsdp").compressor.method, Cast)


def test_limits_of_size_are_of_whole_parameters() -> None:
    """A layer of 33 × 37 is compressed on two shards of 17 and 16 rows, as it is on one."""
    switch = SizeSwitch(TopK(0.1))
    assert switch.compresses((33, 37))
    assert not switch.compresses(shard_shape((33, 37), 0, 2))
    assert for_shards(PerParameter(switch), 2).compresses(shard_shape((33, 37), 0, 2))
    assert not for_shards(PerParameter(switch), 2).compresses(shard_shape((30, 33), 0, 2))
    assert for_shards(TopK(0.1), 2) == TopK(0.1)


def test_shards_have_other_seeds_and_replicas_the_same() -> None:
    seeds = [seed_of_shard(7, shard) for shard in range(4)]
    assert seeds[0] == 7
    assert len(set(seeds)) == 4
    workers = ShardedWorkers(Compression(TopK(0.1), seed=7).configured("a test"))
    workers.shard, workers.shards = 3, 4
    assert [workers.make_engine(replica, 2).seed for replica in (0, 1)] == [seeds[3]] * 2


def test_a_shard_of_any_dimension() -> None:
    assert shard_shape((5, 4), 0, 2) == (3, 4)
    assert shard_shape((5, 4), 1, 2) == (5, 2)
    assert shard_shape((1,), 0, 4) == (1,)
