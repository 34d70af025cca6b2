"""SimulatedDDPStrategy refuses what cannot work, deals training data only, and logs time."""

import csv
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_gc import Identity, NetworkModel, NoMemory, PerParameter, TopK
from lightning_gc.controllers import TotalError
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor, SimulatedDDPStrategy
from lightning_gc.lightning.simulation.sharded_loader import Dealt
from lightning_gc.lightning.simulation.simulated_workers import to_batches, to_micro_batches
from tests.support.fitting import quiet_trainer
from tests.support.models import Plain, common_batches, common_rows
from tests.support.simulation import fit_case, simulated

TOPK = PerParameter(TopK(0.1))


def two(**settings: Any) -> dict[str, Any]:
    return simulated(2, {"compressor": TOPK, **settings})


@pytest.mark.parametrize(
    ("given", "seen", "steps"), [(1, 3, 20), (3, 3, 20), (6, 6, 10), (15, 15, 4)]
)
def test_accumulation(given: int, seen: int, steps: int) -> None:
    class Looks(pl.Callback):
        def on_train_start(self, trainer: Any, pl_module: Any) -> None:
            assert trainer.accumulate_grad_batches == seen

    case = {"compressor": TOPK, "accumulate_grad_batches": given, "callbacks": [Looks()]}
    assert simulated(3, case)["steps"] == steps


@pytest.mark.parametrize("given", [2, 4, 5])
def test_accumulation_that_workers_cannot_share(given: int) -> None:
    case = {"compressor": TOPK, "accumulate_grad_batches": given}
    with pytest.raises(
        ValueError, match=rf"={given}\) with 3 simulated.*a multiple of 3; {3 * given}"
    ):
        simulated(3, case)


class Manual(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False


class Skips(Plain):
    def training_step(self, batch: Tensor, batch_idx: int) -> Any:
        return None if batch_idx == 3 else super().training_step(batch, batch_idx)


class Repeats(Plain):
    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS(self.parameters(), max_iter=4)


class Thaws(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.head.bias.requires_grad_(False)

    def on_train_epoch_start(self) -> None:
        self.head.bias.requires_grad_(True)


class Sparse(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(5, 3, sparse=True)


class Endless(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return iter(common_rows(5 * 4))


@pytest.mark.parametrize(
    ("settings", "error", "words"),
    [
        ({"module": Manual}, ValueError, "Manual optimizes manually"),
        (
            {"callbacks": [GradientAccumulationScheduler({2: 4})]},
            ValueError,
            r"GradientAccumulationScheduler changes .*k\*2",
        ),
        (
            {"devices": 2, "accelerator": "cpu"},
            ValueError,
            r"has 2 devices, but 2 simulated .*devices=1",
        ),
        ({"module": Skips}, RuntimeError, "returned None"),
        ({"module": Repeats}, RuntimeError, "LBFGS"),
        ({"module": Thaws}, RuntimeError, r"head\.bias was unfrozen, added or replaced"),
        ({"module": Sparse}, ValueError, "sparse=True"),
        (
            {"limit_train_batches": 0.05},
            ValueError,
            r"\(limit_train_batches=0\.05\) .* 15 batches that each of 2 .*limit_train_batches=1\.",
        ),
        (
            {"overfit_batches": 0.05},
            ValueError,
            r"Trainer\(overfit_batches=0\.05\) .*overfit_batches=1\.",
        ),
    ],
)
def test_refused(settings: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        two(**settings)


class Counted(Endless):
    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return 4 * self.batches

    def __iter__(self) -> Any:
        return iter(common_rows(len(self)))


class Either(Plain):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batches = batch.values() if isinstance(batch, dict) else [batch]
        return torch.stack([self.loss(each, batch_idx) for each in batches]).mean()


FEWER, DEALT = "limit_train_batches=2)", "use_distributed_sampler=True)"


@pytest.mark.parametrize(
    ("settings", "error", "advised"),
    [
        (
            {"data": lambda: common_batches(20, 4), "use_distributed_sampler": False},
            ValueError,
            {FEWER: {}, DEALT: {"use_distributed_sampler": True}},
        ),
        ({"data": lambda: DataLoader(Counted(5), 4)}, ValueError, {FEWER: {}}),
        (
            {"data": lambda: DataLoader(Counted(5), 4), "use_distributed_sampler": False},
            ValueError,
            {FEWER: {}},
        ),
        (
            {"data": lambda: {"a": DataLoader(Counted(5), 4), "b": common_batches(16, 4)}},
            ValueError,
            {FEWER: {}},
        ),
        ({"data": lambda: DataLoader(Endless(), 4)}, RuntimeError, {FEWER: {}}),
        ({"data": lambda: DataLoader(Endless(), 20)}, RuntimeError, {"at least 2 batches": None}),
        ({"data": lambda: DataLoader(Counted(1), 4)}, ValueError, {"at least 2 batches": None}),
        (
            {"data": lambda: common_batches(4, 4), "use_distributed_sampler": False},
            ValueError,
            {DEALT: {"use_distributed_sampler": True}},
        ),
    ],
)
def test_batches_that_workers_cannot_share(
    settings: dict[str, Any], error: type[Exception], advised: dict[str, dict[str, Any] | None]
) -> None:
    """The advice is not what is so already, and each of it is enough."""
    with pytest.raises(error, match="2 simulated workers cannot share") as refused:
        two(module=Either, **settings)
    known = {FEWER, DEALT, "at least 2 batches"}
    assert {each for each in known if each in str(refused.value)} == set(advised)
    for words, change in advised.items():
        if change is not None:
            change = {"limit_train_batches": 2} if words == FEWER else change
            assert two(module=Either, **settings | change)["steps"] > 0


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"workers": 0}, "workers=0"),
        ({"workers": 2.0}, r"workers=2\.0"),
        ({"workers": 2, "network": 10.0}, r"network=10\.0.*NetworkModel\(bandwidth_gbps=10\.0\)"),
        ({"workers": 2, "seed": "a"}, "SimulatedDDPStrategy.seed='a'"),
        ({"workers": 2, "state": "some"}, "'full', 'mean' or 'off'"),
        ({"workers": 2, "controller": 3}, r"SimulatedDDPStrategy\(controller=3\)"),
        ({"workers": 2, "controller": TotalError(0.1)}, "a density"),
        ({"workers": 2, "memory": NoMemory(), "scheme": "all_reduce"}, "AllReduce"),
    ],
)
def test_bad_configurations(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        SimulatedDDPStrategy(TOPK, **arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"bandwidth_gbps": 0}, "bandwidth_gbps=0"),
        ({"bandwidth_gbps": float("nan")}, "bandwidth_gbps=nan"),
        ({"latency_us": -1}, "latency_us=-1"),
        ({"topology": "star"}, "'parameter_server', 'ring' or 'all_gather'"),
    ],
)
def test_bad_networks(arguments: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        NetworkModel(**arguments)


@pytest.mark.parametrize("topology", ["parameter_server", "ring", "all_gather"])
def test_networks(topology: Any) -> None:
    """Alone there is nothing to wait for; seconds grow with bytes, latency and 1 / bandwidth."""
    network = NetworkModel(2.0, 5.0, topology)
    assert network.seconds(1, 1e9, 1e9) == 0
    waiting = {"parameter_server": 2, "ring": 6, "all_gather": 3}[topology] * 5e-6
    assert network.seconds(4) == pytest.approx(waiting)
    moving = {"parameter_server": 2 * 8, "ring": 8 * 1.5, "all_gather": 3 * 8}[topology]
    assert network.seconds(4, 1e9, 1.5e9) == pytest.approx(waiting + moving / 2)


def test_one_strategy_for_one_trainer() -> None:
    strategy = SimulatedDDPStrategy(TOPK, workers=2)
    quiet_trainer(strategy)
    with pytest.raises(ValueError, match="SimulatedDDPStrategy already belongs to a Trainer"):
        quiet_trainer(strategy)


class Validates(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.validated: list[int] = []
        self.when: list[int] = []
        self.workers: list[int] = []

    def on_validation_start(self) -> None:
        self.when.append(self.trainer.global_step)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.workers.append(self.trainer.strategy.worker)  # type: ignore[attr-defined]
        return super().training_step(batch, batch_idx)

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        assert self.trainer.strategy.worker == 0  # type: ignore[attr-defined]
        self.validated += batch[:, 0].tolist()


@pytest.mark.parametrize(("interval", "when"), [(1.0, [10]), (4, [4, 8]), (0.25, [2, 4, 6, 8, 10])])
@pytest.mark.filterwarnings("ignore")  # Lightning's advice for small fits
def test_only_training_data_is_dealt(interval: float, when: list[int]) -> None:
    """``val_check_interval`` counts batches of a worker; validation sees every row, in order."""
    module = Validates()
    trainer = quiet_trainer(
        SimulatedDDPStrategy(TOPK, workers=3), val_check_interval=interval, num_sanity_val_steps=1
    )
    trainer.fit(module, common_batches(120, 4), common_batches(20, 4))
    assert module.when[1:] == when
    assert module.validated[4:] == common_rows(20)[:, 0].tolist() * len(when)
    assert module.workers == [0, 1, 2] * 10
    assert isinstance(trainer.train_dataloader, Dealt)
    assert isinstance(trainer.val_dataloaders, DataLoader)
    assert trainer.val_check_interval == interval
    before = [p.clone() for p in module.parameters()]
    trainer.validate(module, common_batches(20, 4), verbose=False)
    assert all(torch.equal(a, b) for a, b in zip(before, module.parameters(), strict=True))


def test_several_loaders() -> None:
    """Batches of a collection are dealt together; the shorter one begins anew."""

    class Pairs(Plain):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            left, right = batch["a"], batch["b"]
            self.seen.append([float(left[0, 0]), float(right[0, 0])])
            return self.loss(left, batch_idx) + self.loss(right, batch_idx)

    def loaders() -> Any:
        return {"a": common_batches(24, 4), "b": common_batches(12, 3)}

    run = two(module=Pairs, data=loaders, max_epochs=1)
    assert run["steps"] == 3
    right = [pair[1] for pair in run["seen"]]
    assert right[4:] == right[:2]


def test_what_is_logged(tmp_path: Path) -> None:
    logger = CSVLogger(tmp_path, name="", version="")
    network = NetworkModel(topology="ring")
    strategy = SimulatedDDPStrategy(TOPK, workers=2, network=network)
    fit_case(strategy, logger=logger, log_every_n_steps=5)
    with (tmp_path / "metrics.csv").open() as file:
        logged = [row for row in csv.DictReader(file) if row.get("compression/wire_bytes")]
    assert [int(row["step"]) for row in logged] == [4, 9, 14, 19, 24, 29]
    for row in logged:
        estimated = float(row["compression/communication_seconds_estimated"])
        assert estimated == pytest.approx(8 * float(row["compression/wire_bytes"]) / 1e10)
        for phase in ("compute", "compress", "decode"):
            assert float(row[f"compression/{phase}_seconds"]) > 0
        assert float(row["compression/relative_error"]) > 0
        assert "compression/communicate_seconds" not in row
        assert "compression/step_seconds" not in row
    assert "gc/network: NetworkModel(topology='ring')" in (tmp_path / "hparams.yaml").read_text()


def test_gradients_that_are_kept() -> None:
    """A parameter outside of the optimizer keeps its mean gradient and gets the next one added."""

    class Aside(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.sums: list[Tensor] = []

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            assert self.head.bias.grad is not None
            self.sums.append(self.head.bias.grad.clone())

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.body.parameters(), lr=0.0)

    class Looks(pl.Callback):
        sums: list[Tensor]

        def on_train_end(self, trainer: Any, pl_module: Any) -> None:
            type(self).sums = pl_module.sums

    case = {"compressor": Identity(), "module": Aside, "callbacks": [Looks()]}
    simulated(2, case | {"data": lambda: common_batches(8, 4)})
    assert torch.allclose(Looks.sums[1], 2 * Looks.sums[0], rtol=1e-4)


def test_units_of_checkpoints() -> None:
    """There and back is the same for whatever Lightning saves between steps, and within."""
    for micro in (
        {"ready": 12, "started": 12, "processed": 12, "completed": 12},
        {"ready": 12, "started": 12, "processed": 12, "completed": 11},
        {"ready": 13, "started": 13, "processed": 12, "completed": 12},
    ):
        progress = {"total": dict(micro), "current": dict(micro)}
        saved = {"loops": {"fit_loop": {"epoch_loop.batch_progress": progress}}}
        to_batches(saved, 3)
        assert progress["total"]["processed"] == 4
        assert progress["total"]["completed"] == micro["completed"] // 3
        to_micro_batches(saved, 3)
        assert progress == {"total": micro, "current": micro}
    to_batches({"state_dict": {}}, 3)


def test_monitor_names_both_strategies() -> None:
    monitor = CompressionMonitor()
    trainer = quiet_trainer("auto", callbacks=[monitor])
    with pytest.raises(ValueError, match="LocalStepsStrategy and SimulatedDDPStrategy"):
        trainer.fit(Plain(), common_batches(8, 1))


@pytest.mark.filterwarnings("ignore")  # Lightning's advice for small fits
def test_the_other_flavour() -> None:
    flavour = pytest.importorskip("lightning.pytorch")
    from lightning.pytorch.demos.boring_classes import BoringModel

    from lightning_gc.lightning import for_lightning

    strategy = for_lightning.SimulatedDDPStrategy(TOPK, workers=2)
    trainer = flavour.Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=1,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[for_lightning.CompressionMonitor()],
    )
    trainer.fit(BoringModel())
    assert trainer.global_step == 32
    assert float(trainer.callback_metrics["compression/total_wire_bytes"]) > 0
