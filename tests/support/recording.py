"""Exchanges as they are written beside recorded ones, on tensors that say they are on a GPU.

Triton's kernels run in its interpreter: set ``TRITON_INTERPRET=1`` before triton is imported.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pkgutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from lightning_gc.core import Reply, Request
from lightning_gc.core.bucket import Bucket
from lightning_gc.engine import Engine
from lightning_gc.engine.recorded_exchange import RecordedLayout
from lightning_gc.kernels import gpu
from lightning_gc.kernels.gpu import prepared_launch
from lightning_gc.transports.simulated import Simulated
from tests.support import counted_waits
from tests.support.counted_waits import Accelerator, Elsewhere, on_device

Shapes = Mapping[str, tuple[int, ...]]
BUCKETS: Sequence[Shapes] = (
    {"a": (13, 40), "b": (7,), "c": (0, 5)},
    {"d": (129,), "e": (2, 300)},
)
SHAPES: Shapes = {**BUCKETS[0], **BUCKETS[1]}
SIZES = [sum(map(math.prod, shapes.values())) for shapes in BUCKETS]


@contextlib.contextmanager
def kernels_elsewhere() -> Iterator[None]:
    """Run kernels, and what else is started, on what tensors elsewhere hold."""
    with contextlib.ExitStack() as stack:
        for _, name, _ in pkgutil.iter_modules(gpu.__path__):
            importlib.import_module(f"{gpu.__name__}.{name}")
        stack.enter_context(mock.patch.object(prepared_launch, "by_triton", _interpret))
        for module in [m for n, m in sys.modules.items() if n.startswith("lightning_gc.")]:
            if "fused" in vars(module):
                stack.enter_context(mock.patch.object(module, "fused", _fused))
        stack.enter_context(mock.patch.object(Bucket, "generator", counted_waits.generator))
        stack.enter_context(torch.no_grad())
        stack.enter_context(Accelerator())
        yield


def _fused(tensor: Tensor, family: str) -> bool:
    return isinstance(tensor, Elsewhere) and tensor.dtype == torch.float32 and tensor.numel() > 0


def _interpret(program: Any, grid: Sequence[int], arguments: Any, constants: Any) -> None:
    held = [each.held if isinstance(each, Elsewhere) else each for each in arguments]
    program[tuple(grid)](*held, **constants)


@contextlib.contextmanager
def as_written() -> Iterator[None]:
    """Record no exchange."""
    with mock.patch.object(RecordedLayout, "is_due", return_value=False):
        yield


class _Copying(Simulated):
    """Returns tensors of its own, as a real transport does."""

    def fulfil(self, requests: Sequence[Request]) -> list[Reply]:
        return [_cloned(reply) for reply in super().fulfil(requests)]


def _cloned(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else [_cloned(each) for each in value]


class Group:
    """W engines that exchange two buckets, with gradients in the same memory in every step.

    Args:
        make: an engine for a worker's index and W.
        workers: W.
        recorded: whether exchanges may be recorded.
        copies: whether replies lie in other memory than what was sent.

    Attributes:
        grads: of the workers, ``(numel,)``.
        kept: tensors whose memory is not to be used again.
    """

    def __init__(
        self,
        make: Callable[[int, int], Engine],
        workers: int,
        *,
        recorded: bool,
        copies: bool = False,
    ) -> None:
        self.make, self.recorded = make, recorded
        self.kept: list[Tensor] = []
        with kernels_elsewhere():
            self.engines = [make(worker, workers) for worker in range(workers)]
            self.grads = [on_device(torch.zeros(sum(SIZES))) for _ in self.engines]
        self._transport = _Copying(workers) if copies else Simulated(workers)

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Exchange gradients, ``(numel,)`` on the CPU for each worker; ``grads`` are the means."""
        for place, gradient in zip(self.grads, gradients, strict=True):
            place.held.copy_(gradient)  # type: ignore[attr-defined]
        with kernels_elsewhere(), contextlib.nullcontext() if self.recorded else as_written():
            cut = [grad.split(SIZES) for grad in self.grads]
            for index, shapes in enumerate(BUCKETS):
                pairs = zip(self.engines, cut, strict=True)
                self._transport.run([engine.flow(own[index], shapes) for engine, own in pairs])
        for engine in self.engines:
            engine.advance()

    @property
    def replays(self) -> list[bool]:
        """Whether each worker has recorded both exchanges."""
        known = [list(engine._recordings._known.values()) for engine in self.engines]
        return [bool(each) and all(k.recorded is not None for k in each) for each in known]

    def everything(self) -> list[Tensor]:
        """Return the means, all errors, and bytes and elements counted."""
        found = [grad.held for grad in self.grads]  # type: ignore[attr-defined]
        for engine in self.engines:
            if engine.statistics.epoch is not None:
                with kernels_elsewhere():
                    state = engine.statistics.epoch.own_state()
                found += [*state.pop("sums").values(), torch.tensor(list(state.values()))]
            for buffers in engine.buffers.named.values():
                found += [counted_waits._held(each) for each in buffers.values()]
            found.append(torch.tensor(list(vars(engine.tally).values())))
        sent = [self._transport.sent_bytes, self._transport.message_bytes]
        return [*found, torch.tensor(sent)]
