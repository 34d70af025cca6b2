"""Engine: one worker's error state, and one flow per bucket from local gradient to mean."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from dataclasses import dataclass
from functools import partial
from itertools import chain, repeat
from typing import Any

import torch
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.core import (
    WHOLE,
    Bucket,
    Each,
    Flow,
    Number,
    Record,
    Reply,
    Request,
    Structure,
    Tally,
)
from lightning_gc.core.saved_state import ERRORS, Plain, each_tensor
from lightning_gc.engine.compatibility import combine
from lightning_gc.engine.error_buffers import (
    ErrorBuffers,
    LearningRates,
    LossScaling,
    Made,
    NarrowBuffers,
    to_host,
)
from lightning_gc.engine.guard import BucketExchange, Guard, Onlooker
from lightning_gc.engine.levels import Levels
from lightning_gc.engine.recorded_exchange import (
    ExchangeRecorder,
    RecordedExchange,
    RecordedLayout,
    Recordings,
    carried,
    entries_of,
    is_ours,
)
from lightning_gc.engine.statistics import Statistics
from lightning_gc.kernels import dispatch
from lightning_gc.kernels.segments import clean
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.transports.base import all_reduce_bytes, reduce_scatter_bytes

ENGINE_STATE: dict[str, Structure] = {
    "memory": Each(Each(ERRORS)),
    "compressor": Each(Record(others=Plain())),
    "learning_rates": Each(Number(low=0)),
    "step": WHOLE,
}
"""Structure of ``Engine.state_dict()`` for any compressor."""


def compressor_state(compressor: Compressor, shapes: Mapping[str, tuple[int, ...]]) -> Structure:
    """Return the structure of an engine's ``"compressor"`` for parameters of these shapes."""
    return Record(maybe={name: compressor.keeps(shape) for name, shape in shapes.items()})


@dataclass
class RoundCounter:
    """Counts rounds and flows; a round synchronises each bucket of a step once."""

    step: int = 0  # finished rounds
    opened: int = -1  # step of the last round with a flow that has started to run
    begun: int = 0  # flows made
    ended: int = 0  # flows that have ended
    advanced: int = 0  # flows made in finished rounds

    def begin_again(self) -> None:
        """Begin a new round: an incomplete one will never be finished."""
        self.ended = self.advanced = self.begun
        self.opened = -1


class Engine:
    """Combines compressor, memory and scheme, and keeps one worker's state by parameter name.

    State is ``{"memory": {name: {buffer: tensor}}, "compressor": {name: {...}}, "learning_rates":
    {name: float}, "step": int}``: plain tensors and numbers. Nothing is keyed by a bucket.

    Args:
        compressor: encodes and decodes gradients.
        memory: the error feedback rule; ``combine`` has the default.
        scheme: how payloads become a mean; ``combine`` has the default.
        worker: this worker's index.
        workers: W.
        seed: of all private random numbers; equal on all workers.

    Attributes:
        levels: the compressor at its current levels.
        memory: as given, or the default.
        reads_weights: as the memory's.
        scatters: this worker gets only its own shard of each parameter's mean.
        buffers: the memory's state.
        compressor_state: parameter name -> the compressor's own state.
        rounds: counts rounds.
        loss_scaling: undoes fp16 loss scaling, by the scale that ``prepare`` sets.
        learning_rates: of each round, set by ``prepare``.
        padding: parameter name -> elements at the end of its gradient that belong to no parameter;
            the memory's state of them stays zero.
        statistics: counts, norms, and sums for a controller.
        peers: W of the last round, where it may change from round to round; else None.
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
        compressor, self.memory, scheme = combine(compressor, memory, scheme)
        self.reads_weights = self.memory.reads_weights
        self.worker = worker
        self.workers = workers
        self.peers: int | None = None
        self.seed = seed
        self.levels = Levels(compressor, scheme)
        self.scatters = scheme is not None and scheme.scatters
        stored, names = self.memory.stored, self.memory.buffers
        self.buffers = ErrorBuffers(names) if stored is None else NarrowBuffers(names, stored)
        self.compressor_state: dict[str, dict[str, Any]] = {}
        self._before: dict[str, dict[str, Any]] = {}  # the same at the start of this round
        self.rounds = RoundCounter()
        self.loss_scaling = LossScaling()
        self.learning_rates = LearningRates()
        self.padding: Mapping[str, int] = {}
        self.statistics = Statistics()
        self._recordings = Recordings()
        traits = compressor.traits
        # Code of others may read the step's number where nothing notices it.
        ours = all(map(is_ours, (compressor, self.memory, scheme)))
        other = self.reads_weights or traits.reads_model or not ours
        self._unrecorded = other or not dispatch.allowed().recorded

    @property
    def compressor(self) -> Compressor:
        """The compressor at its current levels."""
        return self.levels.compressor

    @property
    def scheme(self) -> Scheme | None:
        """As given, or the default at the current levels; None for a ``Collective``."""
        return self.levels.scheme

    def dense_bytes(self, nbytes: int) -> int:
        """Return the bytes that this worker would send for ``nbytes`` of uncompressed gradients."""
        ring = reduce_scatter_bytes if self.scatters else all_reduce_bytes
        return ring(nbytes, self.peers or self.workers)

    @property
    def tally(self) -> Tally:
        """Elements and bytes so far."""
        return self.statistics.tally

    @property
    def reads_rates(self) -> bool:
        """Whether memory or statistics read learning rates."""
        epoch = self.statistics.epoch
        return self.memory.lr_aware or (epoch is not None and epoch.errors)

    @property
    def step(self) -> int:
        """Number of finished rounds."""
        return self.rounds.step

    @property
    def torn(self) -> bool:
        """Whether a round is incomplete: errors are neither those before nor those after it."""
        return not self.rounds.begun == self.rounds.ended == self.rounds.advanced

    def flow(
        self,
        grad: Tensor,
        shapes: Mapping[str, tuple[int, ...]],
        *,
        weights: Mapping[str, Tensor] | None = None,
        wanted: bool = True,
    ) -> Flow:
        """Return the flow that replaces ``grad`` by the mean over workers, in place.

        Args:
            grad: flat local gradients, ``(numel,)``.
            shapes: parameter name -> shape, in the order in which they lie in ``grad``.
            weights: parameter name -> value; needed if the memory ``reads_weights``.
            wanted: False if ``grad`` need not become the mean.
        """
        if self.rounds.begun == self.rounds.advanced and self.levels.traits.reads_model:
            self._before = {n: dict(s) for n, s in self.compressor_state.items() if s}
        self.rounds.begun += 1
        wanted = wanted or bool(self.memory.common)
        return self._synchronise(grad, shapes, weights or {}, wanted, self._before, self.step)

    def _synchronise(
        self,
        grad: Tensor,
        shapes: Mapping[str, tuple[int, ...]],
        weights: Mapping[str, Tensor],
        wanted: bool,
        before: Mapping[str, Mapping[str, Any]],
        step: int,
    ) -> Flow:
        """Start the recorded exchange of an equal step again, or run it as it is written."""
        if self.rounds.opened != step:
            self._open_round(step)
        written = self._unrecorded or grad.device.type == "cpu"  # there values decide what is done
        layout = None if written else self._layout(grad, shapes, wanted)
        # What runs beside another exchange would write into its memory.
        repeats = layout is not None and layout.repeats and not self._recordings.busy
        proven = layout.proven if layout is not None and repeats else None
        turn = BucketRound(self)
        if proven is not None:
            self._recordings.busy = True
            try:
                yield from turn.again(proven, Bucket(grad, shapes, step))
            finally:
                self._recordings.busy = False
        else:
            state = {name: self.compressor_state.setdefault(name, {}) for name in shapes}
            if self.levels.on_menu:
                self.levels.own_state(state, shapes)
            bucket = Bucket(
                grad,
                shapes,
                step=step,
                seed=self.seed,
                worker=self.worker,
                workers=self.workers,
                state=state,
                tally=self.statistics.tally,
                wanted=wanted,
                weights=weights,
                before=before,
            )
            flow = self._recordings.flow(layout, bucket, turn) if layout and repeats else None
            old = {} if layout is None or layout.recorded is None else entries_of(bucket.state)
            with dispatch.host.steady():
                yield from flow or turn.as_written(bucket, None)
            if old:
                carried(old, bucket.state)  # else the next step is another situation
        if self.loss_scaling.revocable and wanted:
            self.loss_scaling.verdicts.append(grad.isfinite().all())
        self.rounds.ended += 1

    def _layout(
        self, grad: Tensor, shapes: Mapping[str, tuple[int, ...]], wanted: bool
    ) -> RecordedLayout | None:
        """Return what is known of a bucket in a step like this; None while a user captures it.

        All that decides what an exchange starts, or where it reads and writes, is here.
        """
        if grad.is_cuda and torch.cuda.is_current_stream_capturing():
            return None  # in a user's graph: its replays call no exchange
        names, levels, state = tuple(shapes), self.levels, self.compressor_state
        rests = levels.sends_whole and self.buffers.named.keys().isdisjoint(names)
        situation = (
            *(levels.compressor, grad.dtype, tuple(shapes.values()), wanted, rests),
            *(levels.uncompressed, self.worker, self.workers, self.peers),
            dispatch.queue_of(grad.device),
        )
        entries = chain(*map(dict.values, map(state.get, names, repeat(_NONE))))
        held = (self.loss_scaling.scale, self.padding, self.buffers.laid_out.get(names), *entries)
        layout = self._recordings.of(names, grad.data_ptr(), situation, held)
        # Norms are measured, or errors of parameters with a rate of 0 put back.
        more = self.memory.lr_aware and 0 in self.learning_rates.now.values()
        layout.repeats = not (self.statistics.norms_wanted or more)
        return layout

    def _open_round(self, step: int) -> None:
        self.rounds.opened = step
        if self.loss_scaling.revocable:
            self.loss_scaling.settle()
        self.statistics.norms.clear()
        self.statistics.leftovers.clear()
        if self.memory.lr_aware:
            self.learning_rates.follow(self.buffers)

    def prepare(self, scale: Tensor | None, rates: Mapping[str, float] | None) -> None:
        """Set the next round's loss scale, 0-dim, and if given learning rates by parameter name."""
        self.loss_scaling.scale = scale
        if rates is not None:
            self.learning_rates.now = dict(rates)

    def advance(self, decoder: Engine | None = None) -> None:
        """End a round: the flows of all its buckets have been made.

        ``decoder``: the simulated worker that has decoded the mean, if this one has not.
        """
        self.rounds.step += 1
        self.rounds.advanced = self.rounds.begun
        if decoder is not None:
            self.loss_scaling.verdicts = list(decoder.loss_scaling.verdicts)

    @property
    def kept(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Parameter name -> the memory's buffer -> tensor in the parameter's shape."""
        return self.buffers.named

    def undo(self, compressor_state: Mapping[str, dict[str, Any]]) -> None:
        """Restore the errors as before the flows of this round, which another attempt repeats.

        Args:
            compressor_state: the compressor's, as before these flows.
        """
        self.loss_scaling.revoke()
        self.compressor_state = {name: dict(kept) for name, kept in compressor_state.items()}
        self.rounds.begin_again()

    def add_errors(self, memory: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Add another worker's errors, by parameter name and buffer, between rounds."""
        self.loss_scaling.settle()
        kept = {name: dict(buffers) for name, buffers in self.buffers.named.items()}
        for name, buffers in memory.items():
            own = kept.setdefault(name, {})
            for buffer, tensor in buffers.items():
                own[buffer] = own[buffer] + tensor if buffer in own else tensor
        self.buffers.load(kept)

    def errors(self) -> Mapping[str, Tensor]:
        """Return the errors by parameter name, in the parameters' shapes.

        Views; where the memory keeps them in fewer bits, made when they are asked for.
        """
        if not self.memory.buffers:
            return {}
        first = self.memory.buffers[0]
        return Made(self.kept, lambda kept: kept[first])

    def state_dict(self) -> dict[str, Any]:
        """Return copies of all state: tensors, numbers and strings only.

        Errors are copied to the host one by one, so that a GPU needs no memory for a second copy.
        """
        self.loss_scaling.settle()
        return {
            "memory": {
                n: {b: to_host(t) for b, t in kept.items()} for n, kept in self.kept.items()
            },
            "compressor": {
                n: each_tensor(s, _alone) for n, s in self.compressor_state.items() if s
            },
            "learning_rates": dict(self.learning_rates.of_errors),
            "step": self.step,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state_dict()``."""
        self.reset(int(state["step"]))
        self.buffers.load(state["memory"])
        self.compressor_state = {name: dict(kept) for name, kept in state["compressor"].items()}
        self.learning_rates.of_errors = dict(state["learning_rates"])

    def begin_fit(self, *, revocable: bool = False) -> None:
        """Begin another fit with the kept state; give up a round that an exception has torn.

        ``revocable``: optimizer steps may be skipped, as by a gradient scaler.
        """
        self.loss_scaling.revocable = revocable
        if self.torn:
            self.loss_scaling.forget()
            self.rounds.begin_again()

    def end_fit(self) -> None:
        """Free the memory of recorded exchanges, and of the gradients that they exchange."""
        self._recordings = Recordings()

    def reset(self, step: int = 0) -> None:
        """Drop all state and start at ``step``."""
        self.loss_scaling.forget()
        self.buffers.load({})
        self.compressor_state = {}
        self.learning_rates.of_errors = {}
        self.rounds.step = step
        self.rounds.begin_again()  # the next round is a new one, even if it has the same step


_NONE: dict[str, Any] = {}


class BucketRound:
    """One bucket in one round of an engine: as it is written, or a recorded exchange again."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def again(self, recorded: RecordedExchange, bucket: Bucket) -> Flow:
        """Start recorded work again. Only statistics read ``bucket``."""
        engine, step = self._engine, bucket.step
        recorded.opening.start(step)
        self._see_gradient(bucket)
        yield from recorded.flow(step)
        if engine.statistics.epoch is not None:
            self._see_error(bucket, recorded.error, None)
        recorded.closing.start(step)
        engine.statistics.tally.add(recorded.tally)

    def as_written(
        self, bucket: Bucket, recorder: ExchangeRecorder | None
    ) -> Generator[Request, Reply, Tensor]:
        """Exchange a bucket, record it if that is due, and return the error."""
        engine = self._engine
        inner = bucket if recorder is None else recorder.bucket
        guard = self._open(inner) if recorder is None else recorder.note(partial(self._open, inner))
        self._see_gradient(bucket)
        exchange = BucketExchange(inner, engine.levels, guard, engine.statistics)
        flow = self._exchange(inner, exchange, guard)
        yield from flow if recorder is None else recorder.follow(flow)
        if engine.statistics.epoch is not None or exchange.norm_before is not None:
            self._see_error(bucket, exchange.error, exchange.norm_before)
        if recorder is None:
            self._close(inner, exchange)
        else:
            recorder.note(recorder.carrying(partial(self._close, inner, exchange)))
        return exchange.error

    def live(self, bucket: Bucket) -> list[Tensor]:
        """Return the memory's tensors of the bucket, if it uses any."""
        engine = self._engine
        unused = not engine.memory.buffers or (engine.levels.sends_whole and self._rests(bucket))
        return [] if unused else engine.buffers.live(bucket)

    def _open(self, bucket: Bucket) -> Guard | None:
        """Look at the gradient and unscale it."""
        engine, grad = self._engine, bucket.grad
        numel = grad.numel()
        bucket.tally.grad_elements += numel
        bucket.tally.grad_bytes += grad.nbytes
        guard: Guard | None = None
        layouts = engine.buffers.layouts
        if numel and engine.levels.sends_whole and self._rests(bucket):
            guard = Onlooker(bucket, layouts, scatters=engine.scatters)
        elif numel and not (engine.levels.exact and not engine.memory.buffers):
            guard = Guard(bucket, layouts, engine.memory.unused, scatters=engine.scatters)
        if engine.loss_scaling.scale is not None:
            grad.div_(engine.loss_scaling.scale)
        return guard

    def _rests(self, bucket: Bucket) -> bool:
        """Whether the memory has nothing to do with a gradient that is sent whole: no error."""
        memory, named = self._engine.memory, self._engine.buffers.named
        # Workers that have errors send them in float32, and all must send alike.
        wide = bucket.grad.dtype.itemsize >= 4
        if not (wide and memory.buffers and memory.rests):
            return False
        return not any(name in named for name in bucket.names)

    def _see_gradient(self, bucket: Bucket) -> None:
        """Let statistics see the gradient, and keep what a skipped step gives back."""
        engine = self._engine
        if engine.statistics.epoch is not None:
            engine.statistics.epoch.see_gradient(bucket)
        if engine.loss_scaling.revocable:
            engine.loss_scaling.back_up(self.live(bucket))

    def _exchange(self, bucket: Bucket, exchange: BucketExchange, guard: Guard | None) -> Flow:
        """Run the memory's flow, and restore what must not change."""
        memory, buffers, rates = (
            self._engine.memory,
            self._engine.buffers,
            self._engine.learning_rates,
        )
        if isinstance(guard, Onlooker):
            yield from exchange(bucket.grad)
            return
        state = buffers.flat(bucket) if memory.buffers else {}
        resting = rates.back_up(bucket, buffers) if memory.lr_aware else []
        if guard is not None and len(state) > 1:  # a single one is the error, which is set aside
            guard.hold([state[name] for name in memory.buffers if name not in memory.common])
        yield from memory.flow(bucket, state, exchange)
        if not exchange.absorbed:
            for buffer in state.values():  # else NaN and overflow would stay in it
                clean(buffer)
        if self._engine.padding:
            self._clear_padding(bucket, state)
        if guard is not None:
            guard.release()
        for live, copy in resting:
            live.copy_(copy)
        if state:
            buffers.keep(bucket, state)
        if self._engine.levels.sends_whole and memory.rests:
            on_host = bucket.grad.device.type == "cpu"  # a device would have to be waited for
            revocable = self._engine.loss_scaling.revocable  # errors may have to come back
            if on_host and not revocable and not any(bool(e.any()) for e in state.values()):
                buffers.forget(bucket)

    def _clear_padding(self, bucket: Bucket, state: Mapping[str, Tensor]) -> None:
        padding = self._engine.padding
        for name, _, stop in bucket.spans():
            for buffer in state.values():
                buffer[stop - padding.get(name, 0) : stop].zero_()

    def _see_error(self, bucket: Bucket, error: Tensor, before: Tensor | None) -> None:
        engine = self._engine
        rates = engine.learning_rates.now if engine.memory.buffers else None
        engine.statistics.see_error(bucket, error, before, rates)

    def _close(self, bucket: Bucket, exchange: BucketExchange) -> None:
        """Write the mean in the gradient's own units."""
        grad, scale = bucket.grad, self._engine.loss_scaling.scale
        if exchange.mean is not grad:
            grad.copy_(exchange.mean)
        if scale is not None:
            grad.mul_(scale)


def _alone(tensor: Tensor) -> Tensor:
    """Return a tensor that is not a part of a larger one, all of which would be saved."""
    larger = tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()
    return tensor.clone() if larger else tensor
