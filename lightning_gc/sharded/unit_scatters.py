"""Reduce-scatters of FSDP2's units, compressed: the scheme, and its place in FSDP2.

FSDP2 lets a module bring its own reduce-scatter (``set_custom_reduce_scatter``, torch 2.9). Ours
has the same group, the same stream and the same order of calls as FSDP2's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.compressors.base import Collective, Compressor
from lightning_gc.compressors.joint import WholeCodec, limits_of, wire_of
from lightning_gc.core import Bucket, Exchange, Flow, MeanShard, Payload, averaged, together
from lightning_gc.core.combinations import judge
from lightning_gc.core.flow import undisturbed
from lightning_gc.kernels import dispatch
from lightning_gc.schemes import Scheme
from lightning_gc.schemes.base import book, toward
from lightning_gc.sharded import fsdp_units
from lightning_gc.sharded.shard_validation import refuse_pass
from lightning_gc.sharded.sharded_workers import FSDPWorkers, stacked
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.distributed import Distributed


@dataclass(frozen=True)
class ReduceScatter(Scheme):
    """The first half of ``TwoShot``, for FSDP2: shard i of the mean, on worker i only.

    ``out_i = 1/W · Σ_j decode(encode(x_j[i]))``, where ``x_j[i]`` is the i-th of W equal parts of
    a parameter's gradient on worker j. Each worker encodes W parts once, with different random
    numbers, and decodes in float32. Dense tensors are exchanged in the same way, in the gradient's
    dtype, and added in the order of workers. A codec that is plain, ``Identity``, asks for torch's
    own reduce-scatter, so gradients have FSDP2's bits.

    With L workers per node it goes in two hops. Worker l of a node first gets, from its L
    neighbours, the shards of the workers l of all nodes, and averages them. Then it encodes each
    of these means again, and sends it to its owner. L times the error of the second encoding is
    added to the error of the worker that made it, so the mean over workers of the errors is exact.
    Dense tensors go in one hop.

    It is not in ``SCHEMES``: it breaks their second law, as workers end with different shards.
    Elements of ``out`` that belong to other workers are undefined afterwards.

    Args:
        workers_per_node: L, as the machines are; consecutive workers are a node. 1: one hop, as
            also where L does not divide W, or there is one node.

    Communication pattern:
        One all-to-all for a bucket: ``(W−1)/W`` times the payload's bytes per worker, half of what
        ``TwoShot`` sends, and flat in W. The numbers of a parameter must be a multiple of W. In two
        hops, of the payload's bytes P: ``(L−1)/L·P`` within the node, ``(1 − L/W)·P/L`` to other
        nodes, and lengths, of 8 bytes for each tensor and worker.

    Raises:
        ValueError: when combined with a compressor that has its own rounds, or that votes;
            ``workers_per_node`` below 1.

    Reference:
        Wang et al., "ZeRO++: Extremely Efficient Collective Communication for Giant Model
        Training" (qgZ), arXiv 2306.10209.
    """

    workers_per_node: int = 1
    limits = {"workers_per_node": "[1, inf) each machine's number of workers"}

    cuts = scatters = True

    def check(self, compressor: Compressor) -> None:
        """Refuse what has no payload for one worker alone."""
        own_rounds = isinstance(compressor.method, Collective)
        judge("FSDP's shards", compressor=compressor, own_rounds=own_rounds)

    def neighbours(self, workers: int) -> int:
        """Return L, or 1 where there is one hop."""
        near = self.workers_per_node
        return near if near < workers and workers % near == 0 else 1

    def encodings(self, workers: int) -> int:
        """Return W: each part is encoded once; and once again in a second hop."""
        near = self.neighbours(workers)
        return workers if near == 1 else workers + workers // near

    def flow(self, codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange a bucket, parameter by parameter, in one message to each worker."""
        if codec.codec.traits.plain:
            _write((yield _uncompressed(bucket, buffer, out)), bucket, out)
            return
        near = self.neighbours(bucket.workers)
        spans = [(name, slice(start, stop)) for name, start, stop in bucket.spans()]
        flows = []
        for name, span in spans:
            part = bucket.part(name, span.start, span.stop)
            if near == 1:
                flows.append(_scattered(codec, part, buffer[span], out[span]))
            else:
                flows.append(_in_two_hops(codec, part, buffer[span], out[span], near))
        yield from together(flows, bucket.workers)

    def dense(self, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
        """Exchange a bucket as it is: as many bytes as a reduce-scatter sends."""
        request = _uncompressed(bucket, buffer, out).as_exchange(bucket.workers)
        _write(averaged((yield request)), bucket, out)


def _uncompressed(bucket: Bucket, buffer: Tensor, out: Tensor) -> MeanShard:
    """Return the request for the mean of a bucket in the gradient's dtype; move it out."""
    wire = buffer.to(bucket.grad.dtype, copy=True)  # a reply may share it with other workers
    if buffer.data_ptr() != out.data_ptr():
        buffer.zero_()
    return MeanShard(tuple(wire[start:stop] for _, start, stop in bucket.spans()))


def _write(means: Sequence[Tensor], bucket: Bucket, out: Tensor) -> None:
    """Write this worker's shards of the mean to their places in ``out``."""
    for mean, (_, start, stop) in zip(means, bucket.spans(), strict=True):
        _shard(out[start:stop], bucket.worker, bucket.workers).copy_(mean)


def _shard(flat: Tensor, index: int, workers: int) -> Tensor:
    """Return the view of part ``index`` of ``workers`` equal ones."""
    size, rest = divmod(flat.numel(), workers)
    assert not rest, "padded to equal parts"
    return flat[index * size : (index + 1) * size]


def _scattered(codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor) -> Flow:
    """Exchange one parameter."""
    workers, me = bucket.workers, bucket.worker
    mine = _shard(out, me, workers)
    size = mine.numel()
    parts = [bucket.shard(i, size) for i in range(workers)]
    payloads: tuple[Payload, ...] = tuple(
        codec.send(_shard(buffer, i, workers), part) for i, part in enumerate(parts)
    )
    arrived = yield Exchange(payloads, limits_of(codec, size))
    mean = torch.zeros_like(mine)
    for sender, payload in enumerate(arrived):
        codec.receive(tuple(payload), mean, 1 / workers, parts[me], sender)
    mine.copy_(mean)


def _in_two_hops(codec: WholeCodec, bucket: Bucket, buffer: Tensor, out: Tensor, near: int) -> Flow:
    """Exchange one parameter within the node, and its means between nodes."""
    workers = bucket.workers
    nodes, (node, local) = workers // near, divmod(bucket.worker, near)
    mine = _shard(out, bucket.worker, workers)
    size = mine.numel()
    shards = [bucket.shard(i, size) for i in range(workers)]
    limits = tuple(field.length for field in wire_of(codec, size))
    neighbours = [node * near + i for i in range(near)]
    counterparts = [i * near + local for i in range(nodes)]

    # A payload for each shard: the second hop sends them to different nodes.
    fields, payloads = len(limits), list[Payload]()
    for i in range(near):
        owners = range(i, workers, near)
        payloads.append(
            tuple(
                tensor
                for owner in owners
                for tensor in codec.send(_shard(buffer, owner, workers), shards[owner])
            )
        )
    arrived = yield toward(neighbours, payloads, workers, limits * nodes)
    means = [torch.zeros_like(mine) for _ in range(nodes)]
    for sender in neighbours:
        for i, mean in enumerate(means):
            payload = tuple(arrived[sender][i * fields : (i + 1) * fields])
            codec.receive(payload, mean, 1 / near, shards[counterparts[i]], sender)

    again = [shards[owner].again() for owner in counterparts]
    payloads = [codec.send(mean, part) for mean, part in zip(means, again, strict=True)]
    for owner, error in zip(counterparts, means, strict=True):
        book(buffer, owner * size, error, near)
    arrived = yield toward(counterparts, payloads, workers, limits)
    mean = torch.zeros_like(mine)
    for sender in counterparts:
        codec.receive(tuple(arrived[sender]), mean, 1 / nodes, again[node], sender)
    mine.copy_(mean)


class UnitScatters:
    """Does the reduce-scatters of a model's units while it lives.

    Args:
        units: of the model.
        workers: this rank's engine, by ``ReduceScatter``, and names of parameters.
        transport: over all ranks of the shards.
        recording: of the same transport; its account.
        before_round: called before the first exchange of each backward pass.
        numbers: of the units.

    Communication pattern:
        One all-to-all for each reduce-scatter of FSDP2, in its order: units as the backward pass
        finishes them. With ``Identity`` it is a reduce-scatter. If ``numbers`` are verified, the
        unit's number is gathered before it. On the host layouts are compared in passes 0, 1, 2, 4,
        8 and so on, as by ``Synchronizer``. A unit that no rank has used yet is left out, as FSDP2
        leaves it out; one that is reduced twice in a pass draws the same random numbers twice,
        unbiased as ever.
    """

    def __init__(
        self,
        units: Sequence[fsdp_units.Unit],
        workers: FSDPWorkers,
        transport: Distributed,
        recording: Recording,
        before_round: Callable[[], None],
        numbers: fsdp_units.UnitNumbers,
    ) -> None:
        self._workers, self._before_round = workers, before_round
        self._numbers = numbers
        self._transport, self._recording = transport, recording
        self._units = [unit for unit in units if unit.columns()]
        self._pass: list[tuple[str, ...]] | None = None  # names in each exchange of this pass
        self._passes = 0  # that have ended here: as many on all ranks, whatever units they use
        dispatch.host.rest(self)
        for unit in self._units:
            exchange = partial(self._exchange, unit.name)
            unit.scatter_by(UnitScatter(unit, workers.names, exchange))

    def _exchange(
        self, name: str, grad: Tensor, shapes: Mapping[str, tuple[int, ...]], group: Any
    ) -> None:
        """Replace this rank's shards in ``grad`` by their means over all ranks."""
        if self._pass is None:
            self._pass = []
            fsdp_units.after_backward(self._finish)
            self._before_round()
        self._pass.append(tuple(shapes))
        # FSDP2's, which may be another one than the mesh's: `set_separate_reduce_scatter_group`.
        self._transport.group = group
        flow = self._workers.flow(self._workers.first, grad, shapes)
        if grad.device.type == "cpu" and not self._passes & (self._passes - 1):
            flow = self._recording.compared(flow, shapes)
        self._recording.run(self._numbers.around(name, flow, grad.device), grad.device)

    def _finish(self) -> None:
        """End a pass, and with it a round: the next one has other random numbers."""
        layout, self._pass = self._pass or [], None
        self._passes += 1
        self._workers.end_round(layout)

    def refuse_interrupted(self) -> None:
        """Raise RuntimeError if a backward pass has begun that never ended; call it between passes.

        Its round would never end, and all further steps would draw the same random numbers.
        """
        fsdp_units.refuse_interrupted(self._pass is not None)

    def close(self) -> None:
        """Let FSDP2 do its own reduce-scatters again."""
        dispatch.host.rest(self, ends=True)
        for unit in self._units:
            unit.scatter_itself()


class UnitScatter:
    """One unit's reduce-scatter: what torch calls a ``ReduceScatter``.

    Args:
        unit: these are its gradients.
        names: sharded parameter -> name, of all that are trained.
        exchange: given the flat gradient ``(numel,)``, parameter after parameter, shapes by name
            and a process group, replaces this rank's shards in it by their means.
    """

    # On CUDA, with FSDP2's streams (torch 2.9 to 2.13; read, and not run on several GPUs):
    #
    # - Order. FSDP2 makes its reduce-scatter stream current, lets it wait for the copies into
    #   `input_tensor`, and calls. All that is done here, and each collective, is queued on that
    #   stream from the thread that FSDP2 calls in, in the place of FSDP2's own reduce-scatter and
    #   on the same communicator. So collectives have the same order on all ranks as without us, no
    #   second communicator competes, and what FSDP2 queues next (the cast, `.grad`, the event for
    #   the optimizer) comes after. The backward pass continues meanwhile. The host waits only where
    #   a compressor does, or its message lengths vary.
    # - Lifetime. `input_tensor` belongs to another stream; FSDP2 keeps it until the event that it
    #   records after this call, and it is only read before. `output_tensor` and tensors allocated
    #   here belong to the current stream, which is the one that uses them, so memory that is freed
    #   is given again in that stream's order. A collective runs on the backend's stream; the
    #   current one waits for it before it continues.

    def __init__(
        self,
        unit: fsdp_units.Unit,
        names: Mapping[Tensor, str],
        exchange: Callable[[Tensor, Mapping[str, tuple[int, ...]], Any], None],
    ) -> None:
        self._unit, self._names, self._exchange = unit, names, exchange

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for input or output, as FSDP2 itself would get it."""
        return torch.empty(*size, dtype=dtype, device=device)

    @undisturbed()
    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Leave the mean over ranks of their row for this rank in ``output_tensor``.

        Args:
            output_tensor: ``(k,)``.
            input_tensor: ``(W·k,)``: a row of all parameters' shards for each rank.
            group: of all ranks.
            op: AVG; others are refused.
            async_op: FSDP2 leaves it out.

        Raises:
            RuntimeError: parameters have changed since the fit began, or the result would not be a
                mean.
        """
        columns = self._unit.columns()
        me, workers = dist.get_rank(group), dist.get_world_size(group)
        numel, divided = input_tensor.numel() // workers, op != dist.ReduceOp.AVG
        refuse_pass(self._unit, self._names, numel, divided=divided)
        rows = input_tensor.view(workers, -1)
        parts = [rows[:, column.start : column.stop].reshape(-1) for column in columns]
        grad = torch.cat(parts)
        names = [self._names[column.param] for column in columns]
        shapes = [stacked(column.shape, workers) for column in columns]
        self._exchange(grad, dict(zip(names, shapes, strict=True)), group)
        for column in columns:  # in `grad` a parameter's rows follow each other
            mine = grad[workers * column.start : workers * column.stop].view(workers, -1)[me]
            output_tensor[column.start : column.stop] = mine
