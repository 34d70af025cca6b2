"""The conversation: what a compressor may ask of a transport, and how conversations are joined.

A *flow* is a generator that yields requests and is sent the replies. It never communicates by
itself, so the same flow runs over NCCL or Gloo, between simulated workers in one thread, and under
a transport that records it. Rule for authors: no context manager may span a ``yield``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, TypeAlias

from torch import Tensor

Payload: TypeAlias = tuple[Tensor, ...]
"""What one worker sends for one tensor: values, indices, scales."""

Limits: TypeAlias = tuple[int | None, ...]
"""Per payload tensor: the most elements that it may have where its length is ragged, else None."""

Reply: TypeAlias = list[Any]


class Mean(NamedTuple):
    """Ask for the element-wise mean over workers of each tensor.

    The transport may reduce in place: the tensors given are consumed, and the reply, a list of
    tensors of the same shapes, may share their storage.
    """

    tensors: Payload


class Gather(NamedTuple):
    """Ask for every worker's tensors. The reply is a list of payloads in worker order.

    Shapes must agree on all workers, except for 1-D tensors with a limit: their lengths may
    differ, up to that limit.
    """

    tensors: Payload
    limits: Limits | None = None


class Exchange(NamedTuple):
    """Send ``payloads[i]`` to worker i. The reply is what every worker sent here, in their order.

    All payloads have the same shapes on all workers, except for tensors with a limit.
    """

    payloads: tuple[Payload, ...]
    limits: Limits | None = None


Request: TypeAlias = Mean | Gather | Exchange
Flow: TypeAlias = Generator[Request, Reply, None]


def together(flows: Sequence[Flow]) -> Flow:
    """Run several flows side by side and merge each round into one request per kind.

    This is what makes layer-wise compression cost one message per bucket, not one per layer.
    """
    waiting = [(flow, request) for flow in flows if (request := next(flow, None)) is not None]
    while waiting:
        following = []
        for kind in (Mean, Gather, Exchange):
            group = [pair for pair in waiting if isinstance(pair[1], kind)]
            if not group:
                continue
            reply = yield join([request for _, request in group])
            for (flow, _), part in zip(
                group, split(reply, [request for _, request in group]), strict=True
            ):
                with contextlib.suppress(StopIteration):
                    following.append((flow, flow.send(part)))
        waiting = following


def join(requests: Sequence[Request]) -> Request:
    """Merge requests of one kind into one."""
    first = requests[0]
    if len(requests) == 1:
        return first
    if isinstance(first, Mean):
        return Mean(tuple(t for r in requests if isinstance(r, Mean) for t in r.tensors))
    if isinstance(first, Gather):
        gathers = [r for r in requests if isinstance(r, Gather)]
        tensors = tuple(t for r in gathers for t in r.tensors)
        return Gather(tensors, _join_limits([(r.limits, len(r.tensors)) for r in gathers]))
    exchanges = [r for r in requests if isinstance(r, Exchange)]
    payloads = tuple(
        tuple(t for payload in toward for t in payload)
        for toward in zip(*(r.payloads for r in exchanges), strict=True)
    )
    return Exchange(payloads, _join_limits([(r.limits, len(r.payloads[0])) for r in exchanges]))


def split(reply: Reply, requests: Sequence[Request]) -> list[Reply]:
    """Hand the reply of a merged request back in parts, one per original request."""
    parts, start = [], 0
    for request in requests:
        width = len(request.payloads[0] if isinstance(request, Exchange) else request.tensors)
        stop = start + width
        if isinstance(request, Mean):
            parts.append(reply[start:stop])
        else:
            parts.append([payload[start:stop] for payload in reply])
        start = stop
    return parts


def _join_limits(limits: Sequence[tuple[Limits | None, int]]) -> Limits | None:
    if all(limit is None for limit, _ in limits):
        return None
    return tuple(n for limit, width in limits for n in (limit or (None,) * width))
