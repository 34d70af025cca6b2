"""Define flows: generators that yield communication requests and receive the replies.

A flow never communicates itself, so it runs unchanged over NCCL or Gloo and between simulated
workers in one thread. Rule for authors: a context manager must not span a ``yield``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

Payload: TypeAlias = tuple[Tensor, ...]
"""The tensors that one worker sends for one gradient tensor: values, indices, scales."""

Limits: TypeAlias = tuple[int | None, ...]
"""Per payload tensor: its maximal number of elements if its length is ragged, otherwise None."""

Reply: TypeAlias = list[Any]


class Arrived(list[Any]):
    """A reply of views of one piece of memory, into which the like can arrive again.

    Attributes:
        memory: all that has arrived, ``(nbytes,)`` uint8.
        again: what the transport needs to receive the like.
    """

    memory: Tensor
    again: tuple[Any, ...]

    @classmethod
    def of(cls, reply: Reply, memory: Tensor, *again: Any) -> Reply:
        """Return the reply with its memory; as it is, if some of it lies elsewhere."""
        storage = memory.untyped_storage()._cdata
        if any(t.untyped_storage()._cdata != storage for payload in reply for t in payload):
            return reply
        made = cls(reply)
        made.memory, made.again = memory, again
        return made

    def moved(self, memory: Tensor) -> Arrived:
        """Return a copy in other memory, of the same size."""
        memory.copy_(self.memory)
        begin = self.memory.storage_offset()

        def there(tensor: Tensor) -> Tensor:
            start = tensor.storage_offset() * tensor.element_size() - begin
            data = memory[start : start + tensor.nbytes]
            return data.view(tensor.dtype).view(tensor.shape)

        made = Arrived([there(tensor) for tensor in payload] for payload in self)
        made.memory, made.again = memory, self.again
        return made


class Mean(NamedTuple):
    """Request the element-wise mean over workers of each tensor.

    The transport may overwrite the tensors. The reply is a list of tensors of the same shapes and
    may share their storage.
    """

    tensors: Payload


class Gather(NamedTuple):
    """Request every worker's tensors. The reply is a list of payloads in worker order.

    Shapes are equal on all workers. Exception: a 1-D tensor with a limit has any length up to it.
    Lengths that differ are sent first, unless all workers know them.

    Attributes:
        tensors: of this worker.
        limits: the greatest lengths of tensors with a limit.
        lengths: of each worker's tensors, in elements, if all workers know them already.
        into: the reply to an earlier request of the same tensors; its memory may be used again.
    """

    tensors: Payload
    limits: Limits | None = None
    lengths: Sequence[Sequence[int]] | None = None
    into: Arrived | None = None


class Exchange(NamedTuple):
    """Send ``payloads[i]`` to worker i. The reply lists the payloads received, in worker order.

    All payloads have the same shapes on all workers, except for tensors with a limit. ``into`` is
    as for ``Gather``.
    """

    payloads: tuple[Payload, ...]
    limits: Limits | None = None
    into: Arrived | None = None


class MeanShard(NamedTuple):
    """Request this worker's shard of the element-wise mean over workers of each tensor.

    The reply is a list of ``(numel/W,)`` tensors, in the dtype of the request or a wider one.

    Attributes:
        tensors: ``(numel,)``, of one dtype. Shard i of W equal ones, which follow each other, is
            for worker i.
    """

    tensors: Payload

    def as_exchange(self, workers: int) -> Exchange:
        """Return the request for all workers' shards; its ``averaged`` reply is this one's."""
        rows = [tensor.view(workers, tensor.numel() // workers) for tensor in self.tensors]
        return Exchange(tuple(zip(*rows, strict=True)))


Request: TypeAlias = Mean | Gather | Exchange | MeanShard
Flow: TypeAlias = Generator[Request, Reply, None]


def together(flows: Sequence[Flow], workers: int) -> Flow:
    """Run flows in lockstep and merge their requests into one per kind.

    Layer-wise compression thus costs one message per bucket, not one per layer. Two workers that
    gather also gather a small mean of the same step, which saves a message on a slow link.

    Args:
        flows: the flows of one worker.
        workers: W.
    """
    waiting = [(flow, request) for flow in flows if (request := next(flow, None)) is not None]
    while waiting:
        if any(isinstance(request, Gather) for _, request in waiting):
            waiting = [_gathered_if_small(flow, request, workers) for flow, request in waiting]
        following = []
        for kind in (Mean, Gather, Exchange, MeanShard):
            group = [pair for pair in waiting if isinstance(pair[1], kind)]
            if not group:
                continue
            asking, requests = zip(*group, strict=True)
            reply = yield join(requests)
            for flow, part in zip(asking, split(reply, requests), strict=True):
                if (request := resume(flow, part)) is not None:
                    following.append((flow, request))
        waiting = following


_SMALL = 1 << 18
"""Maximal bytes of a gathered mean. Larger means are all-reduced, which needs less memory."""


def is_gathered(nbytes: float, workers: int) -> bool:
    """Return whether a mean of ``nbytes`` joins a gather of the same step.

    An all-gather sends (W−1)·n bytes, an all-reduce 2·(W−1)/W·n. Both are n for two workers.
    """
    return workers == 2 and nbytes <= _SMALL


def _gathered_if_small(flow: Flow, request: Request, workers: int) -> tuple[Flow, Request]:
    """Return a flow and request that gather the tensors of a small ``Mean``; others unchanged."""
    if not isinstance(request, Mean):
        return flow, request
    nbytes = sum([t.nbytes for t in request.tensors])
    if not is_gathered(nbytes, workers):
        return flow, request
    gathered = _gathered_mean(flow, request, workers)
    return gathered, next(gathered)


def _gathered_mean(flow: Flow, mean: Mean, workers: int) -> Flow:
    payloads = yield Gather(mean.tensors)
    share = 1 / workers  # applied before the sum, as in an all-reduce
    total = [tensor * share for tensor in payloads[0]]
    for payload in payloads[1:]:  # in the same order on all workers, so that the bits are equal
        for so_far, tensor in zip(total, payload, strict=True):
            so_far.add_(tensor * share)
    request = resume(flow, total)
    while request is not None:
        request = resume(flow, (yield request))


def resume(flow: Flow, reply: Reply) -> Request | None:
    """Send a reply to a flow; return its next request, or None at its end."""
    try:
        return flow.send(reply)
    except StopIteration:
        return None


@contextlib.contextmanager
def undisturbed(*, inference: bool = False) -> Iterator[None]:
    """Run flows without gradients, and without modes of the user's thread that runs them.

    Autocast would change bits. What inference mode makes cannot be changed in place later.

    Args:
        inference: stay in inference mode, as what the caller made in it is to be changed.
    """
    autocast = partial(torch.autocast, enabled=False)
    stays = inference and torch.is_inference_mode_enabled()
    with torch.inference_mode(stays), torch.no_grad(), autocast("cpu"), autocast("cuda"):
        yield


def described(request: Request | None) -> str:
    """Return what must be equal on all workers: the kind of request and the fixed shapes."""
    if request is None:
        return "nothing"
    payloads = request.payloads if isinstance(request, Exchange) else (request.tensors,)
    limits = None if isinstance(request, Mean | MeanShard) else request.limits
    shapes = []
    for payload in payloads:
        for tensor, limit in zip(payload, limits or (None,) * len(payload), strict=True):
            shape = f"at most {limit}" if limit is not None else str(tuple(tensor.shape))
            shapes.append(f"{shape} {str(tensor.dtype).removeprefix('torch.')}")
    return f"{type(request).__name__}[{', '.join(shapes)}]"


def join(requests: Sequence[Request]) -> Request:
    """Merge requests of one kind into one."""
    first = requests[0]
    if len(requests) == 1:
        return first
    if isinstance(first, Mean | MeanShard):
        parts = [r.tensors for r in requests if isinstance(r, Mean | MeanShard)]
        return type(first)(tuple(t for tensors in parts for t in tensors))
    if isinstance(first, Gather):
        gathers = [r for r in requests if isinstance(r, Gather)]
        tensors = tuple(t for r in gathers for t in r.tensors)
        limits = _join_limits([(r.limits, len(r.tensors)) for r in gathers])
        return Gather(tensors, limits, _join_lengths(gathers))
    exchanges = [r for r in requests if isinstance(r, Exchange)]
    payloads = tuple(
        tuple(t for payload in toward for t in payload)
        for toward in zip(*(r.payloads for r in exchanges), strict=True)
    )
    return Exchange(payloads, _join_limits([(r.limits, len(r.payloads[0])) for r in exchanges]))


def split(reply: Reply, requests: Sequence[Request]) -> list[Reply]:
    """Split the reply to a merged request into one reply per original request."""
    parts, start = [], 0
    for request in requests:
        width = len(request.payloads[0] if isinstance(request, Exchange) else request.tensors)
        stop = start + width
        if isinstance(request, Mean | MeanShard):
            parts.append(reply[start:stop])
        else:
            parts.append([payload[start:stop] for payload in reply])
        start = stop
    return parts


def averaged(payloads: Sequence[Sequence[Tensor]]) -> list[Tensor]:
    """Return the mean of each tensor over the workers that have sent it.

    Tensors are added in worker order, in float32 or wider.
    """
    means = [
        torch.zeros_like(t, dtype=torch.promote_types(t.dtype, torch.float32)) for t in payloads[0]
    ]
    for payload in payloads:
        for mean, tensor in zip(means, payload, strict=True):
            mean.add_(tensor, alpha=1 / len(payloads))
    return means


def _join_lengths(gathers: Sequence[Gather]) -> Sequence[Sequence[int]] | None:
    """Return the lengths of all tensors of each worker if every request knows its own."""
    known = [gather.lengths for gather in gathers if gather.lengths is not None]
    if not known or any(g.lengths is None and g.limits is not None for g in gathers):
        return None
    fixed = [[[t.numel() for t in g.tensors]] * len(known[0]) for g in gathers]
    each = [g.lengths or same for g, same in zip(gathers, fixed, strict=True)]
    return [[n for part in parts for n in part] for parts in zip(*each, strict=True)]


def _join_limits(limits: Sequence[tuple[Limits | None, int]]) -> Limits | None:
    if all(limit is None for limit, _ in limits):
        return None
    return tuple(n for limit, width in limits for n in (limit or (None,) * width))
