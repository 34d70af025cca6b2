"""Fits of models in shards on four ranks: uncompressed they are torch's own HSDP.

The same LightningModule is trained by torch's HSDP, by plain FSDP2, and by ours.
"""

from functools import partial
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from pytorch_lightning.strategies import ModelParallelStrategy
from torch.distributed.fsdp import MixedPrecisionPolicy

from lightning_gc import QSGD, Identity, PerParameter, TopK
from tests.support.accelerator import BACKEND, needs_four
from tests.support.fitting import quiet_trainer
from tests.support.hsdp import RANKS, NativeHSDP, Sharded, batches, fit_sharded, hsdp, left_by
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_four]
Found = list[dict[str, Any]]


class Manual(Sharded):
    """Two optimizers, and two backward passes a step."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> None:  # type: ignore[override]
        for optimizer in self.optimizers():  # type: ignore[union-attr]
            optimizer.zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=0.05) for part in (self.body, self.head)]


class Twice(Sharded):
    """Calls a unit twice in a forward pass, so that FSDP2 reduces its gradient in two parts."""

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        first, second, third = self.body
        hidden = torch.tanh(second(torch.tanh(first(batch))))
        hidden = third(torch.tanh(third(hidden)))
        output: torch.Tensor = self.head(hidden + 0.1 * self.frozen(hidden)) * self.gain
        return output


class Validated(Sharded):
    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.log("loss", self(batch).square().mean(), sync_dist=True)


class Dropped(Sharded):
    """Drops the gradient of one micro-batch, as of a batch that is no good."""

    def on_after_backward(self) -> None:
        if self.trainer.fit_loop.epoch_loop.batch_idx == 2:  # the first of a pair
            self.zero_grad()


def reduced(policy: torch.dtype | None, dtype: torch.dtype) -> Any:
    return partial(Sharded, MixedPrecisionPolicy(param_dtype=policy, reduce_dtype=dtype))


DAY: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulated": {
        "accumulate_grad_batches": 2,
        "steps": 5,
        "module": partial(Sharded, adam=True),
    },
    "accumulated and dropped": {
        "accumulate_grad_batches": 2,
        "steps": 5,
        "module": partial(Dropped, adam=True),
    },
}
NIGHT: dict[str, dict[str, Any]] = {
    "clipped by norm": {"gradient_clip_val": 0.5},
    "clipped by value": {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
    "manual": {"module": Manual},
    "a unit called twice": {"module": Twice},
    "bf16-mixed": {"precision": "bf16-mixed"},
    "bf16-true": {"precision": "bf16-true"},
    "reduced in bfloat16": {"module": reduced(None, torch.bfloat16)},
    "computed in bfloat16": {"module": reduced(torch.bfloat16, torch.bfloat16)},
    "reduced in float32": {"module": reduced(torch.bfloat16, torch.float32)},
    "accumulated in bfloat16": {
        "module": reduced(None, torch.bfloat16),
        "accumulate_grad_batches": 2,
    },
}
GAPS = {"accumulated in bfloat16": 2e-4}
"""Lightning's own strategy reduces every micro-batch and adds in float32; others: at most 1e-6."""


def native(**options: Any) -> NativeHSDP:
    return NativeHSDP(2, process_group_backend=BACKEND, **options)


def fit_cases(rank: int, cases: dict[str, dict[str, Any]]) -> dict[str, Any]:
    found = {}
    for name, case in cases.items():
        for strategy, key in (
            (hsdp(Identity(), bucket_cap_mb=0.002), name),
            (native(), f"{name} by torch"),
        ):
            seen = Seen()
            found[key] = fit_sharded(rank, strategy, callbacks=[seen], **case)
            found[key]["norms"] = (seen.after, seen.before)
    return found


class Seen(pl.Callback):
    """Notes gradients where Lightning shows them first, and what was clipped."""

    def __init__(self) -> None:
        self.after: list[float] = []
        self.before: list[float] = []

    def on_after_backward(self, trainer: Any, pl_module: Any) -> None:
        self.after.append(norm(pl_module))

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        self.before.append(norm(pl_module))


def norm(module: Any) -> float:
    grads = [p.grad.full_tensor() for p in module.parameters() if p.grad is not None]
    return float(torch.stack([g.double().norm() for g in grads]).norm())


def everything(rank: int) -> dict[str, Any]:
    """In one set of processes, for starting them takes long."""
    found = fit_cases(rank, DAY)
    found["apart"] = fit_sharded(
        rank,
        hsdp(PerParameter(TopK(0.05))),
        steps=50,
        module=partial(Sharded, adam=True, seed=rank),
    )
    found["levels"] = fit_sharded(rank, hsdp(QSGD(4)), steps=1)["levels"]
    return found


@pytest.fixture(scope="module")
def found() -> Found:
    results: Found = run_in_processes(everything, RANKS, timeout=200)
    return results


def check_same(found: Found, name: str) -> None:
    for rank in found:
        assert rank[name]["steps"] == rank[f"{name} by torch"]["steps"]
        for param, ours in rank[name]["whole"].items():
            theirs = rank[f"{name} by torch"]["whole"][param]
            np.testing.assert_allclose(ours, theirs, rtol=0, atol=GAPS.get(name, 1e-6))


@pytest.mark.parametrize("name", DAY)
def test_uncompressed_it_is_hsdp(found: Found, name: str) -> None:
    check_same(found, name)
    rounds = 3 if name.startswith("accumulated") else 4
    assert {rank[name]["rounds"] for rank in found} == {rounds}, "of five batches, in pairs: three"


def fit_both(rank: int) -> tuple[dict[str, Any], dict[str, Any]]:
    plain = ModelParallelStrategy(
        data_parallel_size=RANKS, tensor_parallel_size=1, process_group_backend=BACKEND
    )
    return fit_sharded(rank, hsdp(Identity())), fit_sharded(rank, plain)


@pytest.mark.nightly
def test_uncompressed_it_is_fsdp2_over_all_ranks() -> None:
    for ours, theirs in run_in_processes(fit_both, RANKS):
        for param, value in ours["whole"].items():
            np.testing.assert_allclose(value, theirs["whole"][param], rtol=0, atol=1e-6)


def test_callbacks_see_the_means(found: Found) -> None:
    """As soon as they see gradients, as with torch's own."""
    for rank in found:
        ours, theirs = (rank[name]["norms"] for name in ("plain", "plain by torch"))
        np.testing.assert_allclose(ours[0], theirs[0], rtol=1e-5)
        assert ours[0] == ours[1], "not clipped"


def test_replicas_start_and_stay_alike(found: Found) -> None:
    """From weights of other seeds, over fifty compressed steps."""
    for rank in found[1:]:
        for param, ours in found[0]["apart"]["whole"].items():
            np.testing.assert_array_equal(ours, rank["apart"]["whole"][param])
    losses = found[0]["apart"]["losses"]
    assert np.mean(losses[-5:]) < 0.8 * np.mean(losses[:5])


def test_levels_are_of_whole_parameters(found: Found) -> None:
    """1,480 elements on two ranks are compressed, as where they are on one; equal on all ranks."""
    for rank in found:
        assert rank["levels"] == dict.fromkeys(("body.1.weight", "body.2.weight"), 4)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_uncompressed_it_is_hsdp_in_other_ways_too() -> None:
    results = run_in_processes(fit_cases, RANKS, NIGHT, timeout=300)
    for name in NIGHT:
        check_same(results, name)


def fit_twice(rank: int) -> dict[str, Any]:
    """Fit, validate, and go on with the same Trainer."""
    strategy = hsdp(PerParameter(TopK(0.1)))
    trainer = quiet_trainer(strategy, devices=RANKS, use_distributed_sampler=False)
    module, data = Validated(), batches(rank, 3)
    trainer.fit(module, data, data)
    trainer.validate(module, data, verbose=False)
    trainer.fit_loop.max_epochs = 2
    trainer.fit(module, data, data)
    return left_by(trainer, module)


@pytest.mark.nightly
def test_a_second_fit_goes_on() -> None:
    """Process groups of the first have been left; errors are kept."""
    results = run_in_processes(fit_twice, RANKS)
    for rank in results:
        assert rank["rounds"] == 6
        for param, ours in results[0]["whole"].items():
            np.testing.assert_array_equal(ours, rank["whole"][param])
