"""GradZip matches alternating least squares in NumPy."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import AllGather, CompressedDDPStrategy, GradZip, NoMemory, PowerSGD, TwoShot
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases

DRAW = torch.Generator().manual_seed(7)
STUDENT = torch.randn(2210, generator=DRAW) / torch.randn(2, 2210, generator=DRAW).norm(dim=0)
ONE = cases.tensors(221)["one element"]
KINDS = {
    **cases.tensors(2210),
    "one element": torch.cat([(i + 1) * ONE for i in range(10)]),
    "Student t, 2 degrees": STUDENT,
    "bfloat16": STUDENT.bfloat16().float(),
}


def ridge(target: np.ndarray, columns: np.ndarray, weight: float) -> np.ndarray:
    """Return the X for which ``‖target − X·columnsᵀ‖² + weight·‖X‖²`` is least.

    By least squares of stacked rows, without normal equations.
    """
    rank = columns.shape[1]
    stacked = np.vstack([columns, np.sqrt(weight) * np.eye(rank)])
    right = np.vstack([target.T, np.zeros((rank, target.shape[0]))])
    return np.asarray(np.linalg.lstsq(stacked, right, rcond=None)[0].T)


def by_hand(
    steps: list[list[np.ndarray]], q: np.ndarray, weight: float
) -> list[tuple[np.ndarray, list[np.ndarray]]]:
    """Return the mean and the errors of every step."""
    errors = [np.zeros_like(grad) for grad in steps[0]]
    found = []
    for grads in steps:
        matrices = [grad + error for grad, error in zip(grads, errors, strict=True)]
        mean = np.mean(matrices, axis=0)
        p = ridge(mean, np.linalg.qr(q)[0], weight)
        p = p / (np.linalg.norm(p, axis=0).max() or 1.0)
        q = ridge(mean.T, p, weight)
        errors = [m - p @ q.T for m in matrices]
        found.append((p @ q.T, errors))
    return found


@pytest.mark.parametrize("weight", [1e-8, 1e-3, 1.0])
@pytest.mark.parametrize(("workers", "rank"), [(1, 1), (2, 3)])
@pytest.mark.parametrize("kind", KINDS)
def test_alternating_least_squares(kind: str, workers: int, rank: int, weight: float) -> None:
    """Over three steps from the Q and the errors of a first one, to 1e-3 of the gradient."""
    numel = 5 * workers * 221
    whole = KINDS[kind][:numel].repeat(-(-numel // 2210))[:numel].view(5, workers, 17, 13)
    lockstep = Lockstep(workers, GradZip(rank, min_ratio=0.0, regulariser=weight))
    lockstep.step([{"w": grad} for grad in whole[0]])
    state = lockstep.engines[0].state_dict()["compressor"]["w"]["q"]
    errors = [engine.errors()["w"].double().numpy() for engine in lockstep.engines]
    steps = [[grad.double().numpy() for grad in grads] for grads in whole[1:4]]
    steps[0] = [grad + error for grad, error in zip(steps[0], errors, strict=True)]
    scale = max([np.linalg.norm(grad) for grads in steps for grad in grads]) or 1.0
    wanted = by_hand(
        [[g / scale for g in grads] for grads in steps], state.double().numpy(), weight
    )
    for (mean, left), grads in zip(wanted, whole[1:4], strict=True):
        result = lockstep.step([{"w": grad} for grad in grads])
        np.testing.assert_allclose(result.mean["w"].double().numpy() / scale, mean, atol=1e-3)
        for error, expected in zip(result.errors, left, strict=True):
            np.testing.assert_allclose(error["w"].double().numpy() / scale, expected, atol=1e-3)


@pytest.mark.parametrize("rank", [1, 2, 4])
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_a_matrix_of_that_rank_is_sent_exactly(rank: int, size: float) -> None:
    """Or of a lower one: the columns that are left over are held back."""
    draw = torch.Generator().manual_seed(rank)
    left = torch.randn(64, rank, generator=draw)
    grads = [left @ torch.randn(rank, 48, generator=draw) * size for _ in range(2)]
    for columns in (rank, rank + 3):
        result = Lockstep(2, GradZip(columns, min_ratio=0.0)).step([{"w": grad} for grad in grads])
        mean = (grads[0] / 2 + grads[1] / 2) / size
        torch.testing.assert_close(result.mean["w"] / size, mean, rtol=1e-4, atol=1e-4)


def test_it_finds_the_largest_directions() -> None:
    """Steps on one matrix without a memory become as good as an SVD."""
    draw = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(60, 60, generator=draw)).Q
    v = torch.linalg.qr(torch.randn(50, 50, generator=draw)).Q
    spectrum = 0.7 ** torch.arange(50)
    matrix = u[:, :50] @ torch.diag(spectrum) @ v.t()
    lockstep = Lockstep(1, GradZip(3), NoMemory())
    for _ in range(15):
        result = lockstep.step([{"w": matrix}])
    least = spectrum[3:].square().sum().sqrt()
    assert (result.mean["w"] - matrix).norm() <= 1.001 * least


def test_with_a_small_regulariser_it_is_the_projection_of_powersgd() -> None:
    """Both on the span of M·Q, from the same first Q."""
    grads = [{"w": torch.randn(40, 30, generator=cases.generator(i))} for i in range(2)]
    ours, theirs = (Lockstep(2, cls(3)) for cls in (GradZip, PowerSGD))
    for _ in range(4):
        results = [run.step(grads).mean["w"] for run in (ours, theirs)]
        torch.testing.assert_close(results[0], results[1], rtol=1e-4, atol=1e-4)


def test_the_regulariser_shortens_what_is_sent() -> None:
    """One column of length 1: by exactly 1 + λ."""
    grad = {"w": torch.randn(40, 30, generator=cases.generator(0))}
    free, held = (Lockstep(1, GradZip(1, regulariser=weight)) for weight in (1e-8, 0.25))
    means = [run.step([grad]).mean["w"] for run in (free, held)]
    torch.testing.assert_close(means[0], 1.25 * means[1])


def test_zeros_and_a_lower_rank_do_not_end_it() -> None:
    """A direction that one step's gradient lacks is found again in the next."""
    lockstep = Lockstep(2, GradZip(2), NoMemory())
    draw = torch.Generator().manual_seed(0)
    one = torch.randn(30, 1, generator=draw) @ torch.randn(1, 30, generator=draw)
    two = one + torch.randn(30, 1, generator=draw) @ torch.randn(1, 30, generator=draw)
    for given in (one, one, torch.zeros(30, 30), two):
        result = lockstep.step([{"w": given}] * 2)
    torch.testing.assert_close(result.mean["w"], two, rtol=1e-3, atol=1e-3)


def test_rank_moves_and_columns_stay() -> None:
    lockstep = Lockstep(2, GradZip(4))
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


def test_bytes() -> None:
    """Two all-reduces of thin matrices, and a flag of 4 bytes."""
    wire = Lockstep(2, GradZip(2)).step([{"w": torch.ones(100, 80)}] * 2).wire_bytes
    assert wire == [2 * (100 + 80) * 4 + 4] * 2
    declared = [(field.name, field.nbytes) for field in GradZip(2).wire(80 * 80)]
    assert declared == [("p", 2 * 80 * 4), ("q", 2 * 80 * 4)]
    assert [(field.name, field.length) for field in GradZip(2).wire(49)] == [("values", 49)]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: GradZip(0), r"GradZip\(rank=0\)"),
        (lambda: GradZip(1.5), "rank=1.5"),  # type: ignore[arg-type]
        (lambda: GradZip(min_ratio=-1), "min_ratio"),
        (lambda: GradZip(dense_steps=-1), "dense_steps"),
        (lambda: GradZip(regulariser=0.0), "regulariser=0.0.*use 1e-8"),
        (lambda: GradZip(regulariser=float("nan")), "regulariser=nan"),
        (lambda: CompressedDDPStrategy(GradZip(), scheme=AllGather()), "takes no scheme"),
        (lambda: CompressedDDPStrategy(GradZip(), scheme=TwoShot()), "takes no scheme"),
    ],
)
def test_refusals(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()
