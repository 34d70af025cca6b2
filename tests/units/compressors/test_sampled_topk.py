"""TopK(selection="sampled") matches its formula, and keeps its promises on any tensor."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from lightning_gc import DGC, AllGather, ErrorFeedback, SparseReduce, TopK, TwoShot
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.sparsifiers import topk_selection
from lightning_gc.core.elias_fano import coded_bytes
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases

DRAWS = {
    "normal": lambda rng, n: rng.normal(size=n),
    "laplace": lambda rng, n: rng.laplace(size=n),
    "student t, 3": lambda rng, n: rng.standard_t(3, n),
    "student t, 2": lambda rng, n: rng.standard_t(2, n),
    "uniform": lambda rng, n: rng.uniform(-1, 1, n),
    "lognormal": lambda rng, n: rng.lognormal(0, 2, n),
    "one in fifty": lambda rng, n: rng.normal(size=n) * (rng.random(n) < 0.02),
    "two levels": lambda rng, n: np.where(rng.random(n) < 0.5, 1.0, -2.0),
    "constant": lambda rng, n: np.full(n, 0.3),
    "zeros": lambda rng, n: np.zeros(n),
    "a stretch": lambda rng, n: rng.normal(size=n) * np.where(np.arange(n) < n / 20, 100, 1),
    "subnormal": lambda rng, n: rng.normal(size=n) * 1e-42,
}
SMOOTH = ["normal", "laplace", "student t, 3", "student t, 2", "uniform", "lognormal"]


def draw(kind: str, numel: int, seed: int) -> Tensor:
    drawn = DRAWS[kind](np.random.default_rng(seed), numel)  # type: ignore[no-untyped-call]
    return torch.from_numpy(drawn.astype(np.float32))


def reference(x: Tensor, density: float, step: int) -> NDArray[np.int64]:
    """Return the ascending positions, found slowly."""
    sizes, numel = np.abs(x.numpy()), len(x)
    k = min(numel, max(1, round(density * numel)))
    wanted = min(max(numel // 100, 65536), -(-256 * numel // k))  # elements of the sample
    stride = max(1, numel // wanted)
    stride -= stride % 2 == 0
    rank = max(1, round(k * (numel // stride) / numel))
    threshold = np.sort(sizes[step % stride :: stride])[-rank]
    for _ in range(4):
        if (sizes >= threshold).sum() >= 0.8 * k or not threshold:
            break
        threshold = threshold * np.float32(0.8)
    found = np.flatnonzero((sizes >= threshold) & (sizes > 0))
    if len(found) > k:
        found = np.sort(found[np.argsort(-sizes[found], kind="stable")[:k]])
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", DRAWS)
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("numel", [1, 2, 1000, 50_000, 200_000])
def test_it_is_its_formula(kind: str, density: float, numel: int) -> None:
    for step in (0, 5):
        x = draw(kind, numel, step)
        chosen = TopK(density, selection="sampled").choose(x, cases.bucket_of(x, step=step))
        expected = reference(x, density, step)
        assert len(chosen) == len(expected)
        np.testing.assert_array_equal(x.abs()[chosen].sort()[0], np.sort(x.abs()[expected]))
        if kind in SMOOTH:  # no two alike
            np.testing.assert_array_equal(chosen.numpy(), expected)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMOOTH)
@pytest.mark.parametrize(("density", "numel"), [(0.01, 100_000), (0.001, 500_000), (0.1, 50_000)])
def test_the_density_that_is_asked_for(kind: str, density: float, numel: int) -> None:
    """0.8·k to k elements in every draw, and 0.93·k in the mean of draws."""
    shares = []
    for step in range(20):
        x = draw(kind, numel, step)
        chosen = TopK(density, selection="sampled").choose(x, cases.bucket_of(x, step=step))
        shares.append(len(chosen) / (density * numel))
    assert 0.8 <= min(shares) <= max(shares) <= 1
    assert np.mean(shares) > 0.93


@pytest.mark.parametrize("kind", ["one in fifty", "zeros"])
def test_zeros_are_not_sent(kind: str) -> None:
    x = draw(kind, 20_000, 0)
    codec = TopK(0.1, selection="sampled")
    values, positions = codec.encode(x.clone(), cases.bucket_of(x))
    assert values.numel() == x.count_nonzero()
    assert positions.numel() == coded_bytes(values.numel(), 20_000)
    assert values.all()


def test_a_sample_that_misleads_costs_elements_and_is_mended_at_the_next_step() -> None:
    """All that is large lies in the sample of step 0: r elements are sent, as ``bound`` says."""
    numel, k = 60_000, 6000
    x = draw("normal", numel, 0) * 1e-3
    stride = topk_selection.stride(k, numel)
    assert stride > 2
    x[::stride] += torch.sign(x[::stride]) * 10
    codec = TopK(0.1, selection="sampled")
    sent = [len(codec.choose(x, cases.bucket_of(x, step=step))) for step in (0, 1)]
    assert topk_selection.rank(k, numel) <= sent[0] <= k
    assert sent[1] == k


def test_nan_is_sent() -> None:
    x = draw("normal", 20_000, 0)
    x[77] = float("nan")
    x[78] = float("inf")
    codec = TopK(0.05, selection="sampled")
    buffer = x.clone()
    values, _ = codec.encode(buffer, cases.bucket_of(x))
    assert values.numel() <= 1000
    assert buffer.isfinite().all()
    assert TopK(0.05, selection="sampled").choose(
        torch.full((20_000,), float("nan")), cases.bucket_of(x)
    ).shape == (1000,)


@settings(max_examples=150)
@given(
    kind=st.sampled_from(sorted(DRAWS)),
    numel=st.integers(1, 30_000),
    density=st.floats(1e-4, 1.0),
    step=st.integers(0, 1000),
    value_dtype=st.sampled_from(("float32", "bfloat16")),
)
def test_of_any_tensor(kind: str, numel: int, density: float, step: int, value_dtype: str) -> None:
    """Never more than k, never an element smaller than one that stays, nothing lost, the bound."""
    codec = TopK(density, value_dtype, "sampled")  # type: ignore[arg-type]
    x = draw(kind, numel, step)
    bucket = cases.bucket_of(x, step=step)
    left, out = x.clone(), torch.zeros_like(x)
    payload = codec.encode(left, bucket)
    codec.decode(payload, out, 1.0, bucket)
    torch.testing.assert_close(out + left, x, rtol=1e-6, atol=0)
    k = codec.most(numel)
    sent = payload[0].numel()
    for tensor, field in zip(payload, codec.wire(numel), strict=True):
        assert (field.dtype, field.varies) == (tensor.dtype, "worker")
        assert tensor.numel() <= field.length
    assert min(topk_selection.rank(k, numel), int(x.count_nonzero())) <= sent <= k
    if value_dtype == "float32" and 0 < sent < numel:
        assert x.abs()[out != 0].min() >= left.abs().max()
    lost = float(left.double().square().sum())
    allowed = codec.bound(numel).allowed(float(x.double().square().sum()))
    assert lost <= allowed * (1 + 1e-6) + numel * 1e-80  # what is subnormal in bfloat16


@pytest.mark.parametrize("scheme", [AllGather(), TwoShot(), SparseReduce()], ids=cases.label)
@pytest.mark.parametrize("workers", [1, 3])
def test_nothing_is_lost_where_the_sample_is_a_part(scheme: Scheme, workers: int) -> None:
    lockstep = Lockstep(workers, TopK(0.1, selection="sampled"), ErrorFeedback(), scheme)
    given = applied = torch.zeros(40_000)
    for step in range(8):
        xs = [draw("laplace", 40_000, 10 * step + worker) for worker in range(workers)]
        result = lockstep.step([{"w": x} for x in xs])
        applied = applied + result.mean["w"]
        given = given + torch.stack(xs).mean(0)
    waiting = torch.stack([named["w"] for named in result.errors]).mean(0)
    torch.testing.assert_close(applied + waiting, given, rtol=0, atol=1e-4)


def test_it_learns_as_fast_as_the_exact_one() -> None:
    """Error feedback on a quadratic: the same distance, to a few percent, after 40 steps."""
    target = draw("student t, 3", 10_000, 0)

    def distance(compressor: Compressor) -> float:
        lockstep, w = Lockstep(2, compressor, ErrorFeedback()), torch.zeros_like(target)
        for _ in range(40):
            w = w - 0.1 * lockstep.step([{"w": w - target}] * 2).mean["w"]
        return float((w - target).norm() / target.norm())

    exact = distance(TopK(0.1))
    assert exact < 0.5
    assert distance(TopK(0.1, selection="sampled")) == pytest.approx(exact, rel=0.05)


def test_more_than_k_are_refused() -> None:
    """A transport lets k elements through; so must what decodes, and no more."""
    x = draw("normal", 100, 0)
    bucket = cases.bucket_of(x)
    payload = TopK(0.2).encode(x.clone(), bucket)
    with pytest.raises(ValueError, match=r"shapes \(\(20,\), .* \(at most 10 values, "):
        TopK(0.1, selection="sampled").whole.receive(payload, torch.zeros(100), 1.0, bucket, 0)
    TopK(0.3, selection="sampled").whole.receive(payload, torch.zeros(100), 1.0, bucket, 0)


def test_what_it_says_of_itself() -> None:
    assert TopK(0.1, selection="sampled").ragged
    assert not TopK(0.1).ragged
    assert TopK(0.1, selection="sampled").at(0.2) == TopK(0.2, selection="sampled")
    assert TopK(0.1, selection="sampled").at(0.2).ragged
    with pytest.raises(ValueError, match=r"TopK\(selection='some'\): use 'exact'.*'sampled'"):
        TopK(0.1, selection="some")  # type: ignore[arg-type]


def test_dgc_is_a_name_for_it_and_a_memory() -> None:
    assert DGC(0.05).method == TopK(0.05, selection="sampled")
    assert DGC(0.05, "bfloat16", "exact").method == TopK(0.05, "bfloat16")
    assert DGC(0.05).at(0.2) == DGC(0.2)
    assert repr(DGC()) == "DGC(density=0.001, value_dtype='float32', selection='sampled')"
    assert DGC().traits == replace(TopK().traits, default_memory="momentum_correction")
    with pytest.raises(ValueError, match=r"DGC\(density=2\)"):
        DGC(2)
    with pytest.raises(ValueError, match=r"selection='some'\): use 'exact'"):
        DGC(selection="some")  # type: ignore[arg-type]
