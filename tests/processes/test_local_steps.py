"""Workers with local steps in processes of their own are the plain loop, bit for bit.

And with H = 1 they are compressed DDP; validation and checkpoints see the common weights.
"""

import contextlib
import csv
import tempfile
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch.distributed as dist
from pytorch_lightning.loggers import CSVLogger

from lightning_gc import (
    QSGD,
    AllGather,
    ErrorFeedback,
    GrowingRounds,
    Identity,
    NoMemory,
    OuterSGD,
    PerParameter,
    TopK,
)
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor
from lightning_gc.transports.base import all_reduce_bytes
from tests.support.accelerator import WORKERS, needs_two
from tests.support.fitting import ddp
from tests.support.local_steps import Learner, by_a_plain_loop, fit_local, whole_digest
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]
STEPS = 8

GATHERED: dict[str, dict[str, Any]] = {
    "topk": {"compressor": PerParameter(TopK(0.1)), "every": 3, "memory": ErrorFeedback()},
    "momenta": {
        "compressor": PerParameter(TopK(0.1)),
        "every": 3,
        "memory": ErrorFeedback(decay=0.9),
        "verify": 2,
        "outer": OuterSGD.diloco(),
        "momentum": 0.9,
    },
    "qsgd": {
        "compressor": PerParameter(QSGD(4)),
        "every": 4,
        "memory": NoMemory(),
        "scheme": AllGather(),
    },
    "rebased": {"compressor": PerParameter(TopK(0.1)), "every": 4, "delay": 2, "momentum": 0.9},
    "mixed": {
        "compressor": PerParameter(TopK(0.1)),
        "every": 6,
        "fragments": 3,
        "delay": 1,
        "merge": "mix",
        "outer": OuterSGD.diloco(),
    },
    "fragments": {"compressor": PerParameter(TopK(0.1)), "every": 4, "fragments": 3},
    "growing": {"compressor": PerParameter(TopK(0.1)), "every": GrowingRounds(0.06, 1)},
    "growing, delayed": {
        "compressor": PerParameter(TopK(0.1)),
        "every": GrowingRounds(0.08, 2),
        "delay": 1,
    },
    "diloco": {"compressor": PerParameter(Identity()), "every": 5, "outer": OuterSGD.diloco()},
}
"""What is gathered, or is the mean of two."""
BEGINS = {"growing": (0, 1, 2, 3, 5)}  # ⌊(0.06/η)²⌋ is 1, 2 and 3 before the last three rounds


class Kept(pl.Callback):
    """Notes what checkpoints would hold, after the steps that it is told."""

    def __init__(self, steps: tuple[int, ...]) -> None:
        self.steps, self.seen = steps, []  # type: ignore[var-annotated]

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        if trainer.global_step in self.steps:
            other = Learner(batch_norm=True)
            before = whole_digest(pl_module)
            other.load_state_dict(trainer.strategy.lightning_module_state_dict())
            assert whole_digest(pl_module) == before, "own weights are back"
            self.seen.append(whole_digest(other))


class Errors(pl.Callback):
    """Notes this worker's errors before every step."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        memory = trainer.strategy.engine.state_dict()["memory"]
        self.seen.append(str({name: kept["error"].tolist() for name, kept in memory.items()}))


def everything(worker: int) -> dict[str, Any]:
    """In one pair of processes, for starting them takes long."""
    found: dict[str, Any] = {name: fit_local(worker, **case) for name, case in GATHERED.items()}
    if worker == 0:
        for name, case in GATHERED.items():
            found[f"{name} by a loop"] = by_a_plain_loop(WORKERS, STEPS, **case)
    every_step: dict[str, Any] = {"compressor": TopK(0.1), "steps": 12}
    found["H=1"] = fit_local(worker, every=1, memory=ErrorFeedback(), **every_step)
    found["DDP"] = fit_local(
        worker, strategy=ddp, memory=ErrorFeedback(lr_aware=True), **every_step
    )
    kept = Kept((2, 3, 4))
    found["validated"] = fit_local(
        worker,
        compressor=QSGD(4),
        every=3,
        module={"batch_norm": True},
        validation=True,
        trainer={"val_check_interval": 2, "callbacks": [kept]},
    )
    found["kept"] = kept.seen
    errors = Errors()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found["broken"] = fit_local(
            worker,
            compressor=PerParameter(TopK(0.1)),
            every=2,
            momentum=0.9,
            module={"broken": (1, 2)},
            trainer={"callbacks": [errors]},
        )
    found["errors"] = errors.seen
    found["warned"] = [str(each.message) for each in caught if "lost" in str(each.message)]
    found["unlike"] = fit_local(
        worker, compressor=TopK(0.1), every=3, module={"seed": worker, "batch_norm": True}
    )
    with tempfile.TemporaryDirectory() as folder:
        found["monitored"] = fit_local(
            worker,
            compressor=QSGD(4),
            every=3,
            steps=10,
            trainer={
                "logger": CSVLogger(folder, name="", version=""),
                "log_every_n_steps": 5,
                "callbacks": [CompressionMonitor()],
            },
        )
        if worker == 0:
            log = Path(folder, "metrics.csv")
            found["rows"] = list(csv.DictReader(log.read_text().splitlines()))
    found["asked"] = asked(worker)
    found["stopped"] = fit_local(
        worker, compressor=TopK(0.1), every=5, trainer={"callbacks": [Stop(7)]}
    )
    return found


def test_the_monitor_counts_every_step(found: list[dict[str, Any]]) -> None:
    """Plain DDP would have sent gradients in all of them; logged is the exchange after."""
    for worker in found:
        metrics = worker["monitored"]["metrics"]
        elements = sum(each.size for each in worker["monitored"]["parameters"])
        dense = 10 * all_reduce_bytes(4 * elements, WORKERS)
        assert metrics["compression/total_dense_bytes"] == dense
        wire = metrics["compression/total_wire_bytes"]
        assert metrics["compression/total_ratio"] == dense / wire
        assert dense / wire > 6, "4 exchanges of 10 steps, and few bits of most elements"
        assert metrics["compression_epoch/dense_bytes"] == dense / 10
    rows = [row for row in found[0]["rows"] if row.get("compression/drift")]
    assert [int(row["step"]) for row in rows] == [5, 9], "after steps 6 and 10, for 5 and 10"
    assert [float(row["compression/rounds"]) for row in rows] == [2, 4]
    for row in rows:
        assert 0 < float(row["compression/outer_step"]) <= 1.5 * float(row["compression/drift"])
        assert float(row["compression/dense_bytes"]) == all_reduce_bytes(4 * elements, WORKERS)


class Asked(pl.Callback):
    """Counts calls of collectives in each batch, from the end of the one before."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.seen: list[list[str]] = []

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            for name in ("broadcast", "all_reduce", "all_gather", "barrier", "all_to_all_single"):
                patch.setattr(dist, name, partial(self._call, name, getattr(dist, name)))
            yield

    def _call(self, name: str, act: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls.append(name)
        return act(*args, **kwargs)

    def on_train_batch_end(self, *_: Any) -> None:
        self.seen.append(list(self.calls))
        self.calls.clear()


def asked(worker: int) -> list[list[str]]:
    calls = Asked()
    with calls.counting():
        fit_local(worker, compressor=Identity(), every=4, steps=9, trainer={"callbacks": [calls]})
    return calls.seen


def test_nothing_is_asked_between_exchanges(found: list[dict[str, Any]]) -> None:
    """Neither by us nor by Lightning; batches 3, 7 and 8 end a round."""
    for worker in found:
        for batch, calls in enumerate(worker["asked"]):
            assert batch in (0, 3, 4, 7, 8) or not calls, (batch, calls)
            assert batch not in (3, 7, 8) or "all_reduce" in calls


class Stop(pl.Callback):
    """Ends the run before its time."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == self.step


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    results: list[dict[str, Any]] = run_in_processes(everything, WORKERS, timeout=200)
    return results


@pytest.mark.parametrize("name", GATHERED)
def test_real_workers_are_the_plain_loop(found: list[dict[str, Any]], name: str) -> None:
    """The last round, of fewer steps, included: so the fit ends with common weights."""
    for worker in found:
        for ours, reference in zip(
            worker[name]["parameters"], found[0][f"{name} by a loop"], strict=True
        ):
            np.testing.assert_array_equal(ours, reference)
    first, second = (worker[name]["trained"] for worker in found)
    same = [a == b for a, b in zip(first, second, strict=True)]
    if GATHERED[name].keys() & {"delay", "fragments"}:
        assert same == [step == 0 for step in range(STEPS)], "some of the weights always differ"
    else:
        starts = BEGINS.get(name) or range(0, STEPS, GATHERED[name]["every"])
        assert same == [step in starts for step in range(STEPS)], "between exchanges all differ"


def test_an_exchange_every_step_is_compressed_ddp(found: list[dict[str, Any]]) -> None:
    """With plain SGD, and errors that DDP keeps in units of the update."""
    for worker in found:
        for ours, theirs in zip(
            worker["H=1"]["parameters"], worker["DDP"]["parameters"], strict=True
        ):
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6)
        assert worker["H=1"]["rounds"] == worker["DDP"]["rounds"] == [12]


def test_validation_and_checkpoints_see_common_weights(found: list[dict[str, Any]]) -> None:
    """In the middle of rounds too, with running statistics; and training goes on as if not."""
    first, second = (worker["validated"]["validated"] for worker in found)
    assert first == second
    assert len(set(first)) == 4, "at steps 2, 4, 6, 8: before the first exchange, after each"
    for worker in found:
        two, three, four = worker["kept"]
        assert two == first[0]
        assert three == four == first[1]
    trained = [worker["validated"]["trained"] for worker in found]
    same = [a == b for a, b in zip(*trained, strict=True)]
    assert same == [step in (0, 3, 6) for step in range(STEPS)]


def test_a_round_that_is_not_finite_costs_that_round(found: list[dict[str, Any]]) -> None:
    """On all workers; steps 2 and 3 are lost, and worker 1's momentum begins anew."""
    first, second = (worker["broken"] for worker in found)
    assert first["digest"] == second["digest"]
    assert all(np.isfinite(each).all() for each in first["parameters"])
    assert first["trained"][4] == second["trained"][4] == first["trained"][2]
    assert [len(worker["warned"]) for worker in found] == [1, 0]
    assert "its 2 steps are lost" in found[0]["warned"][0]
    for worker in found:
        assert worker["errors"][4] == worker["errors"][2] != worker["errors"][6]
    assert first["trained"][6] == second["trained"][6] != first["trained"][4]


def test_all_begin_with_the_weights_of_worker_0(found: list[dict[str, Any]]) -> None:
    first, second = (worker["unlike"] for worker in found)
    assert first["trained"][0] == second["trained"][0]
    assert first["digest"] == second["digest"]
    for ours, theirs in zip(first["buffers"], second["buffers"], strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_a_run_that_is_stopped_ends_with_common_weights(found: list[dict[str, Any]]) -> None:
    first, second = (worker["stopped"] for worker in found)
    assert first["steps"] == 7
    assert first["rounds"] == [2]
    assert first["digest"] == second["digest"]
