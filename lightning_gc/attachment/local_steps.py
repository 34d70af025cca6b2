"""LocalSteps: exchange differences of weights every H steps, in any training loop.

Lightning's ``LocalStepsStrategy`` holds the same ``AttachedRounds``, and forwards its hooks.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial, wraps
from types import TracebackType
from typing import Any, Literal, Never, Protocol, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_gc.attachment.attached import (
    Attached,
    InBackground,
    ModuleHook,
    Setup,
    peers_of,
)
from lightning_gc.checkpoint.worker_state import MODULE, CheckpointParts
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.control.control_loop import Moment
from lightning_gc.controllers import Controller
from lightning_gc.core.registry import did_you_mean
from lightning_gc.exchange import Workers, configure
from lightning_gc.exchange.peers import Peers, ShardParts, on_all_ranks, take_over
from lightning_gc.exchange.synchronizer import Synchronizer, leave
from lightning_gc.exchange.validation import check_agreement, check_controller
from lightning_gc.exchange.verification import Verify, verification
from lightning_gc.exchange.workers import reshard
from lightning_gc.local_steps import GrowingRounds, OuterSGD, RadialDirectional
from lightning_gc.local_steps.elastic import (
    Elastic,
    ElasticExchange,
    ElasticState,
    check_elastic,
)
from lightning_gc.local_steps.local_rounds import (
    ROUNDS,
    Exchanger,
    LocalRounds,
    ModuleState,
    OwnState,
    embeddings,
    finished,
    in_rounds,
    keep,
    reset_poisoned,
)
from lightning_gc.local_steps.refusals import (
    HOOKS,
    OwnSteps,
    UncountedPasses,
    check_island,
    check_rounds,
    check_unequal,
    innermost,
    refuse_elastic,
    refuse_grace,
    refuse_optimizers,
    refuse_settings,
    refuse_shards,
    refuse_synchronised_norms,
    warn_of_one_round,
)
from lightning_gc.local_steps.roll import Roll
from lightning_gc.local_steps.round_plan import Outer, RoundPlan
from lightning_gc.local_steps.unequal import Unequal
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme
from lightning_gc.sharded.fsdp_units import units_of
from lightning_gc.sharded.shard_exchange import synchronizer_of_shards, take_over_shards
from lightning_gc.sharded.shard_validation import refuse_curves, refuse_model
from lightning_gc.sharded.sharded_workers import ShardedWorkers
from lightning_gc.transports.base import all_reduce_bytes
from lightning_gc.transports.distributed import Distributed, own_group
from lightning_gc.transports.island import ALONE, Island


class RoundExchange(Exchanger, InBackground, Protocol):
    """Carries out the exchanges of one real worker until it is closed."""


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

    exchange: RoundExchange
    peers: Peers
    begin: Callable[[nn.Module], None]
    island: Island = ALONE
    inside: dist.ProcessGroup | None = None
    between: dist.ProcessGroup | None = None


Meet = Callable[[Setup, Mapping[str, str]], Meeting]
"""Connects a worker, given the settings that must be equal on all workers, as text."""


def among_ranks(setup: Setup, agreed: Mapping[str, str]) -> Meeting:
    """Connect a worker to all ranks of the default process group, whose number is fixed."""
    synchronizer = Synchronizer(
        setup.workers,
        setup.device,
        timeout=setup.timeout,
        revocable=True,
        agreed=agreed,
        verify=setup.verify,
    )
    return Meeting(synchronizer, peers_of(setup.device, None, None), take_over)


def by_rendezvous(elastic: Elastic, wanted: int | None = None, size: int = 1) -> Meet:
    """Return what connects an elastic worker, whose processes are all of its job's, to the others.

    Args:
        elastic: where they meet.
        wanted: the worker's number in a checkpoint.
        size: N, its processes.
    """

    def meet(setup: Setup, agreed: Mapping[str, str]) -> Meeting:
        parts = (elastic, setup.workers, setup.device, agreed, wanted)
        exchange = ElasticExchange(*parts, size=size, timeout=setup.timeout)
        setup.checkpoint_parts.common["elastic"] = ElasticState(exchange)
        begin = take_over if size > 1 else _as_it_is
        return Meeting(exchange, Peers(False, setup.device), begin, exchange.island)

    return meet


def among_islands(size: int) -> Meet:
    """Return what connects a worker of ``size`` consecutive ranks to the others.

    Args:
        size: N, processes of each worker.

    Raises:
        ValueError: when it connects, if N does not divide the number of processes.
    """

    def meet(setup: Setup, agreed: Mapping[str, str]) -> Meeting:
        islands, seats = _islands(setup, str(size), size)
        longest = None if setup.timeout is None else _ACTS * setup.timeout
        island = Island.among(islands, longest)
        inside = own_group(islands, setup.timeout)
        synchronizer = Synchronizer(
            setup.workers,
            setup.device,
            timeout=setup.timeout,
            revocable=True,
            agreed=agreed,
            verify=setup.verify,
            groups=seats,
            island=island,
        )
        peers = peers_of(setup.device, None, None)
        return Meeting(synchronizer, peers, take_over, island, inside)

    return meet


def among_shards(model: nn.Module, size: int) -> Meet:
    """Return what connects a rank, which has a shard of its worker, to the same rank of the others.

    Args:
        model: on which ``fully_shard`` was called, with the mesh of each worker's ranks.
        size: N, consecutive ranks of each worker.

    Raises:
        ValueError: when it connects, on all ranks, if one's model is not so, or ranks differ.
    """

    def meet(setup: Setup, agreed: Mapping[str, str]) -> Meeting:
        islands, seats = _islands(setup, f"{size} of a model in shards", size)
        own = islands[dist.get_rank() // size]
        on_all_ranks(partial(refuse_model, model, own, "islands"), setup.device)
        workers, node = setup.workers, units_of(model)[0].mesh.get_group()
        assert isinstance(workers, ShardedWorkers)
        between = own_group(seats, setup.timeout)
        synchronizer = synchronizer_of_shards(
            workers,
            node,
            between,
            seats,
            setup.device,
            "weights between islands",
            agreed=agreed,
            timeout=setup.timeout,
            revocable=True,
            verify=setup.verify,
        )
        peers = peers_of(setup.device, between, None, ShardParts(node, setup.device))
        begin = partial(take_over_shards, between=between)
        return Meeting(synchronizer, peers, begin, between=between)

    return meet


def _islands(setup: Setup, kind: str, size: int) -> tuple[list[range], list[range]]:
    """Return the ranks of each island, and those that are at the same place in all islands.

    ``kind``: of island, in words, which all ranks compare before they make groups.
    """
    check_agreement({"island": kind}, Distributed(), setup.device)
    ranks = dist.get_world_size()
    if ranks % size:
        raise ValueError(
            f"{setup.owner}(island={size}): {ranks} processes are not islands of {size}, "
            f"and all islands must be equal. Start {size}, {2 * size}, {3 * size}, ... of them."
        )
    islands = [range(first, first + size) for first in range(0, ranks, size)]
    return islands, [range(seat, ranks, size) for seat in range(size)]


def _as_it_is(module: nn.Module) -> None:
    """Leave a module to the rounds, which load a snapshot."""


_ACTS = 3
"""Collectives of rank 0, each within the timeout, for which its island waits at most."""


class AttachedRounds(Attached):
    """Handle of a module whose workers exchange differences of weights every H steps.

    Args:
        module: that is trained, without a wrapper.
        setup: as for ``Attached``.
        plan: when what is exchanged.
        outer: the step of the common weights.
        unequal: how unequal workers share a round, or None.
        keep: takes the rounds of this process, before the control loop sets H.
        meet: connects this worker to the others.

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
        outer: Outer,
        unequal: Unequal | None,
        keep: Callable[[Sequence[LocalRounds]], None],
        meet: Meet = among_ranks,
    ) -> None:
        setup.workers.name(module)
        agreed = {name: repr(value) for name, value in vars(plan).items() if name != "owner"}
        agreed |= {"outer": repr(outer), "unequal": repr(unequal)}
        meeting = meet(setup, setup.agreed | agreed)
        setup.checkpoint_parts.saves = meeting.island.leads
        if unequal is not None:
            unequal.check_workers(plan.owner, setup.workers.first.workers)
        self._keep, self.meeting, self._outer, self._plan = keep, meeting, outer, plan
        sizes = [param.numel() * param.element_size() for param in setup.workers.names]
        self._inside_bytes = all_reduce_bytes(sum(sizes), meeting.island.size)
        self._unequal = unequal
        super().__init__(module, setup, meeting.peers, meeting.exchange)

    def _start(self) -> None:
        self.meeting.begin(self._module)
        workers, exchange = self._workers, self.meeting.exchange
        given = (self._module, workers.names, workers.first, exchange, self._plan, self._outer)
        self.rounds = LocalRounds(*given, unequal=self._unequal, parts=self.parts)
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
        rate = max(float(group["lr"]) for group in optimizers[0].param_groups)
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


class StepCount:
    """Counts the steps of a loop as all its workers do: a ``Loop`` of elastic rounds.

    Args:
        owner: the class, for the warning.
        optimizer: of the loop.

    Attributes:
        steps: that are done.
        total: of the run; None: not known.
        schedulers: that the loop steps once after each optimizer step.
    """

    def __init__(self, owner: str, optimizer: Optimizer) -> None:
        self._owner, self._optimizer = owner, optimizer
        self.steps = 0
        self.total: int | None = None
        self.schedulers: Sequence[LRScheduler] = ()

    def go_on_from(self, steps: int) -> None:
        """Count from here, with an optimizer that begins again and learning rates of this step."""
        self._optimizer.state.clear()
        missing, self.steps = steps - self.steps, steps
        if missing > 0 and not self.schedulers and hasattr(self._optimizer.step, _SCHEDULED):
            warnings.warn(
                f"{self._owner}: this worker goes on with step {steps}, and its learning-rate "
                f"scheduler is {missing} steps behind. Use until(total, scheduler).",
                stacklevel=2,
            )
        with warnings.catch_warnings():  # of a scheduler's step before the optimizer's first
            warnings.simplefilter("ignore", UserWarning)
            for _ in range(missing):
                for each in self.schedulers:
                    each.step()

    def check(self) -> None:
        """Raise nothing: signals raise in the loop themselves."""


_SCHEDULED = "_wrapped_by_lr_sched"
"""Torch's schedulers set this attribute on an optimizer's ``step``."""


class LocalSteps(AttachedRounds):
    """Let workers train alone for H optimizer steps, and exchange compressed weights then.

    For training loops of your own, in plain torch, Fabric, Accelerate or transformers. Make it on
    all workers, after the weights are loaded and before the first step. It registers hooks of the
    optimizer, so the loop does not change. The model must not be wrapped in
    ``DistributedDataParallel``. Weights are bit-equal to ``LocalStepsStrategy``'s.

    After each exchange the model holds the common weights. Between two exchanges it holds this
    worker's own weights, and ``common_weights`` shows the common ones for a while. ``finish``
    makes the last exchange. As a context manager, ``LocalSteps`` calls ``finish`` at the end.

    With ``elastic`` each worker is a separate job, without a process group, and may die, leave and
    join. The loop is then ``for step in local.until(1000):``. It chooses its batches by ``step``
    and ``local.number``. An exception, Ctrl-C's too, leaves the run: another worker gets the error.

    With ``island`` N consecutive ranks are one worker, whose model FSDP2 has in shards. They
    average their gradients in every step. Rank s of each worker exchanges its shards with rank s of
    the others.

    Args:
        model: the module that is trained. All workers begin with worker 0's weights and buffers.
        optimizer: of the model's parameters. Every worker makes the same number of steps.
        compressor: as for ``LocalStepsStrategy``, like all arguments that are not described here.
        memory: the error feedback rule, of differences of weights.
        scheme: how payloads become a mean.
        controller: chooses levels or H; the loop calls ``begin_epoch`` or ``begin_batch``.
        every: H, in optimizer steps.
        outer: the step of the common weights.
        delay: steps of overlap.
        merge: with a delay, how the result is taken over.
        fragments: parts in which parameters are exchanged, one after the other.
        unequal: how workers that differ share a round, with ``pace="equal"``: the loop makes every
            step. ``weigh="tokens"`` is refused, as the batches are not seen.
        elastic: where workers meet that may die, leave and join; as for ``LocalStepsStrategy``.
        island: N, the number of consecutive ranks that train as one worker. Above 1 the model is in
            shards: call ``fully_shard`` with a mesh of these ranks. ``island_rank`` chooses a
            rank's share of its worker's data. Methods are called on all ranks of a worker.
        scaler: of fp16 training. A step that it skips counts as a step, so workers agree on the
            rounds.
        seed: of the compressor's private random numbers.
        timeout: of the exchange's collectives. Default: the process group's timeout. Elastic
            workers have ``Elastic(timeout=...)`` instead.
        verify: what workers compare.
        min_numel: as for ``CompressedDDPStrategy``.
        unknown: refused, with a suggestion.

    Communication pattern:
        As ``LocalStepsStrategy``, over the default process group: nothing between exchanges. In an
        island FSDP2's collectives, and with each exchange two all-reduces of one number.

    Raises:
        ValueError: what ``LocalStepsStrategy`` refuses; no process group, or one that cannot send
            from the model's device; a model that is wrapped in DDP, is in shards without an
            ``island``, or synchronises batch norms; an optimizer of other parameters, or one that
            communicates; on all workers, models or settings that differ; in the first step, weights
            that are not finite.
        RuntimeError: in a step, weights that were loaded since the last one; a parameter that was
            unfrozen, replaced or cast; another optimizer than the given one. A step while the
            common weights are shown, or of an elastic worker outside of ``until``.
        PeerError: in a step, an exchange has failed.

    Warns:
        UserWarning: weights that change without a step of the optimizer; ``every`` steps without a
            gradient; a run of fewer steps than a round.

    Example:
        ``examples/plain_torch_local_steps.py`` trains and resumes; in short::

            with LocalSteps(model, optimizer, QSGD(4), every=32):
                for x, y in loader:
                    optimizer.zero_grad()
                    loss(model(x), y).backward()
                    optimizer.step()
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer,
        compressor: Compressor | str,
        memory: Memory | str | None = None,
        scheme: Scheme | str | None = None,
        controller: Controller | str | None = None,
        *,
        every: int | GrowingRounds = 32,
        outer: Outer = OuterSGD(),  # noqa: B008 - frozen
        delay: int = 0,
        merge: Literal["rebase", "mix"] = "rebase",
        fragments: int = 1,
        unequal: Unequal | None = None,
        elastic: Elastic | None = None,
        island: int = 1,
        scaler: torch.amp.GradScaler | None = None,
        seed: int = 0,
        timeout: timedelta | None = None,
        verify: Verify = 0,
        min_numel: int = MIN_NUMEL,
        **unknown: Never,
    ) -> None:
        owner = type(self).__name__
        _refuse_unknown(owner, unknown)
        configuration = configure(owner, compressor, memory, scheme, seed, min_numel)
        parts = configuration.compressor, configuration.memory
        controller = check_controller(controller, *parts, owner)
        refuse_settings(owner, *parts, controller, outer)
        plan = RoundPlan.of(owner, every, fragments, delay, merge)
        check_rounds(owner, plan, controller)
        check_unequal(owner, plan, unequal)
        refuse_grace(owner, unequal)
        _refuse_pace(owner, unequal)
        check_island(owner, island, unequal)
        verification(verify, owner)
        check_elastic(elastic, owner)
        if elastic is not None:
            parts_of = (controller, configuration, verify, outer, unequal)
            refuse_elastic(owner, elastic, plan, *parts_of)
            if timeout is not None:
                raise ValueError(
                    f"{owner}(elastic=..., timeout={timeout!r}): elastic workers wait as long as "
                    f"Elastic(timeout={elastic.timeout:g}) says, in seconds; set it there."
                )
        _refuse_model(owner, model, island)
        if island > 1:
            refuse_in_shards(owner, island, outer, controller, elastic, scaler)
            reshard(model)
        refuse_synchronised_norms(owner, model)
        refuse_optimizers(owner, [optimizer])
        self._optimizer = _with_hooks(owner, optimizer)
        device = _device_of(owner, model, self._optimizer)
        if elastic is None:
            _refuse_process_group(owner, device)
        if any(each._module is model for each in self._open):
            raise ValueError(
                f"{owner}: this model's weights or gradients are exchanged already; close the "
                f"handle before you make another one."
            )
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scaler, self._owner = scaler, owner
        self._count, self._entered = StepCount(owner, self._optimizer), elastic is None
        self._scaling = False
        workers = Workers(configuration) if island == 1 else ShardedWorkers(configuration)
        optimizers = [self._optimizer]
        more_workers = "start more processes, or leave LocalSteps out"
        settings = scaler, timeout, verify, more_workers
        kept = CheckpointParts(workers, settings={"exchanged": "weights"})
        setup = Setup(owner, kept, controller, lambda: optimizers, device, *settings)
        meet = among_ranks if elastic is None else by_rendezvous(elastic)
        if island > 1:
            meet = among_shards(model, island)
        self._island = island
        self._loaded = ""  # class of the module whose weights were loaded
        self._changed: str | None = None  # before the first pass after a step, once it was made
        super().__init__(model, setup, plan, outer, unequal, self._keep_rounds, meet)
        self._listen()
        if scaler is not None:
            self._count_attempts(scaler)

    def _listen(self) -> None:
        """Hear steps, forward passes and loaded weights."""
        names, module = self._workers.names, self._module
        every = self._every
        fix = f"Call finish(), and make {self._owner} again with the optimizer that steps"
        hooks = self._before_step, self._after_step
        self._own_steps = own = OwnSteps(self._owner, names, every, *hooks, fix=fix)
        own.begin([self._optimizer])
        parts = self._owner, names, every, lambda: own.inside, self._look
        self._passes = UncountedPasses(*parts)
        self._bounded = embeddings(module, names, bounded=True)
        before, after = ModuleHook(self._passes.before), ModuleHook(self._passes.after)
        loaded = ModuleHook(self._note_loaded).watch
        self._watching += [
            module.register_forward_pre_hook(before.watch),
            module.register_forward_hook(after.watch),
            *(each.register_load_state_dict_post_hook(loaded) for each in module.modules()),
        ]

    def _every(self) -> int:
        return self.rounds.length

    def _note_loaded(self, module: nn.Module) -> None:
        self._loaded = type(module).__name__

    _own_steps: OwnSteps | None = None

    def _keep_rounds(self, rounds: Sequence[LocalRounds]) -> None:
        parts = self._setup.checkpoint_parts
        parts.common[MODULE] = ModuleState(self._module, rounds[0])  # before the rounds' state
        self._own: list[OwnState] = keep(
            parts, rounds, self._setup.optimizers, lambda: self._scaler
        )

    @property
    def _elastic(self) -> ElasticExchange | None:
        exchange = self.meeting.exchange
        return exchange if isinstance(exchange, ElasticExchange) else None

    @property
    def number(self) -> int:
        """This worker's number, by which its data can be chosen."""
        return self._workers.first.worker if self._elastic is None else self._elastic.number

    @property
    def island_rank(self) -> int:
        """This process's rank in its worker, by which its share of the worker's data is chosen."""
        return 0 if self._island == 1 else dist.get_rank() % self._island

    @property
    def roll(self) -> Roll | None:
        """The rounds of an elastic run, since this worker came in; else None."""
        return None if self._elastic is None else self._elastic.roll

    def until(self, total: int, *schedulers: LRScheduler) -> Iterator[int]:
        """Yield the number of each step of an elastic run; the last step exchanges everything.

        The worker comes into the run with the first one, and waits for others. If it has been too
        late for a round, the numbers go on where the others are.

        Args:
            total: optimizer steps of the run, equal on all workers.
            schedulers: that the loop steps once after each optimizer step. If the numbers go on
                elsewhere, they are stepped up to the others' learning rate.

        Raises:
            ValueError: without ``elastic``.
            RuntimeError: no rendezvous, or too few workers, for ``Elastic(patience=...)`` seconds.
        """
        exchange, count = self._elastic, self._count
        if exchange is None:
            raise ValueError(
                f"{self._owner}.until({total}) counts the steps of elastic workers; without "
                f"elastic=Elastic(...) use range({total})."
            )
        count.total, count.schedulers = total, schedulers
        warn_of_one_round(self._owner, total, self.rounds.every)
        if not self._entered:
            count.steps = exchange.steps
            exchange.enter(self.rounds, count)
            self._entered = True
        while count.steps < total:
            yield count.steps

    def stepped(self, ends: bool = False) -> None:
        """As for ``AttachedRounds``; count the step, too."""
        count = self._count
        self._passes.step()
        self._changed = None
        super().stepped(ends or count.steps + 1 == count.total)
        count.steps += 1

    def _before_step(self) -> None:
        """Refuse a step that would be lost, or be taken for another one."""
        if not self._entered:
            raise RuntimeError(
                f"{self._owner}(elastic=...): the worker has not come into the run yet, and would "
                f"lose this step. Let the loop be: for step in local.until(total)."
            )
        weights = self.rounds.weights
        if weights.shown:
            raise RuntimeError(
                f"{self._owner}: a step within common_weights() would change the weights that all "
                f"workers share; train after it."
            )
        if self._loaded:
            raise RuntimeError(
                f"{self._owner}: weights were loaded into {self._loaded} since the last step, and "
                f"workers would average a part of them in. Load weights before you make it, or "
                f"call its reset() on all workers after you load."
            )
        changed = self._changed_outside() if self._changed is None else self._changed
        begun = self._own_steps and self._own_steps.begun
        if not begun and not self.rounds.apart:
            weights.refuse_not_finite(self._owner)
        if changed and not begun:
            raise RuntimeError(
                f"{self._owner}: the model's weights have changed since it was made, in {changed}, "
                f"so other workers would not begin with them. Load weights before you make it, or "
                f"call its reset() on all workers."
            )
        self._warn_of_changes(changed)

    def _changed_outside(self) -> str:
        """Return which weights have changed since the last exchange, if no step has been counted.

        With fragments or a delay there is always a step since the last exchange. Embeddings with a
        ``max_norm`` change in each pass, and are left out.
        """
        replaced = [] if self.rounds.apart else self.rounds.weights.replaced
        changed = [name for name in replaced if name not in self._bounded]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return changed[0] + more if changed else ""

    def _look(self) -> None:
        """Note which weights have changed before a pass, which may change some itself."""
        self._changed = self._changed_outside()

    def _warn_of_changes(self, changed: str) -> None:
        if changed:
            warnings.warn(
                f"{self._owner}: weights have changed since the last exchange without a step of "
                f"its optimizer: {changed}. The change counts as this worker's training, and is "
                f"averaged and compressed. If you have loaded weights, call reset() on all "
                f"workers. To bound or norm weights, do it in a hook, by "
                f"optimizer.register_step_post_hook, before you make {self._owner}.",
                stacklevel=3,
            )

    def _after_step(self) -> None:
        if self._scaler is None:
            self.stepped()
        elif not self._scaling:
            raise RuntimeError(
                f"{self._owner}(..., scaler=...): the optimizer made a step without the scaler, "
                f"which counts the steps. Call scaler.step(optimizer), or leave scaler out."
            )

    def _count_attempts(self, scaler: Any) -> None:
        """Count a step that the scaler skips too: scalers are local, and H is common."""
        step = scaler.step

        @wraps(step)
        def counted(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self not in self._open or innermost(optimizer) is not self._optimizer:
                return step(optimizer, *args, **kwargs)
            self._scaling = True
            try:
                output = step(optimizer, *args, **kwargs)
            finally:
                self._scaling = False
            self.stepped()
            return output

        scaler.step = counted

    def decide(self, epoch: int, moment: Callable[[], Moment]) -> None:
        """As for ``Attached``; levels change between exchanges, and steps count in rounds."""

        def between_exchanges() -> Moment:
            self.rounds.arrive()
            return in_rounds(moment(), self.rounds.every)

        super().decide(epoch, between_exchanges)

    @contextlib.contextmanager
    def common_weights(self) -> Iterator[None]:
        """Show the common weights and buffers in the model: for validation, or to save a model.

        This worker's own weights are back afterwards. Call it on all workers or on one. A forward
        pass of a model in shards needs all ranks of an island.
        """
        with self.rounds.weights.presented():
            yield

    def reset(self) -> None:
        """Begin again at worker 0's weights and buffers, as after others have been loaded.

        Errors, outer momentum and the place in the round are zero. Optimizers stay as they are.
        Call it on all workers, between steps.
        """
        if self._elastic is not None:
            raise RuntimeError(
                f"{self._owner}(elastic=...): reset() needs all workers, and others may come. Load "
                f"weights before you make it."
            )
        self.rounds.arrive()
        super().reset()
        self.rounds.restart()
        self.meeting.begin(self._module)
        self.rounds.begin(*self.rounds.weights.held())
        self._loaded, self._changed = "", None

    def state_dict(self, mode: Literal["full", "mean"] = "full") -> dict[str, Any]:
        """Return all that this worker needs to go on, between steps; every rank saves its own.

        It holds the model with the common weights, this worker's weights, optimizer, scaler and
        errors, outer momentum, and the place in the round. The loop saves its schedulers and its
        place in the data. Tensors, numbers and strings only.

        Args:
            mode: as for ``Attached``. ``"mean"`` has the optimizer of the worker that saves it.
        """
        self.rounds.arrive()
        self._warn_of_changes(self._changed_outside())
        return super().state_dict(mode)

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from ``state_dict()`` of the same worker, bit for bit; or of all workers.

        Call it on all workers, after anything else that loads model or optimizer. All states are
        checked before any is loaded.

        Args:
            state: as for ``Attached``. If the number of workers has changed, each begins with the
                mean of the weights and errors, and with worker 0's optimizer. In an island a list
                has the states of this rank's shard.

        Raises:
            ValueError: as for ``Attached``.
        """
        super().load_state_dict(state)
        if not self._own[0].load_optimizers():
            first = state if isinstance(state, Mapping) else state[0]
            self._own[0].take(first["own"][ROUNDS])
            self._own[0].load_optimizers()
        self._loaded, self._changed = "", None

    def finish(self) -> None:
        """Exchange what is left, so that all workers end with the common weights; then close.

        Call it on all workers, after the last step.

        Communication pattern:
            If no step was made since the last exchange, an all-reduce of one number: whether
            weights have changed on some worker all the same. If so, or else, the last exchange.

        Raises:
            PeerError: the last exchange failed.
        """
        if self in self._open and self._elastic is None:
            steps, changed = self.rounds.position, self._changed_outside()
            self._warn_of_changes(changed)
            if self.rounds.apart or self._on_any(bool(changed)):
                if not self._workers.first.step:
                    warn_of_one_round(self._owner, steps, self.rounds.length)
                self.refuse_unsynchronised()
                self.end_rounds()
        self.close()

    def _on_any(self, is_so: bool) -> bool:
        """Return whether it is so on any worker, or in any part of one; all must ask."""
        here = torch.tensor([float(is_so)], dtype=torch.float64, device=self._setup.device)
        return bool(self.parts.total(self._peers.mean(here)) > 0)

    def end(self, failed: bool) -> None:
        """As for ``Attached``; an elastic worker that stops early gives its error to another."""
        total = self._count.total
        early = self._elastic is not None and (total is None or self._count.steps < total)
        super().end(failed or early)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self.finish()
        else:
            self.end(failed=True)

    def _detach(self) -> None:
        if self._own_steps is not None:
            self._own_steps.end()


def _refuse_unknown(owner: str, given: Mapping[str, Any]) -> None:
    for name in given:
        known = LocalSteps.__init__.__kwdefaults__ or {}
        raise ValueError(f"{owner}({name}=...): unknown argument{did_you_mean(name, known)}.")


def _refuse_pace(owner: str, unequal: Unequal | None) -> None:
    """Raise ValueError for what needs a loop that skips steps, or shows its batches."""
    if unequal is not None and unequal.pace != "equal":
        raise ValueError(
            f"{owner}(unequal=Unequal(pace={unequal.pace!r})): the loop makes every step, so none "
            f"can be skipped; use pace='equal', or LocalStepsStrategy."
        )
    if unequal is not None and unequal.weigh == "tokens":
        raise ValueError(
            f"{owner}(unequal=Unequal(weigh='tokens')): the loop's batches are not seen; use "
            f"weigh='equal', or LocalStepsStrategy."
        )


def refuse_in_shards(
    owner: str,
    island: int,
    outer: Outer,
    controller: Controller | None,
    elastic: Elastic | None,
    scaler: Any,
) -> None:
    """Raise ValueError for settings that a worker in shards cannot have.

    Args:
        owner: the strategy or class, for the sentence.
        island: N, ranks of a worker.
        outer: the step of the common weights.
        controller: of levels, or None.
        elastic: where workers meet that come and go, or None.
        scaler: of fp16 training, or None.
    """
    if elastic is not None:
        raise ValueError(
            f"{owner}(island={island}, elastic={elastic!r}): a worker that joins would need the "
            f"shards of each rank, and a snapshot has one rank's. Leave elastic out, or use "
            f"LocalStepsStrategy(island={island}, elastic=...) with complete models."
        )
    if isinstance(outer, RadialDirectional):
        raise ValueError(
            f"{owner}(island={island}, outer={outer}): it averages norms of complete tensors, "
            f"and a rank has shards; use outer={outer.sgd!r}."
        )
    if scaler is not None and scaler.is_enabled():
        raise ValueError(
            f"{owner}(island={island}, scaler=...): a model in shards reduces gradients in float32 "
            f"or bfloat16, which need no loss scaling; leave it out."
        )
    refuse_curves(owner, controller)


def _refuse_model(owner: str, model: Any, island: int) -> None:
    """Raise ValueError for a module that exchanges gradients, or is not in one process."""
    if not isinstance(model, nn.Module):
        raise ValueError(f"{owner}({type(model).__name__}(...)): give the module that is trained.")
    for module in model.modules():
        bases = {(base.__module__, base.__name__) for base in type(module).__mro__}
        names = {name for where, name in bases if where.startswith("torch.")}
        if names & _GRADIENTS:
            raise ValueError(
                f"{owner}({type(model).__name__}(...)): {(names & _GRADIENTS).pop()} exchanges "
                f"gradients in every backward pass. Give the module inside it, such as ddp.module, "
                f"and train that module."
            )
        if names & (_SHARDS if island == 1 else {_FSDP}):
            raise ValueError(
                f"{owner}({type(model).__name__}(...)): {(names & _SHARDS).pop()} keeps the "
                f"weights in shards, so no process has a worker's weights. Give each process the "
                f"complete model, or shard it by fully_shard among N ranks and give island=N."
            )
    if island == 1:
        refuse_shards(owner, model, islands=True)


_GRADIENTS = {"DistributedDataParallel", "DDP", "ReplicateModule"}
_FSDP = "FullyShardedDataParallel"
_SHARDS = {_FSDP, "FSDPModule"}


def _with_hooks(owner: str, optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"{owner}(optimizer={type(optimizer).__name__}(...)): give the optimizer that trains "
            f"the model, one of torch.optim.Optimizer."
        )
    found: Optimizer = innermost(optimizer)
    if HOOKS not in vars(found):
        raise ValueError(
            f"{owner}(optimizer={type(found).__name__}(...)): torch calls no hooks in its steps, "
            f"since its __init__ does not call super().__init__(params, defaults); let it do so."
        )
    return found


def _device_of(owner: str, model: nn.Module, optimizer: Optimizer) -> torch.device:
    """Return the device of all trained parameters, which the optimizer must have."""
    trained: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    devices = {param.device for param in trained}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device: no parameter is trained"
        raise ValueError(
            f"{owner}: the trained parameters are on {found}; all must be on one device."
        )
    own = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        other = next((each for each in group["params"] if each not in own), None)
        if other is not None:
            raise ValueError(
                f"{owner}: parameter group {number} of {type(optimizer).__name__} has a tensor of "
                f"shape {tuple(other.shape)} that is not a parameter of the model, so it would "
                f"not be exchanged. Give the model and the optimizer of its parameters."
            )
    return devices.pop()


def _refuse_process_group(owner: str, device: torch.device) -> None:
    """Raise ValueError unless the default process group can send from ``device``."""
    if not dist.is_initialized():
        raise ValueError(
            f"{owner}: no process group exists, so workers cannot exchange weights. Call "
            f'torch.distributed.init_process_group("gloo") first, and start with torchrun.'
        )
    backends = dist.get_backend_config()
    if not any(each.startswith(f"{device.type}:") for each in backends.split(",")):
        raise ValueError(
            f"{owner}: the model is on {device}, but the default process group has the backend "
            f"{backends}. Move the model before, or give init_process_group a backend for "
            f"{device.type}, such as 'cpu:gloo,cuda:nccl'."
        )
