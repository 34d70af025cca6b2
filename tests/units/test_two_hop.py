"""TwoHop's three roundings are those of a loop in NumPy; nothing is lost, and links carry less."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch

from lightning_gc import QSGD, EFSignSGD, ErrorFeedback, NoMemory, RandomK, SignSGD, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.core.flow import Exchange, Reply, Request
from lightning_gc.schemes import Scheme, TwoHop, TwoShot
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.transports.simulated import Simulated

SIZE, NEAR = 37, 2


def rounded(x: np.ndarray) -> np.ndarray:
    """Return what ``EFSignSGD`` sends."""
    found: np.ndarray = np.abs(x).mean() * np.where(x >= 0, 1.0, -1.0)
    return found


@pytest.mark.parametrize("nodes", [2, 3])
def test_a_loop_in_numpy(nodes: int) -> None:
    workers = NEAR * nodes
    xs = [np.random.default_rng(w).standard_normal(SIZE) for w in range(workers)]
    lockstep = Lockstep(workers, EFSignSGD(), NoMemory(), TwoHop(NEAR))
    result = lockstep.step([{"w": torch.tensor(x).float()} for x in xs])

    size = -(-SIZE // workers)
    padded = [np.pad(x, (0, workers * size - SIZE)) for x in xs]
    mean, errors = np.zeros(workers * size), np.stack(padded)
    for local in range(NEAR):
        part = slice(local * nodes * size, (local + 1) * nodes * size)
        means = []  # of each node
        for node in range(nodes):
            near = range(node * NEAR, (node + 1) * NEAR)
            sent = [rounded(padded[w][part]) for w in near]
            for w, each in zip(near, sent, strict=True):
                errors[w, part] -= each
            means.append(np.mean(sent, 0))
        for node in range(nodes):
            own, shard = node * NEAR + local, slice(node * size, (node + 1) * size)
            sent = [rounded(each[shard]) for each in means]
            final = rounded(np.mean(sent, 0))
            start = part.start + node * size
            mean[start : start + size] = final
            errors[own, start : start + size] += workers * (np.mean(sent, 0) - final)
            for other in range(nodes):
                error = means[other][shard] - sent[other]
                errors[other * NEAR + local, start : start + size] += NEAR * error
    np.testing.assert_allclose(result.mean["w"].numpy(), mean[:SIZE], rtol=1e-4, atol=1e-6)
    for found, error in zip(result.errors, errors, strict=True):
        np.testing.assert_allclose(found["w"].numpy(), error[:SIZE], rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("workers", [4, 6])
@pytest.mark.parametrize("compressor", [TopK(0.1), QSGD(4, 64), RandomK(0.1)], ids=str)
def test_nothing_is_lost(compressor: Compressor, workers: int) -> None:
    lockstep = Lockstep(workers, compressor, ErrorFeedback(), TwoHop(workers // 2))
    assert cases.lost(lockstep, 10) < cases.TOLERANCE[torch.float32]


class Listening(Simulated):
    """Counts the bytes of exchanges from worker 0 to other nodes."""

    abroad = 0

    def fulfil(self, requests: Sequence[Request]) -> list[Reply]:
        first = requests[0]
        if isinstance(first, Exchange):
            for payload in first.payloads[NEAR:]:
                self.abroad += sum(t.numel() * t.element_size() for t in payload)
        return super().fulfil(requests)


def test_a_node_sends_others_an_nth() -> None:
    sent = []
    for scheme in (TwoShot(), TwoHop(NEAR)):
        lockstep = Lockstep(6, QSGD(4, 64), NoMemory(), scheme)
        lockstep.transport = listening = Listening(6)
        lockstep.step([{"w": torch.randn(6 * 64 * 4)} for _ in range(6)])
        sent.append(listening.abroad)
    assert sent[0] == NEAR * sent[1] > 0


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_without_whole_nodes_it_is_two_shot(workers: int) -> None:
    made = cases.gradients(workers, 0)
    schemes: tuple[Scheme, ...] = (TwoShot(), TwoHop(NEAR))
    one, other = (Lockstep(workers, QSGD(4), None, s).step(made).mean for s in schemes)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert TwoHop(NEAR).encodings(workers) == TwoShot().encodings(workers)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="workers_per_node=0"):
        TwoHop(0)
    with pytest.raises(ValueError, match=r"SignSGD.*TwoShot"):
        Lockstep(4, SignSGD(), None, TwoHop(NEAR))
