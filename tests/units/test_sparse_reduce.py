"""SparseReduce matches its formula, sends the promised volume, and survives bad tensors."""

import math
from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_gc import (
    COMPRESSORS,
    AllGather,
    ErrorFeedback,
    HardThreshold,
    NoMemory,
    PerParameter,
    RandomK,
    SizeSwitch,
    SparseReduce,
    TopK,
    TwoShot,
)
from lightning_gc.compressors import Compressor
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases

Array = NDArray[np.float32]
Choose = Callable[[Array], NDArray[np.int64]]


def largest(density: float) -> Choose:
    def choose(x: Array) -> NDArray[np.int64]:
        k = min(len(x), max(1, round(density * len(x))))
        return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])

    return choose


def reaching(threshold: float) -> Choose:
    return lambda x: np.flatnonzero(np.abs(x) >= threshold)


def reference(xs: Sequence[Array], choose: Choose) -> tuple[Array, list[Array]]:
    """Return the mean that all get and the errors that workers keep; slow, one loop per law."""
    workers, numel = len(xs), len(xs[0])
    errors = [x.copy() for x in xs]
    sent: list[dict[int, np.float32]] = []
    quantiles, numbers = [], []
    for error in errors:
        chosen = choose(error)
        sent.append({int(i): error[i] for i in chosen})
        error[chosen] = 0
        n = len(chosen)
        marks = range(1, workers)
        quantiles.append([chosen[n * i // workers] if n else numel * i // workers for i in marks])
        numbers.append(n)

    def rounded(total: int) -> int:  # of total / W, halves upwards
        return (2 * int(total) + workers) // (2 * workers)

    unit = max(1, math.ceil(numel / 65536))
    inner = [
        unit * rounded(sum(q // unit for q in column)) for column in zip(*quantiles, strict=True)
    ]
    cuts = [0, *sorted(min(cut, numel) for cut in inner), numel]
    most = math.ceil(1.25 * max(rounded(sum(numbers)), 1) / workers)

    mean = np.zeros(numel, np.float32)
    for owner in range(workers):
        total: dict[int, np.float32] = {}
        arrived = 0
        for worker in range(workers):
            for i, value in sent[worker].items():
                if cuts[owner] <= i < cuts[owner + 1]:
                    part = value * np.float32(1 / workers)
                    total[i] = total.get(i, np.float32(0)) + part
                    arrived += 1
        order = sorted((i for i in total if total[i]), key=lambda i: (-abs(total[i]), i))
        survivors = order[: min(math.ceil(arrived / workers), most)]
        for i in survivors:
            mean[i] = total.pop(i)
    for worker, values in enumerate(sent):
        for i, value in values.items():
            if not mean[i]:
                errors[worker][i] = value
    return mean, errors


def gradients(workers: int, numel: int, kind: str, step: int) -> list[Tensor]:
    g = cases.generator(100 * step + workers)
    xs = [torch.randn(numel, generator=g) for _ in range(workers)]
    for worker, x in enumerate(xs):
        if kind == "one shard":
            x[: numel // 20 + 1] *= 1000
        if kind == "apart":
            start = worker * numel // workers
            x[start : start + numel // 20 + 1] *= 1000
    return xs


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("numel", [1, 2, 3, 7, 500, 70_001])
@pytest.mark.parametrize("kind", ["random", "one shard", "apart"])
@pytest.mark.parametrize(
    ("compressor", "choose"),
    [
        (TopK(0.02), largest(0.02)),
        (TopK(1.0), largest(1.0)),
        (HardThreshold(2.5), reaching(2.5)),
        (HardThreshold(1e9), reaching(1e9)),
    ],
    ids=lambda value: str(value) if isinstance(value, Compressor) else "",
)
def test_it_is_its_formula(
    compressor: Compressor, choose: Choose, workers: int, numel: int, kind: str
) -> None:
    """Three steps with error feedback: the same elements, to the rounding of one product."""
    if numel > 1000 and compressor.level != 0.02:
        return  # slow, and nothing new
    lockstep = Lockstep(workers, compressor, ErrorFeedback(), SparseReduce())
    errors = [np.zeros(numel, np.float32)] * workers
    for step in range(3):
        xs = gradients(workers, numel, kind, step)
        result = lockstep.step([{"w": x} for x in xs])
        mean, errors = reference([e + x.numpy() for e, x in zip(errors, xs, strict=True)], choose)
        got = result.mean["w"].numpy()
        np.testing.assert_array_equal(got != 0, mean != 0)
        np.testing.assert_allclose(got, mean, rtol=1e-6)
        for found, expected in zip(result.errors, errors, strict=True):
            rounding = 1e-6 * np.abs(expected).max()
            np.testing.assert_allclose(found["w"].numpy(), expected, rtol=1e-6, atol=rounding)


@pytest.mark.parametrize("kind", ["random", "one shard"])
@pytest.mark.parametrize("compressor", [TopK(0.01), TopK(0.01, selection="sampled")], ids=str)
def test_volume_is_flat_beside_a_ring(compressor: Compressor, kind: str) -> None:
    """The share of a dense ring's bytes at W = 3, 4 and 8 is that at W = 2, within 10 %.

    A ring's own bytes, and so these, grow by 1.5 and 1.75 from two workers to four and eight.
    """
    shares = []
    for workers in (2, 3, 4, 8):
        lockstep = Lockstep(workers, compressor, NoMemory(), SparseReduce())
        xs = gradients(workers, 400_000, kind, 0)
        sent = max(lockstep.step([{"w": x} for x in xs]).wire_bytes)
        shares.append(sent / (2 * (workers - 1) / workers * 1_600_000))
    assert max(shares) < 1.1 * min(shares)
    assert shares[0] < 1 / 75


@pytest.mark.parametrize("workers", [2, 3, 4, 8])
def test_volume_is_bounded_where_workers_disagree(workers: int) -> None:
    """All that a worker selects lies in another's range: k once, and 1.25·k·(W−1)/W again."""
    numel, k = 400_000, 4000
    xs = [torch.randn(numel, generator=cases.generator(i)) for i in range(workers)]
    for worker, x in enumerate(xs):
        x[slice(20_000) if worker == 0 else slice(-20_000, None)] *= 1000
    lockstep = Lockstep(workers, TopK(0.01), NoMemory(), SparseReduce())
    sent = max(lockstep.step([{"w": x} for x in xs]).wire_bytes)
    entries = k + 1.25 * k * (workers - 1) / workers
    assert sent <= entries * 5.2 + 32 * workers + 16 * workers + 100  # bytes an element, lengths


def test_it_keeps_more_than_two_shot_where_one_shard_holds_what_is_large() -> None:
    xs = gradients(4, 100_000, "one shard", 0)
    exact = torch.stack(xs).mean(0)
    lost = {}
    for scheme in (SparseReduce(), TwoShot(), AllGather()):
        result = Lockstep(4, TopK(0.01), NoMemory(), scheme).step([{"w": x} for x in xs])
        lost[type(scheme)] = float((result.mean["w"] - exact).norm() / exact.norm())
    assert lost[AllGather] < lost[SparseReduce] < 0.8 < 0.9 < lost[TwoShot]


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_one_bad_element_reaches_all_and_stays_nowhere(workers: int, bad: float) -> None:
    lockstep = Lockstep(workers, TopK(0.1), ErrorFeedback(), SparseReduce())
    lockstep.step([{"w": x} for x in gradients(workers, 50, "random", 0)])
    spoilt = gradients(workers, 50, "random", 1)
    spoilt[-1][7] = bad
    assert not lockstep.step([{"w": x} for x in spoilt]).mean["w"].isfinite().all()
    for engine in lockstep.engines:
        assert engine.errors()["w"].isfinite().all()
    after = lockstep.step([{"w": x} for x in gradients(workers, 50, "random", 2)])
    assert after.mean["w"].isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rounded_values_leave_the_rest_in_errors(dtype: str) -> None:
    compressor = TopK(0.05, value_dtype=dtype)  # type: ignore[arg-type]
    lockstep = Lockstep(3, compressor, ErrorFeedback(), SparseReduce())
    assert cases.lost(lockstep, 20) < cases.TOLERANCE[torch.float32]


@pytest.mark.parametrize("fresh", [pytest.param(True, marks=pytest.mark.nightly), False])
def test_ranges_stay_equally_busy(fresh: bool) -> None:
    """Over many steps with error feedback, no owner is sent more than twice what another is."""
    workers, numel = 8, 30_000
    lockstep = Lockstep(workers, TopK(0.01), ErrorFeedback(), SparseReduce())
    busy = np.zeros(workers)
    for step in range(30):
        xs = gradients(workers, numel, "random", step if fresh else 0)
        mean = lockstep.step([{"w": x} for x in xs]).mean["w"]
        if step >= 10:
            busy += [part.count_nonzero() for part in mean.tensor_split(workers)]
    assert busy.max() < 2 * busy.min()


def test_what_it_counts() -> None:
    """Elements once, what was selected once, bytes without those of the second round."""
    lockstep = Lockstep(4, TopK(0.05), ErrorFeedback(), SparseReduce())
    lockstep.step([{"w": x} for x in gradients(4, 1000, "random", 0)])
    for engine in lockstep.engines:
        assert engine.statistics.tally.elements == 1000
        assert engine.statistics.tally.sent == 50
        assert 50 * 4 < engine.statistics.tally.payload_bytes < 50 * 6


@pytest.mark.parametrize(
    ("compressor", "fix"),
    [
        ("qsgd", r"Use TwoShot\(\)"),
        ("cast", r"Use TwoShot\(\)"),
        ("identity", r"Use AllReduce\(\)"),
        (RandomK(0.1), r"Use AllReduce\(\)"),
    ],
)
def test_who_selects_nothing_is_refused(compressor: Compressor | str, fix: str) -> None:
    given = COMPRESSORS[compressor]() if isinstance(compressor, str) else compressor
    with pytest.raises(ValueError, match=r"SparseReduce\(\) splits .* does not select.*" + fix):
        Lockstep(2, given, None, SparseReduce())


def test_wrappers_of_who_selects_are_taken() -> None:
    inner = SizeSwitch(TopK(0.1), min_numel=100)
    for compressor in (inner, PerParameter(inner)):
        lockstep = Lockstep(3, compressor, ErrorFeedback(), SparseReduce())
        assert cases.lost(lockstep, 10) < cases.TOLERANCE[torch.float32]
