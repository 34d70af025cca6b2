"""Together steps, saves and loads several optimizers as they would by themselves."""

import copy
import pickle
from collections import defaultdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as lrs

from lightning_gc import Together
from lightning_gc.lightning.progress import Scheduled, forecast
from tests.support.optimizers import parts

ROWS = torch.randn(8, 8, generator=torch.Generator().manual_seed(0))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(8, 6), nn.Linear(6, 2)

    def loss(self) -> Tensor:
        output: Tensor = self.head(self.body(ROWS))
        return output.square().mean()


def stepped(model: Net, *optimizers: torch.optim.Optimizer) -> None:
    for each in optimizers:
        each.zero_grad()
    model.loss().backward()
    for each in optimizers:
        each.step()


def weights(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in model.parameters()]


def equal(one: nn.Module, other: nn.Module) -> bool:
    return all(torch.equal(*pair) for pair in zip(weights(one), weights(other), strict=True))


def test_it_steps_as_the_parts_do() -> None:
    alone, joined = Net(), Net()
    muon, adam = parts(alone)
    together = Together(parts(joined))
    for _ in range(3):
        stepped(alone, muon, adam)
        together.zero_grad()
        losses: list[Tensor] = []

        def closure(losses: list[Tensor] = losses) -> Tensor:
            losses.append(joined.loss())
            losses[-1].backward()
            return losses[-1]

        assert together.step(closure) is losses[0]
        assert len(losses) == 1, "the closure is called once for all parts"
    assert equal(alone, joined)


def test_a_saved_state_goes_on() -> None:
    """Also after a copy and a pickle, and in the format of torch: numbered in order."""
    model, again = Net(), Net()
    one = Together(parts(model))
    for _ in range(2):
        stepped(model, one)
    saved = copy.deepcopy(one.state_dict())
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    assert numbers == list(range(4)) == list(saved["state"])
    again.load_state_dict(model.state_dict())
    other = Together(parts(again))
    other.param_groups[1]["lr"] = 7.0
    other.load_state_dict(state_dict=saved)
    assert other.param_groups[1] is other.optimizers[1].param_groups[0]
    assert other.param_groups[1]["lr"] == one.param_groups[1]["lr"]
    stepped(model, one)
    stepped(again, other)
    assert equal(model, again)
    for made in (copy.deepcopy(one), pickle.loads(pickle.dumps(one))):  # noqa: S301 - our own
        assert repr(made.state_dict()) == repr(one.state_dict())


def test_its_state_can_be_exchanged() -> None:
    """As simulated workers do: each keeps what it has seen, and begins with nothing."""
    model = Net()
    together = Together(parts(model))
    stepped(model, together)
    mine, weight = together.state, model.head.weight
    together.state = defaultdict(dict)  # type: ignore[assignment]
    assert not together.state
    stepped(model, together)
    theirs = together.state
    assert theirs[weight]["step"] == 1
    stepped(model, together)
    together.state = mine
    assert together.state[weight] is mine[weight] is together.optimizers[1].state[weight]
    assert (theirs[weight]["step"], mine[weight]["step"]) == (2, 1)
    together.state[weight] = {}
    assert together.optimizers[1].state[weight] == {}
    assert len(mine) == len(list(mine)) == 4


def test_a_scaler_skips_all_parts_or_none() -> None:
    """Of separate optimizers it would skip the one alone whose gradient is not finite."""
    model = Net()
    together = Together(parts(model))
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for bad in (False, True, False):
        before = weights(model)
        together.zero_grad()
        scaler.scale(model.loss()).backward()
        if bad:
            model.head.bias.grad.fill_(torch.inf)  # type: ignore[union-attr]
        scaler.step(together)
        scaler.update()
        moved = [not torch.equal(*pair) for pair in zip(before, weights(model), strict=True)]
        assert moved == [not bad] * 4
    assert scaler.get_scale() == 4.0


def test_clipping_sees_all_parts() -> None:
    model = Net()
    together = Together(parts(model))
    model.loss().backward()
    given = [param for group in together.param_groups for param in group["params"]]
    nn.utils.clip_grad_norm_(given, 0.1)
    norms = torch.stack([param.grad.norm() for param in model.parameters()])  # type: ignore[union-attr]
    assert float(norms.norm()) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize("whole", [True, False])
def test_schedulers(whole: bool) -> None:
    """Of the whole, or of the parts; they resume, and can be forecast."""
    model = Net()
    together = Together(parts(model))
    muon, adam = together.optimizers
    made: list[Any] = [lrs.ExponentialLR(muon, 0.5), lrs.StepLR(adam, 2, 0.1)]
    line = lrs.StepLR(together, 2, 0.1) if whole else together.scheduler(made)
    found = forecast([together], [Scheduled(line, 1)], 0, 4)
    seen = []
    for _ in range(4):
        seen.append(max(group["lr"] for group in together.param_groups))
        stepped(model, together)
        line.step()
    assert found == pytest.approx(seen)
    assert line.get_last_lr() == [group["lr"] for group in together.param_groups]
    assert together.param_groups[1]["lr"] == pytest.approx(0.01 * 0.01)
    if not whole:
        assert together.param_groups[0]["lr"] == pytest.approx(0.02 * 0.5**4)
        other = Together(parts(Net()))
        again = other.scheduler([lrs.ExponentialLR(o, 0.5) for o in other.optimizers[:1]])
        again.load_state_dict(line.state_dict())
        assert again.last_epoch == line.last_epoch == 4


def test_hooks_of_its_state_run() -> None:
    together, called = Together(parts(Net())), []
    together.register_state_dict_post_hook(lambda _, state: called.append("saved"))
    together.register_load_state_dict_pre_hook(lambda _, state: called.append("before"))
    together.register_load_state_dict_post_hook(lambda _: called.append("after"))
    together.load_state_dict(together.state_dict())
    assert called == ["saved", "before", "after"]


class Keeps(torch.optim.SGD):
    """Counts its steps in an entry that is of no parameter."""

    def step(self, closure: Any = None) -> Any:
        self.state["steps"] = {"count": 1}  # type: ignore[index]


class Own(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {}


def of(kind: Any, model: nn.Module) -> Any:
    return kind(model.parameters(), lr=0.1)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda m: Together([]), "at least one optimizer"),
        (lambda m: Together([m]), "instances of torch.optim.Optimizer"),
        (lambda m: Together([of(torch.optim.SGD, m)] * 2), "in SGD and in SGD"),
        (lambda m: Together([Together(parts(m))]), "give its parts"),
        (lambda m: Together([of(Own, m)]), "Own has its own form of state_dict"),
        (lambda m: Together([of(torch.optim.LBFGS, m)]), "LBFGS.step needs a closure"),
        (lambda m: Together(parts(m)).add_param_group({}), "which part is to train"),
        (lambda m: Together(parts(m)).scheduler([lrs.StepLR(of(Own, m), 1)]), "is of Own, which"),
        (
            lambda m: (lambda t: t.scheduler([lrs.ReduceLROnPlateau(t.optimizers[0])]))(
                Together(parts(m))
            ),
            "needs a metric",
        ),
        (
            lambda m: Together(parts(m)).load_state_dict({"state": {}, "param_groups": [{}]}),
            "has 2 parameter groups, but the state to load has 1",
        ),
        (
            lambda m: Together(parts(m)[::-1]).load_state_dict(Together(parts(m)).state_dict()),
            "in the order in which they were saved",
        ),
        (
            lambda m: (lambda t: (t.step(), t.state_dict()))(Together([of(Keeps, m)])),
            "Keeps keeps 'steps', which",
        ),
    ],
)
def test_refused(make: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        make(Net())
