"""Loops that move weights without a counted step, or count a step that trains nothing."""

import copy
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import torch.distributed as dist
from lightning_fabric import Fabric
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from lightning_gc import Identity, LocalSteps, Together
from lightning_gc.lightning.for_pytorch_lightning import SimulatedLocalStepsStrategy
from tests.support.accelerator import WORKERS
from tests.support.fitting import digest, fit, unwarned
from tests.support.local_steps import Learner, local
from tests.support.models import own_batches
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes
EVERY = 2


class SAM(torch.optim.Optimizer):
    """Steps at the gradient of a point uphill, by an optimizer that it holds."""

    def __init__(self, params: Any, **settings: Any) -> None:
        super().__init__(params, {"lr": 0.1})
        self.base_optimizer = torch.optim.SGD(self.param_groups, momentum=0.9, **settings)
        self.kept: list[Tensor] = []

    @property
    def params(self) -> list[Any]:
        return [param for group in self.param_groups for param in group["params"]]

    @torch.no_grad()
    def first_step(self) -> None:
        self.kept = [param.clone() for param in self.params]
        for param in self.params:
            param.add_(param.grad, alpha=0.05)  # type: ignore[arg-type]

    @torch.no_grad()
    def second_step(self) -> None:
        for param, kept in zip(self.params, self.kept, strict=True):
            param.data = kept
        self.base_optimizer.step()
        self.zero_grad()

    def step(self, closure: Any = None) -> Any:
        self.first_step()
        with torch.enable_grad():
            closure()
        self.second_step()


class Forwards(torch.optim.Optimizer):
    """Hands all on to the optimizer that it has, as ``AcceleratedOptimizer`` does."""

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer

    def step(self, closure: Any = None) -> Any:
        return self.optimizer.step(closure)

    def train(self) -> Any:
        return self.optimizer.train()

    def eval(self) -> Any:
        return self.optimizer.eval()

    @property
    def param_groups(self) -> Any:  # type: ignore[override]
        return self.optimizer.param_groups


def sgd(params: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def together(params: Iterator[Tensor]) -> Together:
    first, *others = params
    return Together([sgd([first]), torch.optim.AdamW(others)])


class Loop:
    """A loop of a user's own, in which something is odd."""

    def __init__(
        self,
        worker: int,
        made: Callable[..., Any] = sgd,
        model: nn.Module | None = None,
        every: int = EVERY,
    ) -> None:
        torch.manual_seed(0)
        self.model = model or nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        self.optimizer = made(self.model.parameters())
        self.local = LocalSteps(self.model, self.optimizer, Identity(), every=every)
        self.draw = torch.Generator().manual_seed(worker)

    def backward(self) -> Tensor:
        loss: Tensor = self.model(torch.randn(3, 4, generator=self.draw)).square().mean()
        loss.backward()
        return loss

    def steps(self, number: int, optimizer: Any = None) -> None:
        for _ in range(number):
            self.model.zero_grad()
            self.backward()
            (optimizer or self.optimizer).step()

    @torch.no_grad()
    def by_hand(self, number: int) -> None:
        for _ in range(number):
            self.model.zero_grad()
            with torch.enable_grad():
                self.backward()
            for param in self.model.parameters():
                param.sub_(param.grad, alpha=0.1)  # type: ignore[arg-type]


def new_optimizer(worker: int) -> Loop:
    loop = Loop(worker)
    loop.steps(3)
    loop.optimizer = torch.optim.AdamW(loop.model.parameters())
    loop.steps(1)
    return loop


def new_in_fabric(worker: int) -> Loop:
    fabric = Fabric(accelerator="cpu", devices=WORKERS, strategy="ddp")
    fabric.launch()
    loop = Loop(worker, lambda params: fabric.setup_optimizers(sgd(params)))
    loop.steps(2)
    loop.optimizer = fabric.setup_optimizers(torch.optim.AdamW(loop.model.parameters()))
    loop.steps(1)
    return loop


def new_and_wrapped(worker: int) -> Loop:
    loop = Loop(worker, lambda params: Forwards(sgd(params)))
    loop.steps(2)
    loop.optimizer = Forwards(torch.optim.AdamW(loop.model.parameters()))
    loop.steps(1)
    return loop


def wrapped(worker: int) -> Loop:
    loop = Loop(worker, lambda params: Forwards(sgd(params)))
    loop.steps(4)
    return loop


def sam_by_hand(worker: int) -> Loop:
    loop = Loop(worker, SAM)
    for _ in range(4):
        loop.backward()
        loop.optimizer.first_step()
        loop.backward()
        loop.optimizer.second_step()
    return loop


def sam_by_closure(worker: int) -> Loop:
    loop = Loop(worker, SAM)
    for _ in range(4):
        loop.backward()
        loop.optimizer.step(loop.backward)
    return loop


def in_the_backward(worker: int) -> Loop:
    parts: list[Any] = []

    def each(params: Any) -> Together:
        parts.extend(sgd([param]) for param in params)
        return Together(parts)

    loop = Loop(worker, each)
    for param, part in zip(loop.model.parameters(), parts, strict=True):
        param.register_post_accumulate_grad_hook(lambda _, part=part: part.step())
    loop.backward()
    return loop


def a_part(worker: int) -> Loop:
    loop = Loop(worker, together)
    loop.steps(1, loop.optimizer.optimizers[1])
    return loop


def second_of_two(worker: int) -> Loop:
    loop = Loop(worker)
    other = torch.optim.AdamW(loop.model[2].parameters())  # type: ignore[index]
    loop.steps(1)
    other.step()
    return loop


def of_another_model(worker: int) -> Loop:
    """As in a GAN: what another optimizer trains is not exchanged here."""
    loop = Loop(worker)
    other = nn.Linear(2, 2)
    second = torch.optim.AdamW(other.parameters())
    for _ in range(4):
        loop.steps(1)
        other(torch.ones(2)).sum().backward()
        second.step()
    return loop


def without_optimizer(worker: int) -> Loop:
    loop = Loop(worker)
    loop.steps(1)
    loop.by_hand(EVERY + 1)
    return loop


def on_one_worker(worker: int) -> Loop:
    """After the last exchange: nobody steps any more, and all must end equal."""
    loop = Loop(worker)
    loop.steps(2)
    if worker == 1:
        loop.by_hand(1)
    return loop


def loaded(worker: int) -> Loop:
    loop = Loop(worker)
    loop.steps(3)
    loop.model[0].load_state_dict(nn.Linear(4, 8).state_dict())  # type: ignore[index]
    loop.steps(1)
    return loop


def loaded_and_reset(worker: int) -> Loop:
    loop = Loop(worker)
    loop.steps(3)
    loop.model[0].load_state_dict(nn.Linear(4, 8).state_dict())  # type: ignore[index]
    loop.local.reset()
    loop.steps(2)
    return loop


def best_at_the_end(worker: int) -> Loop:
    """Within a round; another part of the weights on each worker would be averaged in."""
    loop = Loop(worker)
    loop.steps(3)
    loop.model.load_state_dict(best().state_dict())
    return loop


def best() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def swapped_at_the_end(worker: int) -> Loop:
    """Within a round, by ``.data``, as averages of weights are put in."""
    loop = Loop(worker)
    loop.steps(3)
    for param in loop.model.parameters():
        param.data.mul_(0.5)
    return loop


def shown_at_the_end(worker: int) -> Loop:
    """Within a round; the worker's own are back before the last exchange."""
    loop = Loop(worker, model=Bounded())
    loop.steps(3)
    with loop.local.common_weights():
        loop.model(torch.ones(3, 4))
    loop.model(torch.ones(3, 4))
    return loop


def set_between(worker: int) -> Loop:
    loop = Loop(worker)
    loop.steps(2)
    loop.model[2].weight.data.fill_(0.5 + worker)  # type: ignore[index]
    loop.steps(2)
    return loop


def bounded_in_a_hook(worker: int) -> Loop:
    def made(params: Any) -> Any:
        own = list(params)
        optimizer = sgd(own)

        def bound(*_: Any) -> None:
            for param in own:
                param.data.clamp_(-0.2, 0.2)

        optimizer.register_step_post_hook(bound)
        return optimizer

    loop = Loop(worker, made)
    loop.steps(4)
    return loop


class Bounded(nn.Module):
    """Bounds its rows in each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.Embedding(4, 4, max_norm=0.1)
        self.head = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.rows(x.argmax(1)))
        return output


def accumulated(worker: int) -> Loop:
    """More passes than steps of a round, in which the weights change within a pass only."""
    loop = Loop(worker, model=Bounded())
    for _ in range(2 * EVERY):
        for _ in range(3 * EVERY):
            loop.backward()
        loop.optimizer.step()
        loop.optimizer.zero_grad()
    return loop


def without_backward(worker: int) -> Loop:
    loop = Loop(worker)
    for _ in range(EVERY):
        loop.optimizer.step()
    return loop


def a_copy(worker: int) -> Loop:
    loop = Loop(worker)
    given, loop.model = loop.model, copy.deepcopy(loop.model)
    loop.steps(EVERY)
    loop.model = given
    return loop


def evolution(worker: int) -> Loop:
    """Steps without gradients that do change weights."""

    class Walks(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            with torch.no_grad():
                for param in self.param_groups[0]["params"]:
                    param.add_(0.01)

    loop = Loop(worker, lambda params: Walks(params, lr=0.1))
    for _ in range(2 * EVERY):
        loop.optimizer.step()
    return loop


def step_that_raised(worker: int) -> Loop:
    """A loop goes on after an error in a step, as after one of memory."""
    loop = Loop(worker)

    def fails() -> None:
        raise LookupError

    with pytest.raises(LookupError):
        loop.optimizer.step(fails)
    loop.steps(4)
    return loop


def cast(worker: int) -> Loop:
    loop = Loop(worker)
    loop.steps(2)
    loop.model.to(torch.bfloat16)
    loop.draw = torch.Generator().manual_seed(0)
    x = torch.randn(3, 4, generator=loop.draw, dtype=torch.bfloat16)
    loop.model(x).sum().backward()
    loop.optimizer.step()
    return loop


def not_finite(worker: int) -> Loop:
    model = nn.Linear(4, 2)
    nn.init.constant_(model.weight, torch.nan)
    loop = Loop(worker, model=model)
    loop.steps(1)
    return loop


def short(worker: int) -> Loop:
    loop = Loop(worker, every=1000)
    loop.steps(2)
    return loop


def compiled(worker: int) -> Loop:
    loop = Loop(worker)
    model = loop.model
    loop.model = torch.compile(model, backend="eager", fullgraph=True)  # type: ignore[assignment]
    loop.steps(4)
    loop.model = model
    return loop


STEPPED = "counts the steps of the SGD that it was given, but another"
LOOPS: dict[Any, tuple[str, int]] = {
    new_optimizer: (f"{STEPPED} AdamW steps 0.weight", 1),
    new_in_fabric: (f"{STEPPED} AdamW steps 0.weight", 1),
    new_and_wrapped: (f"{STEPPED} AdamW steps 0.weight", 1),
    wrapped: ("", 2),
    sam_by_hand: ("", 2),
    sam_by_closure: ("", 2),
    in_the_backward: ("another SGD steps 2.bias. Such steps", 0),
    a_part: ("Call the step() of Together that holds it", 0),
    second_of_two: (f"{STEPPED} AdamW steps 2.weight", 0),
    of_another_model: ("", 2),
    without_optimizer: ("have changed in 2 or more forward passes without a step", 1),
    on_one_worker: ("without a step of its optimizer: 0.weight and 3 more", 2),
    loaded: ("were loaded into Linear since the last step", 1),
    loaded_and_reset: ("", 2),
    best_at_the_end: ("into Sequential since the last step, so finish() gives worker 0's", 1),
    swapped_at_the_end: ("changed since the last step without a step of its optimizer: 0.", 2),
    shown_at_the_end: ("", 2),
    set_between: ("without a step of its optimizer: 2.weight. The change", 2),
    bounded_in_a_hook: ("", 2),
    accumulated: ("", 2),
    without_backward: ("2 steps of SGD in a row in which no exchanged weight", 1),
    a_copy: ("2 steps of SGD in a row in which no exchanged weight", 1),
    evolution: ("", 2),
    step_that_raised: ("", 2),
    cast: ("0.weight is torch.bfloat16 on cpu now, but was torch.float32", 1),
    not_finite: ("that all workers begin with are not finite: weight.", 0),
    short: ("LocalSteps(every=1000): the run has 2 steps", 1),
    compiled: ("", 2),
}
"""Loop -> what is said on some worker, "" if it trains right; rounds that are exchanged."""


def looped(worker: int) -> dict[str, tuple[str, int, str]]:
    dist.init_process_group("gloo")
    found = {}
    for case in LOOPS:
        made: list[LocalSteps] = []
        with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always", UserWarning)
            began = LocalSteps.__init__

            def noting(
                self: LocalSteps, *args: Any, b: Any = began, m: Any = made, **kw: Any
            ) -> None:
                m.append(self)
                b(self, *args, **kw)

            patch.setattr(LocalSteps, "__init__", noting)
            try:
                loop = case(worker)
                loop.local.finish()
                ends = digest(loop.model)
            except (RuntimeError, ValueError) as error:
                made[0].end(failed=True)
                ends, text = "", str(error)
            else:
                text = " ".join(str(each.message) for each in caught)
        found[case.__name__] = text, made[0]._workers.first.step, ends
    return found


@pytest.fixture(scope="module")
def loops() -> list[dict[str, tuple[str, int, str]]]:
    found: list[dict[str, tuple[str, int, str]]] = run_in_processes(looped, WORKERS, timeout=200)
    return found


@pytest.mark.parametrize("case", LOOPS, ids=lambda case: case.__name__)
def test_a_loop_is_right_or_told(case: Any, loops: list[dict[str, tuple[str, int, str]]]) -> None:
    """Within a round, on all workers that do it; those that end have equal weights."""
    words, rounds = LOOPS[case]
    texts, counts, ends = zip(*(each[case.__name__] for each in loops), strict=True)
    assert counts == (rounds,) * WORKERS
    assert len(set(ends)) == 1
    told = [text for text in texts if words in text]
    assert told if words else texts == ("",) * WORKERS, texts
    assert case is on_one_worker or len(told) == WORKERS


def test_sam_by_hand_is_sam_by_a_closure(loops: list[dict[str, tuple[str, int, str]]]) -> None:
    for each in loops:
        assert each["sam_by_hand"] == each["sam_by_closure"]


def test_weights_loaded_before_the_end_keep_every_bit(
    loops: list[dict[str, tuple[str, int, str]]],
) -> None:
    assert [each["best_at_the_end"][2] for each in loops] == [digest(best())] * WORKERS


class Steps(pl.Callback):
    """Makes a step of an optimizer after a batch, without the Trainer."""

    def __init__(self, own: bool) -> None:
        self.own = own

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *_: Any) -> None:
        other = torch.optim.AdamW(pl_module.parameters())
        (trainer.optimizers[0] if self.own else other).step()


class Detached(Learner):
    """Has a loss that depends on no weight."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.loss(batch, batch_idx).detach().requires_grad_()


class Broken(Learner):
    def __init__(self) -> None:
        super().__init__()
        self.head.weight.data.fill_(torch.nan)


class Remembers(torch.optim.SGD):
    """Keeps an object in its state."""

    def step(self, closure: Any = None) -> Any:
        found = super().step(closure)
        self.state[self.param_groups[0]["params"][0]]["seen"] = Fraction(1, 3)
        return found


class Remembering(Learner):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return Remembers(self.parameters(), lr=0.1)


FITS: dict[str, tuple[dict[str, Any], str]] = {
    "another optimizer": ({"callbacks": [Steps(own=False)]}, "another AdamW steps body.0.weight"),
    "its optimizer": ({"callbacks": [Steps(own=True)]}, "Let the Trainer make all steps"),
    "detached": ({"module": Detached}, "steps of SGD in a row in which no exchanged weight"),
    "an object": ({"module": Remembering}, "Remembers has Fraction at ['state'][0]['seen']"),
    "not finite": ({"module": Broken}, "are not finite: head.weight"),
    "one round": ({"every": 1000}, "(every=1000): the run has 4 steps, fewer than a round"),
}


def fitted(worker: int, simulated: bool = False) -> dict[str, str]:
    found = {}
    for name, (case, _) in FITS.items():
        settings: dict[str, Any] = {"module": Learner, "every": EVERY} | case
        module, every = settings.pop("module"), settings.pop("every")
        if simulated:
            strategy: Any = SimulatedLocalStepsStrategy(Identity(), workers=WORKERS, every=every)
            batches = own_batches(0, 4 * WORKERS)
        else:
            strategy, batches = local(Identity(), every=every), own_batches(worker, 4)
            settings |= {"devices": WORKERS, "use_distributed_sampler": False}
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                fit(strategy, module, batches, **settings)
            except (RuntimeError, ValueError) as error:
                found[name] = str(error)
            else:
                found[name] = " ".join(str(each.message) for each in caught)
    return found


def test_a_fit_is_told() -> None:
    """With real and with simulated workers."""
    for worker, said in enumerate((*run_in_processes(fitted, WORKERS), fitted(0, simulated=True))):
        for name, (_, words) in FITS.items():
            told = words in said[name] or (name == "one round" and worker == 1)
            assert told, (worker, name, said[name])


def filled(worker: int) -> list[str]:
    """Let torch fill an empty state by a step at a rate of 0, then make a round of two steps."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    found = []
    with LocalSteps(net, optimizer, Identity(), every=2):
        get_optimizer_state_dict(net, optimizer)
        assert optimizer.state
        for x in own_batches(worker, 2, 4):
            optimizer.zero_grad()
            net(x[:, :4]).square().mean().backward()
            optimizer.step()
            found.append(digest(net))
    return found


def test_a_step_that_fills_an_optimizer_is_no_step_of_a_round() -> None:
    zero, one = run_in_processes(filled, 2)
    assert [a == b for a, b in zip(zero, one, strict=True)] == [False, True]


def test_an_optimizer_that_no_checkpoint_has_may_keep_objects() -> None:
    strategy = SimulatedLocalStepsStrategy(Identity(), workers=WORKERS, every=2, state="off")
    with unwarned():
        assert fit(strategy, Remembering, own_batches(0, 4 * WORKERS))


class Filling(pl.Callback):
    """Lets torch fill the optimizer's state, as tools for checkpoints do."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        get_optimizer_state_dict(pl_module, trainer.optimizers[0])


def test_nor_is_it_one_under_the_trainer() -> None:
    found = []
    for callbacks in ([], [Filling()]):
        strategy = SimulatedLocalStepsStrategy(Identity(), workers=WORKERS, every=2)
        with unwarned():
            fitted = fit(
                strategy, partial(Learner, 0.9), own_batches(0, 4 * WORKERS), callbacks=callbacks
            )
        found.append(fitted["digest"])
    assert found[0] == found[1]
