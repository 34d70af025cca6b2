"""Workers: engines, parameter names, levels and bucket layout of the workers in one process."""

from __future__ import annotations

import functools
import itertools
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from lightning_gc.core import Flow
from lightning_gc.core.bucket import in_memory_order
from lightning_gc.engine import Engine
from lightning_gc.engine.levels import Requested
from lightning_gc.exchange.compression import Configuration
from lightning_gc.exchange.validation import refuse_complex_parameters
from lightning_gc.transports.accounting import Mark, Recorder
from lightning_gc.transports.background import Background

Shapes = Mapping[str, tuple[int, ...]]
MakeFlow = Callable[[Tensor, Shapes], Flow]
"""Makes the flow that replaces a flat gradient by the mean over workers."""


class Regrouping:
    """Collects all of DDP's buckets of a round and exchanges them in another layout.

    DDP rebuilds its buckets after the first step of every process. Some results depend on the
    layout: in ``TwoShot``, which worker owns which shard, and so which worker's error gets the
    second rounding. One step without overlap is the price of resuming bit for bit.

    Args:
        layout: parameter names in each bucket of the last round before the checkpoint.
    """

    def __init__(self, layout: Sequence[Sequence[str]]) -> None:
        self.layout = [tuple(names) for names in layout]
        self._held: list[tuple[Tensor, Shapes, torch.futures.Future[Tensor]]] = []

    def hold(
        self, grad: Tensor, shapes: Shapes, background: Background
    ) -> torch.futures.Future[Tensor]:
        """Add a bucket; return the future that ``send`` will complete with its mean."""
        future = background.promise()
        self._held.append((grad, shapes, future))
        return future

    def send(self, make_flow: MakeFlow, background: Background) -> None:
        """Exchange the buckets held in ``layout`` and copy the means back into them."""
        pieces: dict[str, Tensor] = {}
        for grad, shapes, _ in self._held:
            sizes = [torch.Size(shape).numel() for shape in shapes.values()]
            pieces |= zip(shapes, grad.split(sizes), strict=True)
        known = {name: shape for _, shapes, _ in self._held for name, shape in shapes.items()}
        copies: list[tuple[Tensor, Tensor]] = []
        for names in self.layout:
            members = [pieces[name] for name in names]
            sizes = [member.numel() for member in members]
            dtype = functools.reduce(torch.promote_types, (each.dtype for each in members))
            flat = members[0].new_empty(sum(sizes), dtype=dtype)
            pairs = list(zip(members, flat.split(sizes), strict=True))
            copies += pairs
            # In order, not here: a flow before may still change what is held.
            background.submit(_copying([(inside, held) for held, inside in pairs]), flat)
            background.submit(make_flow(flat, {name: known[name] for name in names}), flat)
        background.submit(_copying(copies), self._held[0][0])
        for grad, _, future in self._held:
            background.submit(_copying([]), grad, future)
        self._held.clear()


def _copying(copies: Sequence[tuple[Tensor, Tensor]]) -> Flow:
    """Copy each second tensor into the first, as a flow without requests, to run in order."""
    for there, here in copies:
        there.copy_(here)
    yield from ()


class HasWeights(Protocol):
    """Gathers of weights by a compressor. A controller may set its level."""

    def set_levels(self, given: Requested | None) -> Requested | None:
        """Use levels from the next gather on; None: the compressor's own. Return them, clamped."""

    def levels(self) -> dict[str, float | None]:
        """Return the level of every weight that is compressed; None: uncompressed for now."""

    def sizes(self) -> dict[str, int]:
        """Return the elements of the same weights."""


class Workers:
    """One engine per worker of this process: one in a real run, W in a simulated one.

    Args:
        configuration: of the engines.

    Attributes:
        engines: in the order of the workers; empty before ``start``.
        accounts: bytes and seconds of these workers, while training.
        names: parameter -> name, of all that are trained.
        layout: parameter names in each bucket of the last round.
        ready: when the gradients of each bucket of the last round were there, as ``mark`` notes it;
            None: nobody wants to know.
        regrouping: exchanges the first round after a resume in the layout of the saved run.
        on_this_machine: workers that share its cores, with this one.
        run: a random name of this fit, equal on all workers.
        model: name -> description of every parameter and buffer, which must be equal on all.
    """

    def __init__(self, configuration: Configuration) -> None:
        self.configuration = configuration
        self.engines: list[Engine] = []
        self.accounts: Sequence[Recorder] = ()
        self.names: dict[Tensor, str] = {}
        self.layout: list[tuple[str, ...]] = []
        self.ready: list[Mark] | None = None
        self.regrouping: Regrouping | None = None
        self.on_this_machine = 1
        self.run = ""
        self.model: dict[str, str] = {}

    def name(self, module: nn.Module) -> None:
        """Set ``names`` to the trained parameters of ``module``, and describe its tensors."""
        trained = ((n, p) for n, p in module.named_parameters() if p.requires_grad)
        self.names = {param: plain_name(name) for name, param in trained}
        self.model = model_in_words(module)

    def start(self, accounts: Sequence[Recorder], *, revocable: bool) -> None:
        """Make an engine per account, or reuse an earlier fit's engines.

        ``revocable``: optimizer steps may be skipped, as by a gradient scaler.
        """
        refuse_complex_parameters(self.names, self.configuration.compressor)
        self.accounts = accounts
        self.regrouping = None
        self.run = secrets.token_hex(4)
        if not self.engines:
            self.engines = [self.make_engine(a.worker, a.workers) for a in accounts]
        for engine in self.engines:
            engine.begin_fit(revocable=revocable)

    def make_engine(self, worker: int, workers: int) -> Engine:
        """Return an engine without state for one of ``workers`` workers."""
        return self.configuration.engine(worker, workers)

    def local(self, param: Tensor) -> Tensor:
        """Return this process's part of a parameter."""
        return local_part(param)

    def place(self) -> dict[str, int]:
        """Return what part of a worker this process has, by names for a saved state."""
        return {}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Parameter name -> shape of this process's part of it."""
        return {name: tuple(self.local(param).shape) for param, name in self.names.items()}

    @property
    def first(self) -> Engine:
        """The first worker's engine."""
        return self.engines[0]

    def prepare_round(self, scaler: Any, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Set loss scale and, if memory or statistics read them, learning rates of the round."""
        # The tensor, not get_scale(): reading a number would wait for the device.
        scale = None if scaler is None else scaler._scale
        rates = learning_rates_of(optimizers, self.names) if self.first.reads_rates else None
        for engine in self.engines:
            engine.prepare(scale, rates)

    def regroup(self, layout: Sequence[Sequence[str]]) -> None:
        """Exchange the next round in ``layout`` if it has exactly this model's parameters."""
        fits = sorted(name for names in layout for name in names) == sorted(self.shapes)
        self.regrouping = Regrouping(layout) if fits else None

    def flow(self, engine: Engine, grad: Tensor, shapes: Shapes, *, wanted: bool = True) -> Flow:
        """Return the flow that replaces one worker's ``grad`` by the mean over workers."""
        weights = None
        if engine.reads_weights:
            own = {name: self.local(p).detach() for p, name in self.names.items()}
            weights = {name: in_memory_order(param) for name, param in own.items()}
        return engine.flow(grad, shapes, weights=weights, wanted=wanted)

    def end_round(self, layout: Iterable[Iterable[str]], ready: Iterable[Mark] = ()) -> None:
        """Count a finished round: its buckets held these parameters, and were ready then."""
        self.layout = [tuple(names) for names in layout]
        if self.ready is not None:
            self.ready = list(ready)
        self.first.advance()
        for engine in self.engines[1:]:
            engine.advance(decoder=self.first)

    def compressed(self) -> dict[Tensor, str]:
        """Return parameter -> name of those that are compressed at some level."""
        takes = self.first.levels.takes
        return {param: n for param, n in self.names.items() if takes(self._largest(param))}

    def _largest(self, param: Tensor) -> tuple[int, ...]:
        """Return the shape of a parameter's largest part, by which it counts as compressed."""
        return tuple(param.shape)

    def levels(self) -> dict[str, float | None]:
        """Return the level of every parameter that is compressed; None: uncompressed for now."""
        if not self.engines:
            return {}
        return self.first.levels.of({n: self._largest(p) for p, n in self.compressed().items()})

    @property
    def gathers(self) -> HasWeights | None:
        """The gathers of compressed weights, in FSDP; None elsewhere."""
        return None

    def weight_levels(self) -> dict[str, float | None]:
        """Return the same of gathered weights, where their compressor has a level."""
        return {} if self.gathers is None else self.gathers.levels()

    def set_levels(
        self, level: float | None, levels: Mapping[str, float | None] | None = None
    ) -> None:
        """Set the levels of all workers, between rounds; see ``Levels.set``."""
        for engine in self.engines:
            engine.levels.set(level, levels)

    def forget_levels(self) -> None:
        """Go back to the compressor's own level, as if none had been set."""
        for engine in self.engines:
            engine.levels.forget()


def learning_rates_of(
    optimizers: Iterable[torch.optim.Optimizer], names: Mapping[Tensor, str]
) -> dict[str, float]:
    """Return parameter name -> learning rate, of all that an optimizer has."""
    groups = (group for optimizer in optimizers for group in optimizer.param_groups)
    return {names[p]: float(group["lr"]) for group in groups for p in group["params"] if p in names}


def local_part(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor in shards, in the same memory; else the tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def reshard(module: nn.Module) -> None:
    """Let FSDP2 free what it has gathered, so that the module has this process's parts.

    The outermost unit keeps gathered parameters after a forward pass without a backward pass.
    """
    for each in module.modules():
        if isinstance(each, FSDPModule):
            each.reshard()


def model_in_words(module: nn.Module) -> dict[str, str]:
    """Return name -> kind, dtype and shape of each parameter and buffer; of tied ones the first."""
    firsts: dict[Tensor, str] = {}
    found = {}
    tensors = itertools.chain(
        module.named_parameters(remove_duplicate=False),
        module.named_buffers(remove_duplicate=False),
    )
    for name, tensor in tensors:
        plain = plain_name(name)
        first = firsts.setdefault(tensor, plain)
        trained = "trained" if tensor.requires_grad else "not trained"
        kind = f"parameter, {trained}" if isinstance(tensor, nn.Parameter) else "buffer"
        cut = f" in {tensor.placements}" if isinstance(tensor, DTensor) else ""
        same = "" if first == plain else f", tied to {first}"
        dtype = str(tensor.dtype).removeprefix("torch.")
        found[plain] = f"{dtype} {tuple(tensor.shape)}{cut} ({kind}{same})"
    return found


def plain_name(name: str) -> str:
    """Return a parameter's name without torch.compile's prefix, for checkpoints."""
    return name.replace("_orig_mod.", "")
