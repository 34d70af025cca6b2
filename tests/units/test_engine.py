"""The engine's state is kept by name, portable, and restored when a step is skipped."""

import io

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_gc import (
    COMPRESSORS,
    Cast,
    ErrorFeedback,
    HardThreshold,
    Identity,
    NoMemory,
    PerParameter,
    TopK,
)
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Exchange, Flow, Gather, Mean, join, split, together
from lightning_gc.engine import Engine
from lightning_gc.engine.statistics import EpochStatistics
from lightning_gc.exchange import Compression, Workers
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.memory import run
from lightning_gc.transports import Simulated
from lightning_gc.transports.simulated import Ledger
from tests.support.engines import step_alone


def test_state_loads_with_weights_only_and_continues_bit_for_bit() -> None:
    straight = Lockstep(2, TopK(0.1))
    for step in range(3):
        straight.step(cases.gradients(2, step))
    resumed = Lockstep(2, TopK(0.1))
    for old, new in zip(straight.engines, resumed.engines, strict=True):
        file = io.BytesIO()
        torch.save(old.state_dict(), file)
        file.seek(0)
        new.load_state_dict(torch.load(file, weights_only=True))
    ours, theirs = (run.step(cases.gradients(2, 3)) for run in (straight, resumed))
    assert torch.equal(cases.flat(ours.mean), cases.flat(theirs.mean))


@pytest.mark.parametrize("cls", COMPRESSORS.values(), ids=COMPRESSORS)
def test_every_element_is_counted_once(cls: type[Compressor]) -> None:
    """As given to a codec or sent whole, also where shards are padded: 35 elements, 4 workers."""
    for compressor in cls.examples():
        run = Lockstep(4, compressor)
        for step in range(2):
            draw = cases.generator(step)
            run.step([{"w": torch.randn(5, 7, generator=draw)} for _ in range(4)])
        for engine in run.engines:
            tally = engine.statistics.tally
            assert tally.grad_elements == 70
            assert tally.whole in (0, 70)
            assert 0 <= tally.sent <= tally.elements


def test_saved_state_is_a_copy() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    step_alone(engine, w=torch.tensor([1.0, 2.0]))
    state = engine.state_dict()
    step_alone(engine, w=torch.tensor([1.0, 2.0]))
    assert state["memory"]["w"]["error"].tolist() == [1.0, 0.0]
    assert state["step"] == 1


def test_level_change_keeps_the_memory() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    step_alone(engine, w=torch.tensor([1.0, 2.0]))
    engine.levels.set(1.0)
    result = step_alone(engine, w=torch.tensor([0.5, 0.5]))
    assert result["w"].tolist() == [1.5, 0.5]


def test_levels_per_parameter_and_uncompressed_ones() -> None:
    engine = Engine(layerwise(TopK(0.25)))
    ramp = torch.tensor([1.0, 2.0, 3.0, 4.0])
    engine.levels.set(0.25, {"b": 0.5, "c": None})
    assert list(engine.levels.of(dict.fromkeys("abc", (9,))).values()) == [0.25, 0.5, None]
    result = step_alone(engine, a=ramp.clone(), b=ramp.clone(), c=ramp.clone())
    assert result["a"].tolist() == [0, 0, 0, 4]
    assert result["b"].tolist() == [0, 0, 3, 4]
    assert result["c"].tolist() == [1, 2, 3, 4]
    engine.levels.set(None)
    zeros = torch.zeros(4)
    step_alone(engine, a=zeros.clone(), b=zeros.clone(), c=zeros.clone())
    result = step_alone(engine, a=zeros + 1, b=zeros + 1, c=zeros + 1)
    assert result["a"].tolist() == [2, 3, 4, 1]  # the whole error goes out with the gradient
    assert not any(error.any() for error in engine.errors().values())


def test_levels_outside_the_knob_are_clamped_with_a_warning() -> None:
    engine = Engine(layerwise(TopK(0.25)))
    with pytest.warns(UserWarning, match=r"Level 7.0 for w is outside density's .* set to 1.0"):
        engine.levels.set(0.1, {"w": 7.0})
    assert engine.levels.of({"w": (9,)}) == {"w": 1.0}
    for nonsense in (-1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="makes no sense"):
            engine.levels.set(nonsense)
    with pytest.raises(ValueError, match=r"makes no sense to Identity\(\)"):
        Engine(Identity()).levels.set(0.5)


def test_without_compression_an_elementwise_compressor_is_left_out() -> None:
    engine = Engine(Cast("bfloat16"))
    engine.levels.set(None)
    third = torch.full((3,), 1 / 3)
    assert torch.equal(step_alone(engine, w=third.clone())["w"], third)


def test_layout_may_change_between_steps() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    step_alone(engine, a=torch.tensor([1.0, 2.0]), b=torch.tensor([3.0, 4.0]))
    step_alone(engine, b=torch.tensor([0.1, 0.0]))
    step_alone(engine, a=torch.tensor([0.0, 0.1]))
    kept = {name: error.tolist() for name, error in engine.errors().items()}
    assert kept["a"] == pytest.approx([0.0, 0.1])
    assert kept["b"] == pytest.approx([0.0, 0.0])


def test_errors_are_unscaled_whatever_the_loss_scale() -> None:
    engine = Engine(layerwise(TopK(0.5)))
    for scale in (1024.0, 2.0):
        engine.loss_scaling.scale = torch.tensor(scale)
        result = step_alone(engine, w=torch.tensor([1.0, 3.0]) * scale)
    assert result["w"].tolist() == [0.0, 6.0]  # 3 a step, in the second step's scale
    assert engine.errors()["w"].tolist() == [2.0, 0.0]


def test_a_skipped_step_gives_back_what_it_took() -> None:
    """A later bucket of the round is not finite: the earlier one's error is as before it."""
    engine = Engine(layerwise(TopK(0.5)))
    engine.loss_scaling.revocable = True
    step_alone(engine, a=torch.tensor([1.0, 2.0]))
    simulated = Simulated(1)
    simulated.run([engine.flow(torch.tensor([0.0, 5.0]), {"a": (2,)})])
    simulated.run([engine.flow(torch.tensor([float("inf"), 0.0]), {"b": (2,)})])
    engine.advance()
    assert engine.errors()["a"].tolist() == [1.0, 0.0]  # 5 went into a step that is skipped
    engine.loss_scaling.settle()
    assert engine.errors()["a"].tolist() == [1.0, 0.0]
    assert step_alone(engine, a=torch.tensor([0.5, 0.0]))["a"].tolist() == [1.5, 0.0]


def test_a_skipped_step_gives_back_what_it_had_sent() -> None:
    engine = Engine(PerParameter(HardThreshold(2.0)))
    engine.loss_scaling.revocable = True
    step_alone(engine, a=torch.tensor([1.5]))  # stays
    simulated = Simulated(1)
    simulated.run([engine.flow(torch.tensor([1.0]), {"a": (1,)})])  # 2.5: sent
    simulated.run([engine.flow(torch.tensor([float("nan")]), {"b": (1,)})])  # skips the step
    engine.advance()
    assert engine.errors()["a"].tolist() == [0.0]
    assert engine.state_dict()["memory"]["a"]["error"].tolist() == [1.5]


def overflows(engine: Engine, gradient: float) -> Flow:
    """A gradient that is finite, and with the error, times the loss scale, is not."""
    engine.loss_scaling.scale, engine.loss_scaling.revocable = torch.tensor(1024.0), True
    return engine.flow(torch.tensor([gradient, 0.0]), {"a": (2,)}, wanted=engine.worker == 0)


def test_a_result_that_overflows_is_a_skipped_step_too() -> None:
    """As the scaler sees it, on whom gradients have no bearing."""
    workers = Workers(Compression(layerwise(TopK(0.5))).configured("test"))
    workers.start(Ledger(2).pages, revocable=True)
    for engine in workers.engines:
        engine.buffers.load({"a": {"error": torch.tensor([2e35, 1.0])}})
    Simulated(2).run([overflows(engine, 2e38) for engine in workers.engines])
    workers.end_round([["a"]])
    for engine in workers.engines:
        assert engine.errors()["a"].tolist() == [0.0, 1.0], "it has been sent"
        engine.loss_scaling.settle()
        assert engine.errors()["a"].tolist() == [pytest.approx(2e35), 1.0]


def test_a_saved_error_takes_no_memory_of_the_device() -> None:
    """Each goes straight to the host, seen by what is made of pretended CUDA tensors."""
    made: list[torch.device] = []

    class Sees(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and func is not torch.ops.aten.detach.default:
                made.append(result.device)
            return result

    with FakeTensorMode():
        engine = Engine(layerwise(TopK(0.5)))
        engine.buffers.load({"a": {"error": torch.zeros(3, device="cuda")}})
        sums = EpochStatistics("epoch sum")
        sums._store.load({"a": {"sum": torch.zeros(3, device="cuda")}})
        with Sees():
            saved = [engine.state_dict()["memory"]["a"]["error"], sums.own_state()["sums"]["a"]]
    assert [tensor.device.type for tensor in saved] == ["cpu", "cpu"]
    assert {device.type for device in made} == {"cpu"}


def test_no_memory_costs_no_buffer_and_no_copy() -> None:
    engine = Engine(Identity())
    grad = torch.randn(5)
    assert run(NoMemory(), Bucket(grad, {"w": (5,)}), {}) is grad
    step_alone(engine, w=grad)
    assert engine.errors() == {}
    assert engine.state_dict()["memory"] == {}


def test_lr_aware_keep_rate_times_error_and_wait_out_zero() -> None:
    """Over a schedule with a zero in it: sum of γ·applied + γ·error = sum of γ·gradient."""
    engine = Engine(layerwise(TopK(0.5)), ErrorFeedback(lr_aware=True))
    applied = given = torch.zeros(4)
    rates = [0.1, 0.5, 0.0, 0.2, 0.05]
    for step, rate in enumerate(rates):
        engine.learning_rates.now = {"w": rate}
        grad = torch.randn(4, generator=cases.generator(step)) * (rate > 0)
        given = given + rate * grad
        applied = applied + rate * step_alone(engine, w=grad.clone())["w"]
    torch.testing.assert_close(applied + rates[-1] * engine.errors()["w"], given)
    state = engine.state_dict()
    resumed = Engine(layerwise(TopK(0.5)), ErrorFeedback(lr_aware=True))
    resumed.load_state_dict(state)
    for one in (engine, resumed):
        one.learning_rates.now = {"w": 0.01}
    results = [step_alone(one, w=torch.ones(4))["w"] for one in (engine, resumed)]
    assert torch.equal(*results)


def test_decay_follows_its_formula() -> None:
    engine = Engine(PerParameter(HardThreshold(100.0)), ErrorFeedback(decay=0.5))
    for _ in range(3):
        step_alone(engine, w=torch.tensor([8.0]))
    assert engine.errors()["w"].tolist() == [8.0 + 4.0 + 2.0]


def test_requests_of_several_flows_are_merged_by_kind() -> None:
    log = []

    def asks(*requests):  # type: ignore[no-untyped-def]
        for request in requests:
            log.append((yield request))

    one, two, three = (torch.full((1,), float(i)) for i in (1, 2, 3))
    flow = together(
        [
            asks(Mean((one,)), Gather((two,))),
            asks(Gather((one, two), (5, None))),
            asks(Mean((three,))),
        ],
        3,
    )
    first = next(flow)
    assert isinstance(first, Mean)
    assert [t.item() for t in first.tensors] == [1, 3]
    second = flow.send([one, three])
    assert isinstance(second, Gather)
    assert second.limits == (5, None)
    third = flow.send([[one, two]])
    assert isinstance(third, Gather)
    assert [t.item() for t in third.tensors] == [2]


def test_exchange_is_merged_per_destination() -> None:
    a, b, c, d = (torch.full((1,), float(i)) for i in range(4))
    requests = [Exchange(((a,), (b,))), Exchange(((c,), (d,)))]
    merged = join(requests)
    assert isinstance(merged, Exchange)
    assert [[t.item() for t in payload] for payload in merged.payloads] == [[0, 2], [1, 3]]
    assert split([[a, c], [b, d]], requests) == [[[a], [b]], [[c], [d]]]
