"""Simulated workers train as real processes do: same data, gradients, errors, bytes, levels."""

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins import MixedPrecision
from torch import Tensor, nn
from torch.amp import GradScaler
from torch.utils.data import DataLoader, WeightedRandomSampler

from lightning_gc import (
    DGC,
    QSGD,
    Cast,
    ErrorFeedback,
    GlobalMomentum,
    HardThreshold,
    Identity,
    Lossless,
    Menu,
    MomentumCorrection,
    NetworkModel,
    PerParameter,
    RandomK,
    Signum,
    StepAhead,
    TopK,
    TwoShot,
)
from lightning_gc.controllers import (
    Accordion,
    AdaQS,
    Controller,
    Schedule,
    TotalErrorBudget,
)
from lightning_gc.lightning.for_pytorch_lightning import (
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
)
from tests.support.local_steps import local
from tests.support.models import Plain, PlainSGD, common_batches, common_rows
from tests.support.processes import run_in_processes
from tests.support.simulation import fit_case, real, simulated

pytestmark = pytest.mark.processes
EVERYWHERE = PerParameter(TopK(0.05))


def in_turn(seen: list[list[Any]]) -> list[Any]:
    """What the workers have seen, as if they had taken turns."""
    return [row for rows in zip(*seen, strict=True) for row in rows]


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_equal_to_real_workers(workers: int) -> None:
    """On an ordinary shuffled DataLoader, over two epochs: data, parameters, errors, totals."""
    exact = [EVERYWHERE, PerParameter(HardThreshold(0.05)), PerParameter(QSGD(4))]
    rounded = [Identity(), PerParameter(RandomK(0.1)), TopK(0.05), Cast("bfloat16")]
    cases: list[dict[str, Any]] = [{"compressor": c} for c in (*exact, *rounded)]
    menu = Menu({"topk": EVERYWHERE, "qsgd": PerParameter(QSGD(4))})
    cases.append({"compressor": menu, "options": {"controller": Schedule((1, 2))}})
    runs = zip(*run_in_processes(real, workers, workers, cases), strict=True)
    for case, them in zip(cases, runs, strict=True):
        us, what = simulated(workers, case), repr(case["compressor"])
        assert us["steps"] == them[0]["steps"] >= 20
        assert us["seen"] == in_turn([run["seen"] for run in them]), what
        assert us["metrics"] == them[0]["metrics"], what
        assert us["metrics"]["compression/total_wire_bytes"] > 0
        if case["compressor"] in (*exact, menu):
            assert us["digest"] == them[0]["digest"], what
            assert us["memory"] == [run["memory"][0] for run in them], what
        tolerance = 1e-2 if isinstance(case["compressor"], Cast) else 1e-6
        for ours, theirs in zip(us["parameters"], them[0]["parameters"], strict=True):
            assert np.abs(ours - theirs).max() <= tolerance, what


@pytest.mark.nightly
@pytest.mark.parametrize("workers", [2, 3])
def test_lossless_trains_as_identity(workers: int) -> None:
    """Bit for bit; the all-reduce of three real workers adds in another order than simulated."""
    cases = [{"compressor": c} for c in (Lossless(), Identity())]
    theirs = run_in_processes(real, workers, workers, cases)
    ours = {simulated(workers, case)["digest"] for case in cases}
    assert len(ours) == 1
    assert {run[0]["digest"] for run in theirs} == ours
    assert workers == 3 or {run[1]["digest"] for run in theirs} == ours


class Branches(Plain):
    """Uses one of two heads, by what the batch holds; decay shows where a gradient is None."""

    def __init__(self) -> None:
        super().__init__()
        self.other = nn.Linear(40, 4)

    def loss(self, batch: Tensor, batch_idx: int) -> Tensor:
        head = self.other if batch[0, 0] > 0.5 else self.head
        output: Tensor = head(self.body(batch))
        return (output - batch[:, :4] * 2).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.01, weight_decay=0.5)


class Normed(Plain):
    """With running statistics, of which DDP keeps worker 0's."""

    def __init__(self) -> None:
        super().__init__()
        self.body.insert(1, nn.BatchNorm1d(40))


class Falling(Plain):
    def configure_optimizers(self) -> Any:
        sgd = torch.optim.SGD(self.parameters(), lr=0.02)
        falling = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.8)
        return [sgd], [{"scheduler": falling, "interval": "step"}]


def scaled() -> list[Any]:
    scaler = GradScaler("cpu", init_scale=2.0**24)  # the first steps overflow
    return [MixedPrecision("16-mixed", "cpu", scaler=scaler)]


def weighted() -> DataLoader[Tensor]:
    generator = torch.Generator().manual_seed(3)
    weights = common_rows()[:, 0].abs().tolist()
    sampler = WeightedRandomSampler(weights, 100, generator=generator)
    return DataLoader(common_rows(), 4, sampler=sampler)  # type: ignore[arg-type]


WAYS: dict[str, dict[str, Any]] = {
    "unused parameters": {"module": Branches},
    "running statistics": {"module": Normed},
    "running statistics, accumulated": {"module": Normed, "accumulate_grad_batches": 2},
    "accumulated, with a shorter last step": {"accumulate_grad_batches": 4},
    "a smaller last batch": {"batch_size": 7},
    "part of an epoch": {"limit_train_batches": 4},
    "clipped": {"gradient_clip_val": 0.1},
    "fp16": {"plugins": scaled},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "lr_aware": {"module": Falling, "options": {"memory": ErrorFeedback(lr_aware=True)}},
    "two-shot": {"options": {"scheme": TwoShot()}},
    "a sampler of one's own": {"data": weighted},
    "overfitting": {"overfit_batches": 2},
    "one batch": {"fast_dev_run": 3},
}


def test_ways_of_training() -> None:
    cases = [{"compressor": EVERYWHERE, "max_epochs": 1, **way} for way in WAYS.values()]
    theirs = [dict(case) for case in cases]
    theirs[0]["options"] = {"find_unused_parameters": True}
    runs = zip(*run_in_processes(real, 2, 2, theirs, timeout=110), strict=True)
    for name, case, them in zip(WAYS, cases, runs, strict=True):
        if "accumulate_grad_batches" in case:
            case["accumulate_grad_batches"] *= 2
        us = simulated(2, case)
        assert us["steps"] == them[0]["steps"] > 0, name
        assert us["seen"] == in_turn([run["seen"] for run in them]), name
        assert us["digest"] == them[0]["digest"], name
        assert us["memory"] == [run["memory"][0] for run in them], name
        assert us["metrics"] == them[0]["metrics"], name
        for ours, its in zip(us["buffers"], them[0]["buffers"], strict=True):
            assert np.array_equal(ours, its), name


class Validated(Plain):
    """Notes before which steps it was validated, and asks early how long the run will be."""

    def __init__(self) -> None:
        super().__init__()
        self.when: list[int] = []
        self.estimated: float = 0

    def noted(self) -> dict[str, Any]:
        return super().noted() | {"when": self.when, "estimated": self.estimated}

    def setup(self, stage: str) -> None:
        self.estimated = self.trainer.estimated_stepping_batches

    def on_validation_start(self) -> None:
        self.when.append(self.trainer.global_step)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Do nothing."""


class ValidatedPairs(Validated):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.seen.append([float(batch["a"][0, 0]), float(batch["b"][0, 0])])
        return self.loss(batch["a"], batch_idx) + self.loss(batch["b"], batch_idx)


def eleven() -> DataLoader[Tensor]:
    return common_batches(250, 8, shuffle=True)


def thirty() -> DataLoader[Tensor]:
    return common_batches(180, 2, shuffle=True)


def pairs() -> dict[str, DataLoader[Tensor]]:
    return {"a": eleven(), "b": common_batches(120, 8, shuffle=True)}


def validation() -> DataLoader[Tensor]:
    return common_batches(96, 8)


SHARES: dict[str, tuple[int, dict[str, Any]]] = {  # two epochs' steps, most of 11 batches
    "half": (10, {"limit_train_batches": 0.5}),
    "a quarter": (4, {"limit_train_batches": 0.25}),
    "most": (18, {"limit_train_batches": 0.9}),
    "a number": (8, {"limit_train_batches": 4}),
    "half, accumulated": (6, {"limit_train_batches": 0.5, "accumulate_grad_batches": 2}),
    "a number, accumulated": (4, {"limit_train_batches": 4, "accumulate_grad_batches": 2}),
    "overfitting a share": (6, {"overfit_batches": 0.3}),
    "overfitting a number": (4, {"overfit_batches": 2}),
    "validated within": (22, {"val_check_interval": 0.3}),
    "validated within half": (10, {"val_check_interval": 0.5, "limit_train_batches": 0.5}),
    "validated after each step": (10, {"val_check_interval": 0.01, "limit_train_batches": 0.5}),
    "validated after rounding": (
        60,  # int(30 * 0.7) is 21, and int(90 * 0.7) is 62
        {"val_check_interval": 0.7, "data": thirty},
    ),
    "reloaded": (
        18,
        {
            "val_check_interval": 0.3,
            "limit_train_batches": 0.9,
            "reload_dataloaders_every_n_epochs": 1,
        },
    ),
    "two loaders": (10, {"limit_train_batches": 0.5, "module": ValidatedPairs, "data": pairs}),
}


@pytest.mark.parametrize("local_steps", [False, True])
def test_shares_of_an_epoch(local_steps: bool) -> None:
    """As many steps as with three processes, the same samples, validated at the same steps."""
    common: dict[str, Any] = {
        "compressor": EVERYWHERE,
        "module": Validated,
        "data": eleven,
        "validation": validation,
    }
    if local_steps:
        common |= {
            "real": local,
            "simulated": SimulatedLocalStepsStrategy,
            "options": {"every": 3},
        }
    shares = dict(list(SHARES.items())[:: 3 if local_steps else 1])
    cases = [common | case for _, case in shares.values()]
    runs = zip(*run_in_processes(real, 3, 3, cases), strict=True)
    for (name, (steps, _)), case, them in zip(shares.items(), cases, runs, strict=True):
        if "accumulate_grad_batches" in case:
            case["accumulate_grad_batches"] *= 3
        us = simulated(3, case)
        assert us["steps"] == us["estimated"] == them[0]["steps"] == steps, name
        assert us["seen"] == in_turn([run["seen"] for run in them]), name
        assert us["when"] == them[0]["when"], name
        assert us["digest"] == them[0]["digest"], name


CONTROLLED: dict[str, tuple[Any, Controller]] = {
    "accordion": (EVERYWHERE, Accordion(low=0.5, high=0.1, interval=1, threshold=0.2)),
    "budget": (PerParameter(HardThreshold(0.1)), TotalErrorBudget(0.1)),
    "noise": (PerParameter(QSGD(3)), AdaQS(bits=3, factor=1.1)),
}


def test_controllers_decide_alike() -> None:
    """Worker 0's observation with the means over workers: the same levels in every step."""
    cases = [
        {"compressor": compressor, "options": {"controller": controller}, "max_epochs": 5}
        for compressor, controller in CONTROLLED.values()
    ]
    runs = zip(*run_in_processes(real, 2, 2, cases), strict=True)
    for name, case, them in zip(CONTROLLED, cases, runs, strict=True):
        us = simulated(2, case)
        assert len({str(levels) for levels in us["levels of steps"]}) > 1, name
        assert us["levels of steps"] == them[0]["levels of steps"], name
        assert us["digest"] == them[0]["digest"], name


def test_dense_workers_share_a_batch() -> None:
    """The same global batch, each worker a share of it: the number of workers does not matter."""
    runs = [
        fit_case(SimulatedDDPStrategy(Identity(), workers=workers), batch_size=8 // workers)
        for workers in (1, 2, 4)
    ]
    for run in runs[1:]:
        assert run["steps"] == runs[0]["steps"] == 30
        for one, several in zip(runs[0]["parameters"], run["parameters"], strict=True):
            assert np.abs(one - several).max() < 1e-5
    assert runs[0]["metrics"]["compression/total_wire_bytes"] == 0
    assert runs[0]["seconds"]["compression_epoch/communication_seconds_estimated"] == 0


class Remembering(pl.LightningModule):
    """A recurrent model that carries its hidden state from window to window."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(8, 16)
        self.head = nn.Linear(16, 8)
        self.hidden: dict[int, tuple[Tensor, Tensor]] = {}

    def on_train_epoch_start(self) -> None:
        self.hidden.clear()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        worker = self.trainer.strategy.worker  # type: ignore[attr-defined]
        output, (h, c) = self.lstm(batch[:-1], self.hidden.get(worker))
        self.hidden[worker] = h.detach(), c.detach()
        loss: Tensor = (self.head(output) - batch[1:]).square().mean()
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def windows(shares: list[int]) -> DataLoader[Tensor]:
    """Windows of 5 rows and 4 columns of text, of which each worker of two has 2 columns."""
    text = torch.randn(10, 6, 4, 8, generator=torch.Generator().manual_seed(1))
    batches = [window[:, 2 * share : 2 * share + 2] for window in text for share in shares]
    return DataLoader(batches, batch_size=None)  # type: ignore[arg-type]


REMEMBERING = {"compressor": EVERYWHERE, "module": Remembering, "use_distributed_sampler": False}


def remember(worker: int) -> list[dict[str, Any]]:
    return real(worker, 2, [REMEMBERING | {"data": lambda: windows([worker])}])


def test_hidden_state_of_every_worker() -> None:
    them = run_in_processes(remember, 2)
    us = simulated(2, REMEMBERING | {"data": lambda: windows([0, 1])})
    assert us["digest"] == them[0][0]["digest"]
    assert us["steps"] == 20


def test_seconds_on_a_network() -> None:
    """A dense gradient up to the server and down again, at 1 Gb/s with 100 µs each way."""
    network = NetworkModel(bandwidth_gbps=1.0, latency_us=100.0)
    run = fit_case(SimulatedDDPStrategy(Identity(), workers=4, network=network))
    elements = 8 * 40 + 40 + 40 * 40 + 40 + 40 * 4 + 4
    estimated = run["seconds"]["compression_epoch/communication_seconds_estimated"]
    assert estimated == pytest.approx(2 * 8 * 4 * elements / 1e9 + 2e-4)
    phases = ("compute", "compress", "decode")
    seconds = {f"{phase}_seconds" for phase in phases} | {"communication_seconds_estimated"}
    shares = {f"{phase}_share" for phase in (*phases, "communicate")}
    assert set(run["seconds"]) == {f"compression_epoch/{name}" for name in seconds | shares}
    assert sum(run["seconds"][f"compression_epoch/{name}"] for name in shares) == pytest.approx(1)
    assert all(value > 0 for value in run["seconds"].values())


@pytest.mark.parametrize(("scheme", "share"), [("all_gather", 1 / 3), ("two_shot", 4 / 6)])
def test_what_a_server_is_sent(scheme: str, share: float) -> None:
    """A message counts once, however many hear it; of a two-shot scheme, half is the answer.

    On a ring of 4, a worker sends a gathered message 3 times, and 6/4 of a two-shot one.
    """
    network = NetworkModel(bandwidth_gbps=16e-9)  # two bytes a second, up and down: M seconds
    run = fit_case(
        SimulatedDDPStrategy(PerParameter(QSGD(8)), scheme=scheme, workers=4, network=network)
    )
    message = run["seconds"]["compression_epoch/communication_seconds_estimated"]
    wire = run["metrics"]["compression_epoch/wire_bytes"]
    assert message == pytest.approx(share * wire, rel=0.01)


def test_memories_do_the_same() -> None:
    memories = [
        MomentumCorrection(0.9, clip=1.0, weight_decay=0.01),
        GlobalMomentum(0.5),
        StepAhead(average_every=4),
    ]
    cases = [
        {"compressor": EVERYWHERE, "module": PlainSGD, "options": {"memory": memory}}
        for memory in memories
    ]
    cases.append({"compressor": PerParameter(Signum()), "module": PlainSGD})
    cases.append({"compressor": PerParameter(DGC(0.05)), "module": PlainSGD})
    cases = [case | {"max_epochs": 1} for case in cases]
    runs = zip(*run_in_processes(real, 2, 2, cases, timeout=110), strict=True)
    for case, them in zip(cases, runs, strict=True):
        us = simulated(2, case)
        assert us["digest"] == them[0]["digest"], case
        assert us["memory"] == [run["memory"][0] for run in them], case
