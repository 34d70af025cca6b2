"""PowerSGD computes what the paper's algorithm computes, here written in NumPy."""

import contextlib
import math
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import (
    AllGather,
    CompressedDDPStrategy,
    GradZip,
    NoMemory,
    PerParameter,
    PowerSGD,
    TwoShot,
)
from lightning_gc.compressors import Compressor
from lightning_gc.core import payload_validation
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import resume
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.recovery import Flooding
from tests.support.bucket_kernels import without_kernels


@pytest.fixture(autouse=True, params=["kernels", "torch"])
def computing(request: pytest.FixtureRequest) -> Iterator[None]:
    """By kernels of whole buckets, where there are any, and by torch."""
    with contextlib.nullcontext() if request.param == "kernels" else without_kernels():
        yield


KINDS = ("normal", "heavy tails", "all negative", "constant", "tiny", "huge")


def by_hand(
    steps: list[list[np.ndarray]], q: np.ndarray, rank: int
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Return the mean and the errors of every step, by the paper's box in float64.

    But for the errors, which are taken from the mean approximation, as in torch's hook.
    """
    errors = [np.zeros_like(grad) for grad in steps[0]]
    found = []
    for grads in steps:
        matrices = [grad + error for grad, error in zip(grads, errors, strict=True)]
        p = np.mean([m @ np.linalg.qr(q)[0] for m in matrices], axis=0)
        p = np.linalg.qr(p)[0][:, :rank]
        q = np.mean([m.T @ p for m in matrices], axis=0)
        errors = [m - p @ q.T for m in matrices]
        found.append((p @ q.T, errors))
    return found


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize(
    ("kind", "rank"),
    # A constant has one direction; what stands beside it is arbitrary.
    [(kind, rank) for kind in KINDS for rank in (1, 3) if (kind, rank) != ("constant", 3)],
)
def test_the_papers_box(kind: str, workers: int, rank: int) -> None:
    """To 1e-3 of the gradient's norm: float32 against float64, over five steps of iteration."""
    whole = cases.tensors(5 * workers * 221)[kind].view(5, workers, 17, 13)
    lockstep = Lockstep(workers, PowerSGD(rank, min_ratio=0.0))
    lockstep.step([{"w": grad} for grad in whole[0]])  # Q is random now, and some errors are left
    start = lockstep.engines[0].state_dict()
    q = start["compressor"]["w"]["q"].double().numpy()
    errors = [engine.errors()["w"].double().numpy() for engine in lockstep.engines]
    assert q.shape == (13, rank)
    steps = [[grad.double().numpy() for grad in grads] for grads in whole[1:]]
    steps[0] = [grad + error for grad, error in zip(steps[0], errors, strict=True)]
    scale = max(np.linalg.norm(grad) for grads in steps for grad in grads)
    for (mean, left), grads in zip(by_hand(steps, q, rank), whole[1:], strict=True):
        result = lockstep.step([{"w": grad} for grad in grads])
        np.testing.assert_allclose(result.mean["w"].numpy() / scale, mean / scale, atol=1e-3)
        for error, wanted in zip(result.errors, left, strict=True):
            np.testing.assert_allclose(error["w"].numpy() / scale, wanted / scale, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 4])
def test_a_matrix_of_that_rank_is_sent_exactly(rank: int) -> None:
    draw = torch.Generator().manual_seed(rank)
    left = torch.randn(64, rank, generator=draw)
    grads = [left @ torch.randn(rank, 48, generator=draw) for _ in range(2)]
    result = Lockstep(2, PowerSGD(rank)).step([{"w": grad} for grad in grads])
    mean = (grads[0] + grads[1]) / 2
    torch.testing.assert_close(result.mean["w"], mean, rtol=1e-4, atol=1e-4)


def test_one_element_is_sent_exactly() -> None:
    x = cases.tensors(221)["one element"].view(17, 13)
    result = Lockstep(1, PowerSGD(1)).step([{"w": x}])
    torch.testing.assert_close(result.mean["w"], x, rtol=1e-5, atol=1e-6)


def test_it_finds_the_largest_directions() -> None:
    """Steps on one matrix without a memory are subspace iteration: as good as an SVD."""
    draw = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(60, 60, generator=draw)).Q
    v = torch.linalg.qr(torch.randn(50, 50, generator=draw)).Q
    spectrum = 0.7 ** torch.arange(50)
    matrix = u[:, :50] @ torch.diag(spectrum) @ v.t()
    lockstep = Lockstep(1, PowerSGD(3), NoMemory())
    for _ in range(15):
        result = lockstep.step([{"w": matrix}])
    least = spectrum[3:].square().sum().sqrt()
    assert (result.mean["w"] - matrix).norm() <= 1.001 * least


def test_rank_moves_and_columns_stay() -> None:
    lockstep = Lockstep(2, PowerSGD(4))
    grads = [{"w": torch.randn(50, 60, generator=cases.generator(i))} for i in range(2)]

    def q(worker: int) -> Tensor:
        kept: Tensor = lockstep.engines[worker].state_dict()["compressor"]["w"]["q"]
        return kept

    for rank in (4, 2, 3):
        for engine in lockstep.engines:
            engine.levels.set(rank)
        lockstep.step(grads)
        assert q(0).shape == (60, rank)
        assert torch.equal(q(0), q(1))


def test_a_gradient_of_zeros_does_not_end_it() -> None:
    """Factors that are zero once would be zero for ever."""
    lockstep = Lockstep(2, PowerSGD(1))
    grad = torch.randn(30, 30, generator=cases.generator(0))
    for given in (grad, torch.zeros(30, 30), grad):
        result = lockstep.step([{"w": given}] * 2)
    assert result.mean["w"].norm() > 0.1 * grad.norm()


@pytest.mark.parametrize("compressor", [PowerSGD(1), GradZip(1)], ids=cases.label)
@pytest.mark.parametrize("message", [0, 1])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_subtracted_from_no_error(
    compressor: Compressor, message: int, value: float
) -> None:
    """All that was given is still in the errors of those who got it, also where nobody may look."""
    grads = [torch.randn(30, 30, generator=cases.generator(i)) for i in range(3)]
    for on_host in (True, False):
        lockstep = Lockstep(3, compressor)
        lockstep.transport = Flooding(3, 2, message, value)
        with mock.patch.object(payload_validation, "on_host", return_value=on_host):
            result = lockstep.step([{"w": grad} for grad in grads])
        assert not result.mean["w"].isfinite().any()
        for engine, grad in zip(lockstep.engines, grads, strict=True):
            assert torch.equal(engine.errors()["w"], grad)


def test_bytes() -> None:
    """Two all-reduces of thin matrices, and a flag of 4 bytes."""
    wire = Lockstep(2, PowerSGD(2)).step([{"w": torch.ones(100, 80)}] * 2).wire_bytes
    assert wire == [2 * (100 + 80) * 4 + 4] * 2


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: PowerSGD(0), "rank=0"),
        (lambda: PowerSGD(1.5), "rank=1.5"),  # type: ignore[arg-type]
        (lambda: PowerSGD(min_ratio=-1), "min_ratio"),
        (lambda: PowerSGD(dense_steps=-1), "dense_steps"),
        (lambda: CompressedDDPStrategy(PowerSGD(), scheme=AllGather()), "takes no scheme"),
        (lambda: CompressedDDPStrategy(PowerSGD(), scheme=TwoShot()), "takes no scheme"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.parametrize(
    "compressor", [PowerSGD(2), GradZip(2), PowerSGD(2, dense_steps=2)], ids=str
)
def test_matrices_of_one_shape_are_as_each_by_itself(compressor: Compressor) -> None:
    """Among them one that a controller has given another rank, which leaves the others' group."""
    shapes = {
        "a": (12, 20),
        "b": (20, 12),
        "c": (12, 20),
        "d": (12, 5, 4),
        "e": (12, 20),
        "f": (9,),
    }
    levels = {"e": 1.0}

    def run(names: str) -> list[dict[str, Tensor]]:
        lockstep = Lockstep(3, compressor)
        for engine in lockstep.engines:
            engine.levels.set(2, {name: levels[name] for name in names if name in levels})
        found = []
        for step in range(4):
            draw = [torch.Generator().manual_seed(10 * step + worker) for worker in range(3)]
            made = [{n: torch.randn(s, generator=g) for n, s in shapes.items()} for g in draw]
            result = lockstep.step([{n: each[n] for n in names} for each in made])
            errors = {f"{n} {w}": e[n] for w, e in enumerate(result.errors) for n in names}
            kept = lockstep.engines[0].state_dict()["compressor"]
            found.append({**result.mean, **errors, **{f"{n} q": kept[n]["q"] for n in kept}})
        return found

    together, alone = run("abcdef"), [run(name) for name in shapes]
    assert {"a q", "d q", "e q"} <= together[-1].keys()
    assert together[-1]["e q"].shape == (20, 1)
    for step, found in enumerate(together):
        wanted = {name: x for each in alone for name, x in each[step].items()}
        assert found.keys() == wanted.keys()
        for name, x in found.items():
            exact = isinstance(compressor, PowerSGD)
            rtol, atol = (0.0, 0.0) if exact else (1e-4, 1e-5)
            gap = f"{step} {name}"
            torch.testing.assert_close(x, wanted[name], rtol=rtol, atol=atol, msg=gap)
            # Nothing that is saved holds the memory of others.
            assert not name.endswith(" q") or x.untyped_storage().nbytes() == 4 * x.numel()


@pytest.mark.parametrize("bad", [math.nan, math.inf, 3e38])
def test_what_is_not_finite_stays_out_of_matrices_beside_it(bad: float) -> None:
    """Of one worker; the engine would end the step for the whole bucket."""
    first, second = (torch.randn(12, 20, generator=cases.generator(i)) for i in range(2))

    def exchanged(given: Tensor) -> list[Tensor]:
        grad = torch.cat([given.view(-1), second.view(-1)])
        states: dict[str, Any] = {"a": {}, "b": {}}
        bucket = Bucket(grad, dict.fromkeys(states, (12, 20)), state=states)
        buffer, out = grad.clone(), torch.zeros_like(grad)
        flow = PerParameter(PowerSGD(2)).flow(bucket, buffer, out, None)
        request: Any = next(flow)
        while request is not None:
            request = resume(flow, list(request.tensors))
        assert states["a"]["q"].isfinite().all()
        return [out[240:], buffer[240:], states["b"]["q"]]

    for clean, other in zip(exchanged(first), exchanged(first * bad), strict=True):
        assert torch.equal(clean, other)
