"""Count the operations that one worker starts on a GPU in a step, on a machine without a GPU.

The worker runs for real on tensors that only say that they are elsewhere (``counted_waits``). Each
operation that would start work on the device is one launch: a Triton kernel, a collective, or an
operation of torch that is neither a view nor an allocation. Some operations of torch start several
kernels (``topk`` some 20), so the counts are lower bounds.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_leaves

from lightning_gc.compressors import Compressor
from lightning_gc.core import payload_validation
from lightning_gc.core.bucket import Bucket
from lightning_gc.core.flow import Flow, resume
from lightning_gc.engine import Engine
from lightning_gc.kernels import accumulate, quantise, segments, select, triton_kernels
from lightning_gc.kernels.segments import Segments
from lightning_gc.transports import distributed
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
    counts = Counting()
    with contextlib.ExitStack() as stack:
        for target, name, stand_in in (*_kernels(counts), *_collectives(counts, workers)):
            stack.enter_context(mock.patch.object(target, name, stand_in))
        for name, module in list(sys.modules.items()):
            if name.startswith("lightning_gc.") and hasattr(module, "fused"):
                stack.enter_context(mock.patch.object(module, "fused", _fused))
        stack.enter_context(mock.patch.object(Bucket, "generator", counted_waits.generator))
        stack.enter_context(torch.no_grad())
        stack.enter_context(counts)
        yield counts


def _fused(tensor: Tensor) -> bool:
    return isinstance(tensor, Elsewhere) and tensor.dtype == torch.float32 and tensor.numel() > 0


def _kernels(counts: Counting) -> list[tuple[Any, str, Any]]:
    """Return stand-ins of Triton's kernels that compute with torch on the host."""

    def add(out: Tensor, positions: Tensor, values: Tensor, scale: float) -> None:
        if positions.numel():
            counts.note("triton scatter_add", positions, values, positions, positions)
            accumulate.reference(_held(out), _held(positions), _held(values), scale)

    def pack(buffer: Tensor, norms: Tensor, block_size: int, bits: int, noise: Any) -> Tensor:
        packed = quantise.quantise(_held(buffer), _held(norms), block_size, bits, _held(noise))
        counts.note("triton round_and_pack", buffer, buffer, norms, packed)
        return Elsewhere(packed)

    def unpack(
        packed: Tensor, norms: Tensor, block_size: int, bits: int, out: Tensor, scale: float
    ) -> None:
        counts.note("triton unpack_and_add", packed, norms, out, out)
        parts = _held(packed), _held(norms)
        quantise.dequantise(*parts, block_size, bits, _held(out), scale, payload_validation.codes)

    def reaching(buffer: Tensor, threshold: float | Tensor) -> Tensor:
        counts.note("triton mark", buffer)
        counts.waits.append("the number of elements that reach a threshold")
        found = select.reaching_reference(_held(buffer), _held(threshold))
        counts.note("triton compact", found, found)
        return Elsewhere(found)

    def take(buffer: Tensor, threshold: float | Tensor) -> tuple[Tensor, Tensor]:
        counts.note("triton mark", buffer)
        counts.waits.append("the number of elements that reach a threshold")
        values, found = select.reference(_held(buffer), _held(threshold))
        counts.note("triton compact", values, found, found)
        return Elsewhere(values), Elsewhere(found)

    def peaks(flat: Tensor, pieces: Tensor, parameters: int) -> Tensor:
        spans = [(0, 0)] * parameters
        for index, start, stop in _held(pieces).t().tolist():
            first = spans[index][0] if spans[index][1] else start
            spans[index] = (first, stop)
        found = segments.peaks(_held(flat), Segments(spans, torch.device("cpu")))
        counts.note("zeros")
        counts.note("triton largest", flat)
        return Elsewhere(found)

    def move_idle(
        how: segments.Move, target: Tensor, source: Tensor, found: Tensor, pieces: Tensor
    ) -> None:
        counts.note("triton move_pieces")
        assert bool((_held(found) != 0).all()), "gradients here are not zero: nothing is moved"

    def silence(flat: Tensor, flag: Tensor) -> None:
        counts.note("triton zero_if")
        segments.silence(_held(flat), _held(flag))

    def clean(flat: Tensor) -> None:
        counts.note("triton zero_non_finite", flat)
        segments.clean(_held(flat))

    stand_ins = (add, pack, unpack, reaching, take, peaks, move_idle, silence, clean)
    names = (
        *("accumulate", "quantise", "dequantise", "reaching", "select"),
        *("peaks", "move_idle", "silence", "clean"),
    )
    return [(triton_kernels, name, each) for name, each in zip(names, stand_ins, strict=True)]


def _collectives(counts: Counting, workers: int) -> list[tuple[Any, str, Any]]:
    """Return stand-ins of the collectives of ``workers`` that all send the same."""

    def all_gather(out: Tensor, own: Tensor, group: Any = None) -> None:
        counts.note("all-gather", own, out)
        _held(out).view(workers, -1).copy_(_held(own).view(1, -1))

    def all_reduce(flat: Tensor, group: Any = None) -> None:
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


def _drive(flow: Flow, transport: distributed.Distributed) -> None:
    request = next(flow, None)
    while request is not None:
        request = resume(flow, transport.fulfil(request))
