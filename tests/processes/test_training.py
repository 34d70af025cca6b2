"""Lightning in two real processes: every edge at which peers lose gradients."""

from typing import Any

import numpy as np
import pytest
import torch
from pytorch_lightning.plugins.precision import MixedPrecision

from lightning_gc import (
    COMPRESSORS,
    QSGD,
    Cast,
    HardThreshold,
    Identity,
    PerParameter,
    RandomK,
    Residual,
    SizeSwitch,
    TopK,
)
from tests.fits import fit
from tests.processes import spread

pytestmark = pytest.mark.processes


def in_two(compressor: Any = None, **settings: Any) -> list[dict[str, Any]]:
    return spread(_fit, 2, compressor, settings)  # type: ignore[no-any-return]


def _fit(worker: int, compressor: Any, settings: dict[str, Any]) -> dict[str, Any]:
    return fit(worker, 2, compressor, **settings)


def assert_nothing_lost(results: list[dict[str, Any]], tolerance: float = 1e-5) -> None:
    """The mean of local gradients = what was applied + the mean of the errors, per parameter."""
    first, second = results[0], results[1]
    assert first["parameters"] == second["parameters"], "replicas have drifted apart"
    given = {n: (first["local"].get(n, 0) + second["local"].get(n, 0)) / 2 for n in first["local"]}
    assert given
    for name, total in given.items():
        kept = (first["errors"][name] + second["errors"][name]) / 2
        gap = np.linalg.norm(first["applied"].get(name, 0) + kept - total)
        assert gap <= tolerance * max(float(np.linalg.norm(total)), 1e-3), name


EVERYWHERE = PerParameter(TopK(0.05))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"bucket_cap_mb": 0.005},
        {"accumulate": 3},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"static_graph": True},
        {"gradient_as_bucket_view": True},
        {"find_unused_parameters": True},
    ],
    ids=str,
)
def test_identity_is_plain_ddp(settings: dict[str, Any]) -> None:
    """The same bits in every parameter after 20 steps, and the same loss curve."""
    plain, ours = in_two(None, **settings), in_two(Identity(), **settings)
    assert [r["parameters"] for r in ours] == [r["parameters"] for r in plain]
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
        {"model": "Branches", "find_unused_parameters": True},
        {"model": "Manual"},
        {"model": "Manual", "bucket_cap_mb": 0.005},
        {"model": "Manual", "static_graph": True},
        {"compiled": "inside"},
        {"compiled": "outside"},
    ],
    ids=str,
)
def test_nothing_is_lost(settings: dict[str, Any]) -> None:
    results = in_two(EVERYWHERE, **settings)
    assert_nothing_lost(results)
    assert any(np.any(error) for error in results[0]["errors"].values())
    assert results[0]["rounds"] == (40 if settings.get("model") == "Manual" else 20)


@pytest.mark.parametrize("scheme", ["all_gather", "two_shot"])
def test_unused_parameters_lose_nothing_in_any_scheme(scheme: str) -> None:
    for compressor in (EVERYWHERE, PerParameter(HardThreshold(0.05))):
        assert_nothing_lost(
            in_two(compressor, model="Branches", find_unused_parameters=True, scheme=scheme)
        )


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_every_compressor_trains_and_keeps_replicas_identical(name: str) -> None:
    model = "Books" if COMPRESSORS[name]().traits.conserves else "Votes"
    first, second = in_two(name, model=model, bucket_cap_mb=0.005)
    assert first["parameters"] == second["parameters"]
    assert first["losses"][-1] < first["losses"][0]


def test_lr_aware_follow_the_learning_rate() -> None:
    """With a rate that falls at every step: γ·applied + γ·error = the sum of γ·gradient."""
    assert_nothing_lost(in_two(EVERYWHERE, model="Scheduled", memory=Residual(lr_aware=True)), 1e-4)


def test_bf16_parameters_keep_float32_errors() -> None:
    results = in_two(EVERYWHERE, precision="bf16-true")
    assert results[0]["parameters"] == results[1]["parameters"]
    assert_nothing_lost(results, tolerance=0.05)  # gradients and means themselves are bfloat16


@pytest.mark.parametrize("loud", [None, 1])
def test_fp16_scaling(loud: int | None) -> None:
    """The first steps overflow on all workers, or a later one on one worker only.

    What a skipped step took from the errors is given back, and errors are in unscaled units.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**22 if loud is None else 2.0**10)
    precision = MixedPrecision("16-mixed", "cpu", scaler=scaler)
    results = in_two(EVERYWHERE, precision=precision, loud=loud)
    assert results[0]["skipped"] == results[1]["skipped"]
    assert 1 <= results[0]["skipped"] < 15
    for result in results:
        for error in result["errors"].values():
            assert np.isfinite(error).all()
            assert np.abs(error).max() < 100
    assert_nothing_lost(results, tolerance=1e-4)


def disagree(worker: int) -> str:
    with pytest.raises(ValueError, match="Worker 1 has compressor=") as caught:
        fit(worker, 2, TopK(0.01 if worker == 0 else 0.02))
    return str(caught.value)


def test_workers_that_disagree_are_refused_at_start() -> None:
    first, second = spread(disagree, 2, timeout=60)
    assert first == second
    assert "TopK(density=0.02," in first
    assert "worker 0 has" in first


def test_other_arguments_reach_ddp_and_granularity_is_a_choice() -> None:
    """SizeSwitch leaves biases dense: their error is zero; a wrapped compressor leaves none."""
    switched = in_two(SizeSwitch(TopK(0.05), min_numel=0))
    assert not switched[0]["errors"]["head.bias"].any()
    assert switched[0]["errors"]["head.weight"].any()
    assert_nothing_lost(switched)
    everything = in_two(PerParameter(RandomK(0.05)))
    assert everything[0]["errors"]["head.bias"].any()
    assert_nothing_lost(everything)


def test_unbiased_and_cast_defaults() -> None:
    assert in_two(QSGD(8))[0]["errors"] == {}
    assert_nothing_lost(in_two(Cast("float16")))


def fit_twice(worker: int) -> tuple[int, bool, str]:
    import pytorch_lightning as pl

    from lightning_gc import CompressedDDPStrategy, CompressionMonitor
    from tests.fits import Books, data, digest

    strategy = CompressedDDPStrategy(EVERYWHERE, process_group_backend="gloo")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        max_epochs=1,
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        callbacks=[CompressionMonitor()],
    )
    torch.manual_seed(0)
    module = Books()
    trainer.fit(module, data(worker, 5))
    kept = strategy.engine
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data(worker, 5))
    assert kept is not None
    assert float(trainer.callback_metrics["compression/total_ratio"]) > 2
    return kept.step, strategy.engine is kept, digest(module)


def test_a_second_fit_of_the_same_trainer_keeps_the_errors() -> None:
    first, second = spread(fit_twice, 2)
    assert first == second
    assert first[:2] == (10, True)


def test_one_worker_takes_the_same_path() -> None:
    (result,) = spread(fit, 1, 1, EVERYWHERE)
    assert result["rounds"] == 20
    given = {name: total + 0 for name, total in result["local"].items()}
    for name, total in given.items():
        gap = np.linalg.norm(result["applied"][name] + result["errors"][name] - total)
        assert gap <= 1e-5 * max(float(np.linalg.norm(total)), 1e-3)


def spoil(worker: int) -> list[bool]:
    """One bad gradient on worker 1, and no loss scaling: what does each worker's .grad hold?"""
    from tests import fits

    class Spoilt(fits.Books):
        def loss(self, batch, batch_idx):
            loss = super().loss(batch, batch_idx)
            return loss * float("inf") if batch_idx == 2 and worker == 1 else loss

        def on_before_optimizer_step(self, optimizer):
            super().on_before_optimizer_step(optimizer)
            grads = [p.grad for p in self.parameters() if p.grad is not None]
            finite.append(all(bool(grad.isfinite().all()) for grad in grads))
            if not finite[-1]:
                optimizer.zero_grad()

    finite: list[bool] = []
    fits.Spoilt = Spoilt  # type: ignore[attr-defined]
    result = fits.fit(worker, 2, EVERYWHERE, model="Spoilt", steps=5)
    assert all(np.isfinite(error).all() for error in result["errors"].values())
    return finite


def test_a_bad_gradient_on_one_worker_is_seen_by_both() -> None:
    assert spread(spoil, 2) == [[True, True, False, True, True]] * 2
