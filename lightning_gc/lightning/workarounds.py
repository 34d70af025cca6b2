"""Work around Lightning: name dead peers, handle SIGTERM, join patiently, end child processes."""

import contextlib
import itertools
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from lightning_gc.core.notices import waiting
from lightning_gc.core.refusal import refuse
from lightning_gc.exchange import JOINING
from lightning_gc.flavours import package_of, refuse_other_package
from lightning_gc.lightning.api import StrategyAPI
from lightning_gc.transports import peer_error
from lightning_gc.transports.distributed import set_timeout
from lightning_gc.transports.interfaces import named_interface

_LIGHTNING = "what Lightning shares between workers: metrics, decisions, paths of checkpoints"
_STEP = "a collective of DDP's, of Lightning's or of the module's own"


def _naming(method: str, operation: str, during: str) -> Callable[..., Any]:
    """Return a method of ``PeerNaming`` that calls the next class's."""

    def named(self: Any, *args: Any, **kwargs: Any) -> Any:
        act = getattr(super(PeerNaming, self), method)
        return self._named(operation, during, act, *args, **kwargs)

    return named


class PeerNaming(StrategyAPI):
    """Mixin, before a strategy of Lightning's, that names the peers in the backend's errors.

    Lightning's own collectives all go through four methods of the strategy; Fabric's ``reduce`` is
    called ``all_reduce``. DDP's, such as the
    broadcast of module buffers, and a module's own fail within a step of the module.
    """

    def barrier(self, name: str | None = None, *args: Any, **kwargs: Any) -> Any:
        """Wait for all workers, as Lightning does around a fit, a validation and a save."""
        until = f"reach Lightning's barrier {name or ''}".strip()
        with peer_error.awaiting_peers(until, self.global_rank, self.world_size):
            return self._named("barrier", _LIGHTNING, super().barrier, name, *args, **kwargs)

    broadcast = _naming("broadcast", "broadcast", _LIGHTNING)
    reduce = _naming("reduce", "all-reduce", _LIGHTNING)
    all_reduce = _naming("all_reduce", "all-reduce", _LIGHTNING)
    all_gather = _naming("all_gather", "all-gather", _LIGHTNING)
    setup = _naming("setup", _STEP, "setting up")
    training_step = _naming("training_step", _STEP, "a training step")
    validation_step = _naming("validation_step", _STEP, "a validation step")
    test_step = _naming("test_step", _STEP, "a test step")
    backward = _naming("backward", _STEP, "a backward pass")

    def on_exception(self, exception: BaseException) -> None:
        """Explain an error that comes from elsewhere, such as a hook of the module's."""
        super().on_exception(exception)
        if self.world_size > 1 and peer_error.is_from_backend(exception):
            own = self.global_rank, self.world_size
            exception.add_note(peer_error.peers_in_words(exception, _STEP, *own))

    def _named(
        self, operation: str, during: str, act: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        with peer_error.naming_peers(operation, during, self.global_rank, self.world_size):
            return act(*args, **kwargs)


_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"


def warn_of_blocking_waits(trainer: Any) -> None:
    """Warn if NCCL has no watchdog, and Lightning broadcasts before each batch.

    Lightning 2.6 reads the result on the host, where nothing ends the wait for a dead worker.
    """
    if os.environ.get(_BLOCKING) != "1" or "nccl" not in dist.get_backend_config():
        return
    if hasattr(trainer.fit_loop.epoch_loop, "_broadcast_sigterm_tensor"):
        warnings.warn(
            f"{_BLOCKING}=1 switches NCCL's watchdog off, and this version of Lightning broadcasts "
            f"before each batch without a limit. If a worker dies, the others wait for ever. Unset "
            f"{_BLOCKING}; the watchdog then ends them after the timeout.",
            stacklevel=2,
        )


GRACE = 10.0  # seconds for a child to report its own error


def end_children(launcher: Any) -> None:
    """Wait for the processes that Lightning's subprocess launcher has started, then kill the rest.

    When worker 0 fails, that launcher, unlike others, does not kill them: a stopped one would stay
    for ever.
    """
    deadline = time.monotonic() + GRACE
    for process in getattr(launcher, "procs", ()):
        if not isinstance(process, subprocess.Popen):
            continue
        try:
            process.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def unshare(module: nn.Module) -> None:
    """Move parameters and buffers on the host out of memory that other processes have too.

    torch shares the memory of tensors that it sends to a new process. Lightning undoes that for
    ``start_method="spawn"`` and not for ``"forkserver"``, where all workers of a machine would make
    their optimizer steps in the same weights, in no order.
    """
    for tensor in itertools.chain(module.parameters(), module.buffers()):
        if is_lazy(tensor):
            continue
        if tensor.device.type == "cpu" and tensor.is_shared():
            with torch.no_grad():
                tensor.data = tensor.data.clone()


_log = logging.getLogger(__name__)


def broadcast_only(when: Callable[[], bool], trainer: Any) -> Callable[[], object]:
    """Let the loop of a Trainer broadcast before those batches only for which ``when`` is true.

    ``when`` must be equal on all workers. A worker that gets SIGTERM itself stops as before. Return
    a function that undoes this.
    """
    name = "_broadcast_sigterm_tensor"  # of Lightning's training loop, from 2.6 on
    loop = trainer.fit_loop.epoch_loop
    broadcast = getattr(type(loop), name, None)
    if broadcast is None:
        return lambda: None
    return _replace(loop, name, partial(_broadcast_when, when, broadcast, loop))


def _broadcast_when(when: Callable[[], bool], broadcast: Callable[[Any], None], loop: Any) -> None:
    if when():
        broadcast(loop)


def note_only(trainer: Any) -> Callable[[], object]:
    """Let a Trainer's handler of SIGTERM note the signal, and send nothing to other workers.

    Lightning 2.6 broadcasts in the handler, wherever the signal interrupts the worker. The other
    workers are elsewhere, so that the broadcast waits until the timeout, takes the place of
    another collective, or raises a bare error of the backend. Without it the loop ends after the
    current step, as in Lightning before 2.6. Return a function that undoes this.
    """
    return _replace(trainer._signal_connector, "_sigterm_notifier_fn", partial(_note, trainer))


def _note(trainer: Any, number: int, _: Any) -> None:
    _log.info("Worker %d has received signal %d and stops.", trainer.global_rank, number)
    launcher, connector = trainer.strategy.launcher, trainer._signal_connector
    if launcher is not None and not connector.received_sigterm:
        launcher.kill(number)  # hands it on to the workers that this process has started
    connector.received_sigterm = True


def sigterm_exception(trainer: Any) -> SystemExit:
    """Return the exception with which this Trainer's loop ends after SIGTERM; its code is None."""
    name = "SIGTERMException"  # of either package, known where the loop raises it
    homes = (sys.modules[cls.__module__] for cls in type(trainer.fit_loop.epoch_loop).__mro__)
    found: SystemExit = next(getattr(home, name) for home in homes if hasattr(home, name))()
    return found


def _replace(owner: Any, name: str, method: Callable[..., None]) -> Callable[[], object]:
    """Replace a method of one object; return what undoes it, once or several times."""
    setattr(owner, name, method)
    return lambda: vars(owner).pop(name, None)


class Joining(StrategyAPI):
    """Mixin, before a strategy of Lightning's, that has ``_timeout``."""

    _until_teardown: contextlib.ExitStack | None = None
    """Contexts that end with ``teardown``."""

    @contextlib.contextmanager
    def _patiently(self) -> Iterator[None]:
        """Join with a timeout of at least a minute, then set the user's.

        Startup takes workers differently long, often longer than a timeout for a silent peer.
        """
        self._until_teardown = contextlib.ExitStack()
        self._name_interface(self._until_teardown)
        timeout = self._timeout
        hurried = timeout is not None and timeout < JOINING
        try:
            self._timeout = JOINING if hurried else timeout
            with waiting("Waiting for the other workers to start"):
                yield
        finally:
            self._timeout = timeout
        if hurried and timeout is not None:
            set_timeout(timeout)

    def _name_interface(self, until: contextlib.ExitStack) -> None:
        """Let Gloo use the interface that leads to worker 0."""
        on_cpu = self.root_device.type == "cpu"
        if self.num_nodes == 1 or not (on_cpu or "gloo" in (self.process_group_backend or "")):
            return
        # Lightning's own logger: it has a handler. One line for each machine is enough.
        logger = logging.getLogger(package_of(type(self)))
        say = logger.info if self.cluster_environment.local_rank() == 0 else logger.debug
        until.enter_context(named_interface(self.cluster_environment.main_address, say))

    def teardown(self) -> None:
        if self._until_teardown is not None:
            self._until_teardown.close()
        self._until_teardown = None
        super().teardown()


class FirstCallback:
    """Mixin, before Lightning's ``Callback``, that is the first of a Trainer's during a fit.

    Lightning calls hooks of callbacks, of the module and of the strategy in this order, where
    something begins and also where it ends. What a strategy does at the beginning and undoes at
    the end would lie across what callbacks do and undo, such as to swap averaged weights in for a
    validation; done by the first callback it lies around all of them.

    Args:
        on_validation_start: called as validation begins.
        on_train_end: called as training ends.
    """

    def __init__(
        self, on_validation_start: Callable[[], None], on_train_end: Callable[[], None]
    ) -> None:
        super().__init__()
        self._on_validation_start, self._on_train_end = on_validation_start, on_train_end
        self._trainer: Any = None

    def join(self, trainer: Any) -> None:
        """Become the Trainer's first callback."""
        self.leave()
        self._trainer = trainer
        trainer.callbacks = [self, *trainer.callbacks]

    def leave(self) -> None:
        """Leave the Trainer's callbacks; again does nothing."""
        if self._trainer is not None:
            others = [each for each in self._trainer.callbacks if each is not self]
            self._trainer.callbacks = others
        self._trainer = None

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self._on_validation_start()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self._on_train_end()


class SingleTrainer(StrategyAPI):
    """Mixin that refuses a second Trainer, at its first access: it reads ``_accelerator``.

    A Trainer or Fabric of another Lightning package is refused when it hands over its accelerator.
    """

    _taken = False
    _owner = "Trainer"

    @property
    def state_key(self) -> str:
        """Refuse to be a callback: a Trainer asks for its key."""
        name = type(self).__name__
        refuse(f"{name} is a strategy, not a callback; write {self._owner}(strategy={name}(...))")

    @property
    def _accelerator(self) -> Any:
        if self._taken:
            refuse(
                f"This {type(self).__name__} already belongs to a {self._owner}, and holds its "
                f"error state. Make a new one for every {self._owner}"
            )
        return self.__dict__.get("_accelerator_in_use")

    @_accelerator.setter
    def _accelerator(self, accelerator: Any) -> None:
        refuse_other_package(self, accelerator)
        self.__dict__["_accelerator_in_use"] = accelerator

    @property
    def accelerator(self) -> Any:
        return self.__dict__.get("_accelerator_in_use")

    @accelerator.setter
    def accelerator(self, accelerator: Any) -> None:
        self._accelerator = accelerator

    def _configure_launcher(self) -> None:
        super()._configure_launcher()
        self._taken = True
