"""One payload for a bucket's parameters: the means and errors of one payload for each."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from lightning_gc import (
    AllGather,
    ErrorFeedback,
    HardThreshold,
    NoMemory,
    PerParameter,
    SizeSwitch,
    TopK,
    TwoShot,
)
from lightning_gc.compressors import Compressor, SIDCo, VarianceCriterion
from lightning_gc.compressors.joint import Joint
from lightning_gc.core import elias_fano
from lightning_gc.core.flow import Exchange, Gather, Mean, resume
from lightning_gc.engine import Engine
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports import Simulated

SHAPES = {
    "first": (40, 30),
    "bias": (30,),
    "empty": (0, 5),
    "second": (64, 20),
    "norm": (64,),
    "third": (33, 34),
}
NUMEL = sum(torch.Size(shape).numel() for shape in SHAPES.values())


@dataclass(frozen=True)
class GatheredApart(AllGather):
    """Encodes parameter by parameter."""

    def joint(self, workers: int) -> Joint:
        return "no"


@dataclass(frozen=True)
class CutApart(TwoShot):
    """Encodes parameter by parameter."""

    def joint(self, workers: int) -> Joint:
        return "no"


APART = {AllGather(): GatheredApart(), TwoShot(): CutApart()}


def train(
    compressor: Compressor, memory: Memory, scheme: Scheme, steps: int = 4, workers: int = 3
) -> list[Tensor]:
    """Return the means and errors of all workers, of gradients that differ in scale."""
    engines = [
        Engine(compressor, memory, scheme, worker=worker, workers=workers, seed=7)
        for worker in range(workers)
    ]
    draw, found = torch.Generator().manual_seed(0), list[Tensor]()
    sizes = [torch.Size(shape).numel() for shape in SHAPES.values()]
    scales = torch.repeat_interleave(torch.logspace(-3, 3, len(sizes)), torch.tensor(sizes))
    for _ in range(steps):
        grads = [torch.randn(NUMEL, generator=draw) * scales for _ in engines]
        Simulated(workers).run([e.flow(g, SHAPES) for e, g in zip(engines, grads, strict=True)])
        for engine, grad in zip(engines, grads, strict=True):
            engine.advance()
            found += [grad, *(error.flatten() for error in engine.errors().values())]
    tallies = [replace(engine.statistics.tally, payload_bytes=0) for engine in engines]
    return [*found, torch.tensor([t.elements for t in tallies] + [t.sent for t in tallies])]


SCHEMES = pytest.mark.parametrize("scheme", APART, ids=repr)


@pytest.mark.slow
@SCHEMES
@pytest.mark.parametrize("memory", [ErrorFeedback(), NoMemory()], ids=repr)
@pytest.mark.parametrize(
    "compressor",
    [
        PerParameter(TopK(0.05)),
        PerParameter(SizeSwitch(TopK(0.05))),
        PerParameter(SizeSwitch(TopK(0.05, "bfloat16", "sampled"))),
        PerParameter(SizeSwitch(SIDCo(0.05))),
        PerParameter(HardThreshold(0.5)),
        PerParameter(TopK(0.05), levels=(("second", 0.3), ("third", None))),
        PerParameter(TopK(0.05), levels=(("second", 0.3),), others_dense=True),
        PerParameter(SizeSwitch(TopK(0.05)), levels=(("bias", 0.5), ("first", 1.0))),
    ],
    ids=repr,
)
def test_results_are_those_of_parameters_by_themselves(
    compressor: Compressor, memory: Memory, scheme: Scheme
) -> None:
    ours, slow = (train(compressor, memory, each) for each in (scheme, APART[scheme]))
    assert len(ours) == len(slow)
    assert all(torch.equal(a, b) for a, b in zip(ours, slow, strict=True))


def test_state_of_parameters_by_themselves() -> None:
    compressor = PerParameter(VarianceCriterion())
    ours, slow = (
        train(compressor, ErrorFeedback(), each) for each in (AllGather(), GatheredApart())
    )
    assert all(torch.equal(a, b) for a, b in zip(ours, slow, strict=True))


@pytest.mark.parametrize("workers", [1, 2, 4, pytest.param(70, marks=pytest.mark.nightly)])
def test_shards_of_all_parameters_are_those_of_each_by_itself(workers: int) -> None:
    """With 70 workers shards of ``norm`` have one element, and the last ones are padding alone.

    Padding that was chosen is counted as sent then, up to as many elements as there are.
    """
    pair, compressor = (TwoShot(), CutApart()), PerParameter(TopK(0.05))
    ours, slow = (train(compressor, ErrorFeedback(), each, 2, workers) for each in pair)
    assert all(torch.equal(a, b) for a, b in zip(ours[:-1], slow[:-1], strict=True))
    assert workers == 70 or torch.equal(ours[-1], slow[-1])


def test_a_bucket_cut_into_shards_has_one_payload_for_each_worker() -> None:
    engine = Engine(PerParameter(SizeSwitch(TopK(0.05))), scheme=TwoShot(), workers=3)
    flow = engine.flow(torch.randn(NUMEL), SHAPES)
    mean = next(flow)
    assert isinstance(mean, Mean)
    exchange = resume(flow, list(mean.tensors))
    assert isinstance(exchange, Exchange)
    numels = [-(-n // 3) for n in (40 * 30, 64 * 20, 33 * 34)]
    for values, positions in exchange.payloads:
        assert values.numel() == sum(round(0.05 * n) for n in numels)
        assert positions.dtype == torch.uint8


def test_a_bucket_has_one_payload_and_one_dense_tensor() -> None:
    engine = Engine(PerParameter(SizeSwitch(TopK(0.05))), scheme=AllGather(), workers=3)
    flow = engine.flow(torch.randn(NUMEL), SHAPES)
    mean = next(flow)
    assert isinstance(mean, Mean)
    assert [tensor.numel() for tensor in mean.tensors] == [30 + 64, 1]  # and the guard's flag
    gather = resume(flow, list(mean.tensors))
    assert isinstance(gather, Gather)
    values, positions = gather.tensors
    assert values.numel() == sum(round(0.05 * n) for n in (40 * 30, 64 * 20, 33 * 34))
    assert positions.dtype == torch.uint8


def test_two_workers_have_both_in_one_message() -> None:
    """An all-reduce of two workers would send as many bytes, in a message more."""
    engine = Engine(PerParameter(SizeSwitch(TopK(0.05))), scheme=AllGather(), workers=2)
    gather = next(engine.flow(torch.randn(NUMEL), SHAPES))
    assert isinstance(gather, Gather)
    assert [tensor.numel() for tensor in gather.tensors[2:]] == [30 + 64, 1]


def test_what_is_sent_dense_stays_so_whatever_positions_arrive() -> None:
    engine = Engine(PerParameter(SizeSwitch(TopK(0.05))), scheme=AllGather(), workers=1)
    grad = torch.randn(NUMEL)
    dense = grad[1200:1230].clone()
    flow = engine.flow(grad, SHAPES)
    mean = next(flow)
    assert isinstance(mean, Mean)
    gather = resume(flow, list(mean.tensors))
    assert isinstance(gather, Gather)
    values = torch.full_like(gather.tensors[0], 9.0)
    positions = elias_fano.encode(torch.arange(1100, 1100 + len(values)), NUMEL)
    flag = gather.tensors[2:]
    assert resume(flow, [[values, positions, *flag]]) is None
    assert (grad[1100:1200] == 9).all()
    assert torch.equal(grad[1200:1230], dense)


@dataclass(frozen=True)
class ByShape(SizeSwitch):
    """Sends values of large tensors in 16 bits: not all parts have payloads of one dtype."""

    def for_shape(self, shape: tuple[int, ...]) -> Compressor | None:
        return TopK(0.05, "bfloat16" if shape == (40, 30) else "float32")


@SCHEMES
def test_payloads_of_two_dtypes_are_not_joined(scheme: Scheme) -> None:
    pair, compressor = (scheme, APART[scheme]), PerParameter(ByShape(TopK(0.05)))
    ours, slow = (train(compressor, ErrorFeedback(), each) for each in pair)
    assert all(torch.equal(a, b) for a, b in zip(ours, slow, strict=True))
