"""What a worker has compiled changes neither what it sends nor what all decode."""

from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import (
    AllGatherOrTwoShot,
    AtomoSVD,
    BinMeans,
    Cast,
    EFSignSGD,
    GradZip,
    Int8,
    SignSGD,
    TopK,
    TwoShot,
    attach,
)
from lightning_gc.compressors import QSGD, Compressor
from lightning_gc.compressors.quantisers.blockwise_codes import JointBlocks
from lightning_gc.compressors.wrappers.per_parameter import forget_plans
from lightning_gc.core import Exchange, Flow, Gather
from lightning_gc.core.digest import ReplicaError
from lightning_gc.core.flow import resume
from lightning_gc.engine import Engine
from lightning_gc.kernels import dispatch
from lightning_gc.schemes import Scheme
from lightning_gc.testing import LocalLockstep, Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.lockstep import Round
from lightning_gc.transports.base import same_layout
from lightning_gc.transports.simulated import Simulated
from tests.support.instances import ALL, schemes_for
from tests.support.processes import run_in_processes

BY_DAY = (Int8(), BinMeans(2), QSGD(4), EFSignSGD(), SignSGD(), Cast(), TopK(0.1))
STEPS = 4
NEVER = STEPS
needs_custom = pytest.mark.skipif(
    not hasattr(FSDPModule, "set_custom_reduce_scatter"), reason="torch 2.9"
)


class Kernels:
    """Numba's kernels of simulated workers, of which each uses them from its own step on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.off = False
        works = dispatch.host.works

        def by_worker(family: str) -> bool:
            return works(family) and (family in dispatch.ROUNDED or not self.off)

        monkeypatch.setattr(dispatch.host, "works", by_worker)

    def given(self, lockstep: Lockstep, since: list[int], *, measured: bool = True) -> Lockstep:
        """Let worker i use them from step ``since[i]`` on; steps that measure take other ways."""
        for engine, first in zip(lockstep.engines, since, strict=True):
            engine.flow = self._flows(engine, iter(range(STEPS)), first, measured)  # type: ignore[method-assign]
        return lockstep

    def _flows(
        self, engine: Engine, steps: Iterator[int], first: int, measured: bool
    ) -> Callable[..., Flow]:
        made = engine.flow

        def flow(*args: Any, **given: Any) -> Flow:
            engine.statistics.norms_wanted = measured
            return self._run(made(*args, **given), next(steps) < first)

        return flow

    def _run(self, flow: Flow, off: bool) -> Flow:
        self.off = off
        request = next(flow, None)
        while request is not None:
            self.off = False
            reply = yield request
            self.off = off
            request = resume(flow, reply)
        self.off = False


def rounds(lockstep: Lockstep) -> list[tuple[Round, list[dict[str, torch.Tensor]]]]:
    """Return the results, and the errors that each worker keeps."""
    found = []
    for step in range(STEPS):
        result = lockstep.step(cases.gradients(len(lockstep.engines), step))
        kept = [{n: e.clone() for n, e in each.errors().items()} for each in lockstep.engines]
        found.append((result, kept))
    return found


def hold(
    kernels: Kernels, compressor: Compressor, scheme: Scheme | None, workers: int, since: list[int]
) -> None:
    """Compare with workers that all use kernels; ``Lockstep`` compares the replicas."""
    for measured in (False, True):
        alike, mixed = (
            rounds(
                kernels.given(Lockstep(workers, compressor, None, scheme), those, measured=measured)
            )
            for those in ([0] * workers, since)
        )
        for step, ((want, had), (found, has)) in enumerate(zip(alike, mixed, strict=True)):
            what = f"{compressor!r}, {scheme!r}, {workers} workers, step {step}, {measured=}"
            assert found.wire_bytes == want.wire_bytes, what
            before, after = [want.mean, *want.errors, *had], [found.mean, *found.errors, *has]
            for expected, got in zip(before, after, strict=True):
                assert list(got) == list(expected), what
                for name, tensor in expected.items():
                    same = torch.equal(bits(got[name]), bits(tensor))
                    assert same, f"{what}, {name}"


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def mixtures(workers: int) -> list[list[int]]:
    """Every second worker never uses kernels; each worker takes them over at its own step."""
    return [[i % 2 * NEVER for i in range(workers)], [(i + 1) % STEPS for i in range(workers)]]


@pytest.mark.parametrize("scheme", [TwoShot(), AllGatherOrTwoShot()], ids=cases.label)
@pytest.mark.parametrize("compressor", BY_DAY, ids=cases.label)
def test_workers_with_and_without_kernels(
    monkeypatch: pytest.MonkeyPatch, compressor: Compressor, scheme: Scheme
) -> None:
    if scheme in schemes_for(compressor):
        for since in mixtures(3):
            hold(Kernels(monkeypatch), compressor, scheme, 3, since)


@pytest.mark.nightly
@pytest.mark.parametrize("compressor", ALL, ids=cases.label)
def test_workers_with_and_without_kernels_at_length(
    monkeypatch: pytest.MonkeyPatch, compressor: Compressor
) -> None:
    for workers in (3, 4):
        for scheme in schemes_for(compressor):
            for since in mixtures(workers):
                hold(Kernels(monkeypatch), compressor, scheme, workers, since)


def test_local_steps_with_and_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """All workers end with the same common weights."""
    started = cases.gradients(3, 0)[0]
    alike, mixed = (LocalLockstep(3, started, Int8()) for _ in range(2))
    Kernels(monkeypatch).given(mixed._lockstep, mixtures(3)[0])
    for step in range(STEPS):
        own = cases.gradients(3, 2 * step)
        wanted, found = alike.round(own).weights, mixed.round(own).weights
        for name, weight in wanted.items():
            assert torch.equal(found[name], weight), f"round {step}, {name}"


def test_the_layouts_of_requests_are_compared() -> None:
    """One worker has another order of fields, of as many bytes."""
    codes, numbers = torch.zeros(7, dtype=torch.uint8), torch.zeros(5)
    rows = Exchange(((codes, numbers, numbers),) * 3)
    parts = Exchange(((codes, numbers[:2], numbers[:2], numbers[2:], numbers[2:]),) * 3)
    for other, said in (
        (parts, r"field 2 is \(2,\) float32 on worker 1, and \(5,\) float32 on worker 0"),
        (Gather((codes,), (9,)), "worker 1 asks for Gather, worker 0 for Exchange"),
        (rows._replace(limits=(9, None, None)), "field 1 is at most 9 uint8 on worker 1"),
    ):
        asked = [rows, other, rows]
        with pytest.raises(ReplicaError, match=f"^Worker 1 would send a, b in .*{said}"):
            Simulated(3).run([same_layout(each, ("a", "b")) for each in asked])
    Simulated(3).run([same_layout(rows, ("a", "b")) for _ in range(3)])


@pytest.mark.parametrize("compressor", [GradZip(), AtomoSVD(), QSGD(4)], ids=cases.label)
def test_autocast_of_the_caller_changes_nothing(compressor: Compressor) -> None:
    plain, cast = (Lockstep(3, compressor) for _ in range(2))
    for step in range(2):
        wanted = plain.step(cases.gradients(3, step))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = cast.step(cases.gradients(3, step))
        for name, mean in wanted.mean.items():
            assert torch.equal(found.mean[name], mean), name


@pytest.mark.processes
@needs_custom
def test_layouts_of_shards_are_compared() -> None:
    for said in run_in_processes(_shards, 2):
        assert said.startswith("Worker 1 would send weight in another layout than worker 0: field")
        assert said.endswith(f"set {dispatch.SWITCH}=torch on all.")


def _shards(worker: int) -> str:
    """Return how a pass ends in which rank 1 has another level."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    model = nn.Linear(64, 64, bias=False)
    fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
    handle = attach(cast(FSDPModule, model), QSGD(4))
    model(torch.ones(2, 64)).sum().backward()
    if worker == 1:
        handle._workers.set_levels(100)
    with pytest.raises(ReplicaError) as refused:
        model(torch.ones(2, 64)).sum().backward()
    dist.destroy_process_group()
    return str(refused.value)


@pytest.mark.processes
def test_three_processes_with_and_without_kernels() -> None:
    """Kernels are taken over in counted rounds; another layout stops all before it is sent."""
    runs = run_in_processes(_train, 3)
    for weights, _, _ in runs:
        for how, each in weights.items():
            assert each == runs[0][0]["alike"], how
    assert runs[1][1] == [False] * 4 + [True] * 4  # made in round 3, taken over in round 4
    for _, _, said in runs:
        assert "Worker 1 would send" in said  # not what ``verify`` says, which blames the network
        assert "uint8 on worker 1, and" in said


def _train(worker: int) -> tuple[dict[str, list[float]], list[bool], str]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    host, rounds, used = dispatch.host, 8, list[bool]()
    host.works("blocks"), host.works("segments")
    known = dict(host._works)

    def run(how: str) -> list[float]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 50), nn.Linear(50, 2))
        ddp = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
        handle = attach(ddp, Int8(), optimizers=optimizer, verify=int(how == "other layout"))
        random = torch.Generator().manual_seed(worker)
        for step in range(rounds):
            if worker == 1 and how == "late" and step == 3:
                host._made |= known
            optimizer.zero_grad()
            ddp(torch.randn(8, 40, generator=random)).square().sum().backward()
            optimizer.step()
            if how == "late":
                used.append(host._works["blocks"])
        handle.check()
        handle.close()
        return torch.cat([p.detach().view(-1) for p in model.parameters()]).tolist()

    weights = {"alike": run("alike")}
    for how in ("without", "late"):
        if worker == 1:
            host._works.update(dict.fromkeys(known, False))
        weights[how] = run(how)
    if worker == 1:
        JointBlocks.in_rows = False  # type: ignore[assignment, method-assign]
        forget_plans()
    with pytest.raises(ReplicaError) as refused:
        run("other layout")
    dist.destroy_process_group()
    return weights, used, str(refused.value)
