"""The forecast of learning rates is what the schedulers do, and leaves them alone."""

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler as lrs

from lightning_gc.lightning.progress import Scheduled, forecast

TOTAL, EPOCH = 60, 10
MAKES: dict[str, Callable[[Any], Any]] = {
    "steps": lambda o: lrs.StepLR(o, 7, 0.5),
    "milestones": lambda o: lrs.MultiStepLR(o, [20, 45]),
    "exponential": lambda o: lrs.ExponentialLR(o, 0.9),
    "cosine": lambda o: lrs.CosineAnnealingLR(o, TOTAL),
    "restarts": lambda o: lrs.CosineAnnealingWarmRestarts(o, 9),
    "one cycle": lambda o: lrs.OneCycleLR(o, 1.0, TOTAL + 1),
    "cyclic": lambda o: lrs.CyclicLR(o, 0.1, 1.0, 5),
    "polynomial": lambda o: lrs.PolynomialLR(o, TOTAL, 2.0),
    "lambda": lambda o: lrs.LambdaLR(o, lambda step: 1 / (1 + step)),
    "warm-up": lambda o: lrs.SequentialLR(
        o, [lrs.LinearLR(o, 0.01, total_iters=10), lrs.CosineAnnealingLR(o, 50)], [10]
    ),
    "chained": lambda o: lrs.ChainedScheduler([lrs.LinearLR(o), lrs.ExponentialLR(o, 0.95)]),
    "plateau": lambda o: lrs.ReduceLROnPlateau(o),
}


@pytest.mark.parametrize("every", [1, EPOCH])
@pytest.mark.parametrize("done", [0, 13])
@pytest.mark.parametrize("name", MAKES)
def test_it_is_what_the_schedulers_do(name: str, done: int, every: int) -> None:
    layer = torch.nn.Linear(3, 3)
    groups = [{"params": [layer.weight], "lr": 0.5}, {"params": [layer.bias], "lr": 0.3}]
    optimizer = torch.optim.AdamW(groups) if name == "warm-up" else torch.optim.SGD(groups, 0.5)
    scheduler = MAKES[name](optimizer)
    seen, found = [], []
    for step in range(TOTAL):
        if step == done:
            before = repr(optimizer.state_dict()), repr(vars(scheduler))
            found = forecast([optimizer], [Scheduled(scheduler, every)], done, TOTAL)
            assert (repr(optimizer.state_dict()), repr(vars(scheduler))) == before
        seen.append(max(group["lr"] for group in optimizer.param_groups))
        layer(torch.ones(3)).sum().backward()
        optimizer.step()
        if (step + 1) % every == 0 and name != "plateau":
            scheduler.step()
    assert found == pytest.approx(seen[done:], rel=1e-9)


def test_a_run_without_a_schedule_keeps_its_rate() -> None:
    layer = torch.nn.Linear(3, 3)
    optimizers = [torch.optim.SGD(layer.parameters(), rate) for rate in (0.1, 0.2)]
    assert forecast(optimizers, [], 3, 7) == [0.2] * 4


class Module:
    """Has what cannot be copied, as a LightningModule with its trainer has."""

    def __init__(self) -> None:
        self.lock = threading.Lock()

    def factor(self, step: int) -> float:
        return 0.5**step


def test_a_schedule_that_is_a_method_of_the_module() -> None:
    """The module is not copied, also where the scheduler is one of several."""
    for nested in (False, True):
        sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        scheduler: Any = lrs.LambdaLR(sgd, Module().factor)
        scheduler = lrs.ChainedScheduler([scheduler]) if nested else scheduler
        assert forecast([sgd], [Scheduled(scheduler, 1)], 0, 3) == [1.0, 0.5, 0.25]
        assert sgd.param_groups[0]["lr"] == 1.0
