"""Training in two processes loses no gradient, whatever DDP, precision and the module do.

Without compression it is plain DDP, bit for bit; a bad gradient is seen by all workers.
"""

from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.plugins.precision import MixedPrecision
from pytorch_lightning.strategies import DDPStrategy

from lightning_gc import (
    COMPRESSORS,
    QSGD,
    Cast,
    CompressionMonitor,
    ErrorFeedback,
    HardThreshold,
    Identity,
    PerParameter,
    RandomK,
    SizeSwitch,
    StepAhead,
    TopK,
)
from tests.support.accelerator import DEVICE, WORKERS, needs_two
from tests.support.fitting import ddp, digest, fit, quiet_trainer
from tests.support.models import Ahead, Books, Branches, Manual, Scheduled, Votes, own_batches
from tests.support.processes import standing

pytestmark = pytest.mark.processes
SYNCHRONISES_STATIC_MANUAL = pytest.mark.skipif(
    not hasattr(DDPStrategy(), "_pl_static_graph_delay_done"),
    reason="refused with Lightning before 2.6",
)
STEPS = 8  # DDP lays its buckets out anew after the first


def fit_one(
    worker: int,
    workers: int,
    compressor: Any = None,
    model: type[Books] = Books,
    steps: int = STEPS,
    accumulate: int = 1,
    loud: int | None = None,
    compiled: str = "",
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Fit as one of several; without a compressor under Lightning's own DDP."""

    def module() -> Any:
        made = model(compiled=True) if compiled == "inside" else model()
        return torch.compile(made, backend="eager") if compiled == "outside" else made

    return fit(
        ddp(compressor, **options),
        module,
        own_batches(worker, steps * accumulate, 6 if loud == worker else None),
        devices=workers,
        max_steps=steps * (2 if model is Manual else 1),
        accumulate_grad_batches=accumulate,
        use_distributed_sampler=False,
        **(trainer or {}),
    )


def fit_in_two(compressor: Any = None, **settings: Any) -> list[dict[str, Any]]:
    return standing.run(_fit, WORKERS, compressor, settings)


def _fit(worker: int, compressor: Any, settings: dict[str, Any]) -> dict[str, Any]:
    return fit_one(worker, WORKERS, compressor, **settings)


def assert_nothing_lost(results: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """The mean of local gradients = what was applied + the mean of the errors, per parameter."""
    first = results[0]
    assert len({each["digest"] for each in results}) == 1, "replicas have drifted apart"
    assert first["local"]
    for name in first["local"]:
        total = sum(each["local"].get(name, 0) for each in results) / len(results)
        kept = sum(each["errors"][0][name] for each in results) / len(results)
        gap = np.linalg.norm(first["applied"].get(name, 0) + kept - total)
        assert gap <= tolerance * max(float(np.linalg.norm(total)), 1e-3), name


EVERYWHERE = PerParameter(TopK(0.05))


def described(settings: dict[str, Any]) -> str:
    """Name a case by its settings."""
    named = {name: getattr(value, "__name__", value) for name, value in settings.items()}
    return ",".join(f"{name}={value}" for name, value in named.items()) or "defaults"


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bucket_cap_mb": 0.005},
        {"accumulate": 3},
        {"trainer": {"precision": "bf16-mixed"}},
        {"trainer": {"precision": "bf16-true"}},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ],
    ids=described,
)
def test_identity_is_plain_ddp(settings: dict[str, Any]) -> None:
    """The same bits in every parameter, and the same loss curve."""
    plain, ours = fit_in_two(None, **settings), fit_in_two(Identity(), **settings)
    assert [r["digest"] for r in ours] == [r["digest"] for r in plain]
    assert [r["losses"] for r in ours] == [r["losses"] for r in plain]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bucket_cap_mb": 0.005},
        {"accumulate": 3},
        {"static_graph": True},
        {"static_graph": True, "bucket_cap_mb": 0.005},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
        {"model": Branches, "find_unused_parameters": True},
        {"model": Manual},
        {"model": Manual, "bucket_cap_mb": 0.005},
        pytest.param({"model": Manual, "static_graph": True}, marks=SYNCHRONISES_STATIC_MANUAL),
        {"compiled": "inside"},
        {"compiled": "outside"},
    ],
    ids=described,
)
def test_nothing_is_lost(settings: dict[str, Any]) -> None:
    results = fit_in_two(EVERYWHERE, **settings)
    assert_nothing_lost(results)
    assert any(np.any(error) for error in results[0]["errors"][0].values())
    assert results[0]["rounds"] == [STEPS * (2 if settings.get("model") is Manual else 1)]


@pytest.mark.parametrize("scheme", ["all_gather", "two_shot"])
def test_unused_parameters_lose_nothing_in_any_scheme(scheme: str) -> None:
    for compressor in (EVERYWHERE, PerParameter(HardThreshold(0.05))):
        assert_nothing_lost(
            fit_in_two(compressor, model=Branches, find_unused_parameters=True, scheme=scheme)
        )


BY_DAY = (
    *("cast", "gtopk", "hard_threshold", "integer_qsgd", "powersgd"),
    *("qsgd", "quantised", "randomk", "sign_sgd", "topk"),
)
"""One compressor of each kind of conversation."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[] if name in BY_DAY else pytest.mark.nightly)
        for name in sorted(COMPRESSORS)
    ],
)
def test_every_compressor_trains_and_keeps_replicas_identical(name: str) -> None:
    model = Books if COMPRESSORS[name]().traits.conserves else Votes
    results = fit_in_two(name, model=model, steps=20, bucket_cap_mb=0.005)
    first = results[0]
    assert first["digest"] == results[-1]["digest"]
    assert first["losses"][-1] < first["losses"][0]


def test_lr_aware_follow_the_learning_rate() -> None:
    """With a rate that falls at every step: γ·applied + γ·error = the sum of γ·gradient."""
    assert_nothing_lost(
        fit_in_two(EVERYWHERE, model=Scheduled, memory=ErrorFeedback(lr_aware=True)), 1e-4
    )


def test_bf16_parameters_keep_float32_errors() -> None:
    results = fit_in_two(EVERYWHERE, trainer={"precision": "bf16-true"})
    assert results[0]["digest"] == results[-1]["digest"]
    assert_nothing_lost(results, tolerance=0.05)  # gradients and means themselves are bfloat16


@pytest.mark.parametrize("loud", [None, WORKERS - 1])
def test_fp16_scaling(loud: int | None) -> None:
    """The first steps overflow on all workers, or a later one on one worker only.

    What a skipped step took from the errors is given back, and errors are in unscaled units.
    """
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**22 if loud is None else 2.0**10)
    precision = MixedPrecision("16-mixed", DEVICE, scaler=scaler)
    results = fit_in_two(EVERYWHERE, trainer={"plugins": [precision]}, steps=20, loud=loud)
    assert results[0]["skipped"] == results[-1]["skipped"]
    assert 1 <= results[0]["skipped"] < 15
    for result in results:
        for error in result["errors"][0].values():
            assert np.isfinite(error).all()
            assert np.abs(error).max() < 100
    assert_nothing_lost(results, tolerance=1e-4)


@needs_two
@pytest.mark.parametrize(("every", "fp16", "common"), [(3, False, [0, 3, 6]), (7, True, [0, 14])])
def test_workers_step_ahead_to_the_same_place(every: int, fp16: bool, common: list[int]) -> None:
    """Of the steps after their errors have been averaged; elsewhere each is at its own.

    With fp16 the seventh step is skipped, and what its averaging did is taken back with it.
    """
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**10)
    plugins = [MixedPrecision("16-mixed", DEVICE, scaler=scaler)] if fp16 else []
    results = fit_in_two(
        EVERYWHERE,
        model=Ahead,
        memory=StepAhead(average_every=every),
        bucket_cap_mb=0.005,
        steps=16 if fp16 else STEPS,
        loud=1 if fp16 else None,
        trainer={"plugins": plugins},
    )
    assert [result["skipped"] for result in results] == [int(fp16)] * 2
    pairs = list(zip(*(result["seen"] for result in results), strict=True))
    assert [step for step, (one, other) in enumerate(pairs) if one == other] == common
    assert_nothing_lost(results, tolerance=1e-4)


def disagree(worker: int) -> str:
    with pytest.raises(ValueError, match="Worker 1 has compressor=") as caught:
        fit_one(worker, 2, TopK(0.01 if worker == 0 else 0.02))
    return str(caught.value)


@needs_two
def test_workers_that_disagree_are_refused_at_start() -> None:
    first, second = standing.run(disagree, 2, timeout=60)
    assert first == second
    assert "TopK(density=0.02," in first
    assert "worker 0 has" in first


def test_other_arguments_reach_ddp_and_granularity_is_a_choice() -> None:
    """SizeSwitch leaves biases dense: their error is zero; a wrapped compressor leaves none."""
    switched = fit_in_two(SizeSwitch(TopK(0.05), min_numel=0))
    assert not switched[0]["errors"][0]["head.bias"].any()
    assert switched[0]["errors"][0]["head.weight"].any()
    assert_nothing_lost(switched)
    everything = fit_in_two(PerParameter(RandomK(0.05)))
    assert everything[0]["errors"][0]["head.bias"].any()
    assert_nothing_lost(everything)


def test_unbiased_and_cast_defaults() -> None:
    assert fit_in_two(QSGD(8))[0]["errors"] == [{}]
    assert_nothing_lost(fit_in_two(Cast("float16")))


def fit_twice(worker: int) -> tuple[int, bool, str]:
    strategy: Any = ddp(EVERYWHERE)
    trainer = quiet_trainer(
        strategy, devices=WORKERS, use_distributed_sampler=False, callbacks=[CompressionMonitor()]
    )
    torch.manual_seed(0)
    module = Books()
    trainer.fit(module, own_batches(worker, 5))
    kept = strategy.engine
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, own_batches(worker, 5))
    alone = "encoding_" if WORKERS == 1 else ""  # without a network
    assert float(trainer.callback_metrics[f"compression/total_{alone}ratio"]) > 2
    return kept.step, strategy.engine is kept, digest(module)


def test_a_second_fit_of_the_same_trainer_keeps_the_errors() -> None:
    results = standing.run(fit_twice, WORKERS)
    assert len(set(results)) == 1
    assert results[0][:2] == (10, True)


def test_one_worker_takes_the_same_path() -> None:
    (result,) = standing.run(fit_one, 1, 1, EVERYWHERE)
    assert result["rounds"] == [STEPS]
    given = {name: total + 0 for name, total in result["local"].items()}
    for name, total in given.items():
        gap = np.linalg.norm(result["applied"][name] + result["errors"][0][name] - total)
        assert gap <= 1e-5 * max(float(np.linalg.norm(total)), 1e-3)


class Spoilt(Books):
    """Of the third batch worker 1's loss is infinite; notes whether gradients are finite."""

    def __init__(self) -> None:
        super().__init__()
        self.finite: list[bool] = []

    def noted(self) -> dict[str, Any]:
        return super().noted() | {"finite": self.finite}

    def loss(self, batch: Any, batch_idx: int) -> Any:
        loss = super().loss(batch, batch_idx)
        return loss * float("inf") if batch_idx == 2 and self.global_rank == 1 else loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        super().on_before_optimizer_step(optimizer)
        grads = [p.grad for p in self.parameters() if p.grad is not None]
        self.finite.append(all(bool(grad.isfinite().all()) for grad in grads))
        if not self.finite[-1]:
            optimizer.zero_grad()


@needs_two
def test_a_bad_gradient_on_one_worker_is_seen_by_both() -> None:
    """There is no loss scaling, which would skip the step."""
    for result in fit_in_two(EVERYWHERE, model=Spoilt, steps=5):
        assert result["finite"] == [True, True, False, True, True]
        assert all(np.isfinite(error).all() for error in result["errors"][0].values())
