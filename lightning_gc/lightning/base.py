"""CompressedStrategy and RealWorker: forward Lightning's hooks to an ``Attached``."""

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_gc.attachment.attached import Attached, Setup
from lightning_gc.checkpoint.side_file_store import Kept, SideFileStore
from lightning_gc.checkpoint.worker_state import CheckpointParts
from lightning_gc.control.control_loop import ControlLoop, Moment
from lightning_gc.core.bucket import in_memory_order
from lightning_gc.core.combinations import judge
from lightning_gc.core.settings import CheckedCalls, parted
from lightning_gc.engine import Engine
from lightning_gc.exchange import Compression, WayIn, Workers, validation
from lightning_gc.exchange.compression import Resolved
from lightning_gc.exchange.peers import Parts
from lightning_gc.exchange.verification import Verify
from lightning_gc.exchange.workers import learning_rates_of
from lightning_gc.flavours import EitherLightning, package_of
from lightning_gc.lightning import workarounds
from lightning_gc.lightning.progress import metrics_due, moment_of, show
from lightning_gc.transports.accounting import Recorder
from lightning_gc.transports.network_model import NetworkModel
from lightning_gc.transports.peer_error import PeerError


class Lookahead:
    """Moves weights by a share of a worker's error, and restores them bit for bit.

    Through ``.data``: autograd does not notice its changes, so the caller must not restore weights
    between forward and backward pass.

    Args:
        share: of the error, as ``Memory.lookahead``.
        names: parameter -> name.
    """

    def __init__(self, share: float, names: Mapping[Tensor, str]) -> None:
        self.share = share
        self._names = names
        self._before: list[tuple[Tensor, Tensor]] = []

    def move(self, errors: Mapping[str, Tensor], rates: Mapping[str, float]) -> None:
        """Move every parameter by ``−share · learning rate · error``."""
        self.put_back()
        with torch.no_grad():
            for param, name in self._names.items():
                if name in errors and rates.get(name):
                    self._before.append((param, param.data.clone()))
                    step = errors[name].to(param.dtype)
                    in_memory_order(param.data).add_(step, alpha=-self.share * rates[name])

    def common(self) -> list[Tensor]:
        """Return the weights that all workers have in common, moved ahead or not."""
        before = {id(param): tensor for param, tensor in self._before}
        return [before.get(id(param), param) for param in self._names]

    def put_back(self) -> None:
        for param, before in self._before:
            param.data.copy_(before)
        self._before.clear()


class CompressedStrategy(workarounds.SingleTrainer, EitherLightning, metaclass=CheckedCalls):
    """Connects the workers of this process to Lightning's hooks. Nothing numerical. A ``Host``.

    Attributes:
        checkpoint_parts: what checkpoints keep of the workers in this process.
        network: model that estimates the seconds of communication; None where they are measured.
        verify: what workers compare.
    """

    elsewhere = validation.ELSEWHERE
    network: NetworkModel | None = None
    verify: Verify = 0
    _timeout: timedelta | None = None
    _attached: Attached | None = None
    _failed = False
    _way = WayIn("", more_workers="use more workers, or Trainer(strategy='auto')", elsewhere="")
    """Words of messages for this way in; ``owner`` is the class of the object."""
    _kind: type[Workers] = Workers
    """Keeper of the engines of this process."""
    _kind_of_store: Callable[..., Any] = SideFileStore
    _resumed_from: Any = None
    _of_fit = frozenset({"_attached", "_exchange", "_own_steps", "_until_teardown"})
    """Attributes with a default, which are left out of a copy."""
    _lookahead = Lookahead(0.0, {})
    _moment: Callable[[Any, int], Moment] = staticmethod(moment_of)
    """Returns metrics and progress of a Trainer before a batch, for a controller."""

    def __init__(
        self, compressor: Any, memory: Any, scheme: Any, controller: Any, **given: Any
    ) -> None:
        owner = type(self).__name__
        exchanged, kept, given = parted(given, Compression, Kept)
        self._way = replace(self._way, owner=owner)
        compression = Compression(compressor, memory, scheme, controller, **exchanged)
        resolved = compression.resolved(self._way)
        configuration = resolved.configuration
        self.compressor, self.memory = configuration.compressor, configuration.memory
        self.scheme, self.seed = configuration.scheme, configuration.seed
        self.controller, self.verify = resolved.controller, resolved.verify
        self.checkpoint_parts = CheckpointParts(self._kind(configuration))
        of_errors = Kept(**kept, owner=owner)
        self._store = self._kind_of_store(self, of_errors.state, of_errors.dtype)
        super().__init__(**given)

    @property
    def is_alone(self) -> bool:
        """See ``Host``."""
        trainer = self.lightning_module._trainer  # None after a fit in other processes
        return trainer is not None and bool(trainer.interrupted)

    def metrics(self) -> tuple[Mapping[str, Any], Collection[str]]:
        """See ``Host``."""
        trainer = self.lightning_module._trainer
        due = metrics_due(trainer) if trainer and self.control_loop is not None else ()
        return (trainer.callback_metrics if trainer else {}), due

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to a fit under way: a copy may begin one of its own."""
        state: Any = super().__getstate__()
        return {name: value for name, value in state.items() if name not in self._of_fit}

    def __repr__(self) -> str:
        """Return class, compressor, and the Lightning package that it is for.

        Lightning's Fabric shows it where it is given a strategy for a Trainer.
        """
        words = f" with {self.compressor}" if hasattr(self, "compressor") else ""
        package = package_of(type(self))
        words += f" for the Trainer of {package}; Fabric takes CompressedFabricStrategy"
        return f"<{type(self).__name__}{words}>"

    @property
    def local_workers(self) -> Workers:
        """Engines, byte accounts and parameter names of the workers in this process."""
        return self.checkpoint_parts.workers

    @property
    def control_loop(self) -> ControlLoop | None:
        """The controller's, once fitting has started."""
        return self.checkpoint_parts.control

    @property
    def engines(self) -> Sequence[Engine]:
        """One per worker of this process, kept between fits; empty before the first."""
        return self.local_workers.engines

    @property
    def engine(self) -> Engine | None:
        return self.engines[0] if self.engines else None

    @property
    def recordings(self) -> Sequence[Recorder]:
        """The byte and time accounts of the workers in this process, while fitting."""
        return self.local_workers.accounts

    @property
    def recording(self) -> Recorder | None:
        return self.recordings[0] if self.recordings else None

    @property
    def worker(self) -> int:
        """The index of this process among all, or of the simulated worker that is running."""
        raise NotImplementedError

    @property
    def names(self) -> Mapping[torch.Tensor, str]:
        """Parameter -> name, of all that are trained."""
        return self.local_workers.names

    def levels(self) -> dict[str, float | None]:
        """Return the level of every parameter that is compressed; None: uncompressed for now."""
        return self.local_workers.levels()

    def weight_levels(self) -> dict[str, float | None]:
        """Return the same of gathered weights, if their compressor has a level: FSDP only."""
        return self.local_workers.weight_levels()

    def _attach(self, make: Callable[[Setup], Attached]) -> None:
        """Begin a fit: end what an earlier one has left, and attach to the module."""
        automatic = self.lightning_module.automatic_optimization
        way = "automatic optimization" if automatic else "manual optimization"
        judge("Training loop", memory=self.memory, way=way, optimizers=())
        bypassed = (
            "Leave backward passes and steps to the Trainer, or set automatic_optimization = "
            "False and call self.manual_backward(loss)"
            if automatic
            else "Call self.manual_backward(loss) instead of loss.backward(), and the last one "
            "before a step outside of no_sync()"
        )
        share = self.memory.lookahead
        self._close()
        self._failed = False
        unused = f"{type(self).__name__}(..., find_unused_parameters=True)"
        setup = Setup(
            replace(self._way, bypassed=bypassed, unused=unused),
            Resolved(self.local_workers.configuration, self.controller, self.verify),
            self.checkpoint_parts,
            self._its_optimizers,
            self.root_device,
            self._scaler(),
            self._timeout,
            (lambda: self._lookahead.common()) if share else None,
        )
        self._attached = make(setup)
        here = {self.local_workers.local(param): name for param, name in self.names.items()}
        self._lookahead = Lookahead(share, here if share else {})

    def _close(self) -> None:
        if self._attached is not None:
            self._attached.end(self._failed)
        self._attached = None

    @property
    def parts(self) -> Parts:
        """Sums over the parts of a worker, where several processes have them."""
        return Parts() if self._attached is None else self._attached.parts

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._attached is not None:
            trainer = self.lightning_module.trainer
            moment = partial(self._moment, trainer, batch_idx)
            self._attached.decide(int(trainer.current_epoch), moment)
        if self.control_loop is not None and self.control_loop.method:
            show(trainer, "method", self.control_loop.method)

    def on_validation_start(self) -> None:
        super().on_validation_start()
        if self.control_loop is not None:
            self.control_loop.pause()

    @property
    def steps_since_exchange(self) -> int:
        """Optimizer steps since the last exchange; 0 where there is one in every step."""
        return 0

    def figures(self) -> dict[str, float]:
        """Return figures of the last exchange for the monitor, besides its own."""
        return {} if self._attached is None else self._attached.figures()

    def setup(self, trainer: Any) -> None:
        """Refuse lazy modules in a fit; then as Lightning's."""
        if trainer.state.fn == "fit":
            validation.refuse_lazy(self.lightning_module)
        super().setup(trainer)

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers; refuse settings that conflict with the memory."""
        super().setup_optimizers(trainer)
        if not self._way.rounds:  # there a memory's momentum acts per round, not per step
            validation.check_optimizers(self.compressor, self.memory, self.optimizers)

    def _its_optimizers(self) -> Sequence[torch.optim.Optimizer]:
        found: Sequence[torch.optim.Optimizer] = self.optimizers
        return found

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, at weights moved ahead if the memory has ``lookahead``."""
        if self._rests():
            return torch.full((), torch.nan, device=self.root_device)
        if not self._lookahead.share:
            return super().training_step(*args, **kwargs)
        engine = self._active_engine()
        engine.loss_scaling.settle()
        rates = learning_rates_of(self.optimizers, self.names)
        self._lookahead.move(engine.errors(), rates)
        try:
            output = super().training_step(*args, **kwargs)
        except BaseException:
            self._lookahead.put_back()
            raise
        if output is None:  # there will be no backward pass
            self._lookahead.put_back()
        return output

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        super().post_backward(closure_loss)
        self._lookahead.put_back()
        if self._attached is not None:
            self._attached.after_pass()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, restored first if an interruption left them moved ahead."""
        self._lookahead.put_back()
        state: dict[str, Any] = super().lightning_module_state_dict()
        return state

    def teardown(self) -> None:
        """End; restore weights that an exception in the backward pass has left moved ahead."""
        self._close()
        self._lookahead.put_back()
        super().teardown()

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write the side files of a full checkpoint, then the checkpoint, atomically."""
        save: Any = super().save_checkpoint
        write = partial(save, checkpoint, storage_options=storage_options)
        self._store.save(checkpoint, filepath, storage_options, write)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._resumed_from = checkpoint_path
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore error state too: this is Lightning's first call after the engine is made."""
        self._store.restore(checkpoint, self._resumed_from)
        super().load_optimizer_state_dict(checkpoint)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)
        self._store.remove(filepath)

    def _rests(self) -> bool:
        """Return whether the running worker skips its batch."""
        return False

    def _active_engine(self) -> Engine:
        """Return the engine of the running worker."""
        return self.engines[0]

    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)


class RealWorker(CompressedStrategy, workarounds.PeerNaming, workarounds.Joining):
    """Mixin, before a ``DDPStrategy`` of Lightning's, that joins and leaves the other workers."""

    def setup_distributed(self) -> None:
        """Join the other workers with a timeout of at least a minute, then set the user's."""
        with self._patiently():
            super().setup_distributed()

    def setup(self, trainer: Any) -> None:
        workarounds.unshare(self.lightning_module)
        workarounds.warn_of_blocking_waits(trainer)
        assert self._until_teardown is not None
        self._until_teardown.callback(workarounds.note_only(trainer))
        super().setup(trainer)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopping_with_peers():
            return super().optimizer_step(*args, **kwargs)

    def _named(self, *args: Any, **kwargs: Any) -> Any:
        with self._stopping_with_peers():
            return super()._named(*args, **kwargs)

    @contextlib.contextmanager
    def _stopping_with_peers(self) -> Iterator[None]:
        """After SIGTERM, end as the signal asks where a peer that got it too has left before.

        Workers that all get the signal leave one after the other, and some wait for those.
        """
        try:
            yield
        except PeerError as error:
            trainer = self.lightning_module.trainer
            if not trainer.received_sigterm:
                raise
            raise workarounds.sigterm_exception(trainer) from error

    @property
    def is_alone(self) -> bool:
        """See ``Host``; so is the process that started the workers, after they have ended."""
        return not dist.is_initialized() or super().is_alone

    @property
    def workers(self) -> int:
        return int(self.world_size)

    @property
    def worker(self) -> int:
        return int(self.global_rank)

    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        self._failed = True
        workarounds.end_children(self._launcher)
