"""Measure each method's computation and messages for each segment of the gradients.

A segment is timed alone, with the module's gradients and at its true size, because the time of a
selection is not linear in the size. Buckets consist of segments.
"""

import dataclasses
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_gc.advice.traces import Asked, Shapes, Trace, pattern, trace
from lightning_gc.compressors import Identity
from lightning_gc.core.flow import is_gathered
from lightning_gc.exchange.bucketing import Layout
from lightning_gc.methods.method import Method
from lightning_gc.schemes import AllReduce
from lightning_gc.transports.distributed import Distributed, gather_text

REPEATS = 2
FEW = 4
"""Up to this number of workers all are simulated; costs for more workers are extrapolated."""
SEEN = (3, 4, 6)
Costs = dict[str, list[Trace]]
"""Method -> a trace for each segment."""


def simulated(workers: int) -> tuple[int, ...]:
    """Return the numbers of workers to simulate, from which costs for ``workers`` follow."""
    return (workers,) if workers <= FEW else SEEN


def segment_trace(method: Method | None, shapes: Shapes, own: Tensor, workers: int) -> Trace:
    """Return a step of one segment.

    Args:
        method: None sends it uncompressed.
        shapes: of the parameters.
        own: their gradient, flat.
        workers: W.

    Raises:
        ValueError: W exceeds ``FEW``, and the method's requests depend on W in a way that cannot
            be extrapolated.
    """
    if method is None:
        parts: tuple[Any, Any, Any] = (Identity(), None, AllReduce())
    else:
        parts = (method.make_compressor({}), *method.memory_and_scheme())
    compressor, memory, scheme = parts
    seen = [
        trace(compressor, scheme, shapes, few, REPEATS, memory=memory, own=own)
        for few in simulated(workers)
    ]
    return seen[0] if len(seen) == 1 else pattern(seen).at(workers)


def measure_costs(
    methods: Mapping[str, Method | None],
    gradients: Mapping[str, Tensor],
    order: Sequence[str],
    pieces: Layout,
    workers: int,
    seconds: float,
    transport: Distributed,
    device: torch.device,
) -> tuple[Costs, dict[str, str]]:
    """Time methods, all workers at once, until the time is up.

    Args:
        methods: by name; None sends gradients uncompressed.
        gradients: parameter name -> gradient of this worker.
        order: names in the order of readiness.
        pieces: positions in ``order`` that make up each segment.
        workers: W of the returned costs.
        seconds: after which no further method is begun.
        transport: between the workers.
        device: a device that the transport's backend can send from.

    Returns:
        The costs, of the slowest worker, and method -> why it is missing.
    """
    costs: Costs = {}
    missing: dict[str, str] = {}
    began = time.monotonic()
    for name, method in methods.items():
        found: dict[str, Any] = {"late": time.monotonic() - began}
        try:
            found["traces"] = [
                dataclasses.asdict(_piece(method, gradients, [order[i] for i in piece], workers))
                for piece in pieces
            ]
        except (ValueError, RuntimeError) as error:
            found["error"] = str(error)
        texts = gather_text(json.dumps(found), transport, device, f"time {name}")
        answers = [json.loads(text) for text in texts]
        errors = [answer["error"] for answer in answers if "error" in answer]
        if errors:
            missing[name] = errors[0]
            continue
        each = [[_trace(saved) for saved in answer["traces"]] for answer in answers]
        costs[name] = [slowest(of_piece) for of_piece in zip(*each, strict=True)]
        if max(answer["late"] for answer in answers) > seconds:
            break
    done = len(costs) + len(missing)
    for name in methods:
        if name not in costs and name not in missing:
            missing[name] = (
                f"there was no time left after {done} of {len(methods)} methods. Give about "
                f"{math.ceil(len(methods) / done)} times the --budget-seconds"
            )
    return costs, missing


def _piece(
    method: Method | None, gradients: Mapping[str, Tensor], names: Sequence[str], workers: int
) -> Trace:
    tensors = [gradients[name] for name in names]
    shapes = {name: tuple(t.shape) for name, t in zip(names, tensors, strict=True)}
    own = torch.cat([tensor.reshape(-1) for tensor in tensors])
    return segment_trace(method, shapes, own, workers)


def _trace(saved: dict[str, Any]) -> Trace:
    asked = tuple(Asked(**each) for each in saved["asked"])
    return Trace(saved["workers"], asked, tuple(saved["seconds"]), saved["sent"])


def slowest(traces: Sequence[Trace]) -> Trace:
    """Return the element-wise maximum of several workers' traces."""
    first = traces[0]
    seconds = tuple(max(each) for each in zip(*(t.seconds for t in traces), strict=True))
    asked = tuple(
        dataclasses.replace(
            each[0],
            nbytes=max(asked.nbytes for asked in each),
            received=max(asked.arriving for asked in each),
        )
        for each in zip(*(t.asked for t in traces), strict=True)
    )
    return Trace(first.workers, asked, seconds, max(t.sent for t in traces))


def bucket_trace(traces: Sequence[Trace]) -> Trace:
    """Return the trace of a bucket from the traces of its segments.

    Flows of a bucket run in lockstep: computation adds up, and the i-th requests of one kind are
    joined. With two workers, a small mean joins a gather.
    """
    if len(traces) == 1:
        return traces[0]
    longest = max(traces, key=lambda each: len(each.asked))
    keys = list(_keys(longest))
    for each in traces:
        keys += [key for key in _keys(each) if key not in keys]
    asked: dict[tuple[str, int], Asked] = {}
    after = dict.fromkeys(keys, 0.0)
    for each in traces:
        for key, one, more in zip(_keys(each), each.asked, each.seconds[1:], strict=True):
            before = asked.get(key)
            asked[key] = one if before is None else _added(before, one)
            after[key] += more
    mean, gather = ("Mean", 0), ("Gather", 0)
    at_first = {each.asked[0].kind for each in traces if each.asked}
    if {"Mean", "Gather"} <= at_first and is_gathered(asked[mean].nbytes, longest.workers):
        keys.remove(mean)
        asked[gather] = _added(asked[gather], asked.pop(mean))
        after[gather] += after[mean]
    first = sum(each.seconds[0] for each in traces)
    seconds = (first, *(after[key] for key in keys))
    sent = sum(each.sent for each in traces)
    return Trace(longest.workers, tuple(asked[key] for key in keys), seconds, sent)


def _keys(each: Trace) -> list[tuple[str, int]]:
    kinds = [asked.kind for asked in each.asked]
    return [(kind, kinds[:i].count(kind)) for i, kind in enumerate(kinds)]


def _added(one: Asked, other: Asked) -> Asked:
    return Asked(
        one.kind,
        one.nbytes + other.nbytes,
        max(one.collectives, other.collectives),
        one.lengths + other.lengths,
        one.arriving + other.arriving,
    )
