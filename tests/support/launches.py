"""Count the operations that one worker starts on a GPU in a step, on a machine without a GPU.

The worker runs for real on tensors that only say that they are elsewhere (``counted_waits``).
Triton's kernels run in its interpreter, so ``TRITON_INTERPRET=1`` must be set before triton is
imported. Each operation that would start work on the device is one launch: a Triton kernel, a
collective, or an operation of torch that is neither a view nor an allocation. Some operations of
torch start several kernels (``topk`` some 20), so the counts are lower bounds. A kernel's bytes are
those that it loads and stores; another operation's bytes are its operands and results.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import pkgutil
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_gc.compressors import Compressor
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Flow, resume
from lightning_gc.engine import Engine
from lightning_gc.engine.recorded_exchange import RecordedLayout
from lightning_gc.kernels import gpu
from lightning_gc.kernels.gpu import prepared_launch
from lightning_gc.schemes import Scheme
from lightning_gc.transports import distributed
from lightning_gc.transports.simulated import Simulated
from tests.support import counted_waits
from tests.support.counted_waits import Accelerator, Elsewhere, on_device

Shapes = Mapping[str, tuple[int, ...]]
_ALLOCATIONS = {
    *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    *("detach", "alias", "lift_fresh", "_unsafe_view"),
}


@dataclass
class Counts:
    """The launches of one worker in one step.

    Attributes:
        launches: name of the operation -> how often it was started.
        nbytes: bytes of the operands and results of all operations.
        waits: times that the host would have waited for the device.
        elements: of all gradients.
    """

    launches: Counter[str] = field(default_factory=Counter)
    nbytes: int = 0
    waits: int = 0
    elements: int = 0

    @property
    def total(self) -> int:
        return self.launches.total()

    @property
    def bytes_per_element(self) -> float:
        return self.nbytes / self.elements


class Counting(Accelerator):
    """An ``Accelerator`` that notes the operations on its tensors in ``counts``."""

    def __init__(self) -> None:
        super().__init__()
        self.counts = Counts()
        self.listening = True

    def note(self, name: str, *tensors: Tensor) -> None:
        if self.listening:
            self.counts.launches[name] += 1
            self.counts.nbytes += sum(_nbytes(tensor) for tensor in tensors)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        name = func._schema.name.removeprefix("aten::")
        leaves = tree_leaves((args, kwargs or {}, result))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if not any(isinstance(tensor, Elsewhere) for tensor in tensors):
            return result
        aliases = [returned.alias_info for returned in func._schema.returns]
        view = any(alias is not None and not alias.is_write for alias in aliases)
        if name == "_local_scalar_dense":
            self.note("copy to the host")
        elif not view and name not in _ALLOCATIONS:
            self.note(name, *tensors)
        return result


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _held(tensor: Any) -> Any:
    return tensor.held if isinstance(tensor, Elsewhere) else tensor


@contextlib.contextmanager
def counting(workers: int) -> Iterator[Counting]:
    """Yield a mode in which Triton's kernels and collectives are counted as one launch each.

    Collectives return what ``workers`` equal workers would have sent.
    """
    counts, traffic = Counting(), _Traffic()
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in (*traffic.patches(), *_collectives(counts, workers)):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        for _, name, _ in pkgutil.iter_modules(gpu.__path__):
            importlib.import_module(f"{gpu.__name__}.{name}")
        stand_in = mock.patch.object(prepared_launch, "by_triton", _launcher(counts, traffic))
        stack.enter_context(stand_in)
        stand_ins = {"fused": _fused}
        for module in [m for n, m in sys.modules.items() if n.startswith("lightning_gc.")]:
            for name in stand_ins.keys() & vars(module).keys():
                stack.enter_context(mock.patch.object(module, name, stand_ins[name]))
        stack.enter_context(mock.patch.object(Bucket, "generator", counted_waits.generator))
        # Steps as written. What a recorded one starts has its own bound, in test_prepared_launch.
        stack.enter_context(mock.patch.object(RecordedLayout, "is_due", return_value=False))
        stack.enter_context(torch.no_grad())
        stack.enter_context(counts)
        yield counts


def _fused(tensor: Tensor, family: str) -> bool:
    return isinstance(tensor, Elsewhere) and tensor.dtype == torch.float32 and tensor.numel() > 0


class _Traffic:
    """Counts the bytes that Triton's interpreter loads and stores, each address once a time."""

    def __init__(self) -> None:
        self.nbytes = 0

    def patches(self) -> Iterator[tuple[Any, str, Any]]:
        from triton.runtime.interpreter import InterpreterBuilder

        for name in ("create_masked_load", "create_masked_store", "create_atomic_rmw"):
            yield InterpreterBuilder, name, self._counted(name, getattr(InterpreterBuilder, name))

    def _counted(self, name: str, original: Any) -> Any:
        def call(builder: Any, *handles: Any) -> Any:
            pointers, mask = {
                "create_masked_load": lambda: (handles[0], handles[1]),
                "create_masked_store": lambda: (handles[0], handles[2]),
                "create_atomic_rmw": lambda: (handles[1], handles[3]),
            }[name]()
            places = np.unique(np.broadcast_to(pointers.data, mask.data.shape)[mask.data])
            width = pointers.get_element_ty().primitive_bitwidth // 8
            self.nbytes += len(places) * width * (2 if "atomic" in name else 1)
            return original(builder, *handles)

        return call


def _launcher(counts: Counting, traffic: _Traffic) -> Any:
    def launch(
        program: Any, grid: Sequence[int], arguments: Sequence[Any], constants: Mapping[str, Any]
    ) -> None:
        """Run the kernel in Triton's interpreter on what the tensors hold."""
        before, listening = traffic.nbytes, counts.listening
        counts.listening = False
        try:
            program[tuple(grid)](*map(_held, arguments), **constants)
        finally:
            counts.listening = listening
        if listening:
            counts.counts.launches[f"triton {program.__name__}"] += 1
            counts.counts.nbytes += traffic.nbytes - before

    return launch


def _collectives(counts: Counting, workers: int) -> list[tuple[Any, str, Any]]:
    """Return stand-ins of the collectives of ``workers`` that all send the same."""

    def all_gather(out: Tensor, own: Tensor, group: Any = None) -> None:
        counts.note("all-gather", own, out)
        _held(out).view(workers, -1).copy_(_held(own).view(1, -1))

    def all_reduce(flat: Tensor, group: Any = None, async_op: bool = False) -> None:
        counts.note("all-reduce", flat, flat)
        _held(flat).mul_(workers)

    def all_to_all(out: Tensor, own: Tensor, *_: Any, **__: Any) -> None:
        counts.note("all-to-all", own, out)
        first = _held(own).view(-1)[: out.numel() // workers]
        _held(out).view(workers, -1).copy_(first.view(1, -1))

    return [
        (distributed, "_all_gather", all_gather),
        (distributed, "register", lambda: None),
        (dist, "all_reduce", all_reduce),
        (dist, "all_to_all_single", all_to_all),
        (dist, "get_rank", lambda group=None: 0),
        (dist, "get_world_size", lambda group=None: workers),
    ]


def launches(compressor: Compressor, buckets: Sequence[Shapes], workers: int) -> Counts:
    """Return the launches of one worker in its second step.

    Args:
        compressor: with the wrappers that a strategy would give it.
        buckets: shapes by parameter name, for each bucket.
        workers: W.
    """
    engine = Engine(compressor, worker=0, workers=workers)
    with counting(workers) as counts:
        transport = distributed.Distributed()
        for step in range(2):
            counts.counts, counts.waits = Counts(), []
            counts._calls.waits = counts.waits
            for index, shapes in enumerate(buckets):
                numel = sum(map(math.prod, shapes.values()))
                draw = torch.Generator().manual_seed(1000 * step + index)
                gradient = on_device(torch.randn(numel, generator=draw) * 0.01)
                counts.counts.elements += numel
                _drive(engine.flow(gradient, shapes), transport)
            engine.advance()
        counts.counts.waits = len(counts.waits)
    return counts.counts


def launches_among(
    compressor: Compressor, scheme: Scheme | None, shapes: Shapes, workers: int
) -> Counts:
    """Return the launches of worker 0 in a second step among workers with other gradients.

    For schemes whose payloads differ in length. Collectives are not counted.
    """
    engines = [Engine(compressor, None, scheme, worker=w, workers=workers) for w in range(workers)]
    numel = sum(map(math.prod, shapes.values()))
    with counting(workers) as counts:
        for step in range(2):
            counts.counts = Counts(elements=numel)
            draw = torch.Generator().manual_seed(step)
            grads = [on_device(torch.randn(numel, generator=draw)) for _ in engines]
            # Only worker 0 is counted, so the others need not decode the mean.
            flows = [
                e.flow(g, shapes, wanted=not e.worker) for e, g in zip(engines, grads, strict=True)
            ]
            counts.listening = False
            Simulated(workers).run([_heard(flows[0], counts), *flows[1:]])
            counts.listening = True
            for engine in engines:
                engine.advance()
    return counts.counts


def _heard(flow: Flow, counts: Counting) -> Flow:
    """Run ``flow``, and count its launches and waits only."""
    reply: Any = None
    while True:
        counts.listening, before = True, len(counts.waits)
        try:
            request = flow.send(reply)
        except StopIteration:
            return
        finally:
            counts.listening = False
            counts.counts.waits += len(counts.waits) - before
        reply = yield request


def _drive(flow: Flow, transport: distributed.Distributed) -> None:
    request = next(flow, None)
    while request is not None:
        request = resume(flow, transport.fulfil(request))
