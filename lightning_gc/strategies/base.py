"""What real and simulated DDP have in common: the configuration, the engines, the controller."""

# No "from __future__ import annotations": see ddp.py, whose base this is.
from collections.abc import Sequence
from typing import Any, Literal

import torch

from lightning_gc.compressors import COMPRESSORS, Compressor
from lightning_gc.controllers import Controller
from lightning_gc.engine import Engine
from lightning_gc.engine.compatibility import by_default, combine
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.network_model import NetworkModel
from lightning_gc.registry import make
from lightning_gc.schemes import SCHEMES, Scheme
from lightning_gc.strategies.checkpoint.resuming import Resuming
from lightning_gc.strategies.control_loop import Turn
from lightning_gc.strategies.lookahead import Ahead
from lightning_gc.strategies.single_trainer import Claimed
from lightning_gc.strategies.validation import check_controller
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.simulated_accounting import Page


class Compressing(Resuming, Claimed):
    """Holds configuration and state of the workers that live in this process.

    Attributes:
        recordings: the byte and time accounts of these workers, while fitting.
        names: parameter -> name, of all that are trained.
        turn: the controller's, once fitting has started.
        network: what estimates the seconds of communication, where they cannot be measured.
    """

    recordings: Sequence[Recording | Page] = ()
    network: NetworkModel | None = None
    _ahead: Ahead | None = None

    def _configure(
        self,
        compressor: Compressor | str,
        memory: Memory | str | None,
        scheme: Scheme | str | None,
        controller: Controller | None,
        seed: int,
        state: Literal["full", "mean", "off"],
        state_dtype: Literal["float32", "bfloat16"],
    ) -> None:
        """Take the configuration.

        Raises:
            ValueError: a combination that cannot work, or an unknown name.
        """
        if not isinstance(seed, int):
            raise ValueError(f"{type(self).__name__}(seed={seed!r}): the seed is a whole number.")
        compressor = make("compressor", compressor, COMPRESSORS, Compressor)
        if memory is not None:
            memory = make("memory", memory, MEMORIES, Memory)
        if scheme is not None:
            scheme = make("scheme", scheme, SCHEMES, Scheme)
        self.compressor, self.memory, self.scheme = combine(by_default(compressor), memory, scheme)
        if controller is not None:
            check_controller(controller, self.compressor, self.memory, type(self).__name__)
        self.controller = controller
        self.turn: Turn | None = None
        self.seed = seed
        self.names: dict[torch.Tensor, str] = {}
        self._keep_state(state, state_dtype)

    @property
    def recording(self) -> Recording | Page | None:
        """The byte and time account of this process's first worker, while fitting."""
        return self.recordings[0] if self.recordings else None

    def levels(self) -> dict[str, float | None]:
        """Return the present level of every parameter that is compressed, None where it is not."""
        if self.engine is None:
            return {}
        engine = self.engine
        return {
            name: engine.level_of(name)
            for param, name in self.names.items()
            if engine.compressor.compresses(tuple(param.shape))
        }

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Give the controller its turn where an epoch begins, and within if it asks."""
        super().on_train_batch_start(batch, batch_idx)  # type: ignore[misc]
        if self.turn is not None:
            self.turn.take(self, self.lightning_module.trainer, batch_idx)  # type: ignore[attr-defined]

    def _name(self, module: torch.nn.Module) -> None:
        """Note what is trained, and under which name its state is kept."""
        trained = ((n, p) for n, p in module.named_parameters() if p.requires_grad)
        self.names = {param: tidy(name) for name, param in trained}

    def _start(self, recordings: Sequence[Recording | Page]) -> None:
        """Make an engine for each account, or go on with those of an earlier fit."""
        self.recordings = recordings
        if not self.engines:
            self.engines = [
                Engine(
                    self.compressor,
                    self.memory,
                    self.scheme,
                    worker=recording.worker,
                    workers=recording.workers,
                    seed=self.seed,
                )
                for recording in recordings
            ]
        for engine in self.engines:
            engine.revocable = self._scaler() is not None
            if self.memory.reads_weights:
                engine.weights = {name: param.detach() for param, name in self.names.items()}
        self._set_ahead()
        if self.controller is not None and self.turn is None:
            shapes = {name: tuple(param.shape) for param, name in self.names.items()}
            self.turn = Turn(self.controller, self.engines, shapes)
            self.kept["turn"] = self.turn.watches
        if self.turn is not None:
            self.turn.attach(recordings)

    def _prepare_round(self) -> None:
        """Tell the engines what gradients have been scaled by, and how far a step goes."""
        scaler = self._scaler()
        rates = self._learning_rates() if self.engines[0].memory.lr_aware else None
        for engine in self.engines:
            if scaler is not None:
                # The tensor, not get_scale(): reading a number would wait for the device.
                engine.loss_scale = scaler._scale
            if rates is not None:
                engine.learning_rates = rates

    def setup_optimizers(self, trainer: Any) -> None:
        """Make the optimizers, and refuse what they must not do beside this memory."""
        super().setup_optimizers(trainer)  # type: ignore[misc]
        for optimizer in self.optimizers:  # type: ignore[attr-defined]
            for group in optimizer.param_groups:
                self.memory.check_optimizer(group)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the forward pass, a step ahead where the memory says so."""
        if self._ahead is None:
            return super().training_step(*args, **kwargs)  # type: ignore[misc]
        engine = self._active_engine()
        engine.settle()
        self._ahead.go(engine.errors(), self._learning_rates())
        try:
            output = super().training_step(*args, **kwargs)  # type: ignore[misc]
        except BaseException:
            self._ahead.back()
            raise
        if output is None:  # there will be no backward pass
            self._ahead.back()
        return output

    def post_backward(self, closure_loss: torch.Tensor) -> None:
        """Put the weights back where they belong."""
        super().post_backward(closure_loss)  # type: ignore[misc]
        if self._ahead is not None:
            self._ahead.back()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights, where they belong, whatever has been interrupted."""
        if self._ahead is not None:
            self._ahead.back()
        state: dict[str, Any] = super().lightning_module_state_dict()  # type: ignore[misc]
        return state

    def _active_engine(self) -> Engine:
        """Return the engine of the worker whose batch is being run."""
        return self.engines[0]

    def _set_ahead(self) -> None:
        self._ahead = Ahead(self.memory.ahead, self.names) if self.memory.ahead else None
        if self._ahead and not self.lightning_module.automatic_optimization:  # type: ignore[attr-defined]
            raise ValueError(
                f"{self.memory!r} moves the weights around each forward and backward pass, which "
                f"only automatic optimization tells apart; use that, or memory=Residual()."
            )

    def _scaler(self) -> Any:
        return getattr(self.precision_plugin, "scaler", None)  # type: ignore[attr-defined]

    def _learning_rates(self) -> dict[str, float]:
        """Return the learning rate of every parameter that an optimizer steps, by name."""
        groups = (g for opt in self.optimizers for g in opt.param_groups)  # type: ignore[attr-defined]
        named = self.names
        return {named[p]: float(g["lr"]) for g in groups for p in g["params"] if p in named}


def tidy(name: str) -> str:
    """Return a parameter's name without the marks of torch.compile, so that state outlives it."""
    return name.replace("_orig_mod.", "")
