"""Communication: refuse collectives within a step of simulated workers, which run one by one."""

from __future__ import annotations

import sys
import warnings
from typing import Any

from torch.nn.modules.batchnorm import _BatchNorm

from lightning_gc.lightning.api import StrategyAPI

_TRUSTED = {"pytorch_lightning", "lightning", "lightning_fabric", "lightning_gc"}
"""Packages whose own calls within a step do not change what is trained."""


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

    @property
    def world_size(self) -> int:
        """1, of processes; warns a user's code which would find W with real workers."""
        if self._training():
            self._warn_of_place("world_size", "1", "workers")
        return int(self.__dict__["world_size"])

    @world_size.setter
    def world_size(self, value: int) -> None:
        self.__dict__["world_size"] = value

    @property
    def global_rank(self) -> int:
        """0; warns a user's code within a step, where a real worker would find its index."""
        if self._in_step():
            self._warn_of_place("global_rank", "0", "worker")
        return int(self.__dict__["global_rank"])

    @global_rank.setter
    def global_rank(self, value: int) -> None:
        self.__dict__["global_rank"] = value

    @property
    def local_rank(self) -> int:
        """0; warns as ``global_rank`` does."""
        if self._in_step():
            self._warn_of_place("local_rank", "0", "worker")
        return int(self.__dict__["local_rank"])

    @local_rank.setter
    def local_rank(self, value: int) -> None:
        self.__dict__["local_rank"] = value

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
