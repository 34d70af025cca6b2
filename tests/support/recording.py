"""Exchanges as they are written beside recorded ones, on a GPU or on tensors that say so.

Without a GPU, Triton's kernels run in its interpreter: set ``TRITON_INTERPRET=1`` before triton is
imported.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pkgutil
import random
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import lightning_gc as gc
from lightning_gc import ErrorFeedback, NoMemory
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.core import Reply, Request
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import resume as answer_to
from lightning_gc.engine import Engine
from lightning_gc.engine.recorded_exchange import RecordedLayout
from lightning_gc.engine.statistics import EpochStatistics
from lightning_gc.kernels import gpu
from lightning_gc.kernels.gpu import prepared_launch
from lightning_gc.memories import Memory
from lightning_gc.transports.simulated import Simulated
from tests.support import counted_waits
from tests.support.bucket_kernels import gradient
from tests.support.counted_waits import Accelerator, Elsewhere, on_device

Shapes = Mapping[str, tuple[int, ...]]
BUCKETS: Sequence[Shapes] = (
    {"a": (13, 40), "b": (7,), "c": (0, 5)},
    {"d": (129,), "e": (2, 300)},
)
SHAPES: Shapes = {**BUCKETS[0], **BUCKETS[1]}
METHODS: list[Compressor] = [
    *(gc.Cast(), gc.Identity(), gc.QSGD(4), gc.Uniform(9, block_size=64), gc.Int8(), gc.Float8()),
    *(gc.TopK(0.05), gc.TopK(0.05, "bfloat16"), gc.ChunkedTopK(0.1, 64), gc.RandomK(0.1)),
    *(gc.EFSignSGD(), gc.OneBitSGD(), gc.SignSGD(), gc.PowerSGD(2), gc.GradZip()),
    gc.Quantised(gc.ChunkedTopK(0.1, 64), gc.BinMeans(2, 16)),
]
AS_WRITTEN: list[Compressor] = [gc.TernGrad(), gc.HardThreshold(1.0), gc.AtomoSVD()]
"""Methods in which the host reads random numbers or lengths."""
MEMORIES: list[Memory] = [
    *(NoMemory(), ErrorFeedback(0.5, gain=0.5), ErrorFeedback(lr_aware=True)),
    *(gc.LocalMomentum(), gc.MomentumCorrection(), gc.EF21(), gc.CSER(every=3)),
]


@contextlib.contextmanager
def kernels_elsewhere(*, kernels: bool = True) -> Iterator[None]:
    """Run kernels, or else torch's operations, on what tensors elsewhere hold."""
    with contextlib.ExitStack() as stack:
        for _, name, _ in pkgutil.iter_modules(gpu.__path__):
            importlib.import_module(f"{gpu.__name__}.{name}")
        stack.enter_context(mock.patch.object(prepared_launch, "by_triton", _interpret))
        for module in [m for n, m in sys.modules.items() if n.startswith("lightning_gc.")]:
            if "fused" in vars(module):
                fused = _fused if kernels else _unfused
                stack.enter_context(mock.patch.object(module, "fused", fused))
        stack.enter_context(mock.patch.object(Bucket, "generator", counted_waits.generator))
        stack.enter_context(torch.no_grad())
        stack.enter_context(Accelerator())
        yield


def _fused(tensor: Tensor, family: str) -> bool:
    return isinstance(tensor, Elsewhere) and tensor.dtype == torch.float32 and tensor.numel() > 0


def _unfused(tensor: Tensor, family: str) -> bool:
    return False


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
        return [cloned(reply) for reply in super().fulfil(requests)]


def cloned(value: Any) -> Any:
    """Return a copy of a reply, in other memory."""
    return value.clone() if isinstance(value, Tensor) else [cloned(each) for each in value]


@dataclass(frozen=True)
class Place:
    """Where gradients lie and kernels run.

    Attributes:
        put: returns a copy of a tensor of the host.
        held: returns what a tensor there holds, in the same memory, for torch to read.
        around: makes a context in which exchanges run.
    """

    put: Callable[[Tensor], Tensor]
    held: Callable[[Tensor], Tensor]
    around: Callable[[], contextlib.AbstractContextManager[Any]]


PRETENDED = Place(on_device, counted_waits._held, kernels_elsewhere)
BY_TORCH = replace(PRETENDED, around=partial(kernels_elsewhere, kernels=False))
"""A step takes a tenth of the time: in the interpreter a launch takes milliseconds."""
GPU = Place(lambda tensor: tensor.to("cuda"), lambda tensor: tensor, torch.no_grad)


def replays(engine: Engine) -> list[bool]:
    """Return for each bucket whether its next step starts a recorded exchange."""
    return [layout.recorded is not None for layout in engine._recordings._known.values()]


class Group:
    """W engines that exchange buckets, with gradients in the same memory in every step.

    Args:
        make: an engine for a worker's index and W.
        workers: W.
        recorded: whether exchanges may be recorded.
        copies: whether replies lie in other memory than what was sent.
        place: where the gradients lie.
        buckets: shapes of the parameters of each.
        dtype: of the gradients.

    Attributes:
        grads: of the workers, ``(numel,)`` of all buckets.
        sizes: elements of each bucket.
        kept: tensors whose memory is not to be used again.
    """

    def __init__(
        self,
        make: Callable[[int, int], Engine],
        workers: int,
        *,
        recorded: bool,
        copies: bool = False,
        place: Place = PRETENDED,
        buckets: Sequence[Shapes] = BUCKETS,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.make, self.recorded, self.place = make, recorded, place
        self.kept: list[Tensor] = []
        self.lay_out(buckets)
        zeros = torch.zeros(sum(self.sizes), dtype=dtype)
        with place.around():
            self.engines = [make(worker, workers) for worker in range(workers)]
            self.grads = [place.put(zeros) for _ in self.engines]
        self._transport = _Copying(workers) if copies else Simulated(workers)

    def lay_out(self, buckets: Sequence[Shapes]) -> None:
        """Cut the gradients' memory into these buckets; what is left over is frozen."""
        self.buckets = buckets
        self.sizes = [sum(map(math.prod, shapes.values())) for shapes in buckets]

    def step(self, gradients: Sequence[Tensor]) -> None:
        """Exchange gradients, ``(numel,)`` for each worker; ``grads`` are the means."""
        for grad, local in zip(self.grads, gradients, strict=True):
            self.place.held(grad).copy_(local)
        self.exchange()

    def together(self, gradients: Sequence[Tensor]) -> None:
        """As ``step`` of one worker, but all buckets are under way at once."""
        written = contextlib.nullcontext() if self.recorded else as_written()
        (engine,), (grad,), (local,) = self.engines, self.grads, gradients
        self.place.held(grad).copy_(local)
        with self.place.around(), written:
            cut = grad.split(self.sizes)
            flows = [
                engine.flow(own, shapes) for own, shapes in zip(cut, self.buckets, strict=True)
            ]
            asked = [next(flow, None) for flow in flows]
            while any(request is not None for request in asked):
                answers = [
                    None if request is None else self._transport.fulfil([request])[0]
                    for request in asked
                ]
                asked = [
                    None if answer is None else answer_to(flow, answer)
                    for flow, answer in zip(flows, answers, strict=True)
                ]
        engine.advance()

    def exchange(self) -> None:
        """Exchange what is in ``grads``."""
        written = contextlib.nullcontext() if self.recorded else as_written()
        with self.place.around(), written:
            cut = [grad[: sum(self.sizes)].split(self.sizes) for grad in self.grads]
            for index, shapes in enumerate(self.buckets):
                pairs = zip(self.engines, cut, strict=True)
                self._transport.run([engine.flow(own[index], shapes) for engine, own in pairs])
        for engine in self.engines:
            engine.advance()

    @property
    def replays(self) -> list[bool]:
        """Whether each worker has recorded all exchanges."""
        known = map(replays, self.engines)
        return [bool(each) and all(each) for each in known]

    def states(self) -> list[Tensor]:
        """Return what checkpoints have of the compressor: its tensors by name."""
        with self.place.around():
            states = [engine.state_dict()["compressor"] for engine in self.engines]
        named = [(n, k, v) for each in states for n, kept in each.items() for k, v in kept.items()]
        tensors = [self.place.held(v) for *_, v in named if isinstance(v, Tensor)]
        rest = [(n, k, None if isinstance(v, Tensor) else v) for n, k, v in named]
        return [*tensors, torch.tensor([*repr(rest).encode()])]

    def everything(self) -> list[Tensor]:
        """Return the means, all errors, and bytes and elements counted."""
        found = list(map(self.place.held, self.grads))
        for engine in self.engines:
            if engine.statistics.epoch is not None:
                with self.place.around():
                    state = engine.statistics.epoch.own_state()
                found += [*state.pop("sums").values(), torch.tensor(list(state.values()))]
            for buffers in engine.buffers.named.values():
                found += [self.place.held(each) for each in buffers.values()]
            found.append(torch.tensor(list(vars(engine.tally).values())))
        sent = [self._transport.sent_bytes, self._transport.message_bytes]
        return [*found, torch.tensor(sent)]


Event = Callable[[Group], None]


def move(group: Group) -> None:
    """Put the gradients elsewhere, as DDP's new buckets do."""
    group.kept = list(group.grads)  # else the allocator could give the same memory
    group.grads = [group.place.put(group.place.held(grad).clone()) for grad in group.grads]


def change_levels(group: Group) -> None:
    """Make the compressor tighter, or as it was."""
    for engine in group.engines:
        knob, levels = engine.compressor.traits.knob, engine.levels
        if knob is not None:
            levels.set(levels._first.level if levels.changed else knob.tightest)


def leave_uncompressed(group: Group) -> None:
    """Send everything uncompressed, or compress again."""
    for engine in group.engines:
        if engine.compressor.traits.knob is not None:
            engine.levels.set(engine.levels._first.level if engine.levels.uncompressed else None)


def measure(group: Group) -> None:
    """Measure norms, as the monitor does in steps that it logs, or stop it."""
    for engine in group.engines:
        engine.statistics.norms_wanted = not engine.statistics.norms_wanted


def resume(group: Group) -> None:
    """Go on in new engines, as after a restart."""
    with group.place.around():
        for index, engine in enumerate(group.engines):
            fresh = group.make(index, len(group.engines))
            fresh.load_state_dict(engine.state_dict())
            requested = engine.levels.requested()
            if requested is not None:
                fresh.levels.set(*requested)
            fresh.statistics.tally.add(engine.tally)
            group.engines[index] = fresh


def reload(group: Group) -> None:
    """Load what a checkpoint would have, into the same engines."""
    with group.place.around():
        for engine in group.engines:
            engine.load_state_dict(engine.state_dict())


def scale(group: Group) -> None:
    """Scale the loss, as float16 needs it."""
    with group.place.around():
        for engine in group.engines:
            engine.begin_fit(revocable=True)
            engine.prepare(group.place.put(torch.tensor(1024.0)), None)


def rescale(group: Group) -> None:
    """Change the scale in place, as a gradient scaler does."""
    for engine in group.engines:
        assert engine.loss_scaling.scale is not None
        group.place.held(engine.loss_scaling.scale).mul_(0.5)


def watch(group: Group) -> None:
    """Let a controller's statistics see gradients and errors."""
    for engine in group.engines:
        engine.statistics.epoch = EpochStatistics("epoch sum", True, True, True)


def rest(group: Group) -> None:
    """Set a learning rate of 0, in which a step changes no error, or another one."""
    for engine in group.engines:
        now = engine.learning_rates.now.get("a", 0.1)
        engine.prepare(engine.loss_scaling.scale, dict.fromkeys(SHAPES, 0.1 - now))


def again(group: Group) -> None:
    """End the fit and begin another one."""
    for engine in group.engines:
        engine.end_fit()
        engine.begin_fit(revocable=engine.loss_scaling.revocable)


LAYOUTS: Sequence[Sequence[Shapes]] = (
    BUCKETS,
    ({"a": (13, 40), "b": (7,)}, {"c": (0, 5), **BUCKETS[1]}),
    (BUCKETS[0], {"d": (129,)}),
    (SHAPES,),
)
"""As DDP has them first, as it has them after its first step, and with a frozen parameter."""
EVENTS: Sequence[Event] = (
    *(move, change_levels, leave_uncompressed, measure, measure, resume, reload, scale),
    *(watch, rest, again),
    *(lambda group, layout=layout: group.lay_out(layout) for layout in LAYOUTS),  # type: ignore[misc]
)


KINDS = ("normal", "idle", "ties", "normal", "not finite", "huge", "idle")
FORTY = {
    **{6: move, 10: change_levels, 14: measure, 15: measure, 18: resume, 22: change_levels},
    **{23: watch, 27: scale, 30: rescale, 33: rest, 34: rest, 35: leave_uncompressed},
    36: leave_uncompressed,
}
FEW = {5: move, 10: change_levels, 15: resume}


def run(
    compressor: Compressor,
    memory: Memory | None,
    workers: int,
    steps: int,
    events: Mapping[int, Event],
    **options: Any,
) -> list[int]:
    """Compare exchanges in every step; return in which ones recorded work was started."""

    def make(worker: int, workers: int) -> Engine:
        return Engine(layerwise(compressor), memory, worker=worker, workers=workers)

    pair = [Group(make, workers, recorded=each, **options) for each in (False, True)]
    replayed = []
    for step in range(steps):
        kind = KINDS[step % len(KINDS)]
        cut = options.get("buckets", BUCKETS)
        gradients = [local_gradient(kind, worker, step, cut) for worker in range(workers)]
        if follow(pair, gradients, [events[step]] if step in events else [], (step, kind)):
            replayed.append(step)
    return replayed


def follow(
    pair: Sequence[Group], gradients: Sequence[Tensor], events: Sequence[Event], told: Any
) -> bool:
    """Compare a step as written and one that may be recorded; return if recorded work was started.

    Means, errors, what checkpoints have, and the counts of bytes are equal.
    """
    for group in pair:
        for event in events:
            event(group)
    before = pair[1].replays
    for group in pair:
        group.step(gradients)
    theirs, ours = (group.everything() + group.states() for group in pair)
    assert len(ours) == len(theirs), told
    assert all(map(_same, ours, theirs)), told
    return all(before) and all(pair[1].replays)


MENU = gc.Menu({"powersgd": gc.PowerSGD(2), "topk": gc.TopK(0.05), "dense": gc.Identity()})
SETTLED = 5
"""Steps without an event, after which an exchange that can be recorded is started again."""


def fuzz(seed: int, steps: int = 14) -> int:
    """Compare a random sequence of steps and events; return how many steps were started again.

    Events often come in pairs, one step apart, as what changes and is changed back.
    """
    draw = random.Random(seed)
    compressor = draw.choice([*METHODS, *AS_WRITTEN, MENU, MENU])
    memory = draw.choice([None, *MEMORIES])
    workers, dtype = draw.choice([1, 1, 3]), draw.choice([torch.float32, torch.bfloat16])

    def make(worker: int, workers: int) -> Engine:
        return Engine(layerwise(compressor), memory, worker=worker, workers=workers)

    try:
        make(0, workers)
    except ValueError:  # a memory that the method does not go with
        memory = None
    more: dict[str, Any] = {"dtype": dtype, "place": draw.choice([PRETENDED, *[BY_TORCH] * 7])}
    pair = [Group(make, workers, recorded=each, **more) for each in (False, True)]
    events: dict[int, list[Event]] = {}
    step = SETTLED
    while step < steps:
        chosen = draw.sample(EVENTS, draw.choice([1, 1, 2]))
        events[step] = chosen
        if draw.random() < 0.7:
            events[step + 1] = chosen[::-1] if draw.random() < 0.7 else draw.sample(EVENTS, 1)
        step += draw.choice([2, 3, SETTLED])
    started = 0
    for step in range(steps):
        kind = draw.choice(KINDS)
        gradients = [local_gradient(kind, worker, step) for worker in range(workers)]
        told = seed, step, kind, compressor, memory, workers, dtype
        started += follow(pair, gradients, events.get(step, ()), told)
    return started


class Peak(TorchDispatchMode):
    """Counts the bytes of tensors elsewhere that live at once."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(self, call: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = call(*args, **(kwargs or {}))
        for each in tree_leaves(result):
            if isinstance(each, Elsewhere):
                self._note(each.held.untyped_storage())
        return result

    def _note(self, storage: Any) -> None:
        memory, nbytes = storage._cdata, storage.nbytes()
        if memory in self._known:
            return
        self._known.add(memory)
        self.live += nbytes
        self.most = max(self.most, self.live)
        weakref.finalize(storage, self._freed, memory, nbytes)

    def _freed(self, memory: int, nbytes: int) -> None:
        self._known.discard(memory)
        self.live -= nbytes


def peaks(
    compressor: Compressor, memory: Memory | None, dtype: torch.dtype, *, recorded: bool
) -> int:
    """Return the most bytes that new tensors have at once in the second step, which is watched."""
    peak = Peak()

    @contextlib.contextmanager
    def counted() -> Iterator[None]:
        with kernels_elsewhere(), peak:  # inside, where tensors are still elsewhere
            yield

    group = Group(
        lambda worker, workers: Engine(layerwise(compressor), memory),
        1,
        recorded=recorded,
        buckets=[{"a": (60, 400)}],
        dtype=dtype,
        place=replace(PRETENDED, around=counted),
    )
    for step in range(2):
        before = peak.most = peak.live
        group.step([torch.randn(24_000, generator=torch.Generator().manual_seed(step))])
    return peak.most - before


def local_gradient(
    kind: str, worker: int, step: int, buckets: Sequence[Shapes] = BUCKETS
) -> Tensor:
    """Return a worker's gradient of one of ``KINDS``, ``(numel,)`` on the host."""
    flat = gradient(kind, [s for shapes in buckets for s in shapes.values()], worker, step)
    if kind == "not finite" and worker == 0:
        flat[::50] = math.nan
    return flat


def _same(one: Tensor, other: Tensor) -> bool:
    return torch.equal(one.isnan(), other.isnan()) and torch.equal(
        one.nan_to_num(7.0), other.nan_to_num(7.0)
    )
