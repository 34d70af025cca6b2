"""What a worker has compiled changes neither what it sends nor what all decode."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from lightning_gc import AllGatherOrTwoShot, BinMeans, Cast, EFSignSGD, Int8, TopK, TwoShot
from lightning_gc.compressors import QSGD, Compressor
from lightning_gc.core import Flow
from lightning_gc.core.flow import resume
from lightning_gc.engine import Engine
from lightning_gc.kernels import dispatch
from lightning_gc.schemes import Scheme
from lightning_gc.testing import LocalLockstep, Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.lockstep import Round
from tests.support.instances import ALL, schemes_for

BY_DAY = (Int8(), BinMeans(2), QSGD(4), EFSignSGD(), Cast(), TopK(0.1))
STEPS = 4
NEVER = STEPS


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
