"""No value that arrives in place of the guard's flag can do harm."""

import pytest
import torch
from torch import Tensor

from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Exchange, Flow, Gather, Mean, MeanShard, Reply, Request
from lightning_gc.core.segments import PIECE, Segments
from lightning_gc.engine.error_buffers import Layouts
from lightning_gc.engine.guard import Guard
from lightning_gc.kernels.segments import Idle, Move
from lightning_gc.testing.contracts import cases
from lightning_gc.transports import Simulated

NAN = float("nan")


def guarded(*values: float) -> Guard:
    return Guard(cases.bucket_of(torch.tensor(values)), Layouts())


def asks(*requests: Request) -> Flow:
    for request in requests:  # noqa: UP028 - "yield from" a tuple cannot be sent replies
        yield request


def answers(guard: Guard, flag: float, request: Request) -> None:
    """Let a watched flow ask, and answer with ``flag`` in the last place."""
    flow = guard.watch(asks(request))
    asked = next(flow)
    assert not isinstance(asked, Exchange)
    damaged = [*asked.tensors[:-1], torch.full_like(asked.tensors[-1], flag)]
    reply: Reply = damaged if isinstance(asked, Mean) else [damaged]
    with pytest.raises(StopIteration):
        flow.send(reply)


def test_a_flag_for_each_element_of_a_parameter() -> None:
    lengths = [3, 1, 2 * PIECE + 17, 40, 40]
    ends = torch.tensor(lengths).cumsum(0).tolist()
    spans = [(end - length, end) for end, length in zip(ends, lengths, strict=True)]
    flags = torch.tensor([True, False, True, True, False])
    found = Segments(spans, torch.device("cpu")).elementwise(flags)
    assert torch.equal(found, flags.repeat_interleave(torch.tensor(lengths)))


@pytest.mark.parametrize("request_kind", [Mean, Gather])
@pytest.mark.parametrize("on_host", [True, False])
@pytest.mark.parametrize(
    ("flag", "poisons"),
    [(5.0, False), (-3e38, False), (0.0, False), (NAN, True), (-float("inf"), True)],
)
def test_only_what_is_not_finite_counts(
    request_kind: type[Mean] | type[Gather], on_host: bool, flag: float, poisons: bool
) -> None:
    guard = guarded(1.0, 2.0)
    guard._on_host = on_host
    answers(guard, flag, request_kind((torch.ones(2),)))
    out = torch.tensor([3.0, 4.0])
    guard.poison(out)
    assert out.tolist()[1] == 4.0
    assert bool(out[0].isnan()) == poisons
    assert poisons or out.tolist() == [3.0, 4.0]


def test_the_flag_rides_where_all_workers_read_the_same() -> None:
    """Not on an exchange, of which every worker sees another part."""
    one = torch.ones(1)
    flow = guarded(NAN).watch(asks(Exchange(((one,),)), Gather((one,)), Gather((one,))))
    first = next(flow)
    assert isinstance(first, Exchange)
    assert len(first.payloads[0]) == 1
    second = flow.send([[one]])
    assert isinstance(second, Gather)
    assert second.tensors[-1].isnan().all()
    third = flow.send([list(second.tensors)])
    assert isinstance(third, Gather)
    assert len(third.tensors) == 1


def test_a_flow_of_exchanges_only_gets_a_message_for_it() -> None:
    def mine(worker: int) -> tuple[Tensor, ...]:
        return (torch.full((1,), float(worker)),)

    guards = [guarded(1.0), guarded(NAN)]
    Simulated(2).run([guard.watch(asks(Exchange((mine(0), mine(1)), None))) for guard in guards])
    for guard in guards:
        assert guard.verdict is not None
        assert guard.verdict.isnan().all()


def test_where_each_has_its_own_shard_the_flag_rides_on_the_exchange() -> None:
    """And what it poisons is the worker's own half of each parameter."""
    for worker in range(2):
        grad = torch.tensor([1.0, NAN, 1.0, 1.0])
        bucket = Bucket(grad, {"one": (2,), "two": (2,)}, worker=worker, workers=2)
        guard = Guard(bucket, Layouts(), scatters=True)
        part = (torch.ones(1),)
        flow = guard.watch(asks(Exchange((part, part), (4,))))
        asked = next(flow)
        assert isinstance(asked, Exchange)
        assert asked.limits == (4, None)
        assert all(payload[-1].isnan().all() for payload in asked.payloads)
        with pytest.raises(StopIteration):
            flow.send([list(payload) for payload in asked.payloads])
        out = torch.zeros(4)
        guard.poison(out)
        assert out.isnan().tolist() == [worker == 0, worker == 1] * 2


def test_the_flag_rides_with_every_shard_of_a_mean() -> None:
    """A worker whose own gradient is finite learns of the other's."""
    guards = []
    for worker, values in enumerate(([1.0, 1.0], [NAN, 1.0])):
        bucket = Bucket(torch.tensor(values), {"one": (2,)}, worker=worker, workers=2)
        guards.append(Guard(bucket, Layouts(), scatters=True))
    Simulated(2).run([guard.watch(asks(MeanShard((torch.ones(2),)))) for guard in guards])
    for worker, guard in enumerate(guards):
        out = torch.zeros(2)
        guard.poison(out)
        assert out.isnan().tolist() == [worker == 0, worker == 1]


def test_nothing_asked_nothing_sent() -> None:
    guard = guarded(1.0)
    assert list(guard.watch(asks())) == []
    assert guard.verdict is None


def moved(gradients: list[float], buffer: list[float], *, on_host: bool = True) -> list[float]:
    """Return what is set aside of ``buffer`` for parameters of one element each."""
    grad = torch.tensor(gradients)
    guard = Guard(Bucket(grad, {str(i): (1,) for i in range(len(grad))}), Layouts())
    if not on_host:
        guard.idle._spans = None
    aside = torch.zeros(len(grad))
    guard.idle.move("take", aside, torch.tensor(buffer))
    return aside.tolist()


@pytest.mark.parametrize("small", [1e-12, 1e-30, 1e-45])
def test_a_small_gradient_is_not_an_absent_one(small: float) -> None:
    assert moved([small, 0.0], [1.0, 2.0]) == [0.0, 2.0]


@pytest.mark.parametrize("on_host", [True, False])
def test_only_what_is_idle_is_set_aside(on_host: bool) -> None:
    """What is not finite elsewhere is sent, and must not come back as NaN."""
    buffer = [float("inf"), 2.0, 3.0]
    assert moved([1.0, 1.0, 0.0], buffer, on_host=on_host) == [0.0, 0.0, 3.0]


@pytest.mark.parametrize("on_host", [True, False])
def test_moves_of_idle_parameters(on_host: bool) -> None:
    """Each move against its definition, element by element."""
    inf = float("inf")
    segments = Segments([(0, 2), (2, 3)], torch.device("cpu"))
    idle = Idle(torch.tensor([1.0, 0.0]), segments)
    if not on_host:
        idle._spans = None
    moves: list[tuple[Move, list[float], list[float]]] = [
        ("copy", [1.0, 2.0, inf], [inf, 5.0, inf]),
        ("take", [1.0, 2.0, 6.0], [inf, 5.0, 0.0]),
        ("add", [1.0, 2.0, 9.0], [inf, 5.0, 6.0]),
    ]
    for how, target, source in moves:
        to = torch.tensor([1.0, 2.0, 3.0])
        of = torch.tensor([inf, 5.0, inf if how == "copy" else 6.0])
        idle.move(how, to, of)
        assert (to.tolist(), of.tolist()) == (target, source), how
