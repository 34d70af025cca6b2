"""Real ranks' reduce-scatters are those of simulated workers, bit for bit, and their means NumPy's.

The net has rows that W does not divide, a parameter of one element (empty on all ranks but the
first), frozen ones, and a layer that takes no part in every second step.
"""

import io
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import QSGD, ErrorFeedback, Identity, NarrowResidual, PerParameter, TopK
from lightning_gc.sharded.unit_scatters import ReduceScatter
from lightning_gc.transports.base import reduce_scatter_bytes
from tests.support.fsdp import Scattered, Way, by_torch, own_shards, scatter, simulated
from tests.support.instances import ALL
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
Found = dict[str, Any]
"""Method -> rank -> step -> what was exchanged; "by torch": torch's own gradients."""

METHODS: dict[str, Way] = {
    "identity": Way(Identity()),
    "qsgd": Way(QSGD(8)),
    "qsgd of all": Way(PerParameter(QSGD(4))),
    "topk, errors dropped": Way(PerParameter(TopK(0.05))),
    "errors": Way(PerParameter(QSGD(4)), ErrorFeedback()),
    "errors in 8 bits": Way(PerParameter(QSGD(4)), NarrowResidual("int8")),
    "two hops": Way(
        PerParameter(QSGD(4)), ErrorFeedback(), ReduceScatter(2)
    ),  # one hop of two ranks
}


def scatter_all(rank: int, ranks: int, methods: list[Way]) -> bytes:
    """Return what was exchanged, by method and step, as a file: tensors would be shared.

    The last entry has torch's own gradients.
    """
    file = io.BytesIO()
    torch.save([*(scatter(rank, ranks, method) for method in methods), by_torch(rank, ranks)], file)
    return file.getvalue()


def scattered(ranks: int, methods: list[Way], timeout: float = 90) -> list[Any]:
    """Return what was exchanged, by method, rank and step; at last torch's own gradients."""
    files = run_in_processes(scatter_all, ranks, ranks, methods, timeout=timeout)
    by_rank = [torch.load(io.BytesIO(file), weights_only=False) for file in files]
    return [list(of_ranks) for of_ranks in zip(*by_rank, strict=True)]


@pytest.fixture(scope="module", params=[2, 4], ids="{} ranks".format)
def found(request: pytest.FixtureRequest) -> Found:
    every = scattered(request.param, list(METHODS.values()))
    return dict(zip([*METHODS, "by torch"], every, strict=True))


@pytest.mark.parametrize("name", METHODS)
def test_real_ranks_are_simulated_workers(found: Found, name: str) -> None:
    check_against_simulation(found[name], METHODS[name])


def check_against_simulation(ranks: list[list[Scattered]], way: Way) -> None:
    for ours, theirs in zip(ranks, simulated(ranks, way), strict=True):
        for real, expected in zip(ours, theirs, strict=True):
            assert real.sent == expected.sent
            for mean, one in zip(real.means, expected.means, strict=True):
                # Without compression, sums have the order of the backend's own reduce-scatter.
                gap = 1e-6 if way.compressor.traits.plain and len(ranks) > 2 else 0
                torch.testing.assert_close(mean, one, rtol=0, atol=gap)
            assert real.errors.keys() == expected.errors.keys()
            assert all(torch.equal(real.errors[n], e) for n, e in expected.errors.items())


@pytest.mark.parametrize("name", ["errors", "two hops"])
def test_nothing_is_lost(found: Found, name: str) -> None:
    """Applied means plus mean errors are the sum of mean gradients; padding has no errors."""
    ranks = found[name]
    count, totals = len(ranks), dict[str, Tensor]()  # gradients less means
    for steps in zip(*ranks, strict=True):
        for at, shapes in enumerate(steps[0].shapes):
            sizes = [torch.Size(shape).numel() for shape in shapes.values()]
            shards = [size // count for size in sizes]
            grads = torch.stack([step.grads[at].double() for step in steps]).mean(0).split(sizes)
            means = zip(*(step.means[at].split(shards) for step in steps), strict=True)
            for n, grad, mean in zip(shapes, grads, means, strict=True):
                totals[n] = totals.get(n, 0) + grad - torch.cat(mean).double()
    for n, total in totals.items():
        errors = torch.stack([steps[-1].errors[n].double() for steps in ranks]).mean(0)
        real = total.numel() - ranks[0][0].padding.get(n, 0)
        torch.testing.assert_close(errors[:real], total[:real], rtol=0, atol=1e-6)
        assert not errors[real:].any()
    assert any(ranks[0][0].padding.values())


def test_uncompressed_it_is_the_mean_at_a_reduce_scatters_bytes(found: Found) -> None:
    ranks = found["identity"]
    exact = 0
    for index, first in enumerate(ranks[0]):
        for at, shapes in enumerate(first.shapes):
            grads = [steps[index].grads[at].double().numpy() for steps in ranks]
            mean = torch.from_numpy(np.mean(grads, axis=0))
            exact += reduce_scatter_bytes(4 * mean.numel(), len(ranks))
            for me, steps in enumerate(ranks):
                expected = own_shards(mean, shapes, me, len(ranks))
                np.testing.assert_allclose(steps[index].means[at], expected, rtol=0, atol=1e-6)
        assert first.sent == exact


def test_uncompressed_it_has_fsdp2s_bits(found: Found) -> None:
    """Gloo adds in another order than that of ranks, and so do both."""
    for steps, theirs in zip(found["identity"], found["by torch"], strict=True):
        for step, wanted in zip(steps, theirs, strict=True):
            ours = dict[str, Tensor]()
            for shapes, means in zip(step.shapes, step.means, strict=True):
                sizes = [math.prod(shape) // len(found["identity"]) for shape in shapes.values()]
                ours |= dict(zip(shapes, means.split(sizes), strict=True))
            assert all(torch.equal(ours[n][: grad.numel()], grad) for n, grad in wanted.items())


def test_units_take_part_where_they_are_used(found: Found) -> None:
    """Once used, in every pass, as zeros where they are not; in one order on all ranks."""
    for steps in found["qsgd"]:
        layouts = [[tuple(shapes) for shapes in step.shapes] for step in steps]
        head, aside = ("last.weight", "last.bias"), ("aside.weight", "aside.bias")
        rest = [("second.weight",), ("first.weight", "first.bias"), ("gain",)]
        for index, layout in enumerate(layouts):
            unused = [aside] if index else []  # the layer's first pass is the second
            assert sorted(layout) == sorted([head, *unused, *rest])
            assert layout == [tuple(shapes) for shapes in found["qsgd"][0][index].shapes]


def test_eight_bits_send_a_quarter(found: Found) -> None:
    """Of what is compressed: 8 bits for 32, and what goes dense."""
    dense, ours = (found[name][0][-1].sent for name in ("identity", "qsgd of all"))
    assert ours < 0.25 * dense


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_every_method_is_as_simulated() -> None:
    methods = list[Way]()
    for method in ALL:
        try:
            ReduceScatter().check(method)
        except ValueError:
            continue  # it has no payload for one rank
        methods.append(Way(method))
    for way, ranks in zip(methods, scattered(2, methods, timeout=800)[:-1], strict=True):
        check_against_simulation(ranks, way)
