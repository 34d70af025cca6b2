"""Each worker's shard of the mean: against NumPy, without bias, with true bytes, dense where small.

The transport is simulated; real ranks are held to it in ``tests/processes/test_fsdp_laws.py``.
"""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import (
    COMPRESSORS,
    QSGD,
    ErrorFeedback,
    Identity,
    NoMemory,
    PerParameter,
    PowerSGD,
    SignSGD,
    SizeSwitch,
    TopK,
)
from lightning_gc.compressors import Codec
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.core.bucket import Bucket
from lightning_gc.engine import Engine
from lightning_gc.sharded.unit_scatters import ReduceScatter
from lightning_gc.testing.contracts import cases
from lightning_gc.transports import Simulated
from lightning_gc.transports.base import reduce_scatter_bytes
from tests.support.fsdp import own_shards
from tests.support.instances import ALL

WORKERS = 3
SHAPES = {"wide": (4 * WORKERS, 130), "bias": (2 * WORKERS,), "narrow": (20 * WORKERS, 30)}
SIZES = [math.prod(shape) for shape in SHAPES.values()]


def gradients(dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    draw = torch.Generator().manual_seed(seed)
    return [torch.randn(sum(SIZES), generator=draw).to(dtype) for _ in range(WORKERS)]


def engines(compressor: Any, seed: int = 0) -> list[Engine]:
    settings = by_default(compressor), NoMemory(), ReduceScatter()
    return [Engine(*settings, worker=i, workers=WORKERS, seed=seed) for i in range(WORKERS)]


def scattered(every: list[Engine], grads: list[Tensor]) -> tuple[list[Tensor], int]:
    """Return each worker's own shards, and the bytes that one has sent."""
    network, mine = Simulated(WORKERS), [grad.clone() for grad in grads]
    network.run([engine.flow(g, SHAPES) for engine, g in zip(every, mine, strict=True)])
    shards = [own_shards(grad, SHAPES, me, WORKERS) for me, grad in enumerate(mine)]
    return shards, network.sent_bytes[0]


def expected(grads: list[Tensor]) -> list[Tensor]:
    mean = torch.stack([grad.double() for grad in grads]).mean(0)
    return [own_shards(mean, SHAPES, me, WORKERS) for me in range(WORKERS)]


def test_it_is_the_mean_of_what_was_decoded() -> None:
    """NumPy adds up what each worker's payload for this one stands for."""
    codec, grads = QSGD(4), gradients()
    shards, _ = scattered(engines(PerParameter(codec), seed=5), grads)
    for me, ours in enumerate(shards):
        pieces = []
        for at, (name, numel) in enumerate(zip(SHAPES, SIZES, strict=True)):
            size, decoded = numel // WORKERS, []
            for sender, grad in enumerate(grads):
                part = grad.split(SIZES)[at].view(WORKERS, size)[me].clone()
                bucket = Bucket(
                    part, {f"{name}#{me}": (size,)}, seed=5, worker=sender, workers=WORKERS
                )
                out = torch.zeros(size)
                codec.decode(codec.encode(part.clone(), bucket), out, 1.0, bucket)
                decoded.append(out.double().numpy())
            pieces.append(np.mean(decoded, axis=0))
        np.testing.assert_allclose(ours.numpy(), np.concatenate(pieces), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_the_mean_over_steps_has_no_bias() -> None:
    """4 bits; the mean of 400 steps comes 20 times as close as one, with new noise in each."""
    every, grads, steps = engines(QSGD(4)), gradients(), 400
    total = [torch.zeros(sum(SIZES) // WORKERS, dtype=torch.float64) for _ in range(WORKERS)]
    once = 0.0
    for _ in range(steps):
        shards, _ = scattered(every, grads)
        for so_far, shard in zip(total, shards, strict=True):
            so_far.add_(shard.double())
        for engine in every:
            engine.advance()
        once = once or _gap(shards, expected(grads))
    assert 0.8 < math.sqrt(steps) * _gap([t / steps for t in total], expected(grads)) / once < 1.2


def _gap(ours: list[Tensor], theirs: list[Tensor]) -> float:
    return float(torch.cat([a.double() - b for a, b in zip(ours, theirs, strict=True)]).norm())


def test_random_numbers_follow_from_seed_worker_name_and_step() -> None:
    grads = [gradients()[0]] * WORKERS
    every, again, other = engines(QSGD(2)), engines(QSGD(2)), engines(QSGD(2), seed=1)
    first, _ = scattered(every, grads)
    assert all(map(torch.equal, first, scattered(again, grads)[0]))
    assert not any(map(torch.equal, first, scattered(other, grads)[0]))
    for engine in every:
        engine.advance()
    second, _ = scattered(every, grads)
    assert not any(map(torch.equal, first, second))
    again[0].load_state_dict(every[0].state_dict())
    assert again[0].step == 1
    # Of equal gradients three workers that drew alike would have a mean at one of s levels.
    levels = first[0][: SIZES[0] // WORKERS].unique().numel()
    assert levels > 2 * WORKERS


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_goes_dense_costs_a_reduce_scatter(dtype: torch.dtype) -> None:
    """In its own dtype, exact but for the order of a sum in float32."""
    grads = gradients(dtype)
    dense = [Identity(), PerParameter(Identity()), SizeSwitch(QSGD(8), min_numel=10**9)]
    for compressor in dense:
        every = engines(compressor)
        shards, sent = scattered(every, grads)
        whole = sum(SIZES) * dtype.itemsize
        assert reduce_scatter_bytes(whole, WORKERS) == every[0].dense_bytes(whole)
        # A flag of 4 bytes for each other worker, and padding to 16, where gradients are guarded.
        assert 0 <= sent - reduce_scatter_bytes(whole, WORKERS) <= 16 * (WORKERS - 1)
        for ours, theirs in zip(shards, expected(grads), strict=True):
            torch.testing.assert_close(ours, theirs.to(dtype))


def test_small_tensors_go_dense_beside_the_others() -> None:
    every, grads = engines(QSGD(8)), gradients()
    shards, sent = scattered(every, grads)
    start = SIZES[0] // WORKERS
    bias = slice(start, start + SIZES[1] // WORKERS)
    for ours, theirs in zip(shards, expected(grads), strict=True):
        torch.testing.assert_close(ours[bias], theirs[bias].float())
    payload = sum(
        field.nbytes for numel in (SIZES[0], SIZES[2]) for field in QSGD(8).wire(numel // WORKERS)
    )
    message = payload + 4 * SIZES[1] // WORKERS + 4  # and the flag
    assert sent == (WORKERS - 1) * (message + -message % 8)
    tally = every[0].statistics.tally
    assert (tally.elements, tally.whole) == (SIZES[0] + SIZES[2], SIZES[1])


def test_uncompressed_for_now_is_scattered_too() -> None:
    every, grads = engines(QSGD(4)), gradients()
    for engine in every:
        engine.levels.set(None)
    shards, sent = scattered(every, grads)
    assert sent - reduce_scatter_bytes(4 * sum(SIZES), WORKERS) <= 16 * (WORKERS - 1)
    for ours, theirs in zip(shards, expected(grads), strict=True):
        torch.testing.assert_close(ours, theirs.float())


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_seen_on_every_worker(value: float) -> None:
    """Wherever it was: in each parameter's own shard, so that norms and clipping see it."""
    grads = gradients()
    grads[1][-1] = value
    shards, _ = scattered(engines(QSGD(8)), grads)
    assert not any(bool(shard.isfinite().all()) for shard in shards)


@pytest.mark.slow
def test_every_method_gives_the_mean_of_what_it_took() -> None:
    """Gradients less what is left of them; rounds of a method's own, and votes, are refused."""
    codecs = [c for c in ALL if isinstance(c.method, Codec) and c.traits.conserves]
    used = [c for c in codecs if not c.traits.needs_sums]
    for compressor in used:
        every = engines(compressor)
        for engine in every:
            engine.statistics.norms_wanted = True
        grads = [grad.abs() + 1 for grad in gradients()]
        shards, _ = scattered(every, grads)
        left = [[e.statistics.leftovers[name].reshape(-1) for name in SHAPES] for e in every]
        taken = [grad - torch.cat(errors) for grad, errors in zip(grads, left, strict=True)]
        for ours, theirs in zip(shards, expected(taken), strict=True):
            gap = float((ours - theirs).abs().max())
            assert gap <= 1e-5, f"{cases.label(compressor)}: {gap}"
    assert len(used) >= len(COMPRESSORS)
    for compressor in set(ALL) - set(used):
        with pytest.raises(ValueError, match=r"Use QSGD\(8\), say"):
            engines(compressor)


@pytest.mark.parametrize("compressor", [PowerSGD(2), SignSGD()], ids=repr)
def test_what_has_no_payload_for_one_worker_is_refused(compressor: Any) -> None:
    with pytest.raises(ValueError, match=r"Use QSGD\(8\), say"):
        ReduceScatter().check(compressor)
    ReduceScatter().check(TopK(0.1))
    assert ReduceScatter().encodings(4) == 4


FOUR = {"wide": (8, 130), "narrow": (40, 30)}


def four(memory: Any, near: int = 2) -> list[Engine]:
    settings = PerParameter(QSGD(4)), memory, ReduceScatter(near)
    return [Engine(*settings, worker=i, workers=4) for i in range(4)]


def test_two_hops_lose_nothing() -> None:
    """What either hop rounds away is in the errors: means plus errors are the gradients."""
    every, network = four(ErrorFeedback()), Simulated(4, per_node=2)
    draw, numel = torch.Generator().manual_seed(0), sum(math.prod(s) for s in FOUR.values())
    given, applied = torch.zeros(numel, dtype=torch.float64), torch.zeros_like(torch.zeros(numel))
    for _ in range(3):
        grads = [torch.randn(numel, generator=draw) for _ in every]
        given += torch.stack(grads).double().mean(0)
        network.run([engine.flow(g, FOUR) for engine, g in zip(every, grads, strict=True)])
        for me, grad in enumerate(grads):
            for _, start, stop in Bucket(grad, FOUR).spans():
                size = (stop - start) // 4
                mine = slice(start + me * size, start + (me + 1) * size)
                applied[mine] += grad[mine]
        for engine in every:
            engine.advance()
    errors = [torch.cat([e.errors()[name].reshape(-1) for name in FOUR]) for e in every]
    kept = torch.stack(errors).double().mean(0)
    assert float(kept.abs().max()) > 0.01
    torch.testing.assert_close(applied.double() + kept, given, rtol=0, atol=1e-6)


def test_two_hops_send_half_between_nodes() -> None:
    """Of two workers each; the rest stays within them. Lengths are 8 bytes a tensor."""
    sent = {}
    for near in (1, 2):
        network = Simulated(4, per_node=near)
        network.run([engine.flow(torch.ones(2240), FOUR) for engine in four(NoMemory(), near)])
        sent[near] = (network.sent_bytes[0], network.node_bytes[0])
    between = sum(field.nbytes for n in (260, 300) for field in QSGD(4).wire(n))
    assert sent[1][0] >= 3 * between
    lengths = 3 * 8 * 5 * 2 + 3 * 8 * 8  # in either hop, for each other worker
    assert between <= sent[2][0] <= between + 2 * lengths
    assert 2 * between <= sent[2][1] <= 2 * between + lengths


@pytest.mark.parametrize("near", [1, 3, 4])
def test_without_nodes_there_is_one_hop(near: int) -> None:
    assert ReduceScatter(near).neighbours(4) == 1
    assert ReduceScatter(2).encodings(4) == 4 + 2
    with pytest.raises(ValueError, match="1 or more"):
        ReduceScatter(0)
