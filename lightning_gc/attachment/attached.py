"""Attached: the handle of a plain torch module whose gradients are compressed."""

from __future__ import annotations

import abc
import copy
import sys
import warnings
import weakref
from collections.abc import Iterable, Mapping
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gc.control.control_loop import CONTROL_STATE, ControlLoop, Moment
from lightning_gc.control.probes import WorkerStatistics
from lightning_gc.controllers import Controller
from lightning_gc.core.checksum import NAME as CHECKSUM
from lightning_gc.core.checksum import check_checksum, checksum, with_checksum
from lightning_gc.core.pytree import Tree, each_tensor
from lightning_gc.core.registry import with_new_names
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
from lightning_gc.exchange.module_hooks import ModuleHook
from lightning_gc.exchange.peers import Parts, Peers, all_or_raise
from lightning_gc.exchange.synchronizer import Synchronizer
from lightning_gc.exchange.validation import (
    check_controller,
    refuse_rounds,
    refuse_second_hook,
    refuse_sparse_gradients,
    refuse_static_accumulation,
    refuse_unsynchronised,
    warn_of_one_queue,
    warn_of_one_worker,
)
from lightning_gc.exchange.verification import Verify
from lightning_gc.exchange.workers import Configuration, Workers
from lightning_gc.transports.accounting import Account
from lightning_gc.transports.distributed import Distributed, gather_text
from lightning_gc.transports.peer_error import naming_peers


class Attached(abc.ABC):
    """Handle of a module whose gradients are compressed; returned by ``attach``.

    Args:
        workers: this rank's engine, started.
        synchronizer: exchanges its gradients.
        controller: as for ``attach``, like ``optimizers``.
        device: of the gradients.
        between: the group whose members' gradients are averaged by it.
        everybody: the group of all ranks that have the module, or a part of it.
        parts: sums over the ranks that have a worker's parameters together.
    """

    _open: ClassVar[weakref.WeakSet[Attached]] = weakref.WeakSet()
    """Of this process: one optimizer may have the parameters of several modules."""

    def __init__(
        self,
        workers: Workers,
        synchronizer: Synchronizer,
        controller: Controller | None,
        optimizers: list[torch.optim.Optimizer],
        device: torch.device,
        between: dist.ProcessGroup | None,
        everybody: dist.ProcessGroup | None,
        parts: Parts,
    ) -> None:
        self._workers, self._synchronizer, self._optimizers = workers, synchronizer, optimizers
        self._device, self._between, self._everybody = device, between, everybody
        self._parts = parts
        self._control: ControlLoop | None = None
        if controller is not None:
            self._control = ControlLoop(controller, workers)
            self._control.attach()
        self._open.add(self)

    @property
    def _exchanged(self) -> dict[Tensor, str]:
        """Parameter -> name, of all modules of this process whose handles are open."""
        return {param: name for each in self._open for param, name in each._workers.names.items()}

    @property
    def levels(self) -> dict[str, float | None]:
        """The level of every parameter that is compressed; None: uncompressed for now."""
        return self._workers.levels()

    def add_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Take an optimizer of the module's parameters that was made after ``attach``.

        Raises:
            ValueError: the memory refuses its settings.
        """
        if any(optimizer is known for known in self._optimizers):
            return
        for group in optimizer.param_groups:
            self._workers.configuration.memory.check_optimizer(group)
        self._optimizers.append(optimizer)

    def check(self) -> None:
        """Raise what has gone wrong in the background, between backward pass and optimizer step.

        Else the next forward or backward pass raises it, or ``close``.

        Raises:
            PeerError: an exchange has failed.
            ReplicaError: workers have found that they differ.
        """
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
        if self._control is None or not self._optimizers:
            raise ValueError(
                "There is no controller, or no optimizer whose learning rate it could see; give "
                "attach(..., controller=Accordion(...), optimizers=optimizer)."
            )
        moment = partial(Moment, metrics or {}, **run)
        first = dist.get_rank(self._everybody) == 0
        peers = Peers(first, self._device, self._mean, self._parts, self._everybody)
        self._control.decide(epoch, self._optimizers, moment, peers)

    def _mean(self, tensor: Tensor) -> Tensor:
        total, workers = tensor.clone(), dist.get_world_size(self._between)
        with naming_peers(
            "all-reduce", "a controller's decision", dist.get_rank(self._between), workers
        ):
            dist.all_reduce(total, group=self._between)
        return total / workers

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
        self._synchronizer.check()
        if self._workers.first.rounds.torn:
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
        transport, workers = Distributed(self._everybody, "loading states"), self._workers
        saves = all_or_raise(
            {transport.worker: partial(check_attached_state, state, workers)},
            transport.workers,
            partial(gather_text, transport=transport, device=self._device),
            ValueError,
        )
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
        if self in self._open:
            self._open.discard(self)
            self._detach()
        self._synchronizer.close(failed=sys.exception() is not None)
        self._synchronizer.check()

    @abc.abstractmethod
    def _detach(self) -> None:
        """Take off what watches the module."""


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
        known = state.get(what)
        if (with_new_names(known) if what == "configuration" else known) != own:
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


def check_settings(
    configuration: Configuration,
    controller: Controller | None,
    optimizers: Iterable[torch.optim.Optimizer],
) -> None:
    """Raise ValueError for a memory or a controller that cannot work with these optimizers."""
    memory, groups = configuration.memory, [g for each in optimizers for g in each.param_groups]
    if memory.lookahead:
        raise ValueError(
            f"{memory!r} moves the weights around each forward pass, which a communication hook "
            f"cannot; use CompressedDDPStrategy, or memory=ErrorFeedback()."
        )
    if memory.lr_aware and not groups:
        raise ValueError(
            f"{memory!r} rescales errors by the learning rates, which attach does not know; give "
            f"attach(..., optimizers=optimizer)."
        )
    for group in groups:
        memory.check_optimizer(group)
    if controller is not None:
        check_controller(controller, configuration.compressor, memory, "attach")
        refuse_rounds(controller, "attach")


class AttachedDDP(Attached):
    """Handle of a ``DistributedDataParallel`` module, by its communication hook.

    Args:
        ddp: the module; the others as for ``attach``.
        configuration: compressor, memory and scheme.
        controller: or None.
        optimizers: of the module's parameters.
        scaler: of fp16 training.
        timeout: of every collective.
        verify: what workers compare.
    """

    def __init__(
        self,
        ddp: DistributedDataParallel,
        configuration: Configuration,
        controller: Controller | None,
        optimizers: list[torch.optim.Optimizer],
        scaler: torch.amp.GradScaler | None,
        timeout: timedelta | None,
        verify: Verify,
    ) -> None:
        check_settings(configuration, controller, optimizers)
        scaler = scaler if scaler is not None and scaler.is_enabled() else None
        refuse_second_hook(ddp)
        refuse_sparse_gradients(ddp.module)
        warn_of_one_queue(ddp)
        workers = Workers(configuration)
        workers.name(ddp.module)
        device = next(iter(workers.names)).device
        synchronizer = Synchronizer(
            workers,
            device,
            ddp.process_group,
            timeout,
            before_round=partial(workers.prepare_round, scaler, optimizers),
            revocable=scaler is not None,
            agreed={"controller": repr(controller)},
            verify=verify,
        )
        group = ddp.process_group
        try:
            super().__init__(
                workers, synchronizer, controller, optimizers, device, group, group, Parts()
            )
            ddp.register_comm_hook(None, ModuleHook(synchronizer.hook).exchange)
        except BaseException:  # such as that of a module that has a hook already
            self._open.discard(self)
            synchronizer.close(failed=True)
            raise
        if workers.first.workers == 1:
            fix = "use more workers, or DDP as it is"
            compressor = configuration.compressor
            warn_of_one_worker(compressor, "One worker: nothing is sent", "gradients", fix)
        # Not by the communication hook, which is not called if all that is trained is new.
        # Before DDP's own collectives, in which this worker would wait for peers that wait for it.
        before = ddp.register_forward_pre_hook(ModuleHook(self._check_before).watch)
        after = ddp.register_forward_hook(ModuleHook(self._refuse_unsynchronised).watch)
        self._watching = (before, after)

    def _check_before(self, ddp: DistributedDataParallel) -> None:
        self._synchronizer.check()
        refuse_static_accumulation(ddp)

    def _refuse_unsynchronised(self, ddp: DistributedDataParallel) -> None:
        refuse_unsynchronised(ddp.module, self._exchanged, self._optimizers)

    def _detach(self) -> None:
        for hook in self._watching:
            hook.remove()
