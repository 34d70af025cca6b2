"""AttachedRounds, and where its workers meet: Ranks, Islands, Shards or a Rendezvous."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, TypeAlias

import torch.distributed as dist
from torch import nn

from lightning_gc.attachment.attached import Attached, Setup, peers_of
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.elastic.elastic_exchange import ElasticExchange, ElasticState
from lightning_gc.exchange import Workers
from lightning_gc.exchange.compression import Resolved
from lightning_gc.exchange.peers import Peers, ShardParts, on_all_ranks, take_over
from lightning_gc.exchange.synchronizer import Synchronizer, leave
from lightning_gc.exchange.validation import check_agreement
from lightning_gc.local_steps.local_rounds import LocalRounds, finished, reset_poisoned
from lightning_gc.local_steps.refusals import refuse_shards
from lightning_gc.local_steps.round_plan import Elastic, RoundPlan
from lightning_gc.sharded.fsdp_units import units_of
from lightning_gc.sharded.shard_exchange import synchronizer_of_shards, take_over_shards
from lightning_gc.sharded.shard_validation import refuse_model
from lightning_gc.sharded.sharded_workers import ShardedWorkers
from lightning_gc.transports.base import all_reduce_bytes
from lightning_gc.transports.distributed import Distributed, own_group
from lightning_gc.transports.island import ALONE, Island


@dataclass(frozen=True)
class Meeting:
    """A worker's connection to the other workers.

    Attributes:
        exchange: carries out the exchanges; it has started the worker's engine.
        peers: the other workers, for a controller's decisions.
        begin: gives a module the weights and buffers that all workers begin with.
        island: the processes of this worker.
        inside: the group in which they average gradients in each step; None: the default group.
        between: a group for decisions of those that have the same shards, left at the end.
    """

    exchange: Synchronizer | ElasticExchange
    peers: Peers
    begin: Callable[[nn.Module], None]
    island: Island = ALONE
    inside: dist.ProcessGroup | None = None
    between: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class Given(Resolved):
    """Settings besides the plan, which a meeting place judges; ``scaler``: of fp16 training."""

    scaler: Any = None


def place_of(plan: RoundPlan) -> Ranks:
    """Return where the workers of a plan meet that have complete modules."""
    if plan.elastic is not None:
        return Rendezvous(plan.elastic, plan.island)
    return Ranks() if plan.island == 1 else Islands(plan.island)


class Ranks:
    """All ranks of the default process group, whose number is fixed."""

    kind: ClassVar[type[Workers]] = Workers
    """The class that keeps what the workers of a process exchange."""

    def refuse(self, plan: RoundPlan, given: Given) -> None:
        """Raise ValueError for settings that cannot be obeyed here."""
        judge("Local steps between processes", plan.owner, plan=plan)

    def refuse_module(self, owner: str, module: nn.Module) -> None:
        """Raise ValueError for a module whose weights no process here has."""
        refuse_shards(owner, module, islands=True)

    def meet(self, setup: Setup, agreed: Mapping[str, str]) -> Meeting:
        """Connect a worker, given the settings that must be equal on all workers, as text.

        Raises:
            ValueError: on all workers, if they differ.
        """
        return Meeting(_synchronizer(setup, agreed), peers_of(setup.device, None, None), take_over)


def _synchronizer(setup: Setup, agreed: Mapping[str, str], **more: Any) -> Synchronizer:
    return Synchronizer(
        setup.workers,
        setup.device,
        timeout=setup.timeout,
        revocable=True,
        agreed=agreed,
        verify=setup.compression.verify,
        **more,
    )


@dataclass(frozen=True)
class Islands(Ranks):
    """Islands of consecutive ranks. Each island is one worker, with complete modules.

    Args:
        size: N, processes of each worker.
    """

    size: int

    def meet(self, setup: Setup, agreed: Mapping[str, str]) -> Meeting:
        """As for ``Ranks``; refuse a number of processes that N does not divide."""
        islands, seats = _islands(setup, str(self.size), self.size)
        longest = None if setup.timeout is None else _ACTS * setup.timeout
        island = Island.among(islands, longest)
        inside = own_group(islands, setup.timeout)
        synchronizer = _synchronizer(setup, agreed, groups=seats, island=island)
        peers = peers_of(setup.device, None, None)
        return Meeting(synchronizer, peers, take_over, island, inside)


@dataclass(frozen=True)
class Shards:
    """Islands of ranks that have a module in shards; each meets the same rank of the others.

    Args:
        model: on which ``fully_shard`` was called, with the mesh of each worker's ranks.
        size: N, consecutive ranks of each worker.
    """

    model: nn.Module
    size: int

    kind: ClassVar[type[Workers]] = ShardedWorkers

    def refuse(self, plan: RoundPlan, given: Given) -> None:
        judge("Local steps of a model in shards", plan.owner, plan=plan, scaler=given.scaler)
        judge("Models in shards", plan.owner, controller=given.controller)

    def refuse_module(self, owner: str, module: nn.Module) -> None:
        """Refuse nothing before ranks meet, which compare their models then."""

    def meet(self, setup: Setup, agreed: Mapping[str, str]) -> Meeting:
        """As for ``Ranks``; refuse a model that is not in shards of N ranks on all ranks."""
        model, size = self.model, self.size
        islands, seats = _islands(setup, f"{size} of a model in shards", size)
        own = islands[dist.get_rank() // size]
        on_all_ranks(partial(refuse_model, model, own, "islands"), setup.device)
        workers, node = setup.workers, units_of(model)[0].mesh.get_group()
        assert isinstance(workers, ShardedWorkers)
        workers.stand(node, None)
        between = own_group(seats, setup.timeout)
        synchronizer = synchronizer_of_shards(
            workers,
            between,
            seats,
            setup.device,
            "weights between islands",
            agreed=agreed,
            timeout=setup.timeout,
            revocable=True,
            verify=setup.compression.verify,
        )
        peers = peers_of(setup.device, between, None, ShardParts(node, setup.device))
        begin = partial(take_over_shards, between=between)
        return Meeting(synchronizer, peers, begin, between=between)


@dataclass(frozen=True)
class Rendezvous(Ranks):
    """A rendezvous of elastic workers. A worker has all processes of its job.

    Args:
        elastic: where it is.
        size: N, processes of each worker.
        wanted: the worker's number in a checkpoint, which it asks for.
    """

    elastic: Elastic
    size: int = 1
    wanted: int | None = None

    def refuse(self, plan: RoundPlan, given: Given) -> None:
        judge("Elastic local steps", plan.owner, plan=plan, elastic=self.elastic, **vars(given))

    def meet(self, setup: Setup, agreed: Mapping[str, str]) -> Meeting:
        parts = (self.elastic, setup.workers, setup.device, agreed, self.wanted)
        exchange = ElasticExchange(*parts, size=self.size, timeout=setup.timeout)
        setup.checkpoint_parts.common["elastic"] = ElasticState(exchange)
        begin = take_over if self.size > 1 else lambda module: None  # rounds load a snapshot
        return Meeting(exchange, Peers(False, setup.device), begin, exchange.island)


MeetingPlace: TypeAlias = Ranks | Shards
"""Where workers meet: what they cannot have there, and how one of them is connected."""


def _islands(setup: Setup, kind: str, size: int) -> tuple[list[range], list[range]]:
    """Return the ranks of each island, and those that are at the same place in all islands.

    ``kind``: of island, in words, which all ranks compare before they make groups.
    """
    check_agreement({"island": kind}, Distributed(), setup.device)
    ranks = dist.get_world_size()
    if ranks % size:
        refuse(
            f"{setup.way.owner}(island={size}): {ranks} processes are not islands of {size}, "
            f"and all islands must be equal. Start {size}, {2 * size}, {3 * size}, ... of them"
        )
    islands = [range(first, first + size) for first in range(0, ranks, size)]
    return islands, [range(seat, ranks, size) for seat in range(size)]


_ACTS = 3
"""Collectives of rank 0, each within the timeout, for which its island waits at most."""


class AttachedRounds(Attached):
    """Handle of a module whose workers exchange differences of weights every H steps.

    Args:
        module: that is trained, without a wrapper.
        setup: as for ``Attached``.
        plan: of the rounds.
        keep: takes the rounds of this process, before the control loop sets H.
        place: where this worker meets the others.

    Attributes:
        rounds: of this worker.
        meeting: its connection.
    """

    rounds: LocalRounds

    def __init__(
        self,
        module: nn.Module,
        setup: Setup,
        plan: RoundPlan,
        keep: Callable[[Sequence[LocalRounds]], None],
        place: MeetingPlace,
    ) -> None:
        setup.workers.name(module)
        meeting = place.meet(setup, setup.agreed | plan.agreed)
        setup.checkpoint_parts.saves = meeting.island.leads
        if plan.unequal is not None:
            plan.unequal.check_workers(plan.owner, setup.workers.first.workers)
        self._keep, self.meeting, self._plan = keep, meeting, plan
        sizes = [param.numel() * param.element_size() for param in setup.workers.names]
        self._inside_bytes = all_reduce_bytes(sum(sizes), meeting.island.size)
        super().__init__(module, setup, meeting.peers, meeting.exchange)

    def _start(self) -> None:
        self.meeting.begin(self._module)
        workers, exchange = self._workers, self.meeting.exchange
        given = (self._module, workers.names, workers.first, exchange, self._plan)
        self.rounds = LocalRounds(*given, parts=self.parts)
        self._keep([self.rounds])
        super()._start()

    def after_pass(self) -> None:
        """Do nothing: a worker's own steps exchange no gradients."""

    def stepped(self, ends: bool = False) -> None:
        """Count this worker's own step; exchange what is due.

        Args:
            ends: it was the last one, so everything is exchanged.
        """
        if ends or self.rounds.is_due:
            self.refuse_unsynchronised()
        self.meeting.island.sent_bytes += self._inside_bytes  # of the step's gradients
        optimizers = self._setup.optimizers()
        # A Trainer without an optimizer has one without groups.
        rate = max((float(group["lr"]) for group in optimizers[0].param_groups), default=0.0)
        if not finished(self.rounds.stepped(ends, rate)):
            reset_poisoned(optimizers, self.parts)

    def end(self, failed: bool) -> None:
        """As for ``Attached``; leave the groups that were made for this."""
        between = self.meeting.between if self in self._open else None
        super().end(failed)
        if between is not None:
            leave(between, failed)

    def end_rounds(self) -> None:
        """Exchange everything now, so that all workers have the common weights."""
        finished(self.rounds.ending())
