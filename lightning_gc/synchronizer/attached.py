"""Attached: the handle of a plain torch module whose gradients are compressed."""

from __future__ import annotations

import abc
import copy
import sys
import warnings
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.controllers import Controller
from lightning_gc.synchronizer import Synchronizer, Workers
from lightning_gc.synchronizer.attached_state import (
    attached_state,
    check_attached_state,
    refuse_other_saves,
)
from lightning_gc.synchronizer.control_loop import ControlLoop, Moment
from lightning_gc.synchronizer.joint_errors import all_or_raise
from lightning_gc.synchronizer.parts import Parts
from lightning_gc.synchronizer.peers import Peers
from lightning_gc.synchronizer.pytree import each_tensor
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
        the state's begins anew, with a warning.

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
                    f"Resumed with changes. Controller {before} is now {now}: it begins anew.",
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
