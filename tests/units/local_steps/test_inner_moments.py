"""InnerMoments: at their periods all workers' optimizers have the mean moments, else their own."""

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_gc import Identity, InnerMoments
from lightning_gc.lightning.for_pytorch_lightning import SimulatedLocalStepsStrategy
from lightning_gc.local_steps.common_weights import mean_of
from lightning_gc.local_steps.local_rounds import Moments
from lightning_gc.local_steps.round_plan import RoundPlan
from lightning_gc.transports import Simulated
from tests.support.fitting import unwarned


def trained(seed: int, *, bias: bool = True) -> tuple[dict[str, Tensor], torch.optim.AdamW]:
    """A layer and its optimizer after three steps; without ``bias`` it has no gradient there."""
    module = nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    draw = torch.Generator().manual_seed(seed)
    for _ in range(3):
        module.weight.grad = torch.randn(3, 5, generator=draw)
        module.bias.grad = torch.randn(3, generator=draw) if bias else None
        optimizer.step()
    return dict(module.named_parameters()), optimizer


def averaged(
    names: tuple[str, ...], *workers: tuple[dict[str, Tensor], torch.optim.Optimizer]
) -> None:
    moments = [Moments(names, params, [optimizer]) for params, optimizer in workers]
    Simulated(len(workers)).run([mean_of(each.flat) for each in moments])
    for each in moments:
        each.take_over()


def test_means_in_numpy() -> None:
    workers = [trained(seed) for seed in range(3)]
    before = [
        {
            (n, k): o.state[p][k].clone().numpy()
            for n, p in ps.items()
            for k in ("exp_avg", "exp_avg_sq")
        }
        for ps, o in workers
    ]
    averaged(("exp_avg",), *workers)
    for own, (params, optimizer) in zip(before, workers, strict=True):
        for name, param in params.items():
            mean = np.mean([each[name, "exp_avg"] for each in before], axis=0)
            state = optimizer.state[param]
            assert np.allclose(state["exp_avg"].numpy(), mean, rtol=1e-6, atol=1e-7)
            assert (state["exp_avg_sq"].numpy() == own[name, "exp_avg_sq"]).all()
            assert float(state["step"]) == 3


def test_what_has_no_state_counts_as_zero() -> None:
    has, lacks = trained(0), trained(1, bias=False)
    before = has[1].state[has[0]["bias"]]["exp_avg"].clone()
    averaged(("exp_avg",), has, lacks)
    assert torch.allclose(has[1].state[has[0]["bias"]]["exp_avg"], before / 2)
    assert not lacks[1].state.get(lacks[0]["bias"])


def test_a_mean_that_is_not_finite_is_left() -> None:
    good, bad = trained(0), trained(1)
    bad[1].state[bad[0]["bias"]]["exp_avg"][0] = torch.inf
    before = good[1].state[good[0]["weight"]]["exp_avg"].clone()
    averaged(("exp_avg",), good, bad)
    assert torch.equal(good[1].state[good[0]["weight"]]["exp_avg"], before)


class Learner(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 2)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.layer(batch) - batch[:, :2]).square().mean()

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05)


@pytest.mark.parametrize(
    ("steps", "equal"), [(4, ()), (8, ("exp_avg",)), (16, ("exp_avg", "exp_avg_sq"))]
)
def test_at_their_periods(steps: int, equal: tuple[str, ...]) -> None:
    """With H = 4, at the end of round 1, 2 and 4."""
    strategy = SimulatedLocalStepsStrategy(
        Identity(), every=4, workers=2, moments=InnerMoments({"exp_avg": 2, "exp_avg_sq": 4})
    )
    seen: list[dict[str, Tensor]] = []

    def look(worker: int) -> None:
        with strategy._entered(worker):
            (states,) = [dict(optimizer.state) for optimizer in strategy.optimizers]
            seen.append({k: v.clone() for k, v in next(iter(states.values())).items()})

    class Look(pl.Callback):
        def on_train_end(self, *_: Any) -> None:
            look(0)
            look(1)

    data = torch.randn(2 * 16, 3, 4, generator=torch.Generator().manual_seed(1))
    trainer = pl.Trainer(
        strategy=strategy, devices=1, accelerator="cpu", max_steps=steps, logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accumulate_grad_batches=2, callbacks=[Look()],
    )  # fmt: skip
    rows: Any = list(data)
    with unwarned():
        trainer.fit(Learner(), torch.utils.data.DataLoader(rows, batch_size=None))
    for kind in ("exp_avg", "exp_avg_sq"):
        assert torch.equal(seen[0][kind], seen[1][kind]) == (kind in equal), kind


def test_refusals() -> None:
    params, optimizer = trained(0)
    with pytest.raises(ValueError, match="no optimizer keeps momentum_buffer; they keep exp_avg"):
        Moments(("momentum_buffer",), params, [optimizer])
    with pytest.raises(ValueError, match=r"step of weight has shape \(\).*leave step out"):
        Moments(("step",), params, [optimizer])
    with pytest.raises(ValueError, match="name a moment"):
        InnerMoments({})
    with pytest.raises(ValueError, match="period of exp_avg must be"):
        InnerMoments({"exp_avg": 0})
    with pytest.raises(ValueError, match="use delay=0"):
        RoundPlan(8, delay=2, moments=InnerMoments())
