"""Weights in FSDP's all-gathers, compressed: one copy for all, exact masters, bytes, resumes."""

import copy
import re
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.loggers import CSVLogger
from torch import nn
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

from lightning_gc import QSGD, Identity, Int8, NarrowResidual, Uniform, WeightDifferences, attach
from lightning_gc.controllers import Accordion, Fixed, Schedule
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from tests.processes.test_fsdp import Resumed, train
from tests.support.accelerator import needs_four, needs_two
from tests.support.fsdp import fsdp
from tests.support.fsdp_loop import Loop, Watch, checkpointed, compiled, prefetching
from tests.support.hsdp import fit_sharded
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]
EIGHT, DIFFERENCES = Int8(block_size=256), WeightDifferences()
ERRORS = NarrowResidual("int8")
LEVELLED = {
    "eight": Uniform(8, block_size=64),
    "differences": WeightDifferences(Uniform(4, block_size=64)),
}
BFLOAT16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
WAYS: dict[str, dict[str, Any]] = {
    "checkpointed": {"before": checkpointed},
    "compiled": {"before": compiled},
    "prefetching": {"after": prefetching},
    "kept": {"reshard": False},
    "offloaded": {"offload": CPUOffloadPolicy(pin_memory=False)},
}


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


BY_DAY = {
    "eight": ("checkpointed", "prefetching", "kept", "offloaded"),
    "differences": ("checkpointed",),
}
PAIRS = [(name, way) for name, ways in BY_DAY.items() for way in ways]


def loops(rank: int, by_day: bool = True) -> dict[str, Any]:
    """Train in all ways, or in those of the day."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found: dict[str, Any] = {}
    for name, policy in (("", None), (", bfloat16", BFLOAT16)):
        found[f"dense{name}"] = Loop(rank, policy=policy).run(0, 4).end()
        exact = Loop(rank, Identity(), weights=Identity(), policy=policy)
        found[f"exact{name}"] = exact.run(0, 4).end()
    for name, weights in (("eight", EIGHT), ("differences", DIFFERENCES)):
        steps = 15 if by_day and name == "differences" else 50
        with Watch() as watch:
            loop = Loop(rank, QSGD(4), weights=weights).run(0, steps)
        backward = sum(each for _, each, _ in watch.calls)
        found[f"{name}, differing"] = (watch.differing(), backward / steps)
        found[f"{name}, computed"] = loop.computed()
        found[f"{name}, exact"] = loop.end()
        base = Loop(rank, Identity(), weights=weights).run(0, 4).end()
        for way in BY_DAY[name] if by_day else WAYS:
            own = Loop(rank, Identity(), weights=weights, **WAYS[way]).run(0, 4).end()
            found[f"{name}, {way}"] = same(base, own)
        narrow = Loop(rank, QSGD(4), weights=weights, policy=BFLOAT16).run(0, 4)
        found[f"{name}, bfloat16"] = narrow.computed()
        narrow.end()
    return found


def everything(rank: int, folder: str) -> dict[str, Any]:
    """In one set of processes, for starting them takes long."""
    found = loops(rank)
    found["resumed"] = resumes(rank)
    found["levels"] = levels(rank)
    found["shares"] = [share(policy) for policy in (MixedPrecisionPolicy(), BFLOAT16)]
    found["uncounted"] = uncounted()
    options: dict[str, Any] = {"weights": LEVELLED["differences"], "memory": ERRORS}
    options["weights_controller"] = Schedule((4, 6))
    path = str(Path(folder, "first.ckpt"))
    found["whole"] = train(rank, 2, **options)
    found["first"] = train(rank, 1, save=path, **options)
    found["second"] = train(rank, 2, resume=path, **options)
    metrics = Metrics()
    settings: dict[str, Any] = {
        "callbacks": [CompressionMonitor(), metrics],
        "logger": CSVLogger(folder, "", ""),
    }
    strategy = fsdp(QSGD(4), weights=LEVELLED["eight"], weights_controller=Fixed(7))
    fit_sharded(rank, strategy, ranks=2, log_every_n_steps=1, **settings)
    found["metrics"] = metrics.found
    found["logged"] = Path(folder, "metrics.csv").read_text() if rank == 0 else ""
    return found


class Metrics(pl.Callback):
    """Keeps what a fit has shown."""

    found: dict[str, float]

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        self.found = {name: float(value) for name, value in trainer.callback_metrics.items()}


def levels(rank: int) -> list[dict[str, Any]]:
    """Return the levels of gradients by epoch, as a controller has chosen."""
    controller = Accordion(low=8, high=2, interval=1)
    loop = Loop(rank, QSGD(4), weights=EIGHT, controller=controller)
    found = []
    for epoch in range(3):
        loop.handle.begin_epoch(epoch, max_epochs=3)
        loop.run(epoch, epoch + 1)
        found.append(dict(loop.handle.levels))
    loop.end()
    return found


def share(policy: MixedPrecisionPolicy) -> float:
    """Return the share of FSDP2's bytes that is sent for a model without small layers."""
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(nn.Linear(256, 256) for _ in range(3)))
    for layer in (*net, net):
        fully_shard(layer, mp_policy=policy)
    handle = attach(net, QSGD(4), weights=EIGHT)
    for _ in range(3):
        net(torch.randn(4, 256)).square().mean().backward()
    account, engine = handle.account(), handle._workers.first
    handle.close()
    assert account.dense_weight_bytes is not None
    dense = engine.dense_bytes(engine.tally.grad_bytes) + account.dense_weight_bytes
    return account.wire_bytes / dense


def uncounted() -> bool:
    """Whether the account of a loop says that nothing is counted where FSDP2 gathers weights."""
    net: Any = fully_shard(nn.Linear(256, 256))
    handle = attach(net, QSGD(4))
    net(torch.randn(4, 256)).square().mean().backward()
    account = handle.account()
    handle.close()
    return account.weight_bytes is account.dense_weight_bytes is None and account.wire_bytes > 0


def resumes(rank: int) -> tuple[bool, list[str]]:
    """Whether a loop that goes on from states equals one that was not interrupted.

    And what is said where the states are of another compressor of weights.
    """
    options: dict[str, Any] = {"weights": DIFFERENCES, "memory": ERRORS}
    first = Loop(rank, QSGD(2), **options).run(0, 4)
    state = saved(first)
    whole = first.run(4, 8).end()
    equal = same(whole, resumed(rank, state, **options).run(4, 8).end())
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        resumed(rank, state, **options | {"weights": Int8()}).run(4, 5).end()
    return equal, [str(each.message) for each in said if "Resumed" in str(each.message)]


def saved(loop: Loop) -> list[Any]:
    """Return the states of model, optimizer and handle."""
    return [copy.deepcopy(each.state_dict()) for each in (loop.net, loop.optimizer, loop.handle)]


def resumed(rank: int, states: list[Any], **options: Any) -> Loop:
    """Return another loop that goes on from ``saved``."""
    loop = Loop(rank, QSGD(2), **options)
    for part, state in zip((loop.net, loop.optimizer, loop.handle), states, strict=True):
        part.load_state_dict(state)
    return loop


def turns(rank: int) -> dict[str, dict[str, Any]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    return {name: turned(rank, weights) for name, weights in LEVELLED.items()}


def turned(rank: int, weights: Any) -> dict[str, Any]:
    """Train while a controller sets the level of weights; resume between epochs and within one."""
    options: dict[str, Any] = {"weights": weights, "weights_controller": Schedule((8, None, 6))}
    loop = Loop(rank, QSGD(2), **options)
    found: dict[str, Any] = {"levels": [], "computed": [], "bytes": []}
    for epoch in range(3):
        between = saved(loop)
        if epoch == 1:
            with torch.no_grad():  # a validation, which leaves the root gathered
                loop.net(loop.data[0])
        loop.handle.begin_epoch(epoch)
        if epoch == 1:
            found["after validation"] = loop.computed()
            found["exact"] = loop.weights()
        loop.handle.account()
        loop.run(4 * epoch, 4 * epoch + 2)
        found["computed"].append(loop.computed())  # which gathers, so not at an epoch's end
        within = saved(loop)
        loop.run(4 * epoch + 2, 4 * epoch + 4)
        found["levels"].append(loop.handle.weight_levels)
        found["bytes"].append(loop.handle.account().weight_bytes)
    whole = loop.end()
    later = resumed(rank, between, **options)
    later.handle.begin_epoch(2)
    later.run(8, 10).computed()
    again = resumed(rank, within, **options)
    found["levels"].append(again.handle.weight_levels)
    found["resumed"] = [same(whole, each.run(10, 12).end()) for each in (later, again)]
    return found


@pytest.fixture(scope="module")
def looped(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = str(tmp_path_factory.mktemp("fits"))
    results: list[dict[str, Any]] = run_in_processes(everything, 2, folder, timeout=300)
    return results


def test_uncompressed_it_is_fsdp2_bit_for_bit(looped: Any) -> None:
    for rank in looped:
        assert same(rank["exact"], rank["dense"])
        assert same(rank["exact, bfloat16"], rank["dense, bfloat16"])


@pytest.mark.parametrize("name", ["eight", "differences"])
def test_all_ranks_compute_with_the_same_weights(looped: Any, name: str) -> None:
    """After 50 steps of 8 bits, the owner of a shard too; biases and norms are exact."""
    check_common(looped, name)


def check_common(ranks: Any, name: str) -> None:
    first = ranks[0]
    for rank in ranks:
        assert same(rank[f"{name}, computed"], first[f"{name}, computed"])
        assert same(rank[f"{name}, bfloat16"], first[f"{name}, bfloat16"])
        assert same(rank[f"{name}, exact"], first[f"{name}, exact"])
    off = {
        n: np.abs(first[f"{name}, computed"][n] - value).max()
        for n, value in first[f"{name}, exact"].items()
    }
    compressed = {"table.weight", "body.0.weight", "body.1.weight", "frozen.weight"}
    frozen = {"frozen.weight"} if name == "differences" else set()  # its first gather was exact
    assert {n for n, gap in off.items() if gap > 0} == compressed - frozen
    assert max(off.values()) < 0.02


@pytest.mark.parametrize("name", ["eight", "differences"])
def test_a_backward_pass_has_its_forward_passs_weights(looped: Any, name: str) -> None:
    for rank in looped:
        differing, gathers = rank[f"{name}, differing"]
        assert differing == 0
        assert gathers == 3, "of the body and the frozen layer; the root is kept"


@pytest.mark.parametrize(("name", "way"), PAIRS)
def test_other_ways_to_compute_have_the_same_weights(looped: Any, name: str, way: str) -> None:
    assert all(rank[f"{name}, {way}"] for rank in looped)


def test_states_resume_bit_for_bit(looped: Any) -> None:
    """Errors in 8 bits, and the copies of weights."""
    assert all(rank["resumed"][0] for rank in looped)


def test_another_compressor_of_weights_is_named(looped: Any) -> None:
    """By one rank, once."""
    (said,), nothing = (rank["resumed"][1] for rank in looped)
    compressors = r"WeightDifferences\(.*Float4\(.*\) is now .*Int8\(.*\)"
    assert re.match(
        rf"Resumed with changes\. Weights' compressor {compressors}: exact weights are kept\.$",
        said,
    )
    assert not nothing


def test_a_controller_sets_equal_levels_on_all_ranks(looped: Any) -> None:
    first = looped[0]["levels"]
    assert set(first[0]) == {"table.weight", "body.0.weight", "body.1.weight"}
    assert {level for each in first for level in each.values()} == {2, 8}
    assert looped[1]["levels"] == first


@pytest.fixture(scope="module")
def knobs() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_in_processes(turns, 2)
    return results


@pytest.mark.parametrize("name", LEVELLED)
def test_a_controller_sets_the_level_of_weights(knobs: Any, name: str) -> None:
    """On all ranks at once: they compute with the same bits; None gathers exact weights."""
    first = knobs[0][name]
    compressed = {"table.weight", "body.0.weight", "body.1.weight", "frozen.weight"}
    assert first["levels"] == [dict.fromkeys(compressed, level) for level in (8, None, 6, 6)]
    assert first["bytes"][1] > first["bytes"][0] > first["bytes"][2]
    for rank in knobs:
        mine = rank[name]
        assert mine["levels"] == first["levels"]
        pairs = zip(mine["computed"], first["computed"], strict=True)
        assert all(same(*pair) for pair in pairs)
        assert same(mine["after validation"], mine["exact"])
        assert not same(mine["computed"][2], mine["computed"][1])


@pytest.mark.parametrize("name", LEVELLED)
def test_levels_of_weights_resume_bit_for_bit(knobs: Any, name: str) -> None:
    """Before a decision, and after it."""
    assert all(rank[name]["resumed"] == [True, True] for rank in knobs)


def test_a_fit_resumes_bit_for_bit(looped: Any) -> None:
    for rank in looped:
        assert same(rank["whole"]["whole"], rank["second"]["whole"])
        assert same(rank["whole"]["memory"], rank["second"]["memory"])
        assert any(each.any() for each in rank["second"]["memory"].values())
        assert rank["second"]["began"] > 0


def test_less_than_a_quarter_is_sent(looped: Any) -> None:
    """Two gathers in 8 bits and a reduce-scatter in 4, for three transfers of 32 or 16."""
    for rank in looped:
        assert rank["uncounted"]
        wide, narrow = rank["shares"]
        assert wide < 0.24
        assert narrow < 0.45


def test_the_monitor_counts_both_legs(looped: Any) -> None:
    metrics = looped[0]["metrics"]
    sent, weights = (metrics[f"compression_epoch/{n}_bytes"] for n in ("wire", "weight"))
    assert 0 < weights < sent < metrics["compression_epoch/dense_bytes"]
    # A gather of all parameters, frozen ones too; one more of all that are resharded; half each.
    body = {"body.0": 38 * 8 + 38, "body.1": 38 * 37 + 40, "body.2": 40 * 40 + 40}
    frozen, head = 40 * 40 + 40, 4 * 40 + 4
    gathered = 2 * (sum(body.values()) + frozen + head) + 2
    scattered = sum(body.values()) - 40 + head + 2
    dense = 4 * (gathered + scattered) // 2
    assert metrics["compression_epoch/dense_bytes"] == pytest.approx(dense, rel=0.2)


def test_the_monitor_logs_both_levels(looped: Any) -> None:
    metrics = looped[0]["metrics"]
    levels = [metrics[f"compression_epoch/{name}"] for name in ("level", "weight_level")]
    assert levels == [4, 7]
    assert metrics["compression_epoch/weight_uncompressed_share"] == 0
    assert "compression/weight_level_min" in looped[0]["logged"]


def of_four(rank: int) -> dict[str, Any]:
    """Also gather in groups of two for the backward pass."""
    found = loops(rank, by_day=False)
    for name, weights in (("eight", EIGHT), ("differences", DIFFERENCES)):
        with Watch() as watch:
            loop = Loop(rank, QSGD(4), weights=weights, reshard=2, hops=2, workers_per_node=2)
            loop.run(0, 4)
        sizes = [weights.numel() for _, backward, weights in watch.calls if backward]
        found[f"{name}, in groups"] = (len(sizes), loop.computed())
        found["legs"] = loop.handle.account()
        if name == "differences":
            own = loop.handle.state_dict()["own"]["weights"]
            found["own"] = {each: tensor.numpy() for each, tensor in own.items()}
        loop.end()
    return found


@pytest.mark.nightly
@needs_four
@pytest.mark.timeout(600)
def test_four_ranks_compute_with_the_same_weights() -> None:
    ranks = run_in_processes(of_four, 4, timeout=500)
    for name in ("eight", "differences"):
        check_common(ranks, name)
        for rank in ranks:
            assert rank[f"{name}, differing"][0] == 0
            assert all(rank[f"{name}, {way}"] for way in WAYS)
            gathers, weights = rank[f"{name}, in groups"]
            assert gathers == 3 * 4
            assert same(weights, ranks[0][f"{name}, in groups"][1])
    for rank in ranks:
        legs = rank["legs"]
        assert legs.node_bytes > 0
        assert 0 < legs.weight_bytes < legs.wire_bytes
    computed = ranks[0]["differences, in groups"][1]
    for name in ranks[0]["own"]:  # each rank saves its own part
        copies = np.concatenate([rank["own"][name] for rank in ranks])
        assert np.array_equal(copies[: computed[name].size], computed[name].ravel())
    for rank in ranks:
        assert same(rank["exact"], rank["dense"])
        assert same(rank["exact, bfloat16"], rank["dense, bfloat16"])


def train_on(rank: int, ranks: int, epochs: int, save: str, resume: str | None) -> dict[str, Any]:
    """Fit and save; return what is left, and the errors at the beginning."""
    noted = Resumed(save)
    strategy = fsdp(QSGD(2), weights=DIFFERENCES, memory=ERRORS)
    settings: dict[str, Any] = {"max_epochs": epochs, "resume": resume, "callbacks": [noted]}
    seen = Errors()
    settings["callbacks"].append(seen)
    return fit_sharded(rank, strategy, 3, ranks=ranks, **settings) | {"at first": seen.errors}


class Errors(pl.Callback):
    """Notes the errors with which a fit begins."""

    def __init__(self) -> None:
        self.errors: dict[str, Any] = {}

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        memory = trainer.strategy.engine.state_dict()["memory"]
        self.errors = {f"{n} error": kept["error"].numpy() for n, kept in memory.items() if kept}


@pytest.mark.nightly
@needs_four
@pytest.mark.timeout(600)
def test_four_ranks_resume_on_four_two_and_three(tmp_path: Path) -> None:
    """Weights are exact; from four ranks to two and to three. Four go on bit for bit."""
    paths = [str(tmp_path / f"{ranks}.ckpt") for ranks in (4, 2, 3)]
    before = run_in_processes(train_on, 4, 4, 1, paths[0], None, timeout=150)
    whole = run_in_processes(train_on, 4, 4, 2, "", None, timeout=150)
    again = run_in_processes(train_on, 4, 4, 2, "", paths[0], timeout=150)
    for mine, resumed in zip(whole, again, strict=True):
        assert same(mine["whole"], resumed["whole"])
        assert same(mine["memory"], resumed["memory"])
    for epochs, ranks in ((2, 2), (3, 3)):
        resume = paths[epochs - 2]
        after = run_in_processes(train_on, ranks, ranks, epochs, paths[epochs - 1], resume)
        for name in before[0]["memory"]:
            mean = np.mean([rank["memory"][name] for rank in before], axis=0)
            for rank in after:
                # Stored in 8 bits again, each rounded by less than a step.
                step = np.abs(mean).max() / 32
                np.testing.assert_allclose(rank["at first"][name], mean, rtol=0, atol=step)
        before = after
