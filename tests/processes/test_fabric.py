"""Fabric: equal to ``attach``, resumed bit for bit, refusals, in both packages."""

import importlib
import importlib.util
import math
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import lightning_gc
from lightning_gc import QSGD, ErrorFeedback, PowerSGD, TopK, flavours
from lightning_gc.controllers import Accordion, Fixed
from lightning_gc.core.saved_state import with_checksum
from tests.processes.test_attach import Loop, Net, batches
from tests.support.fitting import digest, unwarned
from tests.support.processes import run_in_processes

NIGHT = pytest.mark.nightly
PACKAGES = [
    pytest.param(name, marks=pytest.mark.skipif(not importlib.util.find_spec(root), reason=why))
    for name, root in (("lightning_fabric", "lightning_fabric"), ("lightning.fabric", "lightning"))
    for why in [f"needs package {root}"]
]
each_package = pytest.mark.parametrize("package", PACKAGES)
one_by_day = pytest.mark.parametrize(
    "package", [PACKAGES[0], pytest.param(*PACKAGES[1].values, marks=[*PACKAGES[1].marks, NIGHT])]
)
STEPS = 12


def strategy_of(package: str, *args: Any, **kwargs: Any) -> Any:
    return flavours_class(package)(*args, **kwargs)


def flavours_class(package: str) -> Any:
    return importlib.import_module(flavours.FABRICS[package]).CompressedFabricStrategy


def fabric_with(package: str, strategy: Any, workers: int = 2, **options: Any) -> Any:
    fabric = importlib.import_module(package).Fabric(
        accelerator="cpu", devices=workers, strategy=strategy, **options
    )
    fabric.launch()
    return fabric


class FabricLoop(Loop):
    """The loop of ``test_attach``, written for Fabric."""

    def __init__(
        self, package: str, worker: int, *args: Any, state: Any = "full", **options: Any
    ) -> None:
        torch.manual_seed(0)
        with unwarned():
            strategy = strategy_of(package, *args, state=state)
            self.fabric = fabric_with(package, strategy, **options)
            self.net = Net()
            self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
            self.model, self.wrapped = self.fabric.setup(self.net, self.optimizer)
        self.handle = self.fabric.strategy.handle
        self.data = batches(worker)

    def run(self, start: int, stop: int, spoil: int = -1) -> None:
        for step in range(start, stop):
            x = self.data[step]
            loss = (self.model(x) - x[:, :4]).square().mean()
            if step == spoil:
                loss = loss * math.inf
            self.wrapped.zero_grad()
            self.fabric.backward(loss)
            self.wrapped.step()


METHODS: tuple[tuple[Any, ...], ...] = (
    (TopK(0.05),),
    (QSGD(4),),
    (PowerSGD(1),),
    (TopK(0.05), ErrorFeedback(lr_aware=True)),
    (TopK(0.05), None, None, Accordion(low=0.5, high=0.05, interval=1)),
)


def both_loops(worker: int, package: str) -> list[tuple[Any, Any]]:
    dist.init_process_group("gloo")
    found = []
    for method in METHODS[:3]:
        plain, fabric = Loop(worker, *method), FabricLoop(package, worker, *method)
        plain.run(0, STEPS)
        fabric.run(0, STEPS)
        (one, errors), (other, theirs) = plain.end(), fabric.end()
        same = all((errors[n] == theirs[n]).all() for n in theirs) and len(errors) == len(theirs)
        found.append((one == other, same))
    return found


@pytest.mark.processes
@each_package
def test_it_equals_attach(package: str) -> None:
    """The same weights and errors, bit for bit."""
    for results in run_in_processes(both_loops, 2, package):
        assert results == [(True, True)] * 3


def saved_and_loaded(worker: int, package: str, folder: str) -> list[Any]:
    found: list[Any] = []
    for index, method in enumerate(METHODS):
        file = f"{folder}/{index}/run.ckpt"
        straight, first, second = (FabricLoop(package, worker, *method) for _ in range(3))
        for loop in (straight, first):
            epochs(loop, method, 0, 6)
        saved = {"model": first.model, "optimizer": first.wrapped, "step": 6, "losses": [1.0]}
        first.fabric.save(file, saved)
        into = {"model": second.model, "optimizer": second.wrapped, "step": 0, "losses": []}
        assert second.fabric.load(file, into) == {}
        assert (into["step"], into["losses"]) == (6, [1.0])
        for loop in (straight, second):
            epochs(loop, method, 6, STEPS)
        first.run(6, 8)  # goes on, saves again under the name, leaves no file of the first
        first.fabric.save(file, saved)
        first.fabric.barrier()
        names = sorted(p.name for p in Path(file).parent.rglob("*worker*"))
        found.append((straight.end()[0] == second.end()[0], [n.split("-")[1] for n in names]))
    return found


def epochs(loop: FabricLoop, method: tuple[Any, ...], start: int, stop: int) -> None:
    for epoch in range(start // 3, stop // 3):
        if len(method) == 4:
            loop.handle.begin_epoch(epoch)
        loop.run(3 * epoch, 3 * epoch + 3)


@pytest.mark.processes
@one_by_day
def test_a_run_is_resumed_bit_for_bit(package: str, tmp_path: Path) -> None:
    for results in run_in_processes(saved_and_loaded, 2, package, str(tmp_path)):
        assert results == [(True, ["step8", "step8"])] * 5


def overflow(worker: int, package: str) -> Any:
    precision = importlib.import_module(f"{package}.plugins").MixedPrecision(
        "16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=64.0)
    )
    with unwarned():
        loop = FabricLoop(package, worker, TopK(0.05), plugins=[precision])
        loop.run(0, 4)
        before, errors = digest(loop.net), loop.handle.state_dict()["engine"]["memory"]
        loop.run(4, 5, spoil=4 if worker == 0 else -1)
        after, kept = digest(loop.net), loop.handle.state_dict()["engine"]["memory"]
        scale = precision.scaler.get_scale()
        loop.run(5, STEPS)
    same = all(torch.equal(errors[n]["error"], kept[n]["error"]) for n in errors)
    return before == after, same, scale, digest(loop.net)


@pytest.mark.processes
def test_a_step_that_the_scaler_skips_changes_no_error() -> None:
    """Worker 0's loss overflows; nobody makes the step."""
    results = run_in_processes(overflow, 2, "lightning_fabric")
    assert [r[:3] for r in results] == [(True, True, 32.0)] * 2
    assert results[0][3] == results[1][3]


def several(worker: int) -> Any:
    """An encoder and a decoder with one optimizer, and accumulated gradients."""
    fabric = fabric_with("lightning_fabric", strategy_of("lightning_fabric", TopK(0.1)))
    torch.manual_seed(0)
    one, two = nn.Linear(16, 64), nn.Linear(64, 16)
    optimizer = torch.optim.SGD([*one.parameters(), *two.parameters()], lr=0.1)
    encoder, decoder = fabric.setup_module(one), fabric.setup_module(two)
    step = fabric.setup_optimizers(optimizer)
    handles = fabric.strategy.handles
    try:
        fabric.strategy.handle  # noqa: B018
    except ValueError as error:
        said = str(error)
    for batch in batches(worker)[:8].chunk(4):
        step.zero_grad()
        for part, x in enumerate(batch):
            with (
                fabric.no_backward_sync(encoder, enabled=part == 0),
                fabric.no_backward_sync(decoder, enabled=part == 0),
            ):
                fabric.backward((decoder(encoder(x)) - x).square().mean())
        step.step()
    rounds = [handle.state_dict()["engine"]["step"] for handle in handles]
    second = fabric.setup_module(one)  # for another phase
    fabric.backward(second(batches(worker)[0]).square().mean())
    return rounds, len(fabric.strategy.handles), said, digest(one) + digest(two)


@pytest.mark.processes
def test_modules_share_an_optimizer_and_gradients_accumulate() -> None:
    (rounds, handles, said, first), (*_, second) = run_in_processes(several, 2)
    assert rounds == [4, 4]
    assert handles == 2
    assert said.startswith("2 modules have been set up by this Fabric")
    assert first == second


def phases(worker: int) -> list[list[float]]:
    """Train a module in three phases, the last one with a new head; return each one's rates."""
    strategy = strategy_of("lightning_fabric", TopK(0.5), controller=Fixed(0.25))
    fabric = fabric_with("lightning_fabric", strategy)
    net, rates = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16)), []
    for phase, rate in enumerate((0.5, 0.25, 0.125)):
        if phase == 2:
            net[1] = nn.Linear(64, 16).to(fabric.device)
        model, optimizer = fabric.setup(net, torch.optim.SGD(net.parameters(), lr=rate))
        strategy.handle.begin_epoch(phase)
        fabric.backward(model(batches(worker)[0]).square().mean())
        optimizer.step()
        known = strategy.handle._setup.optimizers()
        rates.append([float(group["lr"]) for each in known for group in each.param_groups])
    return rates


@pytest.mark.processes
def test_an_optimizer_of_an_earlier_phase_is_forgotten() -> None:
    assert run_in_processes(phases, 2) == [[[0.5], [0.25], [0.125]]] * 2


def unusable(worker: int, folder: str) -> list[str]:
    package, path = "lightning_fabric", f"{folder}/run.ckpt"
    said = []

    def say(act: Any) -> None:
        try:
            act()
        except (ValueError, RuntimeError) as error:
            said.append(str(error))

    loop = FabricLoop(package, worker, TopK(0.05))
    loop.run(0, 3)
    state = {"model": loop.model}
    loop.fabric.save(path, state)
    content = torch.load(path, weights_only=True)
    new = content["lightning_gc"]
    content["lightning_gc"] = {n: new[n] for n in ("stem", "workers", "modules")} | {"fabric": 1}
    if worker == 0:
        torch.save(content, f"{folder}/old.ckpt")
    loop.fabric.barrier()
    say(lambda: loop.fabric.load(f"{folder}/old.ckpt", state))
    other = FabricLoop(package, worker, QSGD(4), None)
    say(lambda: other.fabric.load(path, {"model": other.model}))
    late = nn.Linear(16, 4)
    with pytest.warns(UserWarning, match="Call fabric.load after fabric.setup"):
        other.fabric.load(path, {"other": late}, strict=False)
    (own,) = Path(folder).rglob(f"*-worker{worker}of2.pt")
    loop.fabric.barrier()
    if worker == 1:
        own.unlink()
    say(lambda: loop.fabric.load(path, state))
    plain = {"model": loop.net.state_dict()}
    if worker == 0:
        torch.save(plain, f"{folder}/plain.ckpt")
    loop.fabric.barrier()
    loop.fabric.load(f"{folder}/plain.ckpt", state)
    said.append(str(loop.handle.state_dict()["engine"]["memory"]))
    say(refuse_lr_aware)
    saved = torch.load(path, weights_only=True)
    main = {name: value for name, value in saved["lightning_gc"].items() if name != "sha256"}
    saved["lightning_gc"] = with_checksum(main | {"workers": 3})
    if worker == 0:
        torch.save(saved, f"{folder}/three.ckpt")
    loop.fabric.barrier()
    say(lambda: loop.fabric.load(f"{folder}/three.ckpt", state))
    return said


def refuse_lr_aware() -> None:
    aware = strategy_of("lightning_fabric", TopK(0.1), ErrorFeedback(lr_aware=True))
    fabric_with("lightning_fabric", aware).setup_module(nn.Linear(4, 4))


@pytest.mark.processes
def test_what_cannot_be_restored_is_a_sentence_on_all_workers(tmp_path: Path) -> None:
    for old, other, gone, none, rates, three in run_in_processes(unusable, 2, str(tmp_path)):
        assert "has format=1, but this version of lightning_gc reads format 2" in old
        assert "a state with configuration=" in other
        assert "Worker 1 of 2 could not restore the errors of" in gone
        assert "move it together with the checkpoint" in gone
        assert none == "{}"
        assert "set up both together: fabric.setup(model, optimizer)" in rates
        assert "worker0of3.pt is missing; move it together with the checkpoint" in three


@each_package
def test_names_and_refusals(package: str) -> None:
    import pytorch_lightning as pl

    fabric = importlib.import_module(package)
    strategy = fabric.Fabric(
        accelerator="cpu", devices=2, strategy="compressed_ddp_topk_spawn"
    ).strategy
    assert isinstance(strategy, flavours_class(package))
    assert "with TopK(0.01) for Fabric" in repr(strategy)
    trainers = lightning_gc.CompressedDDPStrategy(TopK(0.1))
    with pytest.raises(ValueError, match="Fabric takes CompressedFabricStrategy"):
        fabric.Fabric(accelerator="cpu", devices=2, strategy=trainers)
    ours = strategy_of(package, TopK(0.1), timeout=timedelta(seconds=5))
    with pytest.raises(ValueError, match="a Trainer takes CompressedDDPStrategy"):
        pl.Trainer(accelerator="cpu", devices=2, strategy=ours, logger=False)
    fabric.Fabric(accelerator="cpu", devices=2, strategy=ours)
    with pytest.raises(ValueError, match="already belongs to a Fabric"):
        fabric.Fabric(accelerator="cpu", devices=2, strategy=ours)
    for wrong, said in (
        ({"memmory": 1}, "unknown argument .did you mean 'memory'"),
        ({"mixed_precision": 1}, r"Use Fabric\(precision='bf16-mixed'\) instead"),
        ({"state": "some"}, "use 'full', 'mean' or 'off'"),
    ):
        with pytest.raises(ValueError, match=said):
            strategy_of(package, TopK(0.1), **wrong)


def test_the_class_is_that_of_the_fabric_which_is_imported() -> None:
    assert lightning_gc.CompressedFabricStrategy is flavours_class("lightning_fabric")
