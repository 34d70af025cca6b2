"""ShardExchange: compressed exchange of one rank's shards of an FSDP2 model with its replicas."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from lightning_gc.exchange.peers import ShardParts, broadcast_all, on_all_ranks
from lightning_gc.exchange.synchronizer import Synchronizer
from lightning_gc.exchange.validation import check_agreement
from lightning_gc.exchange.verification import Verify
from lightning_gc.exchange.workers import Shapes, local_part, reshard
from lightning_gc.kernels.dispatch import used_here
from lightning_gc.sharded import fsdp_units
from lightning_gc.sharded.shard_validation import Way, refuse_model, refuse_pass
from lightning_gc.sharded.sharded_workers import ShardedWorkers, block_of
from lightning_gc.transports.distributed import Distributed, gather_text, own_group


class ShardExchange:
    """Checks the model on all ranks, lets replicas start equal, and listens to FSDP2's units.

    Args:
        model: sharded by FSDP2 over the ranks of a replica, on all ranks of the default group.
        workers: engine and parameter names of this rank; ``mesh`` says which shard it has.
        mesh: of replicas and shards, in this order, and maybe of tensor-parallel ranks.
        device: of the gradients.
        way: ``"HSDP"``, or ``"attach"`` if parameters are on a mesh of replicas and shards.
        bucket_cap_mb: megabytes of this rank's shards from which on a bucket is full.
        agreed: name -> text of other settings that must be equal on all ranks.
        timeout: of every collective.
        before_round: called before the first bucket of each round.
        common: returns the weights that ``verify`` compares; None: this rank's shards.
        verify: what replicas compare, as for ``CompressedDDPStrategy``.

    Attributes:
        synchronizer: exchanges buckets with the replicas.
        buckets: joins units into buckets.
        parts: sums over the ranks of the node.

    Raises:
        ValueError: on all ranks, if one's model is not as it must be, or ranks differ.
    """

    def __init__(
        self,
        model: nn.Module,
        workers: ShardedWorkers,
        mesh: DeviceMesh,
        device: torch.device,
        *,
        way: Way,
        bucket_cap_mb: float,
        agreed: Mapping[str, str],
        timeout: timedelta | None,
        before_round: Callable[[], None],
        common: Callable[[], Iterable[Tensor]] | None = None,
        verify: Verify = 0,
    ) -> None:
        between, shards = mesh.get_group(0), mesh.get_group(1)
        tensors = mesh.get_group(2) if mesh.ndim > 2 and mesh.size(2) > 1 else None
        check = partial(refuse_model, model, dist.get_process_group_ranks(shards), way)
        on_all_ranks(partial(check, tensors=tensors), device)
        workers.stand(shards, tensors)
        workers.name(model)
        node = own_group(mesh.mesh.flatten(1).tolist(), timeout) if tensors else shards
        self.parts = ShardParts(node, device, workers.copies)
        self.synchronizer = synchronizer_of_shards(
            workers,
            between,
            mesh.mesh.flatten(1).t().tolist(),
            device,
            "gradients between replicas",
            agreed={"bucket_cap_mb": repr(bucket_cap_mb), **agreed},
            timeout=timeout,
            before_round=before_round,
            common=common,
            verify=verify,
        )
        take_over_shards(model, between, tensors)
        self.buckets = ShardBuckets(
            fsdp_units.units_of(model),
            workers.names,
            bucket_cap_mb * MEGABYTE,
            self.synchronizer.submit,
            self.synchronizer.check,
            self.synchronizer.end_round,
        )


def take_over_shards(
    model: nn.Module, between: dist.ProcessGroup, tensors: dist.ProcessGroup | None = None
) -> None:
    """Let replicas begin with the first one's shards, and all ranks with rank 0's other tensors.

    Args:
        model: sharded over the ranks of each replica.
        between: the group of ranks that have the same shards.
        tensors: the tensor-parallel group: its ranks begin with equal copies of what they have in
            common.
    """
    reshard(model)
    share_copies(model, tensors)
    sharded, plain = list[Tensor](), list[Tensor]()  # plain: ignored_params, which are frozen
    for param in model.parameters():
        (sharded if isinstance(param, DTensor) else plain).append(param)
    broadcast_all(map(local_part, sharded), between)
    broadcast_all((*plain, *model.buffers()))


def share_copies(model: nn.Module, tensors: dist.ProcessGroup | None) -> None:
    """Let tensor-parallel ranks begin with equal copies of what they have in common."""
    if tensors is not None:
        reshard(model)
        units, size = fsdp_units.units_of(model), tensors.size()
        every = [(param, unit.mesh.ndim) for unit in units for param in unit.params]
        shared = [p for p, dims in every if block_of(p, dims, size).copies == size]
        broadcast_all(map(local_part, shared), tensors)


def synchronizer_of_shards(
    workers: ShardedWorkers,
    between: dist.ProcessGroup,
    columns: Sequence[Sequence[int]],
    device: torch.device,
    what: str,
    *,
    agreed: Mapping[str, str],
    **others: Any,
) -> Synchronizer:
    """Return what exchanges one rank's shards, after all ranks have compared their settings.

    Args:
        workers: with the parameter names of this rank; it knows which shard it has.
        between: the group of ranks that have the same shards.
        columns: global ranks of all such groups.
        device: of the shards.
        what: is exchanged, and between whom.
        agreed: name -> text of settings that must be equal on all ranks.
        others: as for ``Synchronizer``.

    Raises:
        ValueError: on all ranks, if they differ.
    """
    sizes = dist.get_world_size(between), workers.shards, workers.tensor_ranks
    same = workers.configuration.in_words() | {
        "replicas, shards and tensor-parallel ranks": repr(sizes),
    }
    check_agreement(same | dict(agreed), Distributed(), device, workers.model)
    ranks = ", ".join(map(str, dist.get_process_group_ranks(between)))
    purpose = f"an exchange of {what}; their workers 0, 1, ... are the ranks {ranks}"
    made: list[Synchronizer] = []

    def make() -> str:
        made.append(
            Synchronizer(workers, device, between, purpose=purpose, groups=columns, **others)
        )
        return ""

    on_all_ranks(make, device)
    workers.run = gather_text(workers.run, Distributed(), device)[0]
    return made[0]


MEGABYTE = 1 << 20
Submit = Callable[[Tensor, Shapes], torch.futures.Future[Tensor]]


@dataclass
class _UnitBucket:
    """Units that are exchanged together; ``flat`` is their gradient in the current pass."""

    units: Sequence[fsdp_units.Unit]
    names: Mapping[Tensor, str]  # parameter -> name
    dtype: torch.dtype
    flat: Tensor | None = None
    calls: dict[fsdp_units.Unit, int] = field(default_factory=dict)  # of their hooks, in this pass
    known: bool = False  # a pass has shown how often its units call
    repeats: bool = False  # one of them has called more than once in a pass
    mean: torch.futures.Future[Tensor] | None = None

    def __post_init__(self) -> None:
        self.pieces = [piece for unit in self.units for piece in unit.pieces()]
        ends = list(itertools.accumulate((p.numel for p in self.pieces), initial=0))
        self.spans = dict(zip((p.param for p in self.pieces), ends[:-1], strict=True))
        self.numel = ends[-1]

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {self.names[piece.param]: piece.shape for piece in self.pieces}

    @property
    def complete(self) -> bool:
        """Whether no more hooks are to be expected in this pass."""
        return self.known and not self.repeats and len(self.calls) == len(self.units)

    def place(self, piece: fsdp_units.Piece) -> slice:
        start = self.spans[piece.param]
        return slice(start, start + piece.numel)


class ShardBuckets:
    """Exchanges the shards that FSDP2's units reduce, one bucket after the other.

    Args:
        units: of the model.
        names: sharded parameter -> name, of all that are trained.
        capacity: bytes of this rank's shards from which on a bucket is full.
        submit: begins the exchange of a bucket: flat gradient ``(numel,)``, replaced in place by
            the mean, and shapes by name; returns a future.
        check: raises what has gone wrong in an exchange.
        end_round: called when all buckets of a pass have been submitted.

    Attributes:
        node_bytes: bytes that this rank has sent in reduce-scatters since the exchange before the
            last one, by the volume of a ring.
        blocked: passes add up their gradients in ``.grad``, and exchange none.

    Communication pattern:
        Buckets follow the backward pass, from the last unit to the first, in the same order on all
        replicas: a unit that takes no part in a pass sends zeros. A bucket is submitted when it and
        the buckets before it are complete, if each of its units has called once per pass so far.
        Otherwise it is submitted at the end of the pass.
    """

    def __init__(
        self,
        units: Sequence[fsdp_units.Unit],
        names: Mapping[Tensor, str],
        capacity: float,
        submit: Submit,
        check: Callable[[], None],
        end_round: Callable[[], None],
    ) -> None:
        self._submit, self._check, self._end_round = submit, check, end_round
        self._names = names
        trained = [unit for unit in reversed(units) if unit.pieces()]
        self._buckets = list(_joined(trained, names, capacity))
        self._home = {unit: bucket for bucket in self._buckets for unit in bucket.units}
        self._running = False
        self.blocked = False
        self._added_up = False  # passes have, since the last exchange
        self.node_bytes = 0
        self._sent = 0  # the same, since the last exchange
        for unit in trained:
            unit.listen(partial(self._take, unit))

    @property
    def layout(self) -> list[tuple[str, ...]]:
        """Parameter names in each bucket."""
        return [tuple(bucket.shapes) for bucket in self._buckets]

    @contextmanager
    def accumulating(self) -> Iterator[None]:
        """Within, backward passes add up gradients and exchange none."""
        self.blocked = True
        try:
            yield
        finally:
            self.blocked = False

    def refuse_interrupted(self) -> None:
        """Raise RuntimeError if a backward pass has begun that never ended; call it between passes.

        Its gradients would be zeros from then on, as nothing would add the means.
        """
        fsdp_units.refuse_interrupted(self._running)

    def close(self) -> None:
        """Listen to no unit any more."""
        for unit in self._home:
            unit.forget()

    def _take(self, unit: fsdp_units.Unit, reduced: Tensor) -> None:
        """Take a unit's reduced gradient out of ``reduced``: the hook.

        On CUDA ``reduced`` belongs to the stream of the reduce-scatter, and this is another one.
        """
        if not self._running:
            self._running = True
            fsdp_units.after_backward(self._finish)
        bucket, pieces = self._home[unit], unit.pieces()
        if unit.keeps_from_replicas:
            raise RuntimeError(
                f"{unit.name} has set_requires_all_reduce(False), but what a pass reduces is "
                f"exchanged between replicas. To accumulate gradients use "
                f"set_requires_gradient_sync(False), and True in the last pass."
            )
        refuse_pass(unit, self._names, reduced.numel(), divided=unit.divides_itself)
        if bucket.mean is not None:
            raise RuntimeError(
                f"{unit.name} was reduced again in a backward pass in which its bucket is under "
                f"way already: its module was called once in the passes before, and now more "
                f"often. Call it equally often from the first step on, or in separate units."
            )
        if not self.blocked:
            used_here(reduced)
            flat = self._flat(bucket, reduced.device)
            for piece in pieces:
                flat[bucket.place(piece)].add_(reduced[piece.start : piece.start + piece.numel])
            reduced.zero_()
            if unit not in bucket.calls:
                self._collect(bucket, pieces)
        self._sent += (len(unit.ranks) - 1) * reduced.numel() * reduced.element_size()
        bucket.calls[unit] = bucket.calls.get(unit, 0) + 1
        if not self.blocked:
            self._send(lambda each: each.complete)

    def _collect(self, bucket: _UnitBucket, pieces: Sequence[fsdp_units.Piece]) -> None:
        """Move into the bucket what passes have added up, if ``zero_grad`` has left it."""
        assert bucket.flat is not None
        for piece in pieces:
            if self._added_up and piece.param.grad is not None:
                added_up = fsdp_units.gradient_of(piece.param)
                used_here(added_up)
                bucket.flat[bucket.place(piece)].add_(added_up.reshape(-1))
                added_up.zero_()

    def _flat(self, bucket: _UnitBucket, device: torch.device) -> Tensor:
        if bucket.flat is None:
            bucket.flat = torch.zeros(bucket.numel, dtype=bucket.dtype, device=device)
        return bucket.flat

    def _send(self, ready: Callable[[_UnitBucket], bool]) -> None:
        """Submit buckets in their order, up to the first that is not ready."""
        for bucket in self._buckets:
            if bucket.mean is not None:
                continue
            if not ready(bucket):
                return
            assert bucket.flat is not None
            if bucket.numel:
                bucket.mean = self._submit(bucket.flat, bucket.shapes)
            else:  # on no replica is anything of these shards
                bucket.mean = torch.futures.Future()
                bucket.mean.set_result(bucket.flat)

    def _finish(self) -> None:
        """End a pass: submit what is left, wait for all means, add them to the gradients."""
        self._running = False
        for bucket in self._buckets:
            bucket.known = True
            bucket.repeats |= any(count > 1 for count in bucket.calls.values())
        if self.blocked:
            self._added_up = True
            for bucket in self._buckets:
                bucket.calls.clear()
            return
        device = next(bucket.flat.device for bucket in self._buckets if bucket.flat is not None)
        for bucket in self._buckets:
            self._flat(bucket, device)
            for unit in bucket.units:
                if unit not in bucket.calls:
                    self._collect(bucket, unit.pieces())
        self._send(lambda each: True)
        for bucket in self._buckets:
            assert bucket.mean is not None
            bucket.mean.wait()
        self._check()
        for bucket in self._buckets:
            self._put(bucket)
        self._added_up = False
        self.node_bytes, self._sent = self._sent, 0
        self._end_round()

    def _put(self, bucket: _UnitBucket) -> None:
        """Add a bucket's means to the gradients, where FSDP2 has seen zeros."""
        assert bucket.flat is not None
        used_here(bucket.flat)
        for piece in bucket.pieces:
            if piece.param.requires_grad:
                mean = bucket.flat[bucket.place(piece)].view(piece.shape)
                fsdp_units.gradient_of(piece.param).add_(mean)
        bucket.flat = bucket.mean = None
        bucket.calls.clear()


def _joined(
    units: Sequence[fsdp_units.Unit], names: Mapping[Tensor, str], capacity: float
) -> Iterator[_UnitBucket]:
    """Yield buckets of consecutive units of one dtype, each closed when it reaches ``capacity``."""
    held: list[fsdp_units.Unit] = []
    size = 0
    for unit in units:
        if held and (size >= capacity or held[-1].dtype != unit.dtype):
            yield _UnitBucket(held, names, held[-1].dtype)
            held, size = [], 0
        held.append(unit)
        size += unit.padded_numel() * unit.dtype.itemsize  # as long on all ranks of a node
    if held:
        yield _UnitBucket(held, names, held[-1].dtype)
