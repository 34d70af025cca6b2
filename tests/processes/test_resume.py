"""A run resumed in new processes is bit for bit the run that was not interrupted."""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from pytorch_lightning.loops.training_epoch_loop import _TrainingEpochLoop

from lightning_gc import (
    MEMORIES,
    QSGD,
    ErrorFeedback,
    GradZip,
    HardThreshold,
    Identity,
    Menu,
    NarrowResidual,
    NoMemory,
    PerParameter,
    PowerSGD,
    RandomK,
    SignSGD,
    TopK,
)
from lightning_gc.compressors import Compressor
from lightning_gc.controllers import (
    Accordion,
    AdaQS,
    Chain,
    DynamicBitWidth,
    Fixed,
    Schedule,
    TotalErrorBudget,
)
from lightning_gc.engine.compatibility import combine
from lightning_gc.memories import Memory
from lightning_gc.testing.contracts.memory import refused
from tests.support.accelerator import WORKERS
from tests.support.instances import ALL, ALL_MEMORIES
from tests.support.processes import run_in_processes
from tests.support.resuming import Sharded, checkpoint, differences, fit_and_save, in_processes

pytestmark = pytest.mark.processes

FEW = [
    (TopK(0.1), NarrowResidual()),
    *((TopK(0.1), cls.examples()[0]) for cls in MEMORIES.values() if cls is not NarrowResidual),
    *((PowerSGD(1), memory) for memory in (ErrorFeedback(), NoMemory())),
    *((c, combine(c)[1]) for c in (GradZip(1), SignSGD(), RandomK(0.1), HardThreshold(0.01))),
]
"""Each memory, errors in fewer bits first and so by day; then what keeps more than errors, what
votes, draws and sends any length.

Of all compressors the engine's state is continued in ``tests/contracts/test_state.py``.
"""

MANY = list(itertools.product(ALL, ALL_MEMORIES))
SLICES = 8  # that several processes may share them


def combinations(
    worker: int, folder: str, part: str, chosen: Sequence[tuple[Compressor, Memory]]
) -> list[dict[str, Any]]:
    """Fit with what goes together, one after the other; return what they left."""
    runs = []
    for number, (compressor, memory) in enumerate(chosen):
        resume = None
        if part == "resumed":
            resume = checkpoint(Path(folder, "whole", str(number)), 0, 5)
        where = str(Path(folder, part, str(number)))
        runs.append(fit_and_save(worker, WORKERS, where, 2, compressor, resume, memory=memory))
    return runs


def assert_resumed(
    folder: Path, chosen: Sequence[tuple[Compressor, Memory]], timeout: float
) -> None:
    possible = [(c, memory) for c, memory in chosen if not refused(memory, c)]
    whole, resumed = (
        run_in_processes(combinations, WORKERS, str(folder), part, possible, timeout=timeout)
        for part in ("whole", "resumed")
    )
    for number, case in enumerate(possible):
        found = differences([w[number] for w in whole], [r[number] for r in resumed])
        assert found == [], case


@pytest.mark.parametrize("first", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_memories_and_kinds_of_compressors(tmp_path: Path, first: int) -> None:
    assert_resumed(tmp_path, FEW[first::2], 110)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(SLICES))
def test_every_instance_with_every_memory(tmp_path: Path, first: int) -> None:
    assert_resumed(tmp_path, MANY[first::SLICES], 280)


def interrupted(
    folder: Path, compressor: Any, crash: int = 10, epochs: int = 4, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Fit at once, and again with a crash before step ``crash`` and a resume after it."""
    options = {"compressor": compressor, "epochs": epochs, **options}
    whole = in_processes(WORKERS, folder=str(folder / "whole"), **options)
    first = folder / "first"
    in_processes(WORKERS, folder=str(first), crash=crash, **options)
    resume = checkpoint(first, (crash - 1) // options.get("batches", 5), crash)
    return whole, in_processes(WORKERS, folder=str(folder / "second"), resume=resume, **options)


def continued(
    folder: Path, compressor: Any, epoch: int = 1, epochs: int = 4, **options: Any
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Fit at once, and go on from what that has saved after an epoch, in new processes."""
    options = {"compressor": compressor, "epochs": epochs, **options}
    whole = in_processes(WORKERS, folder=str(folder / "whole"), **options)
    resume = checkpoint(folder / "whole", epoch, 5 * (epoch + 1))
    return whole, in_processes(WORKERS, folder=str(folder / "second"), resume=resume, **options)


EVERYWHERE = PerParameter(TopK(0.2))
CONTROLLED = {
    "accordion": (EVERYWHERE, Accordion(low=0.5, high=0.1, interval=1, threshold=0.2)),
    "accordion, first batch": (
        EVERYWHERE,
        Accordion(low=0.5, high=0.1, interval=1, threshold=0.2, detector="minibatch"),
    ),
    "bit width": (
        PerParameter(QSGD(4)),
        DynamicBitWidth(
            ((9.0, 4), (1.0, 6), (0.5, 8)), monitor="val_loss", mode="min", loss_delta=0.2
        ),
    ),
    "noise": (PerParameter(QSGD(3)), AdaQS(bits=3, factor=1.1)),
    "budget": (PerParameter(HardThreshold(0.1)), TotalErrorBudget(0.1)),
    "menu": (
        Menu({"topk": TopK(0.2), "powersgd": PowerSGD(2), "qsgd": QSGD(4), "dense": Identity()}),
        Schedule((2, 1, None, 1)),  # saved while the second choice is in force
    ),
    "chain": (EVERYWHERE, Chain(Schedule((0.5, None)), Fixed(0.1), at_epoch=3)),
}
BY_DAY = ("accordion", "bit width", "noise", "menu")  # and "budget" within an epoch, below


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n in BY_DAY else pytest.mark.nightly) for n in CONTROLLED],
)
def test_controllers_go_on(tmp_path: Path, name: str) -> None:
    """The checkpoint comes before the turn, so what it looks at must be saved, not only its state.

    Levels are those of the end; the controller's state has been through all of them.
    """
    compressor, controller = CONTROLLED[name]
    whole, resumed = continued(tmp_path, compressor, controller=controller)
    assert differences(whole, resumed) == []
    assert resumed[0]["controller"] == resumed[-1]["controller"]


@pytest.mark.parametrize(
    ("when", "loss_delta"),
    [
        ({"monitor": "val_loss"}, 0.2),
        # Before the epoch's end its training loss is not known.
        pytest.param({"save_on_train_epoch_end": False}, None, marks=pytest.mark.nightly),
    ],
)
def test_saved_when_validation_ends(
    tmp_path: Path, when: dict[str, Any], loss_delta: float | None
) -> None:
    compressor, controller = CONTROLLED["bit width"]
    controller = replace(controller, loss_delta=loss_delta)  # type: ignore[type-var]
    saving = {"save_top_k": -1, **when}
    whole, resumed = continued(tmp_path, compressor, saving=saving, controller=controller)
    assert differences(whole, resumed) == []
    assert whole[0]["controller"] != controller.init()


@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": 0.005},
        {"accumulate": 3},
        {"memory": ErrorFeedback(lr_aware=True)},
    ],
    ids=str,
)
def test_ways_of_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    whole, resumed = continued(tmp_path, EVERYWHERE, epoch=0, epochs=2, **options)
    assert differences(whole, resumed) == []


def test_an_optimizer_that_is_spread_over_the_workers(tmp_path: Path) -> None:
    whole, resumed = continued(tmp_path, EVERYWHERE, epoch=0, epochs=2, module=Sharded)
    assert differences(whole, resumed) == []


COUNTS_THE_SAVED_BATCH = pytest.mark.skipif(
    not hasattr(_TrainingEpochLoop, "restarted_on_train_batch_end"),
    reason="this Lightning repeats the number of the batch after which it saved",
)


@pytest.mark.parametrize(
    "name", ["bit width", pytest.param("budget", marks=COUNTS_THE_SAVED_BATCH)]
)
def test_within_an_epoch(tmp_path: Path, name: str) -> None:
    """With a data loader that goes on where it was; the epoch's own metrics begin anew."""
    compressor, controller = CONTROLLED[name]
    saving = {"save_top_k": -1, "every_n_train_steps": 1}
    whole, resumed = interrupted(
        tmp_path,
        compressor,
        epochs=2,
        crash=8,
        saving=saving,
        stateful=True,
        controller=controller,
    )
    assert differences(whole, resumed) == []


@pytest.mark.parametrize(
    "step", [*(pytest.param(at, marks=pytest.mark.nightly) for at in (0, 7)), 8]
)
def test_fp16_with_an_overflow_on_one_worker(tmp_path: Path, step: int) -> None:
    """Saved after 8 steps: the overflow is long past, was just before, or comes just after."""
    whole, resumed = interrupted(
        tmp_path,
        EVERYWHERE,
        epochs=1,
        batches=16,
        crash=8,
        saving={"save_top_k": -1, "every_n_train_steps": 1},
        stateful=True,
        loud=step,
        scaler={"init_scale": 1024.0},
    )
    assert differences(whole, resumed) == []
    assert whole[0]["skipped"] == 1
