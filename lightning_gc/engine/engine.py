"""The only owner of state: one flow per bucket, from the local gradient to the common mean."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_gc.bucket import Bucket, Tally
from lightning_gc.compressors.base import Compressor, dense
from lightning_gc.engine.compatibility import combine
from lightning_gc.engine.error_buffers import Store
from lightning_gc.engine.guard import Guard
from lightning_gc.engine.levels import clamped
from lightning_gc.engine.statistics import Observer
from lightning_gc.flow import Flow, Mean
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme


class Engine:
    """Joins compressor, memory and scheme, and keeps their state by parameter name.

    State is ``{"memory": {name: {buffer: tensor}}, "compressor": {name: {...}}, "learning_rates":
    {name: float}, "step": int}``: plain tensors and numbers. Nothing is keyed by a bucket.

    Args:
        compressor: how gradients are made small.
        memory: what is remembered; see ``combine`` for the default.
        scheme: how workers reach a mean; see ``combine`` for the default.
        worker: this worker's index.
        workers: how many there are.
        seed: of all private random numbers; equal on all workers.

    Attributes:
        loss_scale: what gradients have been multiplied by (fp16), as a 0-dim tensor, or None.
            Errors are kept in unscaled units.
        revocable: an optimizer step may be skipped for a non-finite gradient, so that errors must
            be as before in the next round. Costs a copy of the memory.
        observe: measure norms before and after compression in this round.
        wanted: whether ``grad`` has to hold the mean when a flow has ended.
        observer: collects what a controller has asked for, or None.
        learning_rates: parameter name -> learning rate of this round's step; read only where the
            memory works in ``lr_aware``.
        weights: parameter name -> its value; read only where the memory ``reads_weights``.
    """

    def __init__(
        self,
        compressor: Compressor,
        memory: Memory | None = None,
        scheme: Scheme | None = None,
        *,
        worker: int = 0,
        workers: int = 1,
        seed: int = 0,
    ) -> None:
        self.compressor, self.memory, self.scheme = combine(compressor, memory, scheme)
        self.worker = worker
        self.workers = workers
        self.seed = seed
        self.step = 0
        self.tally = Tally()
        self.loss_scale: Tensor | None = None
        self.revocable = False
        self.observe = False
        self.wanted = True
        self.learning_rates: dict[str, float] = {}
        self.weights: dict[str, Tensor] = {}
        self.levels: dict[str, float | None] = {}
        self.uncompressed = False
        self.observer: Observer | None = None
        self.norms: list[tuple[Tensor, Tensor]] = []  # (‖x‖, ‖x − C(x)‖) per observed bucket
        self.leftovers: dict[str, Tensor] = {}  # of the observed round, by name
        self._store = Store(self.memory.buffers)
        self._compressor_state: dict[str, dict[str, Any]] = {}
        self._round = -1
        self._begun = self._ended = self._advanced = 0  # flows: handed out, finished, of rounds
        self.error_rates: dict[str, float] = {}  # name -> γ of the errors, in update units
        self._verdicts: list[Tensor] = []
        self._before: list[tuple[Tensor, Tensor]] = []  # (live flat buffer, its copy)

    def flow(self, grad: Tensor, shapes: Mapping[str, tuple[int, ...]]) -> Flow:
        """Return the conversation that replaces ``grad`` by the mean over workers, in place.

        Args:
            grad: flat local gradients, ``(numel,)``.
            shapes: parameter name -> shape, in the order in which they lie in ``grad``.
        """
        self._begun += 1
        state = {name: self._compressor_state.setdefault(name, {}) for name in shapes}
        bucket = Bucket(
            grad,
            shapes,
            step=self.step,
            seed=self.seed,
            worker=self.worker,
            workers=self.workers,
            state=state,
            levels=self._bucket_levels(shapes),
            tally=self.tally,
            wanted=self.wanted or bool(self.memory.common),
            weights=self.weights,
        )
        return self._converse(bucket)

    def advance(self) -> None:
        """Count a finished round: all buckets have been handed to ``flow``."""
        self.step, self._advanced = self.step + 1, self._begun

    @property
    def torn(self) -> bool:
        """Whether a round is under way, so that errors are neither those before nor after it."""
        return not self._begun == self._ended == self._advanced

    def set_levels(
        self, level: float | None, levels: Mapping[str, float | None] | None = None
    ) -> None:
        """Move the compressor's knob, between rounds. Errors stay.

        Args:
            level: for all parameters; None sends them uncompressed, errors included.
            levels: parameter name -> level, for those that differ.

        Raises:
            ValueError: a level that is nonsense, or a compressor without a knob.

        Warns:
            UserWarning: a level outside the knob's range, which is clamped.
        """
        self.levels = {n: clamped(self.compressor, v, n) for n, v in (levels or {}).items()}
        level = clamped(self.compressor, level, "all parameters")
        self.uncompressed = level is None
        if level is not None:
            self.compressor = self.compressor.at(level)

    def level_of(self, name: str) -> float | None:
        """Return the level at which a parameter is sent now; None: uncompressed, or no knob."""
        return self.levels.get(name, None if self.uncompressed else self.compressor.level)

    def _bucket_levels(self, names: Iterable[str]) -> Mapping[str, float | None]:
        if not self.levels and not self.uncompressed:
            return {}
        return {name: self.level_of(name) for name in names}

    def _converse(self, bucket: Bucket) -> Flow:
        grad, scale = bucket.grad, self.loss_scale
        self._open_round(bucket.step)
        self.tally.grad_bytes += bucket.numel * grad.element_size()
        guard = None if self.compressor.exact or not bucket.numel else Guard(bucket)
        if guard is not None:
            guard.silence(grad)
        if scale is not None:
            grad.div_(scale)
        if self.observer is not None:
            self.observer.see_gradient(bucket)
        if self.memory.averages(bucket.step):
            yield from self._average(bucket)
        resting = self._resting(bucket)
        held = guard.hold(self._own(bucket)) if guard is not None else []
        buffer = self._compensate(bucket)
        whole = buffer.clone() if self.memory.compares else buffer
        before = torch.linalg.vector_norm(buffer) if self.observe else None
        out = grad if self._in_place(grad) else torch.zeros_like(grad, dtype=torch.float32)
        flow = self._exchange(bucket, buffer, out)
        if guard is None:
            yield from flow
        else:
            aside = guard.set_aside(buffer) if self.memory.buffers else None
            yield from guard.watch(flow)
            if aside is not None:
                buffer.add_(aside)
            guard.poison(out)
        if self.memory.looks_back:
            self.memory.remember(bucket, self._store.flat(bucket), whole, out)
        if guard is not None:
            guard.release(held)
            if guard.verdict is not None and self.revocable:
                self._verdicts.append(guard.verdict)
        for live, copy in resting:
            live.copy_(copy)

        if self.observer is not None and self.memory.buffers:
            self.observer.see_error(buffer)
        if before is not None:
            self.norms.append((before, torch.linalg.vector_norm(buffer)))
            self.leftovers |= bucket.split(buffer)
        if out is not grad:
            grad.copy_(out)
        if scale is not None:
            grad.mul_(scale)
        self._ended += 1

    def _own(self, bucket: Bucket) -> list[Tensor]:
        """Return this worker's own buffers, if there are more than the one that is set aside."""
        own = [name for name in self.memory.buffers if name not in self.memory.common]
        return [self._store.flat(bucket)[n] for n in own] if len(self.memory.buffers) > 1 else []

    def _average(self, bucket: Bucket) -> Flow:
        """Replace errors by their mean over workers."""
        error = self._store.flat(bucket)[self.memory.buffers[0]]
        (average,) = yield Mean((error.clone(),))
        error.copy_(average)

    def _exchange(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        if self.memory.flushes(bucket.step):
            return dense(buffer, out)
        if self.uncompressed and self.compressor.elementwise:
            return dense(buffer, out)
        return self.compressor.flow(bucket, buffer, out, self.scheme)

    def _compensate(self, bucket: Bucket) -> Tensor:
        """Return the buffer to compress, which is not the gradient itself if observed."""
        flats = self._store.flat(bucket) if self.memory.buffers else {}
        if self.revocable:
            self._before += [(flat, flat.clone()) for flat in flats.values()]
        buffer = self.memory.compensate(bucket, flats)
        if not self._in_place(buffer):
            return buffer.float()
        return buffer.clone() if self.observe and buffer is bucket.grad else buffer

    def _in_place(self, flat: Tensor) -> bool:
        """Whether arithmetic on ``flat`` is precise enough: float32, or no arithmetic at all."""
        return flat.dtype.itemsize >= 4 or (self.compressor.exact and self.scheme.averages)

    def _open_round(self, step: int) -> None:
        if step != self._round:
            self.settle()
            self._round = step
            self.norms.clear()
            self.leftovers.clear()
            if self.memory.lr_aware:
                self._follow_learning_rates()

    def _resting(self, bucket: Bucket) -> list[tuple[Tensor, Tensor]]:
        """Return (view, copy) of errors that stay as they are, for what is sent moves no weight.

        In units of the update, a step at learning rate 0 neither adds γ·g to an error nor takes
        anything out of it. The gradient is sent all the same: an optimizer may average it.
        """
        if not self.memory.lr_aware or 0 not in self.learning_rates.values():
            return []
        self._store.flat(bucket)  # lays them out where they are new
        names = [name for name in bucket.names if self.learning_rates.get(name) == 0]
        views = [view for name in names for view in self._store.named[name].values()]
        return [(view, view.clone()) for view in views]

    def _follow_learning_rates(self) -> None:
        """Keep γ·e when γ changes. A rate of zero moves nothing: the last other one is kept."""
        for name, rate in self.learning_rates.items():
            if rate == 0:
                continue
            ratio = self.error_rates.get(name, rate) / rate
            self.error_rates[name] = rate
            if ratio != 1:
                for kept in self._store.named.get(name, {}).values():
                    kept.mul_(ratio)

    def settle(self) -> None:
        """Take back the last round if its result was not finite: its step has been skipped."""
        if self._verdicts:
            skipped = ~torch.stack(self._verdicts).isfinite().all()
            for live, copy in self._before:
                if live.device.type != "cpu":
                    torch.where(skipped, copy, live, out=live)
                elif skipped:
                    live.copy_(copy)
        self._verdicts.clear()
        self._before.clear()

    def errors(self) -> dict[str, Tensor]:
        """Return the errors by parameter name: views, in the parameters' shapes."""
        if not self.memory.buffers:
            return {}
        return {name: kept[self.memory.buffers[0]] for name, kept in self._store.named.items()}

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all state: tensors, numbers and strings only."""
        self.settle()
        named = self._store.named
        return {
            "memory": {n: {b: t.clone() for b, t in kept.items()} for n, kept in named.items()},
            "compressor": {n: dict(s) for n, s in self._compressor_state.items() if s},
            "learning_rates": dict(self.error_rates),
            "step": self.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from ``state_dict()``."""
        self.reset(int(state["step"]))
        self._store.load(state["memory"])
        self._compressor_state = {name: dict(kept) for name, kept in state["compressor"].items()}
        self.error_rates = dict(state["learning_rates"])

    def reset(self, step: int = 0) -> None:
        """Forget all errors and begin anew, at ``step``."""
        self._verdicts.clear()
        self._before.clear()
        self._store.load({})
        self._compressor_state = {}
        self.error_rates = {}
        self.step = step
        self._round = -1  # the next round is a new one, whatever its number
        self._ended = self._advanced = self._begun
