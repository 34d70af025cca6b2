"""PowerSGD beside NumPy, and beside torch's own hook in real processes."""

from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import AllGather, CompressedDDPStrategy, NoMemory, PerParameter, PowerSGD, TwoShot
from lightning_gc.engine import Engine
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.transports import Distributed, run
from tests.processes import spread

SHAPES = {"a": (40, 30), "b": (16, 3, 5, 5), "c": (40, 30)}  # two are alike
KINDS = ("normal", "heavy tails", "all negative", "constant", "tiny", "huge")


def gradients(worker: int, step: int) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(100 * step + worker)
    return {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}


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
            engine.set_levels(rank)
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


class Given(nn.Module):
    """Has whatever gradients one gives."""

    def __init__(self) -> None:
        super().__init__()
        zeros = {name: nn.Parameter(torch.zeros(shape)) for name, shape in SHAPES.items()}
        self.parts = nn.ParameterDict(zeros)

    def forward(self, grads: dict[str, Tensor]) -> Tensor:
        return torch.stack([(self.parts[n] * g).sum() for n, g in grads.items()]).sum()


def against_the_hook(worker: int, rank: int) -> float:
    """Return the largest gap to torch's hook over ten steps, relative to the gradient."""
    dist.init_process_group("gloo", rank=worker, world_size=2, timeout=timedelta(seconds=30))
    module = DistributedDataParallel(Given(), bucket_cap_mb=100)
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=rank, start_powerSGD_iter=2, min_compression_rate=1
    )
    module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    compressor = PerParameter(PowerSGD(rank, min_ratio=1.0, dense_steps=2))
    engine = Engine(compressor, worker=worker, workers=2)
    transport, gap = Distributed(), 0.0
    for step in range(12):
        grads = gradients(worker, step)
        module.zero_grad()
        if step == 2:  # its first random Q, in the order in which the hook draws them
            torch.manual_seed(np.random.RandomState(0).randint(1_000_000_000))
            first = {n: torch.randn(torch.Size(s[1:]).numel(), rank) for n, s in order().items()}
            kept = engine.state_dict()
            kept["compressor"] = {name: {"q": q} for name, q in first.items()}
            engine.load_state_dict(kept)
        module(grads).backward()
        flat = torch.cat([grads[name].reshape(-1) for name in SHAPES])
        run(engine.flow(flat, SHAPES), transport)
        engine.advance()
        theirs = torch.cat([module.module.parts[n].grad.reshape(-1) for n in SHAPES])  # type: ignore[union-attr, operator]
        gap = max(gap, float((flat - theirs).norm() / theirs.norm()))
    # The group is not destroyed: a thread of Gloo's may still hold the hook's callbacks, which are
    # Python's, while that call waits for it and holds the interpreter. One run in four hung.
    return gap


def order() -> dict[str, tuple[int, ...]]:
    """Parameters in the order in which the hook draws, which takes those of one shape together.

    In DDP's bucket they lie in reverse after its first step.
    """
    shapes = list(dict.fromkeys(reversed(SHAPES.values())))
    return {n: s for shape in shapes for n, s in reversed(SHAPES.items()) if s == shape}


@pytest.mark.processes
@pytest.mark.parametrize("rank", [1, 2, 4])
def test_torchs_hook(rank: int) -> None:
    """Two dense steps and ten compressed ones, errors included, to 1e-4."""
    assert max(spread(against_the_hook, 2, rank)) < 1e-4
