"""Attached: start, refuse, prepare, check, control, save and close the exchange of gradients.

Plain torch, Fabric, Lightning's strategies and the simulator hold one, and forward their hooks.
"""

from __future__ import annotations

import copy
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gc.control.control_loop import CONTROL_STATE, ControlLoop, Moment
from lightning_gc.control.probes import WorkerStatistics
from lightning_gc.controllers import Controller
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.checksum import check_checksum, checksum, with_checksum
from lightning_gc.core.pytree import Tree, each_tensor
from lightning_gc.core.state_structure import (
    COUNT,
    LEVEL,
    TEXT,
    WHOLE,
    Each,
    Listed,
    Optional,
    Pair,
    Record,
    Structure,
)
from lightning_gc.engine.engine import ENGINE_STATE
from lightning_gc.engine.levels import RequestedLevels
from lightning_gc.exchange.peers import Parts, Peers, on_all_ranks, take_over
from lightning_gc.exchange.synchronizer import Synchronizer
from lightning_gc.exchange.validation import (
    check_controller,
    digest_of,
    refuse_second_hook,
    refuse_sparse_gradients,
    refuse_static_accumulation,
    refuse_unsynchronised,
    warn_of_one_queue,
    warn_of_one_worker,
)
from lightning_gc.exchange.verification import Verify
from lightning_gc.exchange.workers import Configuration, Workers
from lightning_gc.local_steps import OuterSGD
from lightning_gc.local_steps.local_rounds import LocalRounds
from lightning_gc.local_steps.round_plan import RoundPlan
from lightning_gc.transports.accounting import Account
from lightning_gc.transports.peer_error import naming_peers


class ModuleHook:
    """Calls ``act`` for the module that it is registered with, and for no copy of that module.

    A module's hooks are part of the module: ``copy.deepcopy``, ``pickle`` and ``torch.save`` take
    them along. What we register holds a process group and a thread, which cannot be copied and
    belong to one module. So a copy of this object holds nothing, and nothing of ours is in a file.

    Torch registers no communication hook with the reducer of a copied ``DistributedDataParallel``.
    The copy therefore averages uncompressed gradients over the default process group, and
    ``attach`` may be called on it.

    Args:
        act: the hook; None calls nothing.
    """

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self._act = act

    def __reduce__(self) -> tuple[type[ModuleHook], tuple[()]]:
        return type(self), ()

    def exchange(self, state, bucket):  # type: ignore[no-untyped-def]
        """Be a communication hook; untyped, as DDP inspects annotations."""
        if self._act is None:
            raise RuntimeError(
                "The communication hook of a copied module exchanges nothing; call attach on the "
                "copy, or train the module that was copied."
            )
        return self._act(state, bucket)

    def watch(self, module: Any, *passed: Any) -> None:
        """Be a hook before or after a module's forward pass."""
        if self._act is not None:
            self._act(module)


@dataclass(frozen=True)
class Setup:
    """Arguments that every way in gives its ``Attached``.

    Attributes:
        owner: the strategy or function with these arguments, for error messages.
        workers: engines and parameter names of this process; engines of an earlier fit continue.
        controller: chooses levels, or None.
        optimizers: returns the optimizers of the module's parameters.
        device: of the gradients.
        scaler: of fp16 training, or None.
        timeout: of every collective; None: that of the process group.
        verify: what workers compare, as for ``CompressedDDPStrategy``.
        weights: returns the weights that ``verify`` compares; None: all trained parameters.
        control: the control loop of an earlier fit, which continues.
        more_workers: advice in the warning of one worker.
    """

    owner: str
    workers: Workers
    controller: Controller | None
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]]
    device: torch.device
    scaler: Any = None
    timeout: timedelta | None = None
    verify: Verify = 0
    weights: Callable[[], Iterable[Tensor]] | None = None
    control: ControlLoop | None = None
    more_workers: str = "use more workers, or DDP as it is"

    @property
    def agreed(self) -> dict[str, str]:
        """Settings besides the configuration that must be equal on all workers, as text."""
        return {"controller": repr(self.controller)}

    def prepare_round(self) -> None:
        """Set loss scale and learning rates of the next round."""
        self.workers.prepare_round(self.scaler, self.optimizers())

    @classmethod
    def of_loop(
        cls,
        owner: str,
        configuration: Configuration,
        controller: Controller | None,
        optimizers: list[torch.optim.Optimizer],
        module: nn.Module,
        workers: type[Workers] = Workers,
        *,
        scaler: Any = None,
        timeout: timedelta | None = None,
        verify: Verify = 0,
    ) -> Self:
        """Return the setup of a training loop that calls none of our hooks.

        Raises:
            ValueError: a memory or a controller that needs more than a communication hook.
        """
        compressor, memory = configuration.compressor, configuration.memory
        groups = [group for each in optimizers for group in each.param_groups]
        if memory.lookahead:
            raise ValueError(
                f"{memory!r} moves the weights around each forward pass, which a communication "
                f"hook cannot; use CompressedDDPStrategy, or memory=Residual()."
            )
        if memory.lr_aware and not groups:
            raise ValueError(
                f"{memory!r} rescales errors by the learning rates, which attach does not know; "
                f"give attach(..., optimizers=optimizer)."
            )
        for group in groups:
            memory.check_optimizer(group)
        check_controller(controller, compressor, memory, owner, rounds=False)
        return cls(
            owner,
            workers(configuration),
            controller,
            lambda: optimizers,
            max(module.parameters(), key=lambda param: param.requires_grad).device,
            scaler if scaler is not None and scaler.is_enabled() else None,
            timeout,
            verify,
        )


class Attached:
    """Handle of a module whose gradients are compressed; returned by ``attach``.

    Args:
        module: that is trained.
        setup: what the way in was given.
        peers: the other workers, for a controller's decisions.
        synchronizer: exchanges gradients in the background, where something does.
    """

    _open: ClassVar[weakref.WeakSet[Attached]] = weakref.WeakSet()
    """Of this process: one optimizer may have the parameters of several modules."""

    def __init__(
        self,
        module: nn.Module,
        setup: Setup,
        peers: Peers,
        synchronizer: Synchronizer | None = None,
    ) -> None:
        self._module, self._setup, self._peers = module, setup, peers
        self._workers, self._synchronizer = setup.workers, synchronizer
        self._device, self._everybody = setup.device, peers.group
        self._control = setup.control
        self._watching: list[Any] = []
        self._open.add(self)
        try:
            self._start()
        except BaseException:
            self.end(failed=True)
            raise

    def _start(self) -> None:
        """Start the control loop and warn of one worker; the engines exist."""
        setup = self._setup
        if setup.controller is not None and self._control is None:
            self._control = ControlLoop(setup.controller, self._workers)
            self._workers.kept["turn"] = self._control.statistics
        if self._control is not None:
            self._control.attach()
        if self._workers.first.workers == 1 and self._peers.decides:
            self._warn_alone()

    def _warn_alone(self) -> None:
        weights = self._workers.exchanged == "weights"
        warn_of_one_worker(
            self._workers.configuration.compressor,
            "One worker: nothing is sent",
            "differences of weights" if weights else "gradients",
            self._setup.more_workers,
        )

    def watch(self) -> Self:
        """Check and refuse around each forward pass: for a training loop without our hooks."""
        # Not by the communication hook, which is not called if all that is trained is new.
        # Before DDP's own collectives, in which this worker would wait for peers that wait for it.
        before, after = ModuleHook(self._before_forward), ModuleHook(self._after_forward)
        self._watching += [
            self._module.register_forward_pre_hook(before.watch),
            self._module.register_forward_hook(after.watch),
        ]
        return self

    def _before_forward(self, module: nn.Module) -> None:
        self.check()
        self.before_pass()

    def _after_forward(self, module: nn.Module) -> None:
        self.refuse_unsynchronised()

    def prepare_round(self) -> None:
        """Set loss scale and learning rates of the next round, where no synchronizer does."""
        self._setup.prepare_round()

    def before_pass(self) -> None:
        """Refuse a pass that cannot be exchanged: before a forward or backward pass."""

    def after_pass(self) -> None:
        """Check parameters and exchange after a backward pass."""
        self.refuse_unsynchronised()
        self.check()

    def refuse_unsynchronised(self) -> None:
        """Raise RuntimeError for a parameter that is trained, and not exchanged."""
        refuse_unsynchronised(self._module, self._exchanged, self._setup.optimizers())

    @property
    def _exchanged(self) -> dict[Tensor, str]:
        """Parameter -> name, of all modules of this process whose handles are open."""
        return {param: name for each in self._open for param, name in each._workers.names.items()}

    @property
    def parts(self) -> Parts:
        """Sums over the parts of a worker, where several processes have them."""
        return self._peers.parts

    @property
    def control(self) -> ControlLoop | None:
        """The controller's, if there is one."""
        return self._control

    @property
    def levels(self) -> dict[str, float | None]:
        """The level of every parameter that is compressed; None: uncompressed for now."""
        return self._workers.levels()

    def figures(self) -> dict[str, float]:
        """Return figures of the last exchange for the monitor, besides its own."""
        return {}

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer of the module's parameters that was made after ``attach``.

        Raises:
            ValueError: the memory refuses its settings.
        """
        known = self._setup.optimizers()
        if any(optimizer is each for each in known):
            return
        for group in optimizer.param_groups:
            self._workers.configuration.memory.check_optimizer(group)
        assert isinstance(known, list)
        known.append(optimizer)

    def check(self) -> None:
        """Raise what has gone wrong in the background, between backward pass and optimizer step.

        Else the next forward or backward pass raises it, or ``close``.

        Raises:
            PeerError: an exchange has failed.
            ReplicaError: workers have found that they differ.
        """
        if self._synchronizer is not None:
            self._synchronizer.check()

    def reset(self) -> None:
        """Set errors and the compressor's state to zero, as for weights from elsewhere.

        The count of steps goes on.
        """
        self._workers.first.reset(self._workers.first.step)

    def set_levels(
        self, level: float | None, levels: Mapping[str, float | None] | None = None
    ) -> None:
        """Set the compression level, between steps, equally on all workers. Errors are kept.

        Args:
            level: for all parameters; None sends them uncompressed, with their errors.
            levels: parameter name -> level, for those that differ.

        Raises:
            ValueError: an invalid level, or a compressor without a knob.
        """
        self._workers.set_levels(level, levels)

    def begin_epoch(
        self, epoch: int, metrics: Mapping[str, float] | None = None, **run: Any
    ) -> None:
        """Let the controller decide on the levels of the next epoch.

        Call it on all workers before the first step of each epoch, after validation, when the
        learning rate is that of the next step.

        Args:
            epoch: the epoch's number, from 0.
            metrics: the latest value of each metric that the controller uses.
            run: ``max_epochs``, ``total_steps``, ``progress`` (finished share of the run), as far
                as known; a controller with a budget needs ``total_steps`` and ``progress``.

        Raises:
            ValueError: there is no controller, or no optimizer.
            RuntimeError: on all workers, if the controller fails.
        """
        self.begin_batch(epoch, metrics, **run)

    def begin_batch(
        self, epoch: int, metrics: Mapping[str, float] | None = None, **run: Any
    ) -> None:
        """Let the controller decide if a decision is due: for those that decide within epochs.

        Call it on all workers before every training batch, instead of ``begin_epoch``.
        """
        if self._control is None or not self._setup.optimizers():
            raise ValueError(
                "There is no controller, or no optimizer whose learning rate it could see; give "
                "attach(..., controller=Accordion(...), optimizers=optimizer)."
            )
        self.decide(epoch, partial(Moment, metrics or {}, **run))

    def decide(self, epoch: int, moment: Callable[[], Moment]) -> None:
        """Let the controller decide, if there is one and a decision is due.

        Args:
            epoch: the batch's epoch.
            moment: returns metrics and progress; called only if a decision is due.
        """
        if self._control is not None:
            self._control.decide(epoch, self._setup.optimizers(), moment, self._peers)

    def account(self) -> Account:
        """Return and reset the bytes and seconds of this worker.

        On CUDA seconds are measured from the first call on, and each call waits for the device.
        """
        account = self._workers.accounts[0].take()
        self._workers.accounts[0].timing = True
        return account

    def state_dict(self) -> dict[str, Any]:
        """Return this worker's state, between steps; every worker must save its own.

        Tensors, numbers and strings only, so ``torch.load(..., weights_only=True)`` reads it.

        Raises:
            RuntimeError: called within a step.
        """
        self.check()
        if self._workers.first.torn:
            raise RuntimeError("A step is under way, so its errors are not final; save after it.")
        control, kept = self._control, None
        if control is not None:
            kept = {
                "controller": repr(control.controller),
                "loop": control.state_dict({}),
                "worker": control.statistics[0].own_state(),
            }
        return attached_state(self._workers, kept)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from ``state_dict()`` of the same worker, bit for bit.

        Call it on all workers. All states are checked before any is loaded. Another controller than
        the state's is reset, with a warning.

        Raises:
            ValueError: on all workers, if one's state is damaged, is not such as the compressor and
                its knob declare, or is that of another worker, number of workers, configuration,
                model, step or run.
        """
        check = partial(check_attached_state, state, self._workers)
        saves = on_all_ranks(check, self._device, self._everybody, "loading states")
        refuse_other_saves(saves)
        there = each_tensor(dict(state), lambda tensor: tensor.to(self._device))
        self._workers.first.load_state_dict(copy.deepcopy(there["engine"]))
        if self._control is not None:
            self._control.begin_anew()
        self._workers.forget_levels()
        if state["levels"] is not None:
            self._workers.set_levels(*state["levels"])
        self._workers.regroup(state["layout"])
        if self._control is not None:
            self._load_control(self._control, there["control"])

    def _load_control(self, control: ControlLoop, state: Mapping[str, Any] | None) -> None:
        now = repr(control.controller)
        before = now if state is None else state.get("controller", now)
        if before != now:
            if self._workers.first.worker == 0:
                warnings.warn(
                    f"Resumed with changes. Controller {before} is now {now}: its state is reset.",
                    stacklevel=3,
                )
        elif state is not None:
            control.load_state_dict(state["loop"])
            control.statistics[0].load_own_state(state["worker"])

    def close(self) -> None:
        """Stop the background thread and leave its process group. No backward pass may follow.

        While an exception is handled, as in a ``finally``, this does not wait for the others.

        Raises:
            PeerError: the last exchange failed; and other errors of the last step.
        """
        self.end(failed=sys.exception() is not None)
        self.check()

    def end(self, failed: bool) -> None:
        """Do what ``close`` does, and raise no error of the last step; again does nothing.

        Args:
            failed: whether this worker stops by an error of its own; then it waits for nobody.
        """
        if self in self._open:
            self._open.discard(self)
            for hook in self._watching:
                hook.remove()
            self._detach()
        if self._synchronizer is not None:
            self._synchronizer.close(failed)

    def _detach(self) -> None:
        """Take off what listens to the module."""


def peers_of(
    device: torch.device,
    between: dist.ProcessGroup | None,
    everybody: dist.ProcessGroup | None,
    parts: Parts | None = None,
) -> Peers:
    """Return the peers of a real worker.

    Args:
        device: one that the groups' backend can send from.
        between: the group whose members are averaged.
        everybody: the group of all ranks that have the module, or a part of it.
        parts: sums over the ranks that have a worker's parameters together.
    """
    first = dist.get_rank(everybody) == 0
    return Peers(first, device, partial(_mean, between), parts or Parts(), everybody)


def _mean(between: dist.ProcessGroup | None, tensor: Tensor) -> Tensor:
    total, workers = tensor.clone(), dist.get_world_size(between)
    with naming_peers("all-reduce", "a controller's decision", dist.get_rank(between), workers):
        dist.all_reduce(total, group=between)
    return total / workers


class AttachedDDP(Attached):
    """Handle of a ``DistributedDataParallel`` module, by its communication hook.

    Args:
        ddp: the module.
        setup: as for ``Attached``.
    """

    _module: DistributedDataParallel

    def __init__(self, ddp: DistributedDataParallel, setup: Setup) -> None:
        refuse_second_hook(ddp)
        refuse_sparse_gradients(ddp.module)
        warn_of_one_queue(ddp)
        setup.workers.name(ddp.module)
        group = ddp.process_group
        synchronizer = Synchronizer(
            setup.workers,
            setup.device,
            group,
            setup.timeout,
            before_round=setup.prepare_round,
            common=setup.weights,
            revocable=setup.scaler is not None,
            agreed=setup.agreed,
            verify=setup.verify,
        )
        super().__init__(ddp, setup, peers_of(setup.device, group, group), synchronizer)

    def _start(self) -> None:
        super()._start()
        assert self._synchronizer is not None
        self._module.register_comm_hook(None, ModuleHook(self._synchronizer.hook).exchange)

    def before_pass(self) -> None:
        """Refuse a static graph that begins with accumulated gradients."""
        refuse_static_accumulation(self._module)

    def refuse_unsynchronised(self) -> None:
        """Raise RuntimeError for a parameter that is trained, and not exchanged."""
        refuse_unsynchronised(self._module.module, self._exchanged, self._setup.optimizers())


class AttachedRounds(Attached):
    """Handle of a module whose workers exchange differences of weights every H steps.

    Args:
        module: that is trained, without a wrapper.
        setup: as for ``Attached``.
        plan: when what is exchanged.
        outer: the step of the common weights.
        keep: takes the rounds of this process, before the control loop sets H.
    """

    def __init__(
        self,
        module: nn.Module,
        setup: Setup,
        plan: RoundPlan,
        outer: OuterSGD,
        keep: Callable[[Sequence[LocalRounds]], None],
    ) -> None:
        setup.workers.name(module)
        tensors = (*module.named_parameters(), *module.named_buffers())
        synchronizer = Synchronizer(
            setup.workers,
            setup.device,
            timeout=setup.timeout,
            revocable=True,
            agreed=setup.agreed
            | {
                "plan": repr(plan),
                "outer": repr(outer),
                "names and shapes of parameters and buffers": digest_of(
                    {name: tuple(tensor.shape) for name, tensor in tensors}
                ),
            },
            verify=setup.verify,
        )
        workers = setup.workers
        parts = (module, workers.names, workers.first, synchronizer, plan, outer)
        self._begin: Callable[[], None] = lambda: keep([LocalRounds(*parts)])
        super().__init__(module, setup, peers_of(setup.device, None, None), synchronizer)

    def _start(self) -> None:
        take_over(self._module)
        self._begin()
        super()._start()

    def after_pass(self) -> None:
        """Do nothing: a worker's own steps exchange no gradients."""


FORMAT = 2
"""Format 1 has nothing of what is in ``_SINCE_2``."""

_STATE: dict[str, Structure] = {
    "format": COUNT,
    "worker": WHOLE,
    "workers": COUNT,
    "configuration": Each(TEXT),
    "layout": Listed(Listed(TEXT)),
    "engine": Record(ENGINE_STATE),
    "levels": Optional(Pair(LEVEL, Each(LEVEL))),
    "control": Optional(
        Record(
            {"loop": CONTROL_STATE, "worker": WorkerStatistics.structure},
            {"controller": TEXT},  # not in states of before
        )
    ),
}
_OF_SHARDS: dict[str, Structure] = {"shard": WHOLE, "shards": COUNT}
_SINCE_2: dict[str, Structure] = {"run": TEXT, CHECKSUM: TEXT}


def attached_state(workers: Workers, control: Tree | None) -> Tree:
    """Return the state of this process's worker, with a checksum."""
    state = {
        "format": FORMAT,
        "run": workers.run,
        "layout": [list(names) for names in workers.layout],
        "engine": workers.first.state_dict(),
        "levels": workers.first.levels.requested(),
        "control": control,
    }
    return with_checksum(state | _identity(workers))


def check_attached_state(state: Any, workers: Workers) -> str:
    """Return the step and the run in which a state was saved, and a checksum of what all share.

    Raises:
        ValueError: it is damaged, or that of another worker, configuration or model.
    """
    known = state.get("format") if isinstance(state, Mapping) else None
    if known not in range(1, FORMAT + 1):
        raise ValueError(
            f"has a state of format={known!r}, but this version of lightning_gc knows formats up "
            f"to {FORMAT}; give what Attached.state_dict() has returned, or upgrade."
        )
    try:
        if known != 1:
            check_checksum(state)
        always = _STATE if known == 1 else {**_STATE, **_SINCE_2}
        Record(always, _OF_SHARDS).check(dict(state))
    except ValueError as error:
        raise _unusable(error) from error
    for what, own in _identity(workers).items():
        if state.get(what) != own:
            raise ValueError(
                f"has a state with {what}={state.get(what)!r}, but here it is {own!r}; give every "
                f"worker the state that it has saved, and attach with the same arguments, or leave "
                f"load_state_dict out, and errors begin at zero."
            )
    for name, kept in state["engine"]["memory"].items():
        for tensor in kept.values():
            if tuple(tensor.shape) != workers.shapes.get(name):
                raise ValueError(
                    f"has a state with an error of {name} of shape {tuple(tensor.shape)}, but the "
                    f"model has {workers.shapes.get(name, 'no such parameter')}."
                )
    try:
        workers.check_declared(state["engine"]["compressor"], state["levels"], place="engine/")
        loop = {} if state["control"] is None else state["control"]["loop"]
        RequestedLevels(workers.configuration.compressor).check(
            loop.get("levels"), "control/loop/levels"
        )
    except ValueError as error:
        raise _unusable(error) from error
    # Ranks of a model in shards may have buckets without any elements, which are not in a layout.
    shared = {
        "levels": state["levels"],
        "layout": [] if workers.place() else state["layout"],
        "loop": {name: loop.get(name) for name in ("state", "levels", "every", "pause", "epoch")},
    }
    saved = f"step {state['engine']['step']}" + (f" of run {state['run']}" if known != 1 else "")
    return f"{saved}{_SHARED}{checksum(shared)}"


def refuse_other_saves(saves: Mapping[int, str]) -> None:
    """Raise ValueError if workers' states, by ``check_attached_state``, were not saved together."""
    first = saves[0].partition(_SHARED)[0]
    for worker, save in saves.items():
        own = save.partition(_SHARED)[0]
        if save == saves[0]:
            continue
        different = f"of {own}, but worker 0 of {first}"
        if own == first:
            different = "with other levels, buckets or decisions than worker 0"
        raise ValueError(
            f"Worker {worker} has a state {different}; give all workers states that were saved "
            f"together."
        )


_SHARED = ", with levels, buckets and decisions of checksum "


def _unusable(error: ValueError) -> ValueError:
    return ValueError(
        f"has a state that cannot be used: {error}. Load an earlier one, or none: then errors "
        f"begin at zero."
    )


def _identity(workers: Workers) -> dict[str, Any]:
    """Return the part of the state that must be equal where it is loaded."""
    return {
        "worker": workers.first.worker,
        "workers": workers.first.workers,
        "configuration": workers.configuration.in_words(),
        **workers.place(),
    }
