"""Loops that bypass the exchange end at the first wrong step; loops with pauses are right."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import QSGD, Together, attach
from tests.processes.test_attach import Loop, Net, batches
from tests.processes.test_fabric import PACKAGES, FabricLoop
from tests.support.fitting import digest, unwarned
from tests.support.processes import run_in_processes, said

pytestmark = pytest.mark.processes
STEPS = 4


def error(out: Tensor, x: Tensor) -> Tensor:
    return (out - x[:, :4]).square().mean()


def through(loop: Any, x: Tensor) -> None:
    error(loop.ddp(x), x).backward()


def module(loop: Any, x: Tensor) -> None:
    error(loop.ddp.module(x), x).backward()


def method(loop: Any, x: Tensor) -> None:
    loop.ddp.module.training_step(x).backward()


def no_sync(loop: Any, x: Tensor) -> None:
    with loop.ddp.no_sync():
        through(loop, x)


def by_hand(loop: Any, x: Tensor) -> None:
    params = list(loop.net.parameters())
    grads = torch.autograd.grad(error(loop.net(x), x), params)
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad


WAYS: tuple[Callable[[Any, Tensor], None], ...] = (module, method, no_sync, by_hand)
WRONG = {"at first": (0, 1, 2, 3), "later": (2, 3), "once": (1,)}


class Bypassing(Loop):
    """A loop whose backward pass goes ``way`` in the steps ``wrong``."""

    made = 0

    def train(self, way: Any, wrong: tuple[int, ...]) -> None:
        for step in range(STEPS):
            self.optimizer.zero_grad()
            (way if step in wrong else through)(self, self.data[step])
            self.optimizer.step()
            self.made += 1


def bypassing(worker: int) -> dict[str, tuple[str, int]]:
    dist.init_process_group("gloo")
    found = {}
    for way in WAYS:
        for when, wrong in WRONG.items():
            for given in (True, False):
                options: dict[str, Any] = {} if given else {"optimizers": None}
                loop = Bypassing(worker, QSGD(4), **options)
                text = said(loop.train, way, wrong)
                found[f"{way.__name__} {when} {given}"] = text, loop.made - wrong[0]
                loop.handle.close()
    loop.train(module, WRONG["at first"])  # closed: it exchanges nothing and says nothing
    return found


def test_the_first_step_without_an_exchange_is_refused() -> None:
    """Whether ``attach`` was given the optimizer or not; plain DDP lets workers drift apart."""
    for found in run_in_processes(bypassing, 2):
        for case, (text, late) in found.items():
            assert text.startswith("RuntimeError: SGD.step was called, but no gradient has"), case
            assert "ddp(x), not ddp.module" in text
            assert "outside of no_sync()" in text
            assert late == 0, case


def with_closures(worker: int) -> tuple[str, str, str]:
    dist.init_process_group("gloo")

    def train(way: Any) -> str:
        loop = Loop(worker, QSGD(4))
        optimizer = torch.optim.LBFGS(loop.net.parameters(), lr=0.1, max_iter=4)

        def closure() -> Tensor:
            optimizer.zero_grad()
            way(loop, loop.data[0])
            return torch.zeros(())

        text = said(lambda: [optimizer.step(closure) for _ in range(2)])
        loop.handle.close()
        return text or digest(loop.net)

    return train(module), train(no_sync), train(through)


def test_a_closure_is_judged_when_it_has_run() -> None:
    zero, one = run_in_processes(with_closures, 2)
    assert zero[2] == one[2]
    for text in (*zero[:2], *one[:2]):
        assert text.startswith("RuntimeError: LBFGS.step was called, but no gradient")


def in_backward(worker: int) -> tuple[str, ...]:
    """One optimizer per parameter steps in a hook; torch's own way, before and after attach."""
    dist.init_process_group("gloo")
    loop = Loop(worker, QSGD(4), optimizers=None)
    for param in loop.net.parameters():
        own = torch.optim.SGD([param], lr=0.1)
        param.register_post_accumulate_grad_hook(lambda _, own=own: own.step())
    hooked = said(through, loop, loop.data[0])
    loop.handle.close()
    with unwarned():  # of torch.jit
        from torch.distributed.optim.apply_optimizer_in_backward import _apply_optimizer_in_backward
    before, after = Net(), Loop(worker, QSGD(4))
    for net in (before, after.net):
        _apply_optimizer_in_backward(torch.optim.SGD, net.parameters(), {"lr": 0.1})
    refused = said(attach, DistributedDataParallel(before), QSGD(4))
    return hooked, refused, said(through, after, after.data[0])


def test_an_optimizer_that_steps_in_the_backward_pass_is_refused() -> None:
    for hooked, *torchs in run_in_processes(in_backward, 2):
        assert hooked.startswith("RuntimeError: SGD.step was called, but no gradient")
        assert "Call step() after loss.backward()" in hooked
        for text in torchs:
            assert text.startswith("RuntimeError: body.0.weight has an optimizer that steps within")


class Parts(nn.Module):
    """Uses ``head`` only if asked to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(16, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, whole: bool = False) -> Tensor:
        out: Tensor = self.body(x)
        return self.head(out) if whole else out


def waiting(worker: int) -> dict[str, str]:
    """A parameter that no loss reaches, in one of several ways; what the step says."""
    dist.init_process_group("gloo")

    def train(prepare: Any, whole: tuple[bool, ...], **options: Any) -> str:
        torch.manual_seed(0)
        net = Parts()
        ddp = DistributedDataParallel(net, **options)
        handle = attach(ddp, QSGD(4), min_numel=0)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)

        def steps() -> None:
            for step, x in enumerate(batches(worker)[: len(whole)]):
                prepare(net, step)
                optimizer.zero_grad(set_to_none=False)
                error(ddp(x, whole=whole[step]), x).backward()
                optimizer.step()

        text = said(steps)
        handle.close()
        return text or digest(net)

    def freeze(net: Parts, step: int) -> None:
        net.head.requires_grad_(step == 0)

    def left_over(net: Parts, step: int) -> None:
        pass

    return {
        "never used": train(left_over, (False,)),
        "used before": train(left_over, (True, False)),
        "frozen late": train(freeze, (True, True)),
        "static": train(left_over, (True, False), static_graph=True),
        "allowed": train(left_over, (True, False), find_unused_parameters=True),
    }


def test_parameters_that_the_loss_does_not_reach_are_named() -> None:
    """With the setting that allows them, whether or not they have a gradient of an earlier step."""
    zero, one = run_in_processes(waiting, 2)
    assert zero["allowed"] == one["allowed"]
    for found in (zero, one):
        for case in ("never used", "used before", "frozen late", "static"):
            text = found[case]
            assert text.startswith("RuntimeError: SGD.step was called, but no gradient has"), case
            assert "gradients of head.weight and head.bias, which" in text, case
            assert "DistributedDataParallel(..., find_unused_parameters=True)" in text, case
            assert "ddp.module" not in text, case
            assert ("frozen after DDP was made" in text) == (case == "frozen late")
            assert ("static_graph=True allows no" in text) == (case == "static")


def in_fabric(worker: int, package: str) -> dict[str, str]:
    def train(way: Any) -> str:
        loop = FabricLoop(package, worker, QSGD(4))

        def steps() -> None:
            for x in loop.data[:STEPS]:
                loop.wrapped.zero_grad()
                way(loop, x)
                loop.wrapped.step()

        text = said(steps)
        loop.handle.close()
        return text or digest(loop.net)

    def inner(loop: Any, x: Tensor) -> None:
        loop.fabric.backward(error(loop.net(x), x))

    def accumulated(loop: Any, x: Tensor) -> None:
        with loop.fabric.no_backward_sync(loop.model):
            loop.fabric.backward(error(loop.model(x), x))

    def right(loop: Any, x: Tensor) -> None:
        accumulated(loop, x[:4])
        loop.fabric.backward(error(loop.model(x[4:]), x[4:]))

    def partly(loop: Any, x: Tensor) -> None:
        loop.fabric.backward(error(loop.model(x), x), inputs=[loop.net.head.weight])

    return {way.__name__: train(way) for way in (inner, accumulated, partly, right)}


@pytest.mark.parametrize("package", PACKAGES[:1])
def test_fabric_s_inner_module_is_refused(package: str) -> None:
    zero, one = run_in_processes(in_fabric, 2, package)
    assert zero["right"] == one["right"]
    for found in (zero, one):
        for name in ("inner", "accumulated"):
            assert "SGD.step was called, but no gradient has been exchanged" in found[name]
            assert "Call the module that fabric.setup returned" in found[name]
        assert "CompressedFabricStrategy(..., find_unused_parameters=True)" in found["partly"]


def in_accelerate(worker: int) -> dict[str, str]:
    accelerate = pytest.importorskip("accelerate")
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)

    def train(way: Any) -> str:
        torch.manual_seed(0)
        net = Net()
        ddp, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.05))
        handle = attach(ddp, QSGD(4), optimizers=optimizer)

        def steps() -> None:
            for x in batches(worker)[:STEPS]:
                way(ddp, optimizer, x)
                optimizer.step()
                optimizer.zero_grad()

        text = said(steps)
        handle.close()
        return text or digest(net)

    def unwrapped(ddp: Any, optimizer: Any, x: Tensor) -> None:
        accelerator.backward(error(accelerator.unwrap_model(ddp)(x), x))

    def forgotten(ddp: Any, optimizer: Any, x: Tensor) -> None:
        with accelerator.no_sync(ddp):
            accelerator.backward(error(ddp(x), x))

    def accumulated(ddp: Any, optimizer: Any, x: Tensor) -> None:
        for part in (x[:4], x[4:]):
            with accelerator.accumulate(ddp):
                accelerator.backward(error(ddp(part), part))
                optimizer.step()
                optimizer.zero_grad()

    return {way.__name__: train(way) for way in (unwrapped, forgotten, accumulated)}


def test_accelerate_s_inner_module_is_refused() -> None:
    pytest.importorskip("accelerate")
    zero, one = run_in_processes(in_accelerate, 2)
    assert zero["accumulated"] == one["accumulated"]
    for found in (zero, one):
        for name in ("unwrapped", "forgotten"):
            assert "SGD.step was called, but no gradient has been exchanged" in found[name], found


class Nested(torch.optim.SGD):
    """Its ``step`` calls SGD's, so that torch calls the hooks of a step twice."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        return super().step(closure)


class Players(nn.Module):
    """Two networks in one module, as of a GAN; one is not used in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = Net(), Net()

    def forward(self, x: Tensor, which: str) -> Tensor:
        out: Tensor = getattr(self, which)(x)
        return out


def sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


def two_modules(worker: int) -> nn.Module:
    """A GAN: the discriminator's gradients of the generator's pass are its own worker's."""
    nets = [Net(), nn.Linear(4, 1)]
    maker, judge = (DistributedDataParallel(net) for net in nets)
    handles = [attach(each, QSGD(4)) for each in (maker, judge)]
    first, second = map(sgd, nets)
    for x in batches(worker)[:STEPS]:
        second.zero_grad()
        (judge(maker(x).detach()).mean() - judge(x[:, :4]).mean()).backward()
        second.step()
        first.zero_grad()
        judge.module(maker(x)).mean().neg().backward()
        first.step()
    for handle in handles:
        handle.close()
    return nn.ModuleList(nets)


def two_optimizers(worker: int) -> nn.Module:
    """In turn, and after a common backward pass; parameters without gradients are left alone."""
    net = Players()
    ddp = DistributedDataParallel(net, find_unused_parameters=True)
    optimizers = {"one": sgd(net.one), "other": sgd(net.other)}
    handle = attach(ddp, QSGD(4), optimizers=list(optimizers.values()))
    for x in batches(worker)[:STEPS]:
        for name, optimizer in optimizers.items():
            net.zero_grad()
            error(ddp(x, name), x).backward()
            optimizer.step()
        net.zero_grad()
        error(ddp(x, "one"), x).backward()
        for optimizer in optimizers.values():
            optimizer.step()
    handle.close()
    return net


def other_steps(worker: int) -> nn.Module:
    """Steps without gradients, with zeros, twice in one, compiled, joined, of another module."""
    loop, alone = Loop(worker, QSGD(4)), nn.Linear(16, 1)
    made = [
        Nested(loop.net.parameters(), lr=0.05),
        Together([sgd(loop.net.body), sgd(loop.net.head)]),
    ]
    get_optimizer_state_dict(loop.net, loop.optimizer)  # makes a step with gradients of zeros
    compiled = torch.compile(loop.optimizer.step, backend="eager")
    for number, x in enumerate(loop.data[:STEPS]):
        for optimizer in (*made, loop.optimizer):
            optimizer.zero_grad(set_to_none=number % 2 == 0)
            optimizer.step()
            with loop.ddp.no_sync():
                through(loop, x[:4])
            through(loop, x[4:])
            (compiled if optimizer is loop.optimizer else optimizer.step)()
        alone(x).sum().backward()
        sgd(alone).step()
    made[0].step(lambda: error(loop.ddp(loop.data[0]), loop.data[0]).backward())
    loop.handle.close()
    return loop.net


RIGHT: tuple[Callable[[int], nn.Module], ...] = (two_modules, two_optimizers, other_steps)


def right(worker: int) -> list[str]:
    dist.init_process_group("gloo")
    found = []
    for train in RIGHT:
        torch.manual_seed(0)
        found.append(digest(train(worker)))
    return found


def test_loops_that_exchange_are_left_alone() -> None:
    """Accumulation, GANs, unused parameters and steps without gradients; workers stay equal."""
    zero, one = run_in_processes(right, 2)
    assert zero == one
