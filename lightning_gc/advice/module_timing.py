"""Callback that times a module's parts: forward, when each gradient is ready, backward, optimizer.

The module trains without exchange. On CUDA by events.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lightning_gc.advice.timeline import Module
from lightning_gc.exchange.workers import plain_name
from lightning_gc.methods.lightning_flavour import pl

Mark = float | torch.cuda.Event


class ModuleTiming(pl.Callback):
    """Records the parts of every step; with accumulated gradients, the last backward pass.

    Args:
        warmup: steps that are not counted.
        keep: keep the last step's gradients, one copy of each.

    Attributes:
        gradients: parameter name -> gradient of the last step, if kept.
    """

    def __init__(self, warmup: int, keep: bool = True) -> None:
        self.warmup, self.keep = warmup, keep
        self.gradients: dict[str, Tensor] = {}
        self._handles: list[Any] = []
        self._steps: list[tuple[float, float, float, dict[str, float]]] = []
        self._before = 0.0  # seconds of the step's batches before the last one
        self._step = 0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """Hook every trained parameter."""
        self._device = trainer.strategy.root_device
        self._ready: dict[str, Mark] = {}
        self._named = {plain_name(n): p for n, p in module.named_parameters() if p.requires_grad}
        for name, param in self._named.items():
            hook = self._noting(name)
            self._handles.append(param.register_post_accumulate_grad_hook(hook))

    def _noting(self, name: str) -> Callable[[Tensor], None]:
        def note(_: Tensor) -> None:
            self._ready[name] = self._now()

        return note

    def on_train_batch_start(self, *_: Any) -> None:
        """Mark the beginning of a batch."""
        self._started = self._now()

    def on_before_backward(self, *_: Any) -> None:
        """Mark the end of the forward pass."""
        self._ready = {}
        self._forward = self._now()

    def on_after_backward(self, *_: Any) -> None:
        """Mark the end of the backward pass."""
        self._backward = self._now()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Mark the end of a batch; at the end of a step, record it."""
        ended = self._now()
        if isinstance(ended, torch.cuda.Event):
            torch.cuda.synchronize()
        if trainer.global_step == self._step:
            self._before += _between(self._started, ended)
            return
        ready = {name: _between(self._forward, mark) for name, mark in self._ready.items()}
        forward = self._before + _between(self._started, self._forward)
        parts = (_between(self._forward, self._backward), _between(self._backward, ended))
        self._steps.append((forward, *parts, ready))
        self._step, self._before = trainer.global_step, 0.0
        if self.keep:
            self.gradients = {
                name: param.grad.detach().clone()
                for name, param in self._named.items()
                if param.grad is not None
            }

    def on_train_end(self, *_: Any) -> None:
        """Remove the hooks."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def module(self) -> Module:
        """Return the median seconds of the parts."""
        counted = self._steps[self.warmup :]
        forward, backward, optimizer = (
            statistics.median(each)
            for each in zip(*((f, b, o) for f, b, o, _ in counted), strict=True)
        )
        return Module(forward, backward, optimizer)

    def ready(self) -> dict[str, float]:
        """Return parameter name -> median seconds until its gradient is ready.

        A parameter that has had no gradient is ready when the backward pass has ended.
        """
        counted, end = self._steps[self.warmup :], self.module().backward
        found = {}
        for name in reversed(list(self._named)):
            seconds = [step[3][name] for step in counted if name in step[3]]
            found[name] = min(statistics.median(seconds), end) if seconds else end
        return dict(sorted(found.items(), key=lambda pair: pair[1]))

    def sizes(self) -> dict[str, tuple[tuple[int, ...], int]]:
        """Return parameter name -> shape and bytes of its gradient."""
        return {
            name: (tuple(param.shape), param.numel() * param.element_size())
            for name, param in self._named.items()
        }

    def _now(self) -> Mark:
        if self._device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _between(start: Mark, stop: Mark) -> float:
    if isinstance(start, torch.cuda.Event) and isinstance(stop, torch.cuda.Event):
        return float(start.elapsed_time(stop)) / 1e3
    assert isinstance(start, float)
    assert isinstance(stop, float)
    return stop - start


class Busy(pl.Callback):
    """Keeps a thread busy while a module trains, as compression beside the backward pass does.

    Args:
        work: what the thread repeats.
    """

    def __init__(self, work: Callable[[], object]) -> None:
        self._work, self._stop = work, threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def on_train_start(self, *_: Any) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread, also after an error."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        with torch.no_grad():
            while not self._stop.is_set():
                self._work()
