"""Attached: start, refuse, prepare, check, control, save and close the exchange of gradients.

Plain torch, Fabric, Lightning's strategies and the simulator hold one, and forward their hooks.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from lightning_gc.checkpoint import memory_store
from lightning_gc.checkpoint.worker_state import CheckpointParts
from lightning_gc.compressors.wrappers.size_switch import leaves_out_all
from lightning_gc.control.control_loop import ControlLoop, Moment
from lightning_gc.core.combinations import judge
from lightning_gc.core.copies import Single
from lightning_gc.core.notices import say
from lightning_gc.core.refusal import refuse
from lightning_gc.exchange import validation
from lightning_gc.exchange.compression import Resolved, WayIn
from lightning_gc.exchange.peers import Parts, Peers, on_all_ranks
from lightning_gc.exchange.synchronizer import Synchronizer
from lightning_gc.exchange.workers import Workers
from lightning_gc.sharded.shard_validation import refuse_new_parameters
from lightning_gc.transports.accounting import Account
from lightning_gc.transports.peer_error import is_from_backend, naming_peers, peers_in_words

if TYPE_CHECKING:
    from lightning_gc.elastic.elastic_exchange import ElasticExchange


class ModuleHook:
    """Calls ``act`` for the module that it is registered with, and for no copy of that module.

    A module's hooks are part of the module: ``copy.deepcopy``, ``pickle`` and ``torch.save`` take
    them along. Our hook holds a process group and a thread, which cannot be copied and belong to
    one module. So a copy of this object holds nothing, and nothing of ours is in a file.

    Torch registers no communication hook with the reducer of a copied ``DistributedDataParallel``.
    The copy therefore averages uncompressed gradients over the default process group, and
    ``attach`` may be called on it.

    Torch cannot remove a communication hook either. After ``close`` this one stays registered and
    raises, until ``attach`` is called again and sets another ``act``.

    Args:
        act: the hook; None calls nothing.
    """

    def __init__(self, act: Callable[..., Any] | None = None) -> None:
        self._act = act

    @classmethod
    def of(cls, ddp: DistributedDataParallel) -> ModuleHook | None:
        """Return the communication hook of a module if it is one of these."""
        if not ddp._get_ddp_logging_data().get("comm_hook"):
            return None  # a copy lists the original's hook, but its reducer has none
        owners = (getattr(hook, "__self__", None) for hook, _ in ddp._comm_hooks)
        return next((owner for owner in owners if isinstance(owner, cls)), None)

    @property
    def closed(self) -> bool:
        """Whether ``close`` was called, and no other ``act`` has been set since."""
        return self._act is _closed

    def open(self, act: Callable[..., Any]) -> None:
        """Call ``act`` from now on."""
        self._act = act

    def close(self) -> None:
        """Raise from now on, and let go of what ``act`` holds."""
        self._act = _closed

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


def _closed(*passed: Any) -> Any:
    raise RuntimeError(
        "A backward pass ran after the handle of this module was closed. Call attach on the module "
        "again before such a pass. DDP cannot continue after this error: wrap the model again."
    )


@dataclass(frozen=True)
class Setup:
    """Arguments that every way in gives its ``Attached``.

    Attributes:
        way: the strategy or function with these arguments, and its advice.
        compression: what is exchanged.
        checkpoint_parts: of the workers of this process; a later fit uses the same object.
        optimizers: returns the optimizers of the module's parameters.
        device: of the gradients.
        scaler: of fp16 training, or None.
        timeout: of every collective; None: the process group's.
        weights: returns the weights that ``verify`` compares; None: all trained parameters.
    """

    way: WayIn
    compression: Resolved
    checkpoint_parts: CheckpointParts
    optimizers: Callable[[], Sequence[torch.optim.Optimizer]]
    device: torch.device
    scaler: Any = None
    timeout: timedelta | None = None
    weights: Callable[[], Iterable[Tensor]] | None = None

    @property
    def workers(self) -> Workers:
        """Engines and parameter names of this process."""
        return self.checkpoint_parts.workers

    @property
    def agreed(self) -> dict[str, str]:
        """Settings besides the configuration that must be equal on all workers, as text."""
        return {"controller": repr(self.compression.controller)}

    def prepare_round(self) -> None:
        """Set loss scale and learning rates of the next round."""
        self.workers.prepare_round(self.scaler, self.optimizers())

    @classmethod
    def of_loop(
        cls,
        way: WayIn,
        compression: Resolved,
        optimizers: list[torch.optim.Optimizer],
        module: nn.Module,
        workers: type[Workers] = Workers,
        *,
        scaler: Any = None,
        timeout: timedelta | None = None,
    ) -> Self:
        """Return the setup of a training loop that calls none of our hooks.

        Raises:
            ValueError: a memory that needs more than a communication hook.
        """
        configuration = compression.configuration
        compressor, memory = configuration.compressor, configuration.memory
        groups = [group for each in optimizers for group in each.param_groups]
        judge("Training loop", memory=memory, way="attach", optimizers=groups)
        validation.check_optimizers(compressor, memory, optimizers)
        return cls(
            way,
            compression,
            CheckpointParts(workers(configuration)),
            lambda: optimizers,
            max(module.parameters(), key=lambda param: param.requires_grad).device,
            scaler if scaler is not None and scaler.is_enabled() else None,
            timeout,
        )


class _OpenHandles:
    """Open handles of this process: one optimizer may have the parameters of several modules.

    While there are any, no optimizer may step on gradients of this worker alone.
    """

    def __init__(self) -> None:
        self._open: weakref.WeakSet[Attached] = weakref.WeakSet()
        self._hearing: list[Any] = []  # hooks of all optimizers of this process

    def __iter__(self) -> Iterator[Attached]:
        return iter(self._open)

    def __contains__(self, handle: Attached) -> bool:
        return handle in self._open

    def add(self, handle: Attached) -> None:
        self._open.add(handle)
        if not self._hearing:
            self._hearing.append(register_optimizer_step_pre_hook(self._before_step))
            self._hearing.append(register_optimizer_step_post_hook(self._after_step))

    def discard(self, handle: Attached) -> None:
        self._open.discard(handle)
        while self._hearing and not self._open:
            self._hearing.pop().remove()

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> Any:
        """Judge a step: before it, or each time its closure has run."""
        if torch.compiler.is_compiling():
            return None
        closures = [each for each in (*args[1:], kwargs.get("closure")) if callable(each)]
        if not closures:
            self._judge(optimizer)
            return None

        def judged(given: Any) -> Any:
            if not any(given is each for each in closures):
                return given

            def closure() -> Any:
                loss = given()
                self._judge(optimizer)
                return loss

            return closure

        return tuple(map(judged, args)), {name: judged(value) for name, value in kwargs.items()}

    def _judge(self, optimizer: torch.optim.Optimizer) -> None:
        """Raise RuntimeError if the optimizer would step on gradients of this worker alone.

        Gradients that have been exchanged leave nothing but a comparison of two counts to do.
        """
        for handle in self._open:
            done, backward = handle.exchanges, torch._C._current_graph_task_id() != -1
            if done is None or (done > handle._stepped.get(optimizer, 0) and not backward):
                continue
            if handle._workers.first.workers > 1:
                cause = partial(handle.why_not_exchanged, optimizer, within=backward)
                validation.refuse_own_gradients(optimizer, handle._workers.names, cause)

    def _after_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Expect another exchange before the next step of this optimizer."""
        if not torch.compiler.is_compiling():
            for handle in self._open:
                if handle.exchanges is not None:
                    handle._stepped[optimizer] = handle.exchanges


class Attached(Single):
    """Handle of a module whose gradients are compressed; returned by ``attach``.

    Args:
        module: that is trained.
        setup: what the way in was given.
        peers: the other workers, for a controller's decisions.
        background: what exchanges in the background, where something does.
    """

    _open: ClassVar = _OpenHandles()
    known: ClassVar[weakref.WeakSet[nn.Module]] = weakref.WeakSet()
    """Modules that have or had a handle."""

    def __init__(
        self,
        module: nn.Module,
        setup: Setup,
        peers: Peers,
        background: Synchronizer | ElasticExchange | None = None,
    ) -> None:
        self._module, self._setup, self._peers = module, setup, peers
        self._workers, self._background = setup.workers, background
        self._watching: list[Any] = []
        # Exchanges of this handle at each optimizer's last step.
        self._stepped = weakref.WeakKeyDictionary[torch.optim.Optimizer, int]()
        self._open.add(self)
        self.known.add(module)
        try:
            self._start()
        except BaseException:
            self.end(failed=True)
            raise

    def _start(self) -> None:
        """Start the control loop, now that engines exist, and say where nothing is saved."""
        controller = self._setup.compression.controller
        parts = self._setup.checkpoint_parts
        if controller is not None and parts.control is None:
            parts.control = ControlLoop(controller, self._workers)
        if parts.control is not None:
            parts.control.attach(parts.rounds)
        weighs = controller is not None and controller.needs.weighed
        if self._workers.first.workers == 1 and self._peers.decides and not weighs:
            self._warn_alone()  # Auto is uncompressed there
        elif self._peers.decides and leaves_out_all(
            self._workers.configuration.compressor, self._workers.shapes.values()
        ):
            say(
                "Nothing is compressed: all trained tensors have fewer than min_numel elements or "
                "one dimension, and are sent uncompressed. min_numel=0 compresses all of them."
            )

    def _warn_alone(self) -> None:
        weights = self._setup.checkpoint_parts.exchanged == "weights"
        validation.warn_of_one_worker(
            self._workers.configuration.compressor,
            "One worker: nothing is sent",
            "differences of weights" if weights else "gradients",
            self._setup.way.more_workers,
        )

    @property
    def control(self) -> ControlLoop | None:
        """The control loop, if there is a controller."""
        return self._setup.checkpoint_parts.control

    def watch(self) -> Self:
        """Check and refuse around each forward pass: for a training loop without our hooks."""
        # Not by the communication hook, which is not called if all that is trained is new.
        # Before DDP's own collectives, in which this worker would wait for peers that wait for it.
        before = ModuleHook(self._before_forward)
        after = ModuleHook(lambda module: self.refuse_unsynchronised())
        self._watching += [
            self._module.register_forward_pre_hook(before.watch),
            self._module.register_forward_hook(after.watch),
        ]
        return self

    def _before_forward(self, module: nn.Module) -> None:
        self.check()
        self.before_pass()
        controller = self._setup.compression.controller
        if controller is not None and controller.needs.weighed and torch.is_grad_enabled():
            # It needs no metrics, so the loop need not call us.
            self.decide(0, partial(Moment, {}))

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
        optimizers, elsewhere = self._setup.optimizers(), self._setup.way.elsewhere
        refuse_new_parameters(self._module, self._exchanged, optimizers, elsewhere)

    def advise(self, **words: str) -> None:
        """Let messages name the user's own settings: for a way in that calls ``attach``.

        ``words``: texts of ``WayIn``.
        """
        self._setup = replace(self._setup, way=replace(self._setup.way, **words))  # type: ignore[arg-type]

    def why_not_exchanged(self, optimizer: torch.optim.Optimizer, *, within: bool) -> str:
        """Return why a step finds gradients that were not exchanged, and what to do.

        Args:
            optimizer: that steps.
            within: whether a backward pass is running.
        """
        if within:
            return "Call step() after loss.backward()"
        if not self._stepped.get(optimizer):
            return self._setup.way.bypassed
        left = "Or the gradient is left from before that step: call zero_grad() after each step"
        return f"{self._setup.way.bypassed}. {left}"

    @property
    def exchanges(self) -> int | None:
        """Exchanges of this handle so far; None where a step need not follow one."""
        return None

    @property
    def _exchanged(self) -> dict[Tensor, str]:
        """Parameter -> name, of all modules of this process whose handles are open."""
        return {param: name for each in self._open for param, name in each._workers.names.items()}

    @property
    def parts(self) -> Parts:
        """Sums over the parts of a worker, where several processes have them."""
        return self._peers.parts

    @property
    def levels(self) -> dict[str, float | None]:
        """The level of every parameter that is compressed; None: uncompressed for now."""
        return self._workers.levels()

    @property
    def weight_levels(self) -> dict[str, float | None]:
        """The same of gathered weights, if their compressor has a level: FSDP with ``weights``."""
        return self._workers.weight_levels()

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
        configuration = self._workers.configuration
        validation.check_optimizers(configuration.compressor, configuration.memory, [optimizer])
        assert isinstance(known, list)
        known.append(optimizer)

    def check(self) -> None:
        """Raise what has gone wrong in the background, between backward pass and optimizer step.

        Else the next forward or backward pass raises it, or ``close``.

        Raises:
            PeerError: an exchange has failed.
            ReplicaError: workers have found that they differ.
        """
        if self._background is not None:
            self._background.check()

    def reset(self) -> None:
        """Set errors and the compressor's state to zero, as for weights from elsewhere.

        The count of steps continues.
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

        Call it on all workers before the first step of each epoch: after validation, and after the
        scheduler has set the learning rate.

        Args:
            epoch: the epoch's number, from 0.
            metrics: the latest value of each metric that the controller uses.
            run: ``max_epochs``, ``total_steps``, ``progress`` (finished share of the run), as far
                as known; a controller with a budget needs ``total_steps`` and ``progress``.

        Raises:
            ValueError: no controller or no optimizer was given.
            RuntimeError: on all workers, if the controller fails.
        """
        self.begin_batch(epoch, metrics, **run)

    def begin_batch(
        self, epoch: int, metrics: Mapping[str, float] | None = None, **run: Any
    ) -> None:
        """Let the controller decide if a decision is due: for those that decide within epochs.

        Call it on all workers before every training batch, instead of ``begin_epoch``.
        """
        if self.control is None or not self._setup.optimizers():
            refuse(
                f"A decision needs a controller, and an optimizer for the learning rate. Give "
                f"{self._setup.way.owner} both, such as controller=Accordion(low=0.1, high=0.01)"
            )
        self.decide(epoch, partial(Moment, metrics or {}, **run))

    def decide(self, epoch: int, moment: Callable[[], Moment]) -> None:
        """Let the controller decide, if there is one and a decision is due.

        Args:
            epoch: the batch's epoch.
            moment: returns metrics and progress; called only if a decision is due.
        """
        if self.control is not None:
            self.control.decide(epoch, self._setup.optimizers(), moment, self._peers)

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
        self.check()
        if self._workers.first.torn:
            raise RuntimeError("A step is under way, so its errors are not final; save after it.")
        if mode not in ("full", "mean"):
            refuse(f"state_dict(mode={mode!r}): use 'full' or 'mean'")
        if mode == "full":
            return memory_store.state_dict(self._setup.checkpoint_parts)
        with self._peers.awaiting("save the mean state"):
            return memory_store.state_dict(
                self._setup.checkpoint_parts,
                lambda tensor: self._peers.mean(tensor.to(self._setup.device)).cpu(),
            )

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
            ValueError: on all workers, if one's state is damaged, differs from what the compressor
                and its knob declare, or belongs to another worker, configuration, model, step or
                run.
        """
        agreed = partial(
            on_all_ranks,
            device=self._setup.device,
            group=self._peers.group,
            purpose="loading states",
            until="load a state",
        )
        memory_store.load(state, self._setup.checkpoint_parts, self._setup.device, agreed)

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
            failed: whether this worker stops by its own error; then it does not wait for others.
        """
        if self in self._open:
            self._open.discard(self)
            control = self.control
            ending = "" if control is None else control.controller.ending(control.state)
            if ending and not failed and self._peers.decides:
                say("%s", ending)
            for hook in self._watching:
                hook.remove()
            self._detach()
        if self._background is not None:
            self._background.close(failed)
        for engine in self._setup.workers.engines:
            engine.end_fit()

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
        ours = ModuleHook.of(ddp)
        validation.refuse_second_hook(ddp, closed=None if ours is None else ours.closed)
        validation.refuse_steps_within_backward(ddp)
        self._hook = ours or ModuleHook()
        validation.refuse_sparse_gradients(ddp.module)
        validation.warn_of_one_queue(ddp)
        setup.workers.name(ddp.module)
        group = ddp.process_group
        self._synchronizer = Synchronizer(
            setup.workers,
            setup.device,
            group,
            setup.timeout,
            before_round=setup.prepare_round,
            common=setup.weights,
            revocable=setup.scaler is not None,
            agreed=setup.agreed,
            verify=setup.compression.verify,
        )
        peers = replace(peers_of(setup.device, group, group), timed=self._synchronizer.timed)
        super().__init__(ddp, setup, peers, self._synchronizer)

    def _start(self) -> None:
        super()._start()
        if not self._hook.closed:
            self._module.register_comm_hook(None, self._hook.exchange)
        self._hook.open(self._synchronizer.hook)

    @property
    def exchanges(self) -> int:
        """Exchanges of this handle so far."""
        return self._synchronizer.rounds

    def _detach(self) -> None:
        self._hook.close()

    def watch(self) -> Self:
        """As ``Attached.watch``; also add the peers to errors of DDP's own collectives."""
        super().watch()
        names = ModuleHook(self._name_peers).watch
        self._watching.append(self._module.register_forward_hook(names, always_call=True))
        return self

    def _name_peers(self, ddp: DistributedDataParallel) -> None:
        error = sys.exception()
        if error is not None and is_from_backend(error):
            group = ddp.process_group
            own = dist.get_rank(group), dist.get_world_size(group)
            error.add_note(peers_in_words(error, "a collective of DDP's", *own))

    def before_pass(self) -> None:
        """Refuse a static graph that begins with accumulated gradients; steps within a pass."""
        validation.refuse_steps_within_backward(self._module)
        validation.refuse_static_accumulation(self._module)

    def refuse_unsynchronised(self) -> None:
        """Raise RuntimeError for a parameter that is trained, and not exchanged."""
        optimizers, elsewhere = self._setup.optimizers(), self._setup.way.elsewhere
        validation.refuse_unsynchronised(
            self._module.module, self._exchanged, optimizers, elsewhere
        )

    def why_not_exchanged(self, optimizer: torch.optim.Optimizer, *, within: bool) -> str:
        """As ``Attached.why_not_exchanged``, or which parameters DDP waits for."""
        unreached = {} if within else validation.not_reached(self._module, self._workers.names)
        if unreached:
            return validation.why_not_reached(self._module, unreached, self._setup.way.unused)
        return super().why_not_exchanged(optimizer, within=within)
