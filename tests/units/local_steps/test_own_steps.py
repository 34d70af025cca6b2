"""Hooks of local steps leave a step as it is: what it compiles, and how often that runs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from lightning_gc.local_steps import refusals
from lightning_gc.local_steps.refusals import OwnSteps

STEPS = 3


class Counted:
    """A backend of torch.compile that makes nothing faster and counts."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph(*args)

        return run


def direction(grad: Tensor) -> Tensor:
    return grad / (1 + grad.abs())


class CompiledHelper(torch.optim.Optimizer):
    """Compiles a helper of its step, as low-bit Adam and Muon do."""

    def __init__(self, params: Any, helper: Callable[[Tensor], Tensor]) -> None:
        super().__init__(params, {"lr": 0.1})
        self._helper = helper

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert not _get_current_dispatch_mode_stack(), "no mode of ours is active in a step"
        for group in self.param_groups:
            for param in group["params"]:
                param.sub_(self._helper(param.grad), alpha=group["lr"])


def train(heard: bool, kind: str) -> tuple[Tensor, int, int, int]:
    """Return a weight after training, graphs made, calls of compiled code, and steps heard."""
    torch.compiler.reset()
    weight, counted, steps = nn.Parameter(torch.linspace(-1, 1, 7)), Counted(), list[int]()
    optimizer: torch.optim.Optimizer
    if kind == "step":
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
        step = torch.compile(optimizer.step, backend=counted)
    else:
        compiled = torch.compile(direction, fullgraph=kind == "fullgraph", backend=counted)
        optimizer = CompiledHelper([weight], compiled)
        step = optimizer.step
    own = OwnSteps("Test", {weight: "weight"}, lambda: 8, after=lambda: steps.append(1))
    if heard:
        own.begin([optimizer])
    try:
        for _ in range(STEPS):
            optimizer.zero_grad()
            weight.square().sum().backward()
            step()
    finally:
        own.end()
    return weight.detach(), counted.graphs, counted.calls, len(steps)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's, of torch.jit
@pytest.mark.parametrize("kind", ["fullgraph", "partial", "step"])
def test_what_a_step_compiles_is_compiled_as_often_and_called_as_often(kind: str) -> None:
    """A helper compiled as a whole or in parts, or the step itself."""
    weight, graphs, calls, _ = train(heard=False, kind=kind)
    again, graphs_heard, calls_heard, steps = train(heard=True, kind=kind)
    assert calls >= STEPS, "the check has something to see"
    assert (graphs_heard, calls_heard) == (graphs, calls)
    assert steps == STEPS
    assert torch.equal(weight, again)


def test_a_step_in_a_cuda_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Replays call no hook, so none of its steps would count."""
    weight = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    own = OwnSteps("Test", {weight: "weight"}, lambda: 8)
    own.begin([optimizer])
    monkeypatch.setattr(refusals, "_is_capturing", lambda params: True)
    with pytest.raises(RuntimeError, match="captured in a CUDA graph"):
        optimizer.step()
    own.end()
