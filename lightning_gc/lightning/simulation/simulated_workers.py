"""SimulatedWorkers: W workers take turns, a micro-batch each, in Lightning's accumulation."""

from __future__ import annotations

import math
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial, update_wrapper
from itertools import chain
from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gc.attachment.attached import Attached, Setup
from lightning_gc.compressors import Compressor
from lightning_gc.core.combinations import judge
from lightning_gc.core.refusal import refuse
from lightning_gc.core.saved_state import Tree
from lightning_gc.engine import Engine
from lightning_gc.exchange.peers import Peers
from lightning_gc.exchange.validation import refuse_sparse_gradients, refuse_unknown_device
from lightning_gc.lightning.api import StrategyAPI
from lightning_gc.lightning.arguments import refuse_unknown
from lightning_gc.lightning.base import CompressedStrategy
from lightning_gc.lightning.simulation import own_state
from lightning_gc.lightning.simulation.sharded_loader import deal, is_dealable
from lightning_gc.local_steps.refusals import with_held
from lightning_gc.transports.accounting import COMPUTE
from lightning_gc.transports.network_model import NetworkModel, rates
from lightning_gc.transports.simulated import Ledger


class AttachedSimulation(Attached):
    """Handle of the simulated workers of one process.

    Args:
        module: that is trained.
        setup: as for ``Attached``.
        ledger: carries out what workers exchange, and counts bytes.
        revocable: optimizer steps may be skipped, as by a gradient scaler.
        begin: called when the engines exist, before the control loop starts.
    """

    def __init__(
        self,
        module: Any,
        setup: Setup,
        ledger: Ledger,
        revocable: bool,
        begin: Callable[[], None],
    ) -> None:
        setup.workers.name(module)
        setup.workers.start(ledger.pages, revocable=revocable)
        self._begin = begin
        super().__init__(module, setup, Peers(True, setup.device, timed=ledger.timed))

    def _start(self) -> None:
        self._begin()
        super()._start()

    def after_pass(self) -> None:
        """Do nothing: gradients are exchanged after the last worker's backward pass."""


_TRUSTED = {"pytorch_lightning", "lightning", "lightning_fabric", "lightning_gc"}
"""Packages that may make calls within a step: they do not change what is trained."""


def _number_of_processes(
    name: str, value: str, instead: str, differs: Callable[[Any], bool]
) -> Any:
    """Return a property that warns a user's code where real workers would have another number.

    Args:
        name: of the property.
        value: that simulated workers have.
        instead: property of the strategy with a real worker's number.
        differs: given the strategy, whether a real worker's number differs now.
    """

    def read(strategy: Any) -> int:
        if differs(strategy):
            strategy._warn_of_place(name, value, instead)
        return int(vars(strategy)[name])

    return property(read, lambda strategy, number: vars(strategy).update({name: number}))


class Communication(StrategyAPI):
    """Mixin, before Lightning's ``SingleDeviceStrategy``: answers collectives, or refuses them.

    A worker's micro-batch cannot wait for values of the next worker's. So collectives are refused
    from the first batch of an epoch to its last, except in validation. Everywhere else, and with
    one worker, each returns what it was given.

    Lightning's own calls within a step are answered: for checkpoints, timers and directories.
    ``self.log(sync_dist=True)`` makes no call, as Lightning sees one process.

    Communication pattern:
        None.
    """

    workers: int
    _of_processes: str
    _for_norms = ""
    """Advice instead of synchronised batch normalisation."""
    _stepping = False
    _warned: frozenset[str] = frozenset()

    def on_train_start(self) -> None:
        super().on_train_start()
        self._stepping = True  # a resumed epoch counts as started before ``on_train_start``

    def teardown(self) -> None:
        self._stepping, self._warned = False, frozenset()
        super().teardown()

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        self._refuse("all_gather")  # Lightning's only call is that of the user's module
        return tensor

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        self._refuse_strangers("reduce")
        return tensor

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        self._refuse_strangers("reduce_boolean_decision")
        return decision

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._refuse_strangers("broadcast")
        return obj

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_strangers("barrier")

    def _refuse_strangers(self, operation: str) -> None:
        if _package(sys._getframe(2)) not in _TRUSTED:
            self._refuse(operation)

    def _refuse(self, operation: str) -> None:
        if self._in_step():
            raise RuntimeError(
                f"{type(self).__name__}.{operation} was called within a training step, where "
                f"{self.workers} simulated workers run one after the other and cannot exchange "
                f"values. Use {self._of_processes} with processes. "
                f"To log a value, self.log(..., sync_dist=True) is allowed."
            )

    def _training(self) -> bool:
        """Return whether several workers are fitted, and neither validated nor interrupted."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        return self.workers > 1 and bool(trainer and trainer.training and not trainer.interrupted)

    def _in_step(self) -> bool:
        """Return whether the batches of an epoch are being run; its own hooks are outside."""
        if not self._stepping or not self._training():
            return False
        epochs = self.lightning_module.trainer.fit_loop.epoch_progress.current
        return bool(epochs.started > epochs.processed)

    world_size = _number_of_processes("world_size", "1", "workers", lambda self: self._training())
    global_rank = _number_of_processes("global_rank", "0", "worker", lambda self: self._in_step())
    local_rank = _number_of_processes("local_rank", "0", "worker", lambda self: self._in_step())

    def _warn_of_place(self, name: str, value: str, instead: str) -> None:
        """Warn once in a fit, if a package other than Lightning reads this property of ours."""
        frame: Any = sys._getframe(2)
        level = 3
        while frame.f_code.co_name == name and _package(frame) in _TRUSTED:  # trainer.world_size
            frame, level = frame.f_back, level + 1
        if name in self._warned or _package(frame) in _TRUSTED:
            return
        self._warned |= {name}
        warnings.warn(
            f"{name}, which was read in training, is {value} for each of {self.workers} simulated "
            f"workers. A loss, learning rate or data set that depends on it differs from real "
            f"workers'. Read trainer.strategy.{instead}, or use {self._of_processes} with "
            f"processes.",
            UserWarning,
            stacklevel=level,
        )

    def _refuse_synchronised_norms(self) -> None:
        """Raise ValueError for batch normalisation with statistics of all workers."""
        module = self.lightning_module
        norms = {n: part for n, part in module.named_modules() if isinstance(part, _BatchNorm)}
        found = ""
        if norms and module.trainer._accelerator_connector._layer_sync is not None:
            found = (
                f"Trainer(sync_batchnorm=True) synchronises the statistics of {next(iter(norms))}"
            )
        for name, part in norms.items():
            if any("SyncBatchNorm" in kind.__name__ for kind in type(part).__mro__):
                found = f"{name} is {type(part).__name__}, which communicates"
        if found and self.workers > 1:
            raise ValueError(
                f"{found} in every forward pass, but the {self.workers} workers of "
                f"{type(self).__name__} run one after the other. {self._for_norms}"
            )


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


class SimulatedWorkers(Communication, CompressedStrategy):
    """Mixin, before Lightning's ``SingleDeviceStrategy``: a step takes W micro-batches.

    The i-th is worker i's. The Trainer's ``accumulate_grad_batches`` is set to W during the fit;
    ``k·W`` from the user means k accumulated micro-batches per worker. If a worker is an island of
    N processes, a step takes W·N, and N in a row are one worker's. A subclass defines each
    worker's own part by ``_begin_fit``, ``_begin_step``, ``_enter``, ``_collect`` and
    ``_complete``.
    """

    workers: int

    @property
    def island(self) -> int:
        """N, the processes of each worker."""
        return 1

    _reset_seed: Callable[[], None]
    _units: MicroBatches | None = None
    _state: own_state.OwnValues | None = None
    _hooks: Sequence[UsersHook] = ()
    _process: int | None = None
    _after_step = False
    settings: own_state.OwnValues
    _held: list[own_state.Holder]
    _samplers: list[weakref.ref[Any]]
    _of_fit = CompressedStrategy._of_fit | {"_hooks", "_held", "_samplers", "_state"}
    _frozen: dict[str, torch.Tensor]

    def __init__(
        self,
        compressor: Compressor | str,
        *others: Any,
        workers: int,
        network: NetworkModel | str = NetworkModel(),  # noqa: B008 - frozen
        **given: Any,
    ) -> None:
        owner = type(self).__name__
        if not isinstance(workers, int) or workers < 1:
            refuse(owner, "give a whole number, 1 or more", workers=workers)
        if isinstance(network, str):
            up, down = rates(network, f"{owner}(network=...): ")
            network = NetworkModel(up) if up == down else NetworkModel(up_gbps=up, down_gbps=down)
        if not isinstance(network, NetworkModel):
            raise ValueError(
                f"{owner}(network={network!r}): give an instance, such as "
                f"NetworkModel(bandwidth_gbps=10.0), or a rate, such as '1gbit'."
            )
        judge("Simulated workers", owner, verify=given.get("verify", 0), instead=self._of_processes)
        refuse_unknown(type(self), compressor, given)
        self.workers = workers
        self.network = network
        self._device_given = "device" in given
        super().__init__(compressor, *others, **given)

    _of_processes = ""
    """Name of the strategy with one process for each worker."""

    def _begin_fit(self, module: Any) -> None:
        """Make each worker's gradients or weights; names and engines exist."""
        raise NotImplementedError

    def _begin_step(self) -> None:
        """Begin a step of all workers."""
        raise NotImplementedError

    def _enter(self, worker: int) -> None:
        """Put what is this worker's own into the module, before its forward pass."""
        raise NotImplementedError

    def _own_hooks(self) -> list[UsersHook]:
        """Take the place of further hooks."""
        return []

    def _moved_by_hand(self) -> dict[str, torch.Tensor]:
        """Return parameters that no optimizer has, if they are copied for each process's turn."""
        return {}

    def _lend(self, worker: int, first: bool) -> None:
        """Prepare ``.grad`` for this worker's backward pass, if need be; ``first``: of the step."""

    def _collect(self, worker: int, again: bool) -> None:
        """Keep what its backward pass has left, if need be; ``again``: more follow in this step."""

    def _complete(self) -> None:
        """Exchange gradients, if they are: all backward passes of this step have ended."""

    @property
    def worker(self) -> int:
        """The worker that runs its micro-batch; 0 outside of training."""
        trainer = getattr(self.lightning_module, "_trainer", None)
        if trainer is None or not trainer.training:
            return 0
        return self._running // self.island

    @property
    def _running(self) -> int:
        """The process that has its turn, else the one that runs its micro-batch."""
        if self._process is not None:
            return self._process
        batch: int = max(self.lightning_module.trainer.fit_loop.batch_idx, 0)
        return batch % self._processes

    @property
    def _processes(self) -> int:
        """W·N, the number of processes that are simulated."""
        return self.workers * self.island

    def _active_engine(self) -> Engine:
        return self.engines[self.worker]

    def setup_environment(self) -> None:
        trainer = self.lightning_module.trainer
        devices = trainer._accelerator_connector._parallel_devices
        if not self._device_given and devices:
            if len(devices) > 1:
                refuse(
                    f"The Trainer has {len(devices)} devices, but {self.workers} simulated workers "
                    f"share one. Use Trainer(devices=1); workers={self.workers} is their number"
                )
            self._root_device = torch.device(devices[0])
        if trainer.state.fn == "fit":
            refuse_unknown_device(self.root_device)
            self._state, self.settings = self._own_states()
            self._reset_seed()  # as Lightning does in each process, after ``seed_everything``
            # Before any hook reads the number of steps, which loads the data and counts it.
            if self._units is not None:  # a copy's, of the fit that it was made in
                self._units.restore()
            self._units = MicroBatches(self._processes, trainer)
        super().setup_environment()

    def setup(self, trainer: Any) -> None:
        """If the Trainer is to fit, make it accumulate W micro-batches and start the engines."""
        if trainer.state.fn != "fit":
            super().setup(trainer)
            return
        module = self.lightning_module
        if not module.automatic_optimization:
            refuse(
                f"{type(module).__name__} optimizes manually, but simulated workers take turns in "
                f"Lightning's gradient accumulation. Join several optimizers: return "
                f"Together([muon, adamw]) with automatic_optimization = True. For one loss per "
                f"optimizer, as in a GAN, use CompressedDDPStrategy with processes"
            )
        refuse_sparse_gradients(module)
        self._refuse_synchronised_norms()
        super().setup(trainer)
        self._done = 0  # micro-batches of this step with a finished backward pass
        per_node = self.local_workers.configuration.neighbours(self.workers)
        self._ledger = Ledger(self.workers, self.network, per_node)
        revocable = self._way.rounds or self._scaler() is not None
        begin = partial(self._begin_fit, module)
        self._attach(
            lambda setup: AttachedSimulation(module, setup, self._ledger, revocable, begin)
        )

    def process_dataloader(self, dataloader: Any) -> Any:
        loader = super().process_dataloader(dataloader)
        trainer = self.lightning_module.trainer
        if not trainer.training:
            return loader
        dealt = deal(loader, self._processes, trainer, self, self._turn)
        if dealt is not loader:
            self._samplers.append(weakref.ref(loader.sampler))  # a loader made again has another
        return dealt

    def on_train_start(self) -> None:
        super().on_train_start()
        assert self._units is not None
        self._units.check_epoch()  # its length is known now
        if self._processes > 1:
            self._hooks = [*batch_ends(self.lightning_module, self._ended), *self._own_hooks()]

    def _turn(self, process: int | None) -> None:
        """Give module, optimizers and callbacks what is this process's own; None: worker 0's.

        A turn begins when a batch is fetched, and ends before the optimizer's step.
        """
        if self._processes == 1 or self._state is None or not self._training():
            return
        self._state.enter(process)
        self.settings.enter(None if process is None else process // self.island)
        self._process = process

    @contextmanager
    def _in_turn(self, process: int) -> Iterator[None]:
        before = self._process
        self._turn(process)
        try:
            yield
        finally:
            self._turn(before)

    def _own_states(self) -> tuple[own_state.OwnValues, own_state.OwnValues]:
        """Return what each process has of its own, and what each worker's optimizers have."""
        self._held, self._samplers, self._frozen = [], [], {}
        return (
            own_state.OwnValues(self._processes, self._holders, self._say),
            own_state.OwnValues(self.workers, self._optimizers_held, self._say_of_settings),
        )

    def _scope(self) -> own_state.Scope:
        module = self.lightning_module
        weights = (each for name, each in module.named_parameters() if name not in self._frozen)
        return own_state.Scope(chain(weights, module.buffers()), module.modules())

    def _holders(self) -> tuple[list[own_state.Holder], own_state.Scope]:
        held, frozen = self._held, self._frozen
        if not self.optimizers:  # data are asked for early, as for the number of steps
            return [own_state.random_holder(self.root_device), *self._sampled()], self._scope()
        if not held:
            frozen.update(self._moved_by_hand())
            sizes = [sum(each.nbytes for each in some) for some in (frozen.values(), self.names)]
            large = 0 if sizes[0] > _MANY_TIMES * sizes[1] else math.inf
            held.extend(own_state.module_holders(self.lightning_module))
            held.append(own_state.random_holder(self.root_device))
            held.append(own_state.Holder("the parameters", dict(frozen), large=large))
        return held + self._sampled(), self._scope()

    def _sampled(self) -> list[own_state.Holder]:
        known = ((ref(), index) for index, ref in enumerate(self._samplers))
        return [
            holder for each, index in known for holder in own_state.sampler_holders(each, index)
        ]

    def _optimizers_held(self) -> tuple[list[own_state.Holder], own_state.Scope]:
        parts = [part for each in self.optimizers for part in with_held(each)]
        return own_state.optimizer_holders(parts), self._scope()

    def _say_of_settings(self, what: str, label: str, name: str) -> None:
        self._say(what, label, name)

    def _say(self, what: str, label: str, name: str) -> None:
        """Warn once of a value that simulated workers cannot have as real ones do."""
        said = {
            "differing": "changes both within a worker's micro-batch and between them. All "
            "simulated workers continue with worker 0's value, where each real worker has its own",
            "too_large": f"changes within a worker's micro-batch, and holds too much to be kept "
            f"for each of {self._processes} workers. All change the same one, so it changes "
            f"{self._processes} times in a step, where each real worker changes its own once",
            "joint": f"was one record of all {self._processes} workers while it only grew, and has "
            f"their entries. A real worker has its own alone, as here with a collections.deque",
        }
        self._say_once(label, name, said[what])

    def _say_once(self, label: str, name: str, what: str) -> None:
        place = f"{name} of {label}"
        if place not in self._warned:
            self._warned |= {place}
            warnings.warn(
                f"{place} {what}. Use {self._of_processes} with processes for the same training.",
                UserWarning,
                stacklevel=2,
            )

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        if self._training():
            self._turn((self.lightning_module.trainer.fit_loop.batch_idx + 1) % self._processes)
        return super().batch_to_device(batch, *args, **kwargs)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._steps_now:
            self._turn(None)  # the module's ``optimizer_step`` begins

    @property
    def _steps_now(self) -> bool:
        """Return whether the running micro-batch is the last one of a step."""
        return self._training() and not self.lightning_module.trainer.fit_loop._should_accumulate()

    def _ended(self, hook: UsersHook, arguments: tuple[Any, ...]) -> None:
        """Call a user's ``on_train_batch_end``: after the step, for each process in its turn."""
        trainer = self.lightning_module.trainer
        batch, total = trainer.fit_loop.batch_idx, trainer.num_training_batches
        accumulated = trainer.accumulate_grad_batches
        loss = {"loss": self._loss / (accumulated // self._processes)}  # not divided by W
        *before, outputs, each, index = arguments
        outputs = outputs | loss if isinstance(outputs, dict) else outputs
        arguments = (*before, outputs, each, index)
        last = min(batch - batch % accumulated + accumulated, total) - self._processes
        if batch < last and not self._steps_now:
            hook.hook(*arguments)  # one of several of a step
            return
        hook.waiting.append((self._running, arguments))
        if not self._steps_now:
            return
        waiting, hook.waiting = hook.waiting, []
        for process, each in waiting:
            with self._acting(process):
                hook.hook(*each)

    @contextmanager
    def _acting(self, process: int) -> Iterator[None]:
        """Let a process have its turn after the step."""
        self._after_step = True
        try:
            with self._in_turn(process):
                yield
        finally:
            self._after_step = False

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        trainer = self.lightning_module.trainer
        self._turn(trainer.fit_loop.batch_idx % self._processes)
        worker = self.worker
        if trainer.fit_loop.batch_idx % trainer.accumulate_grad_batches == 0:
            self._done = 0  # also if the last step was abandoned
            for hook in self._hooks:
                hook.waiting.clear()
        turn = self._done % self._processes
        if turn != trainer.fit_loop.batch_idx % self._processes:
            raise RuntimeError(
                f"Worker {worker}'s micro-batch runs when it is worker "
                f"{turn // self.island}'s turn. Simulated workers cannot skip a backward "
                f"pass, or use an optimizer that calls its closure several times, such as LBFGS."
            )
        if self._done == 0:
            self._begin_step()
        self._enter(worker)
        self._ledger.compute.start(self.root_device)
        output = super().training_step(*args, **kwargs)
        self._ledger.compute.lap(COMPUTE)
        if output is None:
            raise RuntimeError(
                "training_step returned None, which cannot be skipped on one worker only. Return a "
                "loss, if need be multiplied by zero."
            )
        loss = output["loss"] if isinstance(output, Mapping) else output
        self._loss = loss.detach().clone()
        return output

    def backward(
        self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        """Run the backward pass of one worker's micro-batch; after the last, complete the step.

        As DDP's hook runs in ``Strategy.backward``: before callbacks see the gradient.
        """
        module, precision = self.lightning_module, self.precision_plugin
        worker = self.worker
        if 0 < self._done < self._processes:  # Lightning has called it for the first one
            for callback in module.trainer.callbacks:
                callback.on_before_zero_grad(module.trainer, module, optimizer)
            module.on_before_zero_grad(optimizer)
        self._lend(worker, first=self._done == 0)
        self.pre_backward(closure_loss)
        # Lightning has divided the loss l by k·W·N. The gradient's factor in (l / kWN)·W is W/kWN,
        # rounded once, which equals the factor of a real worker's l / k where N is 1.
        loss = precision.pre_backward(closure_loss * self.workers, module)
        self._ledger.compute.start(self.root_device)
        precision.backward(loss, module, optimizer, *args, **kwargs)
        self._ledger.compute.lap(COMPUTE)
        self._collect(worker, again=module.trainer.accumulate_grad_batches > self._processes)
        self._passed(worker)
        detached: torch.Tensor = precision.post_backward(loss, module)
        self.post_backward(detached)
        if self._steps_now:
            self._turn(None)
        return detached

    def _passed(self, worker: int) -> None:
        """Count a worker's micro-batch; after the last worker's, complete the step."""
        trainer = self.lightning_module.trainer
        self._done += 1
        if not trainer.fit_loop._should_accumulate():
            if self._done % self._processes:
                batches = trainer.fit_loop.batch_idx + 1
                fix = f"at least {self._processes} batches"
                if batches > self._processes:
                    fix = (
                        f"Trainer(limit_train_batches={batches // self._processes}), in batches of "
                        f"each worker, which leaves out the rest"
                    )
                raise RuntimeError(
                    f"The epoch has ended after {batches} micro-batches, with worker {worker}'s, "
                    f"and {self.workers} simulated workers cannot share them evenly. Use {fix}."
                )
            self._complete()
            self._done = 0

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        if self._after_step and self._process:  # as with processes, where worker 0 writes
            return
        to_batches(checkpoint, self._processes)
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        loaded = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        to_micro_batches(loaded, self._processes)
        return loaded

    def teardown(self) -> None:
        if self._units is not None:
            self._units.restore()
        for hook in self._hooks:
            hook.restore()
        self._hooks, self._state, self._process = (), None, None
        super().teardown()


_MANY_TIMES = 4
"""Frozen weights that are so much larger than the trained ones are not copied, only watched."""


class UsersHook:
    """Stands for a user's hook while simulated workers are trained.

    Args:
        owner: a module or a callback.
        name: of the hook.
        called: called with this and the arguments of each call.

    Attributes:
        hook: the user's.
        waiting: process and arguments of calls that wait for the end of the step.
    """

    def __init__(
        self, owner: Any, name: str, called: Callable[[UsersHook, tuple[Any, ...]], None]
    ) -> None:
        self.owner, self.name, self._called = owner, name, called
        self.hook = getattr(owner, name)
        self._before = vars(owner).get(self.name)
        self.waiting: list[tuple[int, tuple[Any, ...]]] = []
        update_wrapper(self, self.hook)
        vars(owner)[self.name] = self

    def __call__(self, *arguments: Any) -> None:
        self._called(self, arguments)

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.owner, self.name)  # a copied owner has its own hook again

    def restore(self) -> None:
        del vars(self.owner)[self.name]
        if self._before is not None:
            vars(self.owner)[self.name] = self._before


def batch_ends(module: Any, ended: Callable[[UsersHook, tuple[Any, ...]], None]) -> list[UsersHook]:
    """Take the place of ``on_train_batch_end`` of the module and of the user's callbacks."""
    owners = [each for each in (*module.trainer.callbacks, module) if overrides(each, _BATCH_END)]
    return [UsersHook(owner, _BATCH_END, ended) for owner in owners]


def overrides(owner: Any, name: str) -> bool:
    """Return whether a hook is the user's, not Lightning's."""
    return own_state.package_of(getattr(owner, name)) not in _TRUSTED


_BATCH_END = "on_train_batch_end"
_PROGRESS = "epoch_loop.batch_progress"


class MicroBatches:
    """Makes a Trainer run W micro-batches for each batch of a real worker.

    During a fit, ``accumulate_grad_batches``, ``limit_train_batches`` and ``val_check_interval``
    are multiplied by W where they are counts, and rounded to whole steps where they are shares.

    Args:
        workers: W.
        trainer: its settings are changed.

    Raises:
        ValueError: ``accumulate_grad_batches`` that W does not divide; a callback that changes it.
    """

    def __init__(self, workers: int, trainer: Any) -> None:
        self.workers = workers
        self.trainer = trainer
        self._given: dict[str, Any] = {}
        given = trainer.accumulate_grad_batches
        if given != 1 and given % workers:
            refuse(
                f"Trainer(accumulate_grad_batches={given}) with {workers} simulated workers: give "
                f"1, or a multiple of {workers}; {workers * given} accumulates {given} for each"
            )
        for callback in trainer.callbacks:
            if hasattr(callback, "going_to_accumulate_grad_batches"):
                refuse(
                    f"{type(callback).__name__} changes accumulate_grad_batches, which simulated "
                    f"workers need for themselves. Remove it; Trainer(accumulate_grad_batches="
                    f"k*{workers}) accumulates k micro-batches for each of {workers} workers"
                )
        self._set("accumulate_grad_batches", workers if given == 1 else given)
        for name in ("limit_train_batches", "val_check_interval"):
            value = getattr(trainer, name)
            if isinstance(value, int):
                self._set(name, value * workers)
            elif isinstance(value, float) and 0 < value < 1:
                given_as = name
                if name == "limit_train_batches" and trainer.overfit_batches > 0:
                    given_as = "overfit_batches"
                self._set(name, EpochShare.of(value, workers, given_as))

    def check_epoch(self) -> None:
        """Raise ValueError if W does not divide the epoch's number of micro-batches."""
        workers, found = self.workers, self.trainer.num_training_batches
        if found == float("inf") or found % workers == 0:
            return
        fixes = []
        if found > workers:
            fixes.append(
                f"Trainer(limit_train_batches={found // workers}), in batches of each worker, "
                f"which leaves out the rest"
            )
        if not self.trainer._accelerator_connector.use_distributed_sampler:
            loaders = self.trainer.fit_loop._combined_loader.flattened
            if all(is_dealable(loader) for loader in loaders):
                fixes.append("Trainer(use_distributed_sampler=True), which shares out the samples")
        fixes = fixes or [f"at least {workers} batches"]
        refuse(
            f"An epoch has {found} micro-batches, and {workers} simulated workers cannot share "
            f"them evenly. Use {', or '.join(fixes)}"
        )

    def restore(self) -> None:
        for name, value in self._given.items():
            setattr(self.trainer, name, value)
        self._given.clear()

    def _set(self, name: str, value: Any) -> None:
        self._given[name] = getattr(self.trainer, name)
        setattr(self.trainer, name, value)


class EpochShare(float):
    """Share of an epoch that Lightning multiplies by the epoch's number of micro-batches.

    The product is W times what a real worker's Lightning computes, ``int(batches * share)``, also
    where a product of floats is a little less than a whole number.
    """

    workers: int
    given_as: str

    @classmethod
    def of(cls, share: float, workers: int, given_as: str) -> EpochShare:
        made = cls(share)
        made.workers, made.given_as = workers, given_as
        return made

    def __mul__(self, micro_batches: Any) -> Any:
        own = micro_batches // self.workers
        batches = int(own * float(self))
        if self.given_as == "val_check_interval":
            batches = max(batches, 1)  # as Lightning does
        if batches == 0:
            refuse(
                f"Trainer({self.given_as}={float(self)}) is less than one of the {own} batches "
                f"that each of {self.workers} simulated workers has. Use a larger share, or a "
                f"number of batches of each worker, such as {self.given_as}=1"
            )
        return batches * self.workers

    __rmul__ = __mul__


def to_batches(checkpoint: Tree, workers: int) -> None:
    """Convert a checkpoint's loop counts to batches per worker, as of a real run; in place."""
    for counts in _counts(checkpoint):
        counts["ready"], counts["started"] = (
            -(-counts[name] // workers) for name in ("ready", "started")
        )
        counts["processed"], counts["completed"] = (
            counts[name] // workers for name in ("processed", "completed")
        )


def to_micro_batches(checkpoint: Tree, workers: int) -> None:
    """Undo ``to_batches``, in place.

    Differences between counts are kept: Lightning derives from them where the run was interrupted.
    """
    for counts in _counts(checkpoint):
        processed = counts["processed"]
        for name in ("ready", "started", "processed", "completed"):
            counts[name] += processed * (workers - 1)


def _counts(checkpoint: Tree) -> list[dict[str, int]]:
    progress = checkpoint.get("loops", {}).get("fit_loop", {}).get(_PROGRESS, {})
    return [progress[name] for name in ("total", "current") if name in progress]
