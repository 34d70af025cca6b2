"""Kernels that factor all matrices of a bucket do what torch's operations do, up to rounding.

They run on a GPU or in Triton's interpreter if there is either, else those of numba for the host.
"""

import math
from importlib.util import find_spec

import pytest
import torch
from torch import Tensor

from lightning_gc import NoMemory, PerParameter, PowerSGD
from lightning_gc.engine import Engine
from lightning_gc.kernels.low_rank import MAX_RANK, Factors, Side, kernels_for
from lightning_gc.memories import Memory
from lightning_gc.testing import Lockstep
from lightning_gc.transports.simulated import Simulated
from tests.support.bucket_kernels import KINDS, gradient, without_kernels
from tests.support.kernel_device import DEVICE, INTERPRETED, here, same, some

pytestmark = [
    pytest.mark.skipif(
        DEVICE == "cpu" and not INTERPRETED and find_spec("numba") is None,
        reason="needs triton with a GPU or its interpreter, or numba",
    ),
    pytest.mark.usefixtures("poisoned", "fused_once"),
    # The interpreter computes with numpy, which warns of what floats do.
    pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning"),
]
SHAPES = [(20, 24), (7,), (0, 5), (9, 3, 5), (), (2, 90), (40, 5), (12, 20), (12, 20)]
"""Square, of three dimensions, wide, tall, and two of one shape; others are sent uncompressed."""
MATRICES = [(20, 24), (9, 70), (2, 90), (40, 5), (1, 1)]
RANKS = some((1, 2, 3, 5), (3,))


def train(
    kind: str, workers: int, rank: int, memory: Memory | None = None, steps: int = 3
) -> list[list[tuple[Tensor, Tensor, Tensor]]]:
    """Return, for each step and worker, the mean, the errors and what was to be sent."""
    compressor = PerParameter(PowerSGD(rank, min_ratio=0.5))
    engines = [Engine(compressor, memory, worker=w, workers=workers) for w in range(workers)]
    named = {f"p{i}": shape for i, shape in enumerate(SHAPES)}
    found = []
    for step in range(steps):
        given = [gradient(kind, SHAPES, worker, step) for worker in range(workers)]
        wanted = [grad + flat(engine) for grad, engine in zip(given, engines, strict=True)]
        grads = list(map(here, given))
        flows = [engine.flow(grad, named) for engine, grad in zip(engines, grads, strict=True)]
        Simulated(workers).run(flows)
        for engine in engines:
            engine.advance()
        left = list(map(flat, engines))
        found.append(list(zip([grad.cpu() for grad in grads], left, wanted, strict=True)))
    return found


def flat(engine: Engine) -> Tensor:
    errors = [error.cpu().reshape(-1) for error in engine.errors().values()]
    return torch.cat(errors) if errors else torch.zeros(sum(map(math.prod, SHAPES)))


@pytest.mark.parametrize("kind", some(KINDS, ("idle", "not finite")))
@pytest.mark.parametrize("case", some([(1, 1), (2, 2), (3, 5)], [(2, 2)]))
def test_as_torch_does(kind: str, case: tuple[int, int]) -> None:
    """Means and errors of three steps; the laws of conservation and of replicas hold exactly."""
    ours = train(kind, *case)
    with without_kernels():
        theirs = train(kind, *case)
    for step, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        means, errors, wanted = zip(*mine, strict=True)
        assert all(same(mean, means[0]) for mean in means)
        scale = 1e-5 * max(float(each.nan_to_num(0, 0, 0).abs().max()) for each in wanted)
        if means[0].isfinite().all():
            total = means[0].double() + torch.stack(errors).double().mean(0)
            sent = torch.stack(wanted).double().mean(0)
            torch.testing.assert_close(total, sent, rtol=1e-4, atol=scale)
        for got, expected in zip(mine, others, strict=True):
            for a, b in zip(got[:2], expected[:2], strict=True):
                assert torch.equal(a.isfinite(), b.isfinite()), step
                known = a.isfinite()
                torch.testing.assert_close(a[known], b[known], rtol=1e-3, atol=200 * scale)


def test_without_a_memory() -> None:
    """The mean is written over the gradient."""
    ours = train("normal", 2, 2, NoMemory(), steps=2)
    with without_kernels():
        theirs = train("normal", 2, 2, NoMemory(), steps=2)
    for mine, others in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine[0][0], others[0][0], rtol=1e-3, atol=1e-3)


def test_an_error_of_an_idle_parameter_rests() -> None:
    """No worker used it: its error keeps its bits, and its columns stay."""
    lockstep = Lockstep(2, PowerSGD(2, min_ratio=0.5))
    draw = torch.Generator().manual_seed(0)
    first, second = (torch.randn(12, 20, generator=draw) for _ in range(2))
    lockstep.step([{"a": here(first), "b": here(second)}] * 2)
    before = [engine.errors()["b"].cpu().clone() for engine in lockstep.engines]
    result = lockstep.step([{"a": here(first), "b": here(torch.zeros(12, 20))}] * 2)
    assert not result.mean["b"].any()
    for engine, error in zip(lockstep.engines, before, strict=True):
        assert same(engine.errors()["b"], error)
        columns = engine.state_dict()["compressor"]["b"]["q"]
        assert columns.isfinite().all()
        assert columns.any()


def columns_of(kind: str, size: int, rank: int) -> Tensor:
    columns = torch.randn(size, rank, generator=torch.Generator().manual_seed(size + rank))
    if kind == "zeros":
        columns.zero_()
    elif kind == "equal":
        columns[:] = columns[:, :1].clone()
    elif kind == "one zero":
        columns[:, rank // 2] = 0
    elif kind == "dependent":
        columns[:, -1] = columns[:, 0] + columns[:, rank // 2]
    elif kind == "units":
        columns = torch.eye(size)[:, :rank].contiguous()
    return columns * {"huge": 1e38, "tiny": 1e-39}.get(kind, 1.0)


@pytest.mark.parametrize("rank", some((1, 2, 5, 8), (2, 5)))
def test_bases_are_orthonormal(rank: int) -> None:
    """And their spans hold the columns; a column without a direction of its own gets a new one."""
    sizes = [5, 9, 90] if rank <= 5 else [8, 90]
    for kind in ("normal", "zeros", "equal", "one zero", "dependent", "units", "huge", "tiny"):
        factors = Factors([0] * len(sizes), [(rank, size) for size in sizes], rank, sizes)
        given = [columns_of(kind, size, rank) for size in sizes]
        kernels = kernels_for(here(torch.ones(1)), rank)
        assert kernels is not None
        bases = kernels.orthonormal(
            here(torch.cat([g.view(-1) for g in given])), factors, Side.RIGHT
        )
        for basis, columns in zip(bases.cpu().split([rank * s for s in sizes]), given, strict=True):
            q = basis.view(rank, -1).double()
            torch.testing.assert_close(
                q @ q.t(), torch.eye(rank, dtype=torch.double), atol=1e-5, rtol=0
            )
            scaled = columns.double() / columns.abs().max().clamp_min(1e-45).double()
            torch.testing.assert_close(q.t() @ (q @ scaled), scaled, atol=1e-5, rtol=0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_what_is_not_finite_is_a_basis_of_nan(bad: float) -> None:
    """Of that matrix only."""
    kernels = kernels_for(here(torch.ones(1)), 2)
    assert kernels is not None
    columns = torch.randn(24, generator=torch.Generator().manual_seed(0))
    columns[3] = bad
    bases = kernels.orthonormal(here(columns), Factors([0, 0], [(6, 9)] * 2, 2, [0, 1]), Side.LEFT)
    assert bases[:12].isnan().all()
    assert bases[12:].isfinite().all()


@pytest.mark.parametrize("rank", RANKS)
def test_sums_of_tiles(rank: int) -> None:
    """Products are those of torch in float64, also where many small tiles share a sum."""
    starts = [sum(n * m for n, m in MATRICES[:i]) for i in range(len(MATRICES))]
    factors = Factors(starts, MATRICES, rank, range(len(MATRICES)), wide=32, tall=16)
    kernels = kernels_for(here(torch.ones(1)), rank)
    assert kernels is not None
    draw = torch.Generator().manual_seed(rank)
    given = torch.randn(factors.numel, generator=draw)
    q = kernels.orthonormal(here(torch.randn(factors.right, generator=draw)), factors, Side.RIGHT)
    buffer, out = here(given), here(torch.zeros(factors.numel))
    (sent,) = kernels.project(buffer, q, factors, None)
    p = kernels.orthonormal(sent, factors, Side.LEFT)
    back = kernels.project_back(buffer, p, factors, None)
    kept = kernels.apply(buffer, out, p, back, q, factors, None)
    flats = [each.cpu().double() for each in (q, sent, p, back, kept, out, buffer)]
    for start, n, m, r, left, right, *_ in factors.places.tolist():
        x = given[start : start + n * m].view(n, m).double()
        basis, rows, again, found = (
            flats[0][right : right + m * r].view(r, m),
            flats[1][left : left + n * r].view(n, r),
            flats[2][left : left + n * r].view(r, n),
            flats[3][right : right + m * r].view(r, m),
        )
        columns = flats[4][right : right + m * r].view(m, r)
        product, rest = (flat[start : start + n * m].view(n, m) for flat in flats[5:])
        for ours, theirs in (
            (rows, x @ basis.t()),
            (found, again @ x),
            (columns, found.t()),
            (product, again.t() @ found),
            (rest, x - again.t() @ found),
        ):
            torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5)


def test_torch_takes_over_for_high_ranks() -> None:
    assert kernels_for(here(torch.ones(1)), MAX_RANK + 1) is None
    assert kernels_for(torch.ones(1, dtype=torch.float64), 1) is None


@pytest.mark.parametrize("rank", some((2, 4), (2,)))
def test_ranks_move_in_one_bucket(rank: int) -> None:
    """Columns are kept, and the missing ones drawn equally on all workers."""
    lockstep = Lockstep(2, PowerSGD(rank, min_ratio=0.5))
    grads = [{n: here(columns_of("normal", 12, 20) * (w + 1)) for n in "ab"} for w in range(2)]
    for level in (rank, 1, 3):
        for engine in lockstep.engines:
            engine.levels.set(level, {"b": 2.0})
        lockstep.step(grads)
        kept = [engine.state_dict()["compressor"] for engine in lockstep.engines]
        for name, columns in (("a", level), ("b", 2)):
            assert kept[0][name]["q"].shape == (20, columns)
            assert same(kept[0][name]["q"], kept[1][name]["q"])
            assert kept[0][name]["q"].untyped_storage().nbytes() == 4 * 20 * columns
