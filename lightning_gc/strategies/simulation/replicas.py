"""Replicas: weights, buffers and optimizers of W simulated workers that train apart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class Replicas:
    """Lets a module and its optimizers be those of one worker at a time.

    The module's tensors are pointed at the worker's own; nothing is copied. Costs W times weights,
    gradients and optimizer state. What optimizers keep in their parameter groups, such as a
    learning rate, is common to all workers. Of a buffer that a worker registers or resizes the next
    one gets a copy: they share what else the module knows of it.

    Args:
        module: its weights and buffers are what all workers start with.
        workers: W.
        optimizers: returns them, once they exist.

    Attributes:
        present: the worker whose weights the module has.
    """

    def __init__(
        self,
        module: nn.Module,
        workers: int,
        optimizers: Callable[[], Sequence[torch.optim.Optimizer]],
    ) -> None:
        self._module = module
        self._params = list(module.parameters())
        self._optimizers = optimizers
        here = {name: each.data for name, each in self._tensors().items()}
        others = ({n: each.clone() for n, each in here.items()} for _ in range(1, workers))
        self._own = [here, *others]
        self._states: list[list[Any]] = [[] for _ in range(workers)]
        self._grads: list[list[Tensor | None]] = []
        self.forget_gradients()
        self.present = 0

    def enter(self, worker: int) -> None:
        """Give module and optimizers this worker's tensors, gradients among them."""
        optimizers, tensors = self._optimizers(), self._tensors()
        self._own[self.present] = {name: each.data for name, each in tensors.items()}
        self._grads[self.present] = [param.grad for param in self._params]
        self._states[self.present] = [each.state for each in optimizers]
        for name, tensor in tensors.items():
            own = self._own[worker].get(name)
            if own is None or (own.shape, own.dtype) != (tensor.shape, tensor.dtype):
                own = tensor.data.clone()
            tensor.data = own
        for param, grad in zip(self._params, self._grads[worker], strict=True):
            param.grad = grad
        states = self._states[worker] or [defaultdict(dict) for _ in optimizers]
        for optimizer, state in zip(optimizers, states, strict=True):
            optimizer.state = state
        self.present = worker

    @contextmanager
    def entered(self, worker: int) -> Iterator[None]:
        """Enter a worker, and at the end the one before."""
        before = self.present
        self.enter(worker)
        try:
            yield
        finally:
            self.enter(before)

    def share(self) -> None:
        """Give all workers copies of the weights and buffers of the one that is present."""
        for worker in range(len(self._own)):
            if worker != self.present:
                self._own[worker] = {n: each.data.clone() for n, each in self._tensors().items()}

    def _tensors(self) -> dict[str, Tensor]:
        """Return weights and buffers by name; to these a module may assign new tensors."""
        params = {str(index): param for index, param in enumerate(self._params)}
        return params | dict(self._module.named_buffers())

    def forget_gradients(self) -> None:
        """Set the gradients of all workers that are not present to None."""
        self._grads = [[None] * len(self._params) for _ in self._own]
