"""Attached: the handle of a plain torch module whose gradients are compressed."""

from __future__ import annotations

import abc
import sys
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from lightning_gc.checkpoint import memory_store
from lightning_gc.control.control_loop import ControlLoop, Moment
from lightning_gc.controllers import Controller
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

    def state_dict(self, mode: Literal["full", "mean"] = "full") -> dict[str, Any]:
        """Return this worker's state, between steps; every worker must save its own.

        Tensors, numbers and strings only, so ``torch.load(..., weights_only=True)`` reads it.

        Args:
            mode: ``"mean"`` returns the mean of all workers' states, from which any number of
                workers can resume. Call it on all workers; one of them saves it.

        Raises:
            RuntimeError: called within a step.
        """
        self._synchronizer.check()
        if self._workers.first.rounds.torn:
            raise RuntimeError("A step is under way, so its errors are not final; save after it.")
        if mode not in ("full", "mean"):
            raise ValueError(f"state_dict(mode={mode!r}): use 'full' or 'mean'.")
        mean = None if mode == "full" else self._mean_on_host
        return memory_store.state_dict(self._workers, self._control, mean)

    def _mean_on_host(self, tensor: Tensor) -> Tensor:
        return self._mean(tensor.to(self._device)).cpu()

    def load_state_dict(self, state: Mapping[str, Any] | Sequence[Mapping[str, Any]]) -> None:
        """Resume from ``state_dict()`` of the same worker, bit for bit; or of all workers.

        Call it on all workers. All states are checked before any is loaded. Another controller than
        the state's is reset, with a warning.

        Args:
            state: the worker's state. If the number of workers has changed: on all workers the same
                list of all saved states, in the order of the workers, or ``state_dict("mean")``.
                Each worker then begins with the mean of the errors, so the mean error stays the
                same and no gradient is lost.

        Raises:
            ValueError: on all workers, if one's state is damaged, is not such as the compressor and
                its knob declare, or is that of another worker, configuration, model, step or run.
        """
        transport = Distributed(self._everybody, "loading states")
        gather = partial(gather_text, transport=transport, device=self._device)

        def agreed(check: Callable[[], str]) -> Mapping[int, str]:
            acts = {transport.worker: check}
            return all_or_raise(acts, transport.workers, gather, ValueError)

        memory_store.load(state, self._workers, self._control, self._device, agreed)

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
            f"cannot; use CompressedDDPStrategy, or memory=Residual()."
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
