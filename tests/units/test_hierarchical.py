"""Hierarchical: the result and errors of a loop in NumPy; nothing lost; bytes by leg."""

import numpy as np
import pytest
import torch

from lightning_gc import QSGD, EFSignSGD, ErrorFeedback, Identity, NoMemory, RandomK, SignSGD, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.schemes import AllGather, Hierarchical, Scheme
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases

SIZE, NEAR = 37, 2


def rounded(x: np.ndarray) -> np.ndarray:
    """Return what ``EFSignSGD`` sends."""
    found: np.ndarray = np.abs(x).mean() * np.where(x >= 0, 1.0, -1.0)
    return found


def made(workers: int, size: int = SIZE) -> list[np.ndarray]:
    return [np.random.default_rng(w).standard_normal(size) for w in range(workers)]


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_loop_in_numpy(nodes: int) -> None:
    workers, xs = NEAR * nodes, made(NEAR * nodes)
    lockstep = Lockstep(workers, EFSignSGD(), NoMemory(), Hierarchical(NEAR))
    result = lockstep.step([{"w": torch.tensor(x).float()} for x in xs])

    size = -(-SIZE // NEAR)
    padded = [np.pad(x, (0, NEAR * size - SIZE)) for x in xs]
    mean, errors = np.zeros(NEAR * size), np.zeros((workers, NEAR * size))
    for node in range(nodes):
        of_node = np.mean(padded[node * NEAR : (node + 1) * NEAR], 0)
        for local in range(NEAR):
            part = slice(local * size, (local + 1) * size)
            sent = rounded(of_node[part])
            mean[part] += sent / nodes
            errors[node * NEAR + local, part] = NEAR * (of_node[part] - sent)
    np.testing.assert_allclose(result.mean["w"].numpy(), mean[:SIZE], rtol=1e-4, atol=1e-6)
    for found, error in zip(result.errors, errors, strict=True):
        np.testing.assert_allclose(found["w"].numpy(), error[:SIZE], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 6])
@pytest.mark.parametrize("compressor", [TopK(0.1), QSGD(4, 64), RandomK(0.1)], ids=str)
def test_nothing_is_lost(compressor: Compressor, workers: int) -> None:
    for near in (2, workers // 2):
        lockstep = Lockstep(workers, compressor, ErrorFeedback(), Hierarchical(near))
        assert cases.lost(lockstep, 10) < cases.TOLERANCE[torch.float32]


@pytest.mark.parametrize("near", [2, 3, 6])
def test_uncompressed_it_is_the_mean(near: int) -> None:
    xs = made(6)
    result = Lockstep(6, Identity(), NoMemory(), Hierarchical(near)).step(
        [{"w": torch.tensor(x).float()} for x in xs]
    )
    np.testing.assert_allclose(result.mean["w"].numpy(), np.mean(xs, 0), rtol=1e-5, atol=1e-6)


def test_in_one_node_nothing_is_encoded() -> None:
    xs = made(3)
    lockstep = Lockstep(3, TopK(0.01), ErrorFeedback(), Hierarchical(3))
    result = lockstep.step([{"w": torch.tensor(x).float()} for x in xs])
    np.testing.assert_allclose(result.mean["w"].numpy(), np.mean(xs, 0), rtol=1e-5, atol=1e-6)
    assert not any(error["w"].any() for error in result.errors)


def test_bytes_by_leg() -> None:
    """Between nodes those of two workers, shared out; within them twice the other parts."""
    size = 4 * 64 * 8
    gradients = [{"w": torch.randn(size)} for _ in range(4)]
    two = Lockstep(2, QSGD(4, 64), NoMemory(), AllGather())
    payload = two.step(gradients[:2]).wire_bytes[0]
    four = Lockstep(4, QSGD(4, 64), NoMemory(), Hierarchical(2))
    between = four.step(gradients).wire_bytes
    # At most three tensors of a payload, three others, three rounds; each message ends in a seal.
    lengths = 3 * 3 * (8 * 3 + 16)
    assert all(payload / 2 <= sent <= payload / 2 + lengths for sent in between)
    (within,) = set(four.transport.node_bytes)
    assert 2 * 4 * size / 2 <= within <= 2 * 4 * size / 2 + 64


@pytest.mark.parametrize("workers", [1, 3, 5])
def test_without_whole_nodes_it_is_all_gather(workers: int) -> None:
    gradients = cases.gradients(workers, 0)
    schemes: tuple[Scheme, ...] = (AllGather(), Hierarchical(NEAR))
    one, other = (Lockstep(workers, QSGD(4), None, s).step(gradients).mean for s in schemes)
    assert all(torch.equal(one[name], other[name]) for name in one)


def test_nodes_that_are_no_machines_are_named() -> None:
    scheme, two = Hierarchical(NEAR), ["left"] * NEAR + ["right"] * NEAR
    assert scheme.misplaced(two) is None
    assert scheme.misplaced(["left"] * 4 * NEAR) is None  # a machine may hold several nodes
    assert scheme.misplaced(["left"]) is None  # who exchanges with nobody
    spans = scheme.misplaced(["left", *two[:-1]]) or ""
    assert "workers 2 to 3 are a node, but run on left and right" in spans
    flat = scheme.misplaced(["left"] * (NEAR + 1)) or ""
    assert "3 workers are not nodes of 2" in flat


def test_refusals() -> None:
    with pytest.raises(ValueError, match="workers_per_node=0"):
        Hierarchical(0)
    with pytest.raises(ValueError, match=r"SignSGD.*TwoShot"):
        Lockstep(4, SignSGD(), None, Hierarchical(NEAR))
