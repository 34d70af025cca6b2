"""Workers over Gloo get the same bits and send the same bytes as the simulator."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_gc import (
    CSER,
    DIANA,
    MEMORIES,
    QSGD,
    SAEF,
    AllGather,
    ErrorFeedback,
    ErrorReset,
    HardThreshold,
    Hierarchical,
    NoMemory,
    TopK,
    TwoHop,
    TwoShot,
)
from lightning_gc.compressors import Collective, Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.core.flow import Exchange, Gather, Mean
from lightning_gc.engine import Engine
from lightning_gc.engine.compatibility import combine
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.transports import Distributed, Recording, distributed
from lightning_gc.transports.base import all_reduce_bytes
from lightning_gc.transports.distributed import broadcast_text, gather_text
from lightning_gc.transports.p2p import PIECE
from tests.support.instances import ALL, ALL_MEMORIES, ONE_EACH, schemes_for
from tests.support.processes import standing

pytestmark = pytest.mark.processes


Combination = tuple[Compressor, Memory, Scheme | None]


def in_all_schemes(pairs: Sequence[tuple[Compressor, Memory]]) -> list[Combination]:
    return [
        (compressor, memory, scheme)
        for compressor, memory in pairs
        for scheme in schemes_for(compressor)
    ]


FEW = in_all_schemes([(compressor, combine(compressor)[1]) for compressor in ONE_EACH])
FEW += [(TopK(0.1), kind.examples()[0], AllGather()) for kind in MEMORIES.values()]
"""Each compressor with the memory that is its own in all schemes, each memory in one."""

MANY = in_all_schemes(
    [(compressor, combine(compressor)[1]) for compressor in ALL]
    + [(TopK(0.1), memory) for memory in ALL_MEMORIES]
)
MANY += [
    (QSGD(4), NoMemory(), TwoHop(2)),
    (QSGD(4), NoMemory(), Hierarchical(2)),
    (QSGD(4), DIANA(), TwoShot()),
    (QSGD(4), DIANA(), AllGather()),
    (TopK(0.1), ErrorFeedback(), Hierarchical(2)),
    (HardThreshold(0.5), ErrorFeedback(), Hierarchical(2)),
    (TopK(0.1, selection="sampled"), ErrorFeedback(), TwoHop(2)),
]
"""Each instance of each; and nodes of two workers, of which there are two with four workers."""


def real(
    worker: int, workers: int, combinations: Sequence[Combination], steps: int
) -> list[list[Any]]:
    """Return, per combination and step: the mean, this worker's error, the bytes it sent."""
    dist.init_process_group("gloo", rank=worker, world_size=workers, timeout=timedelta(seconds=30))
    results = []
    for compressor, memory, scheme in combinations:
        engine = Engine(layerwise(compressor), memory, scheme, worker=worker, workers=workers)
        per_node = 1 if engine.scheme is None else engine.scheme.neighbours(workers)
        transport = Distributed(per_node=per_node)
        rows: list[Any] = []
        for step in range(steps):
            named = cases.gradients(workers, step)[worker]
            flat = torch.cat([grad.reshape(-1) for grad in named.values()])
            before = transport.sent_bytes
            engine.statistics.norms_wanted = True
            flow = engine.flow(flat, {name: tuple(grad.shape) for name, grad in named.items()})
            engine.advance()
            Recording(transport).run(flow, flat.device)
            errors = torch.cat(
                [engine.statistics.leftovers[name].reshape(-1) for name in cases.SHAPES]
            )
            rows.append((flat.numpy(), errors.numpy(), transport.sent_bytes - before))
        results.append(rows)
    dist.destroy_process_group()
    return results


@pytest.mark.parametrize("workers", [pytest.param(2, marks=pytest.mark.nightly), 3])
def test_gloo_equals_the_simulator(workers: int) -> None:
    """Bit for bit where payloads are gathered; to rounding where three or more are all-reduced."""
    assert_equal(workers, FEW, steps=2, timeout=90)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_gloo_equals_the_simulator_for_all(workers: int) -> None:
    assert_equal(workers, MANY, steps=4, timeout=250)


def assert_equal(
    workers: int, combinations: Sequence[Combination], steps: int, timeout: float
) -> None:
    measured = standing.run(real, workers, workers, combinations, steps, timeout=timeout)
    for index, (compressor, memory, scheme) in enumerate(combinations):
        lockstep = Lockstep(workers, compressor, memory, scheme)
        what = f"{compressor} {memory} {scheme}"
        averaged = scheme is None or scheme.averages
        dense = (
            isinstance(memory, (CSER, ErrorReset, SAEF)) or getattr(memory, "average_every", 0) > 0
        )
        exact = workers <= 2 or not (averaged or dense)
        for step in range(steps):
            simulated = lockstep.step(cases.gradients(workers, step))
            expected = torch.cat([mean.reshape(-1) for mean in simulated.mean.values()])
            for worker in range(workers):
                mean, error, nbytes = measured[worker][index][step]
                mean, error = torch.from_numpy(mean), torch.from_numpy(error)
                kept = cases.flat(simulated.errors[worker]).float()
                if exact:
                    assert torch.equal(mean, expected), what
                    assert torch.equal(error, kept), what
                else:
                    # What follows from a mean in a second round multiplies its rounding.
                    near = 1e-5 if isinstance(compressor.method, Collective) else 1e-6
                    torch.testing.assert_close(mean, expected, rtol=1e-5, atol=near, msg=what)
                    torch.testing.assert_close(error, kept, rtol=1e-5, atol=near, msg=what)
                assert nbytes == simulated.wire_bytes[worker], what


def requests(worker: int, workers: int) -> None:
    """Fulfil each kind of request and check the answer from first principles."""
    dist.init_process_group("gloo", rank=worker, world_size=workers, timeout=timedelta(seconds=30))
    transport = Distributed()
    single, double = torch.full((3,), float(worker)), torch.full((2, 2), 2.0 * worker).double()
    means = transport.fulfil(Mean((single, double, torch.tensor(float(worker)))))
    middle = (workers - 1) / 2
    assert torch.allclose(means[0], torch.full((3,), middle))
    assert means[1].dtype == torch.float64
    assert torch.allclose(means[1], torch.full((2, 2), 2 * middle).double())
    assert torch.allclose(means[2], torch.tensor(middle))

    # Large ones travel where they are, at the same time as small ones, which are joined.
    large = [torch.full((1 << 18,), float(worker + i)) for i in range(2)]
    small = [torch.full((i + 1,), 10.0 * worker + i) for i in range(2)]
    before = transport.sent_bytes
    mixed = transport.fulfil(Mean((large[0], small[0], large[1], small[1])))
    for i, mean in enumerate((mixed[0], mixed[2])):
        assert mean.data_ptr() == large[i].data_ptr()
        assert torch.allclose(mean, torch.full((1 << 18,), middle + i))
    for i, mean in enumerate((mixed[1], mixed[3])):
        assert torch.allclose(mean, torch.full((i + 1,), 10 * middle + i))
    numels = (1 << 18, 1 << 18, 1 + 2)
    assert transport.sent_bytes - before == sum(all_reduce_bytes(4 * n, workers) for n in numels)

    odd = torch.arange(3, dtype=torch.uint8) + worker  # 3 bytes before 8-byte values
    fixed = transport.fulfil(Gather((odd, torch.full((2,), worker, dtype=torch.int64))))
    for sender, (small, large) in enumerate(fixed):
        assert small.tolist() == [sender, sender + 1, sender + 2]
        assert large.tolist() == [sender] * 2

    ragged = transport.fulfil(
        Gather((torch.full((worker,), 1.5), torch.ones(2, dtype=torch.int32)), (10, None))
    )
    assert [len(first) for first, _ in ragged] == list(range(workers))
    assert all(second.tolist() == [1, 1] for _, second in ragged)

    # Each at its own length, of several pieces, and none is sent twice to anybody.
    elements = [(PIECE // 4 * 10 if i == workers - 1 else PIECE // 4) - i for i in range(workers)]
    own = torch.arange(elements[worker]) % 251 + worker
    sizes = [-(-numel // 16) * 16 + 16 for numel in elements]  # padding and seal
    before = transport.sent_bytes
    for sender, (values,) in enumerate(transport.fulfil(Gather((own.byte(),), (PIECE * 10,)))):
        assert torch.equal(values, (torch.arange(elements[sender]) % 251 + sender).byte())
    announced = 8 * (workers - 1)
    after = sizes[(worker + 1) % workers]
    assert transport.sent_bytes - before - announced == sum(sizes) - after

    rows = [torch.zeros(i, dtype=torch.uint8) for i in range(workers)]
    transport._broadcast_each(rows, torch.full_like(rows[worker], worker))  # as on a device
    assert [row.tolist() for row in rows] == [[i] * i for i in range(workers)]

    nothing = transport.fulfil(Gather((torch.empty(0),), (10,)))
    assert [len(payload[0]) for payload in nothing] == [0] * workers

    toward = tuple((torch.full((2,), 10.0 * worker + i),) for i in range(workers))
    for sender, (values,) in enumerate(transport.fulfil(Exchange(toward))):
        assert values.tolist() == [10.0 * sender + worker] * 2

    lengths = tuple((torch.full((worker + i,), float(worker)),) for i in range(workers))
    for sender, (values,) in enumerate(transport.fulfil(Exchange(lengths, (10,)))):
        assert values.tolist() == [float(sender)] * (sender + worker)

    with pytest.raises(ValueError, match="announces 3 elements where at most 2 are possible"):
        transport.fulfil(Gather((torch.zeros(3),), (2,)))

    full = torch.OutOfMemoryError("no memory is left")  # of this worker; no peer has failed
    with (
        mock.patch.object(distributed, "_all_gather", side_effect=full),
        pytest.raises(torch.OutOfMemoryError),
    ):
        transport.fulfil(Gather((torch.zeros(3),)))

    cpu = torch.device("cpu")
    texts = gather_text("wörker " * worker, transport, cpu)
    assert texts == ["wörker " * i for i in range(workers)]
    for text in ("nöthing special " * 999, ""):
        assert broadcast_text(text if worker == 0 else f"not of {worker}", cpu) == text
    with (
        mock.patch.object(distributed, "MAX_TEXT", 10),
        pytest.raises(ValueError, match=r"text of 11 bytes, where 0..10 are possible"),
    ):
        broadcast_text("x" * 11 if worker == 0 else None, cpu)
    dist.destroy_process_group()


@pytest.mark.parametrize("workers", [1, 2, 3, 4])
def test_every_kind_of_request(workers: int) -> None:
    standing.run(requests, workers, workers)
