"""LocalSteps: exchange differences of weights every H steps, in a training loop of your own."""

from __future__ import annotations

import contextlib
import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import wraps
from typing import Any, Literal, Self, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from lightning_gc.attachment.attached import ModuleHook, Setup
from lightning_gc.attachment.attached_rounds import (
    AttachedRounds,
    Given,
    MeetingPlace,
    Shards,
    place_of,
)
from lightning_gc.checkpoint.worker_state import MODULE, CheckpointParts
from lightning_gc.compressors import Compressor
from lightning_gc.control.control_loop import Moment
from lightning_gc.controllers import Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.settings import CheckedCalls, parted, takes_fields, unknown_argument
from lightning_gc.elastic.elastic_exchange import ElasticExchange
from lightning_gc.elastic.roll import Roll
from lightning_gc.exchange import Compression, WayIn
from lightning_gc.exchange.automatic import WITH_LOCAL_STEPS
from lightning_gc.exchange.compression import CompressionFields
from lightning_gc.exchange.validation import check_timeout, refuse_lazy
from lightning_gc.exchange.workers import local_part, reshard
from lightning_gc.local_steps import RoundFields, RoundPlan, local_rounds, refusals
from lightning_gc.memories import Memory
from lightning_gc.schemes import Scheme


class StepCount:
    """Counts the steps of a loop as all its workers do: a ``Loop`` of elastic rounds.

    Args:
        owner: the class, for the warning.
        optimizer: of the loop.
        entered: the worker takes part from the beginning.

    Attributes:
        entered: whether it has come into the run.
        steps: that are done.
        total: of the run; None: not known.
        schedulers: that the loop steps once after each optimizer step.
    """

    def __init__(self, owner: str, optimizer: Optimizer, *, entered: bool) -> None:
        self._owner, self.optimizer, self.entered = owner, optimizer, entered
        self.steps = 0
        self.total: int | None = None
        self.schedulers: Sequence[LRScheduler] = ()

    def go_on_from(self, steps: int) -> None:
        """Count from here, with an optimizer that begins again and learning rates of this step."""
        self.optimizer.state.clear()
        missing, self.steps = steps - self.steps, steps
        if missing > 0 and not self.schedulers and hasattr(self.optimizer.step, _SCHEDULED):
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


class LoopFields(CompressionFields, RoundFields, total=False):
    """Arguments of ``LocalSteps`` that are given by name, for type checkers."""


_WAY = WayIn(
    "LocalSteps",
    more_workers="start more processes, or leave LocalSteps out",
    elsewhere="",
    rounds=True,
    no_choice=WITH_LOCAL_STEPS,
)


@takes_fields(Compression, RoundPlan)
class LocalSteps(AttachedRounds, metaclass=CheckedCalls):
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

    Args:
        model: the module that is trained. All workers begin with worker 0's weights and buffers.
        optimizer: of the model's parameters. Every worker makes the same number of steps.
        controller: of levels or H; the loop calls ``begin_epoch`` or ``begin_batch``.
        scaler: of fp16 training. A step that it skips counts as a step, so workers agree on the
            rounds.
        timeout: of the exchange's collectives. Default: the process group's timeout. Elastic
            workers have ``Elastic(timeout=...)`` instead.
        fields: what is exchanged, and the rounds' settings, as for ``LocalStepsStrategy``.
            ``unequal`` needs
            ``pace="equal"``, as the loop makes every step, and another ``weigh`` than ``"tokens"``,
            as its batches are not seen. With an ``island`` of N the model is in shards: call
            ``fully_shard`` with a mesh of these ranks. ``island_rank`` chooses a rank's share of
            its worker's data. Methods are called on all ranks of a worker.

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
        scaler: torch.amp.GradScaler | None = None,
        timeout: timedelta | None = None,
        **fields: Unpack[LoopFields],
    ) -> None:
        owner = type(self).__name__
        if isinstance(optimizer, Compressor) or isinstance(compressor, Optimizer):
            refuse(
                f"{owner}: the order is model, optimizer, compressor; write "
                f"{owner}(model, optimizer, QSGD(4))"
            )
        check_timeout(owner, timeout)
        exchanged, of_rounds, unknown = parted(fields, Compression, RoundPlan)
        if unknown:
            known = list(inspect.signature(type(self)).parameters)
            raise ValueError(unknown_argument(type(self), next(iter(unknown)), known))
        plan = RoundPlan(owner=owner, **of_rounds)
        judge("LocalSteps", owner, plan=plan, timeout=timeout)
        way = replace(_WAY, owner=owner)
        compression = Compression(compressor, memory, scheme, controller, **exchanged)
        given = compression.resolved(way)
        configuration = given.configuration
        plan.check(configuration.compressor, configuration.memory, given.controller)
        place = place_of(plan) if plan.island == 1 else Shards(model, plan.island)
        place.refuse(plan, Given(configuration, given.controller, given.verify, scaler))
        optimizer = _judged(model, optimizer, plan, place)
        device = next(p.device for p in model.parameters() if p.requires_grad)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        self._scaler, self._owner = scaler, owner
        self._count = StepCount(owner, optimizer, entered=plan.elastic is None)
        kept = CheckpointParts(place.kind(configuration), settings={"exchanged": "weights"})
        optimizers = [optimizer]
        setup = Setup(way, given, kept, lambda: optimizers, device, scaler, timeout)
        super().__init__(model, setup, plan, self._keep_rounds, place)
        self._loop = LoopSteps(self, model, self._count, scaler)
        self._watching += self._loop.watching

    _loop: LoopSteps | None = None  # while it starts, it may fail and be closed

    @property
    def _heard(self) -> LoopSteps:
        assert self._loop is not None
        return self._loop

    def _keep_rounds(self, rounds: Sequence[local_rounds.LocalRounds]) -> None:
        parts = self._setup.checkpoint_parts
        parts.common[MODULE] = local_rounds.ModuleState(
            self._module, rounds[0]
        )  # before the rounds' state
        self._own: list[local_rounds.OwnState] = local_rounds.keep(
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
        island = self._plan.island
        return 0 if island == 1 else dist.get_rank() % island

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
            refuse(
                f"{self._owner}.until({total}) counts the steps of elastic workers; without "
                f"elastic=Elastic(...) use range({total})"
            )
        count.total, count.schedulers = total, schedulers
        refusals.warn_of_one_round(self._owner, total, self.rounds.every)
        if not count.entered:
            count.steps = exchange.steps
            exchange.enter(self.rounds, count)
            count.entered = True
        while count.steps < total:
            yield count.steps

    def stepped(self, ends: bool = False) -> None:
        """As for ``AttachedRounds``; count the step, too."""
        count = self._count
        self._heard.counted()
        super().stepped(ends or count.steps + 1 == count.total)
        count.steps += 1
        self._heard.changes.remember()

    def decide(self, epoch: int, moment: Callable[[], Moment]) -> None:
        """As for ``Attached``; levels change between exchanges, and steps count in rounds."""

        def between_exchanges() -> Moment:
            self.rounds.arrive()
            return local_rounds.in_rounds(moment(), self.rounds.every)

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
        self._heard.changes.forget()

    def state_dict(self, mode: Literal["full", "mean"] = "full") -> dict[str, Any]:
        """Return all that this worker needs to go on, between steps; every rank saves its own.

        It holds the model with the common weights, this worker's weights, optimizer, scaler and
        errors, outer momentum, and the place in the round. The loop saves its schedulers and its
        place in the data. Tensors, numbers and strings only.

        Args:
            mode: as for ``Attached``. ``"mean"`` has the optimizer of the worker that saves it.
        """
        self.rounds.arrive()
        self._heard.changes.warn()
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
            self._own[0].take(first["own"][local_rounds.ROUNDS])
            self._own[0].load_optimizers()
        self._heard.changes.forget()

    def finish(self) -> None:
        """Exchange what is left, so that all workers end with the common weights; then close.

        Call it on all workers, after the last step. If weights were loaded into the model since
        then, as the best ones are at the end, all workers take worker 0's, bit for bit.

        Communication pattern:
            An all-reduce of one number: whether weights were loaded on some worker. If not, and no
            step was made since the last exchange, another one: whether weights have changed on some
            worker all the same. If so, or else, the last exchange.

        Raises:
            PeerError: the last exchange failed.
        """
        if self in self._open and self._elastic is None:
            if self._on_any(self._heard.changes.warn_of_loaded()):
                self.reset()
            steps, changed = self.rounds.position, self._heard.changes.warn()
            if self.rounds.apart or self._on_any(bool(changed)):
                if not self._workers.first.step:
                    refusals.warn_of_one_round(self._owner, steps, self.rounds.length)
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.finish()
        else:
            self.end(failed=True)

    def _detach(self) -> None:
        if self._loop is not None:
            self._loop.end()


class LoopSteps:
    """Hears a loop's optimizer steps, forward passes and loaded weights.

    Args:
        local: counts the steps.
        module: that is trained.
        count: of its steps.
        scaler: of fp16 training, or None.

    Attributes:
        changes: of weights, outside of steps.
        watching: hooks of the module.
    """

    def __init__(self, local: LocalSteps, module: nn.Module, count: StepCount, scaler: Any) -> None:
        self._local, self._count, self._scaler = local, count, scaler
        self._scaling = self._ended = False
        self._owner = owner = type(local).__name__
        rounds = local.rounds

        def every() -> int:
            return rounds.length

        fix = f"Call finish(), and make {owner} again with the optimizer that steps"
        self.own = own = refusals.OwnSteps(
            owner, rounds.names, every, self._before, self._after, fix=fix
        )
        own.begin([count.optimizer])
        self.changes = changes = OutsideChanges(owner, module, rounds)
        parts = owner, rounds.names, every, lambda: own.inside, changes.look
        self._passes = refusals.UncountedPasses(*parts)
        before, after = ModuleHook(self._passes.before), ModuleHook(self._passes.after)
        loaded = ModuleHook(changes.note_loaded).watch
        self.watching = [
            module.register_forward_pre_hook(before.watch),
            module.register_forward_hook(after.watch),
            *(each.register_load_state_dict_post_hook(loaded) for each in module.modules()),
        ]
        if scaler is not None:
            self._count_attempts(scaler)

    def counted(self) -> None:
        """Note that a step has been counted."""
        self._passes.step()
        self.changes.counted()

    def end(self) -> None:
        """Hear no more steps."""
        self._ended = True
        self.own.end()

    def _before(self) -> None:
        """Refuse a step that would be lost, or be taken for another one."""
        if not self._count.entered:
            raise RuntimeError(
                f"{self._owner}(elastic=...): the worker has not come into the run yet, and would "
                f"lose this step. Let the loop be: for step in local.until(total)."
            )
        self.changes.judge(self.own.begun)

    def _after(self) -> None:
        if self._scaler is None:
            self._local.stepped()
        elif not self._scaling:
            raise RuntimeError(
                f"{self._owner}(..., scaler=...): the optimizer made a step without the scaler, "
                f"which counts the steps. Call scaler.step(optimizer), or leave scaler out."
            )

    def _count_attempts(self, scaler: Any) -> None:
        """Count a step that the scaler skips too: scalers are local, and H is common."""
        step = scaler.step
        stepped = torch.compiler.disable(self._local.stepped)  # not what the optimizer does

        @wraps(step)
        def counted(optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if self._ended or refusals.innermost(optimizer) is not self._count.optimizer:
                return step(optimizer, *args, **kwargs)
            self._scaling = True
            try:
                output = step(optimizer, *args, **kwargs)
            finally:
                self._scaling = False
            stepped()
            return output

        scaler.step = counted


class OutsideChanges:
    """Refuses, or warns of, weights that change without a step of the optimizer.

    Args:
        owner: the class, for the sentences.
        module: whose weights they are.
        rounds: of the worker.
    """

    def __init__(self, owner: str, module: nn.Module, rounds: local_rounds.LocalRounds) -> None:
        self._owner, self._rounds = owner, rounds
        tables = (m for m in module.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag))
        clipped = [table.weight for table in tables if table.max_norm is not None]
        # Forward passes change these weights.
        self._bounded = {rounds.names[weight] for weight in clipped if weight in rounds.names}
        self.forget()

    def forget(self) -> None:
        """Take the weights as they are: they were loaded on all workers."""
        self._loaded = ""  # class of the module whose weights were loaded
        self._chosen: list[Tensor] = []  # parameters of which some weights are remembered
        self._after: dict[str, Tensor] = {}  # some weights, after the last step
        self.counted()

    def counted(self) -> None:
        """Note that a step has been counted."""
        self._changed: str | None = None  # before the first pass after a step, once it was made

    def note_loaded(self, module: nn.Module) -> None:
        """Note that weights were loaded into a module."""
        self._loaded = type(module).__name__

    def warn_of_loaded(self) -> bool:
        """Return whether weights were loaded since the last step; warn of it."""
        if self._loaded:
            warnings.warn(
                f"{self._owner}: weights were loaded into {self._loaded} since the last step, so "
                f"finish() gives worker 0's to all workers, uncompressed. Steps since the last "
                f"exchange are dropped. To agree with that, call reset() on all workers first.",
                stacklevel=4,
            )
        return bool(self._loaded)

    def remember(self) -> None:
        """Keep a few weights as they are after a step; no worker waits for its device."""
        self._after = {name: part.clone() for name, part in self._some.items()}

    @property
    def _some(self) -> dict[str, Tensor]:
        """The last weights of up to three parameters, of which a swap changes some."""
        names = self._rounds.names
        if not self._chosen:
            found = [p for p, n in names.items() if p.is_contiguous() and n not in self._bounded]
            ends = {0: None, len(found) // 2: None, len(found) - 1: None}
            self._chosen = [found[at] for at in ends if found]
        parts = ((names[param], local_part(param.detach())) for param in self._chosen)
        return {name: part.reshape(-1)[-8:] for name, part in parts}

    def look(self) -> None:
        """Note which weights have changed before a pass, which may change some itself."""
        self._changed = self.found()

    def found(self, *, within: bool = False) -> str:
        """Return which weights have changed since the last exchange, if no step has been counted.

        With fragments or a delay there is always a step since the last exchange. Embeddings with a
        ``max_norm`` change in each pass, and are left out. ``within``: if a step has been counted,
        return which of a few weights have changed since then.
        """
        replaced = [] if self._rounds.apart else self._rounds.weights.replaced
        if within and self._rounds.apart:
            now = self._some
            replaced = [n for n, each in self._after.items() if not _same(each, now.get(n))]
        changed = [name for name in replaced if name not in self._bounded]
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        return changed[0] + more if changed else ""

    def judge(self, begun: bool) -> None:
        """Raise RuntimeError before a step that would be lost; ``begun``: one has been made."""
        weights = self._rounds.weights
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
        changed = self.found() if self._changed is None else self._changed
        if not begun and not self._rounds.apart:
            weights.refuse_not_finite(self._owner)
        if changed and not begun:
            raise RuntimeError(
                f"{self._owner}: the model's weights have changed since it was made, in {changed}, "
                f"so other workers would not begin with them. Load weights before you make it, or "
                f"call its reset() on all workers."
            )
        self.warn(changed)

    def warn(self, changed: str | None = None) -> str:
        """Warn that these weights have changed, if any; None: look. Return which."""
        changed = self.found(within=True) if changed is None else changed
        if changed:
            since = "step" if self._rounds.apart else "exchange"
            warnings.warn(
                f"{self._owner}: weights have changed since the last {since} without a step of "
                f"its optimizer: {changed}. The change counts as this worker's training, and is "
                f"averaged and compressed. If you have loaded weights, call reset() on all "
                f"workers. To bound or norm weights, do it in a hook, by "
                f"optimizer.register_step_post_hook, before you make {self._owner}.",
                stacklevel=4,
            )
        return changed


def _same(one: Tensor, other: Tensor | None) -> bool:
    """Return whether values are equal; NaN is NaN."""
    return other is not None and torch.allclose(one, other, rtol=0, atol=0, equal_nan=True)


def _judged(
    model: nn.Module, optimizer: Optimizer, plan: RoundPlan, place: MeetingPlace
) -> Optimizer:
    """Return the optimizer that torch knows; refuse it or the module."""
    _refuse_model(plan.owner, model, plan.island)
    refuse_lazy(model)
    place.refuse_module(plan.owner, model)
    if plan.island > 1:
        reshard(model)
    refusals.refuse_synchronised_norms(plan.owner, model)
    refusals.refuse_optimizers(plan.owner, [optimizer])
    found = _with_hooks(plan.owner, optimizer)
    device = _device_of(plan.owner, model, found)
    if plan.elastic is None:
        _refuse_process_group(plan.owner, device)
    if any(each._module is model for each in LocalSteps._open):
        refuse(
            f"{plan.owner}: this model's weights or gradients are exchanged already; close the "
            f"handle before you make another one"
        )
    return found


def _refuse_model(owner: str, model: Any, island: int) -> None:
    """Raise ValueError for a module that exchanges gradients, or is not in one process."""
    if not isinstance(model, nn.Module):
        refuse(f"{owner}({type(model).__name__}(...)): give the module that is trained")
    for module in model.modules():
        bases = {(base.__module__, base.__name__) for base in type(module).__mro__}
        names = {name for where, name in bases if where.startswith("torch.")}
        if names & _GRADIENTS:
            refuse(
                f"{owner}({type(model).__name__}(...)): {(names & _GRADIENTS).pop()} exchanges "
                f"gradients in every backward pass. Give the module inside it, such as ddp.module, "
                f"and train that module"
            )
        if names & (_SHARDS if island == 1 else {_FSDP}):
            refuse(
                f"{owner}({type(model).__name__}(...)): {(names & _SHARDS).pop()} keeps the "
                f"weights in shards, so no process has a worker's weights. Give each process the "
                f"complete model, or shard it by fully_shard among N ranks and give island=N"
            )


_GRADIENTS = {"DistributedDataParallel", "DDP", "ReplicateModule"}
_FSDP = "FullyShardedDataParallel"
_SHARDS = {_FSDP, "FSDPModule"}


def _with_hooks(owner: str, optimizer: Any) -> Optimizer:
    if not isinstance(optimizer, Optimizer):
        refuse(
            f"{owner}(optimizer={type(optimizer).__name__}(...)): give the optimizer that trains "
            f"the model, one of torch.optim.Optimizer"
        )
    found: Optimizer = refusals.innermost(optimizer)
    if refusals.HOOKS not in vars(found):
        refuse(
            f"{owner}(optimizer={type(found).__name__}(...)): torch calls no hooks in its steps, "
            f"since its __init__ does not call super().__init__(params, defaults); let it do so"
        )
    return found


def _device_of(owner: str, model: nn.Module, optimizer: Optimizer) -> torch.device:
    """Return the device of all trained parameters, which the optimizer must have."""
    trained: list[Tensor] = [param for param in model.parameters() if param.requires_grad]
    devices = {param.device for param in trained}
    if len(devices) != 1:
        found = ", ".join(sorted(map(str, devices))) or "no device: no parameter is trained"
        refuse(owner, f"the trained parameters are on {found}; all must be on one device")
    own = set(model.parameters())
    for number, group in enumerate(optimizer.param_groups):
        other = next((each for each in group["params"] if each not in own), None)
        if other is not None:
            refuse(
                f"{owner}: parameter group {number} of {type(optimizer).__name__} has a tensor of "
                f"shape {tuple(other.shape)} that is not a parameter of the model, so it would "
                f"not be exchanged. Give the model and the optimizer of its parameters"
            )
    return devices.pop()


def _refuse_process_group(owner: str, device: torch.device) -> None:
    """Raise ValueError unless the default process group can send from ``device``."""
    if not dist.is_initialized():
        refuse(
            f"{owner}: no process group exists, so workers cannot exchange weights. Call "
            f'torch.distributed.init_process_group("gloo") first, and start with torchrun'
        )
    backends = dist.get_backend_config()
    if not any(each.startswith(f"{device.type}:") for each in backends.split(",")):
        refuse(
            f"{owner}: the model is on {device}, but the default process group has the backend "
            f"{backends}. Move the model before, or give init_process_group a backend for "
            f"{device.type}, such as 'cpu:gloo,cuda:nccl'"
        )
