"""Lockstep on a GPU, for tests whose gradients and comparisons stay on the CPU."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.testing import Lockstep
from lightning_gc.testing.lockstep import Round


def device() -> torch.device:
    """Return the GPU if there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


class OnDevice(Lockstep):
    """Simulated workers whose gradients and state are on the GPU.

    Args:
        around: makes a context in which each synchronisation runs.
    """

    def __init__(self, *arguments: Any, around: Callable[[], Any] | None = None) -> None:
        super().__init__(*arguments)
        if around is not None:
            run = self.transport.run

            def within(*flows: Any) -> None:
                with around():
                    run(*flows)

            self.transport.run = within  # type: ignore[method-assign, assignment]

    def step(self, gradients: Sequence[Mapping[str, Tensor]]) -> Round:
        moved = [{n: grad.to(device()) for n, grad in named.items()} for named in gradients]
        found = super().step(moved)
        mean = {n: t.cpu() for n, t in found.mean.items()}
        errors = [{n: t.cpu() for n, t in named.items()} for named in found.errors]
        return Round(mean, errors, found.wire_bytes)
