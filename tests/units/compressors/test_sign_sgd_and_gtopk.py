"""SignSGD's majority vote and gTop-k's merge tree match slow references."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import AllGather, GTopK, SignSGD, Signum, TwoShot
from lightning_gc.compressors.sparsifiers.gtopk import merged
from lightning_gc.core.flow import Exchange
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.codecs import KINDS, each_kind


def drawn(workers: int, numel: int, seed: int = 0) -> list[np.ndarray]:
    draw = np.random.default_rng(seed)
    return [draw.standard_t(2, numel).astype(np.float32) for _ in range(workers)]


def step(lockstep: Lockstep, gradients: list[np.ndarray]) -> Any:
    return lockstep.step([{"w": torch.from_numpy(g.copy())} for g in gradients])


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 8])
@pytest.mark.parametrize("scheme", [AllGather(), TwoShot()])
def test_the_majority_decides(workers: int, scheme: Any) -> None:
    """Every element on which workers are not evenly divided."""
    gradients = drawn(workers, 500)
    got = step(Lockstep(workers, SignSGD(), None, scheme), gradients).mean["w"].numpy()
    votes = np.sign(gradients).sum(0)
    np.testing.assert_array_equal(got[votes != 0], np.sign(votes[votes != 0]))
    divided = got[votes == 0]
    if workers % 2:
        assert not len(divided)
    elif isinstance(scheme, AllGather):
        assert not divided.any()
    else:
        assert set(divided) == {-1.0, 1.0}
        share = (divided > 0).mean()
        assert abs(share - 0.5) < 4 * 0.5 / math.sqrt(len(divided))


@each_kind
def test_a_vote_of_one(kind: str) -> None:
    x = KINDS[kind].numpy()
    got = step(Lockstep(1, SignSGD()), [x]).mean["w"].numpy()
    np.testing.assert_array_equal(got[x != 0], np.sign(x[x != 0]))
    assert set(np.abs(got)) == ({1.0} if x.any() else {0.0})


@pytest.mark.parametrize("workers", [4, 6, 12])
def test_a_tie_in_two_shots_is_a_coin(workers: int) -> None:
    """Also where halves of W do not add up to zero exactly: 1/W is rounded."""
    numel, steps, source = 600, 12, np.random.default_rng(0)
    lockstep = Lockstep(workers, SignSGD(), None, TwoShot())
    both = np.repeat([[1.0], [-1.0]], workers // 2, axis=0).repeat(numel, axis=1)
    votes, total = source.permuted(both, axis=0), np.zeros(numel)
    for _ in range(steps):
        result = lockstep.step([{"w": torch.tensor(vote).float()} for vote in votes])
        total += result.mean["w"].numpy()
    assert (np.abs(total) == steps).mean() < 0.02  # 2/2¹² of coins


def test_a_tensor_of_zeros_does_not_vote() -> None:
    gradients = [*drawn(1, 100), np.zeros(100, np.float32), np.zeros(100, np.float32)]
    got = step(Lockstep(3, SignSGD(), None, AllGather()), gradients).mean["w"].numpy()
    np.testing.assert_array_equal(got, np.sign(gradients[0]))


def test_a_bit_an_element() -> None:
    result = step(Lockstep(2, SignSGD(), None, AllGather()), drawn(2, 8000))
    assert result.wire_bytes == [8000 / 8 + 4 + 4] * 2  # votes, and the guard's flag


def test_signum_votes_with_averages() -> None:
    lockstep, averages = Lockstep(3, Signum(), None, AllGather()), [np.zeros(50)] * 3
    for number in range(6):
        gradients = drawn(3, 50, number)
        averages = [0.9 * m + 0.1 * g for m, g in zip(averages, gradients, strict=True)]
        got = step(lockstep, gradients).mean["w"].numpy()
        np.testing.assert_array_equal(got, np.sign(np.sign(averages).sum(0)))


def tree(gradients: list[np.ndarray], k: int) -> tuple[dict[int, float], list[np.ndarray]]:
    """Return what is applied, and the errors: by dictionaries, each node after the other."""
    selections, errors = [], []
    for x in gradients:
        best = sorted(range(len(x)), key=lambda i: -abs(x[i]))[:k]
        selections.append({i: float(x[i]) for i in best})
        errors.append(np.array([0 if i in best else v for i, v in enumerate(x)], float))
    nodes = {worker: dict(chosen) for worker, chosen in enumerate(selections)}
    lost = []
    span = 1
    while span < len(gradients):
        for receiver in range(0, len(gradients) - span, 2 * span):
            both = nodes[receiver]
            for i, value in nodes.pop(receiver + span).items():
                both[i] = both.get(i, 0) + value
            best = sorted(both, key=lambda i: -abs(both[i]))[:k]
            lost += [(receiver, i, both[i]) for i in both if i not in best]
            nodes[receiver] = {i: both[i] for i in best}
        span *= 2
    applied = nodes[0]
    for worker, chosen in enumerate(selections):
        for i, value in chosen.items():
            if i not in applied:
                errors[worker][i] += value
    for worker, i, value in lost:
        if i in applied:
            errors[worker][i] += value
    return applied, errors


@pytest.mark.parametrize("workers", [1, 2, 3, 4, 5, 6, 7, 8, 13])
@pytest.mark.parametrize("kind", ["normal", "heavy tails", "alike"])
def test_gtopk_is_the_tree(workers: int, kind: str) -> None:
    gradients = drawn(workers, 120, workers)
    if kind == "normal":
        gradients = [np.sign(g) * np.abs(g) ** 0.5 for g in gradients]
    if kind == "alike":  # selections overlap, so that parts of a sum are lost on the way
        gradients = [gradients[0] * (1 + 0.3 * g / np.abs(g).max()) for g in gradients]
        gradients = [g.astype(np.float32) for g in gradients]
    lockstep = Lockstep(workers, GTopK(0.1))
    result = step(lockstep, gradients)
    applied, errors = tree(gradients, 12)
    expected = np.zeros(120)
    for i, value in applied.items():
        expected[i] = value / workers
    np.testing.assert_allclose(result.mean["w"].numpy(), expected, rtol=1e-5)
    for worker in range(workers):
        got = result.errors[worker]["w"].numpy()
        np.testing.assert_allclose(got, errors[worker], rtol=1e-4, atol=1e-6)


def test_gtopk_books_what_is_lost_on_the_way() -> None:
    """Element 0 loses worker 3's part at the merge of 2 and 3, and is applied all the same."""
    gradients = [np.array(row, np.float32) for row in ([9, 0, 0], [0, 1, 0], [0, 0, 8], [2, 0, 0])]
    result = step(Lockstep(4, GTopK(0.3)), gradients)
    assert result.mean["w"].tolist() == [9 / 4, 0, 0]
    assert result.errors[2]["w"].tolist() == [2, 0, 8]  # of the merge, and its own
    assert result.errors[3]["w"].tolist() == [0, 0, 0]


@each_kind
def test_gtopk_of_one_worker_is_topk(kind: str) -> None:
    x = KINDS[kind].numpy()
    result = step(Lockstep(1, GTopK(0.1)), [x])
    sent, left = result.mean["w"].numpy(), result.errors[0]["w"].numpy()
    np.testing.assert_array_equal(sent + left, x)
    assert np.count_nonzero(sent) <= 30
    assert np.abs(left).max() <= np.sort(np.abs(x))[-30]


@pytest.mark.parametrize("workers", [2, 5, 8])
def test_gtopk_sends_a_logarithm_of_payloads(workers: int) -> None:
    """Worker 0 one down to each of its children, the last worker one up."""
    numel, k = 4096, 41
    result = step(Lockstep(workers, GTopK(0.01)), drawn(workers, numel))
    levels = math.ceil(math.log2(workers))
    lengths = 2 * levels * (workers - 1) * 32 + (workers - 1) * 16  # and digest and flag
    payload = (
        4 * k
        + math.ceil(k * int(math.log2(numel / k)) / 8)
        + math.ceil((k + (numel - 1) // 2 ** int(math.log2(numel / k)) + 1) / 8)
    )
    more = math.ceil((payload + 8) / 16) * 16 - 16  # with its seal, than an empty payload
    assert result.wire_bytes[0] == lengths + levels * more
    assert result.wire_bytes[-1] == lengths + more


def test_a_liar_in_the_tree_is_named() -> None:
    x = torch.ones(20)
    flow = GTopK(0.1).rounds(cases.bucket_of(x, workers=2), x.clone(), x.clone())
    request = next(flow)
    assert isinstance(request, Exchange)
    wrong = (torch.ones(2), torch.full((2,), 255, dtype=torch.uint8))
    with pytest.raises(ValueError, match="what worker 1 sent for w"):
        flow.send([(torch.empty(0), torch.empty(0, dtype=torch.uint8)), wrong])


def test_merging_does_not_depend_on_the_order() -> None:
    one = (torch.tensor([1, 4, 7]), torch.tensor([1.0, -2.0, 3.0]))
    other = (torch.tensor([0, 4]), torch.tensor([5.0, 1.5]))
    (kept, values), (dropped, lost) = merged(one, other, 2)
    assert kept.tolist() == [0, 7]
    assert values.tolist() == [5.0, 3.0]
    assert dropped.tolist() == [1, 4, 4]  # once more what both have
    assert lost.tolist() == [1.0, -0.5, 0.0]


@pytest.mark.parametrize("density", [0.0, 1.5, -1.0])
def test_gtopk_refuses(density: float) -> None:
    with pytest.raises(ValueError, match="density"):
        GTopK(density)
