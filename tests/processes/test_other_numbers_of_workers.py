"""``attach`` and Fabric resume with another number of workers: each has the mean of the errors."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from lightning_gc import PowerSGD, TopK
from lightning_gc.controllers import Accordion
from tests.processes.test_attach import Loop, Net
from tests.processes.test_fabric import FabricLoop
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
Tensors = dict[str, Any]
METHODS: dict[str, tuple[Any, ...]] = {
    "topk": (TopK(0.05), None, None, Accordion(low=0.5, high=0.05, interval=1)),
    "powersgd": (PowerSGD(1),),
}
WAYS = list(itertools.product(("attach", "fabric"), ("full", "mean"), METHODS))


def loop_of(way: str, mode: str, name: str, worker: int, workers: int) -> Any:
    if way == "attach":
        return Loop(worker, *METHODS[name])
    return FabricLoop("lightning_fabric", worker, *METHODS[name], state=mode, workers=workers)


def save(loop: Any, folder: Path, way: str, mode: str, worker: int) -> None:
    if way == "fabric":
        loop.fabric.save(str(folder / "run.ckpt"), {"model": loop.model})
        return
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(loop.handle.state_dict(mode), folder / f"{worker}.pt")
    dist.barrier()


def load(loop: Any, folder: Path, way: str, mode: str, before: int) -> None:
    if way == "fabric":
        loop.fabric.load(str(folder / "run.ckpt"), {"model": loop.model})
        return
    states = [torch.load(folder / f"{i}.pt", weights_only=True) for i in range(before)]
    loop.handle.load_state_dict(states if mode == "full" else states[0])


def errors(loop: Any) -> Tensors:
    memory = loop.handle.state_dict()["engine"]["memory"]
    return {name: kept["error"].numpy().astype(np.float64) for name, kept in memory.items()}


def owed(loop: Any, start: int, stop: int) -> Tensors:
    """Run some steps; return the sum of this worker's gradients less the applied means."""
    twin, found = Net(), dict.fromkeys(dict(loop.net.named_parameters()), 0.0)
    for step in range(start, stop):
        twin.load_state_dict(loop.net.state_dict())
        x = loop.data[step]
        own = torch.autograd.grad((twin(x) - x[:, :4]).square().mean(), list(twin.parameters()))
        if loop.handle.control is not None:
            loop.handle.begin_epoch(step)
        loop.run(step, step + 1)
        for (name, param), grad in zip(loop.net.named_parameters(), own, strict=True):
            found[name] = found[name] + (grad - param.grad).numpy().astype(np.float64)
    return found


def trained(worker: int, workers: int, before: int, folder: str) -> list[tuple[Tensors, ...]]:
    """Go on from ``before`` workers' state, if there were any, in every way; save."""
    dist.init_process_group("gloo")
    found: list[tuple[Tensors, ...]] = []
    for way, mode, name in WAYS:
        loop = loop_of(way, mode, name, worker, workers)
        here = Path(folder, f"{way}-{mode}-{name}")
        if before:
            load(loop, here / str(before), way, mode, before)
        begun = errors(loop) if before else dict.fromkeys(dict(loop.net.named_parameters()), 0.0)
        due = owed(loop, workers, workers + 3)
        found.append((begun, due, errors(loop)))
        save(loop, here / str(workers), way, mode, worker)
        loop.handle.close()
    return found


def mean(found: list[Any], way: int, part: int) -> Tensors:
    return {n: np.mean([w[way][part][n] for w in found], axis=0) for n in found[0][way][part]}


def gap(one: Tensors, other: Tensors) -> float:
    return max(float(np.abs(one[name] - other[name]).max()) for name in one)


def test_applied_means_and_the_mean_error_add_up(tmp_path: Path) -> None:
    """2 workers, then 3, then 2: the mean error goes on, and nothing is lost in the steps."""
    before, last = 0, None
    for workers in (2, 3, 2):
        found = run_in_processes(trained, workers, workers, before, str(tmp_path), timeout=240)
        for index, case in enumerate(WAYS):
            begun, due, ended = (mean(found, index, part) for part in range(3))
            assert max(np.abs(error).max() for error in ended.values()) > 1e-3, case
            assert gap({n: begun[n] + due[n] for n in ended}, ended) < 1e-6, case
            if last is not None:
                for worker in found:
                    assert gap(mean(last, index, 2), worker[index][0]) < 1e-6, case
        before, last = workers, found


def sentences(worker: int) -> list[str]:
    dist.init_process_group("gloo")
    loop, said = Loop(worker, TopK(0.05)), []
    loop.run(0, 1)
    earlier = gathered(loop.handle.state_dict())
    loop.run(1, 2)
    states = gathered(loop.handle.state_dict())
    means = loop.handle.state_dict("mean")
    for wrong in (states[:1], states[::-1], [earlier[0], states[1]], [means, means], []):
        try:
            loop.handle.load_state_dict(wrong)
        except ValueError as error:
            said.append(str(error))
    before = errors(loop)
    loop.handle.load_state_dict(states)
    assert gap(before, errors(loop)) == 0
    loop.handle.close()
    return said


def gathered(state: Any) -> list[Any]:
    """Return all workers' states."""
    states: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(states, state)
    return states


def test_a_list_that_is_not_of_one_save_is_refused() -> None:
    """A list of as many states as there are workers gives each its own, bit for bit."""
    for said in run_in_processes(sentences, 2):
        one, turned, apart, means, none = said
        assert "has a list with the states of workers [0], saved by 2 workers" in one
        assert "has a list with the states of workers [1, 0]" in turned
        assert "has a list with states of step 1 of run" in apart
        assert "give one state_dict() of each" in means
        assert "has a list with the states of workers [], saved by 0 workers" in none
