"""Resuming: Lightning's checkpoint hooks, which save error state and restore it on resume."""

from typing import Any, Literal, cast

import torch

from lightning_gc.controllers import Controller
from lightning_gc.strategies.checkpoint import side_files
from lightning_gc.strategies.checkpoint.save_restore import Checkpoints, Host
from lightning_gc.synchronizer import Workers
from lightning_gc.synchronizer.control_loop import ControlLoop

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Resuming:
    """Mixin of strategies (``Host``) that makes runs resume bit for bit."""

    local_workers: Workers
    controller: Controller | None
    control_loop: ControlLoop | None

    def _configure_state(
        self,
        state: Literal["full", "mean", "off"],
        state_dtype: Literal["float32", "bfloat16"],
    ) -> None:
        if state not in ("full", "mean", "off"):
            raise ValueError(f"state={state!r}: use 'full', 'mean' or 'off'.")
        if state_dtype not in _DTYPES:
            raise ValueError(f"state_dtype={state_dtype!r}: use 'float32' or 'bfloat16'.")
        self._checkpoints = Checkpoints(state, _DTYPES[state_dtype])
        self._stems: dict[str, list[str]] = {}  # path -> prefixes of its side files, oldest first
        self._resumed_from: Any = None

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None
    ) -> None:
        """Write the side files of a full checkpoint, then the checkpoint, atomically."""
        full = bool(self.local_workers.engines) and "optimizer_states" in checkpoint
        full = full and self._checkpoints.mode != "off"
        if full:
            self._checkpoints.save(cast(Host, self), checkpoint, filepath, storage_options)

        def write(path: Any) -> None:
            super(Resuming, self).save_checkpoint(checkpoint, path, storage_options)  # type: ignore[misc]

        self._checkpoints.publish(cast(Host, self), filepath, write)
        if full:
            self._remove_old_side_files(filepath)

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        self._resumed_from = checkpoint_path
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, *args, **kwargs)  # type: ignore[misc]
        return loaded

    def load_optimizer_state_dict(self, checkpoint: Any) -> None:
        """Restore error state too: this is Lightning's first call after the engine is made."""
        super().load_optimizer_state_dict(checkpoint)  # type: ignore[misc]
        if self.local_workers.engines:
            self._checkpoints.restore(cast(Host, self), checkpoint, self._resumed_from)

    def remove_checkpoint(self, filepath: Any) -> None:
        super().remove_checkpoint(filepath)  # type: ignore[misc]
        if self.local_rank == 0:  # type: ignore[attr-defined]
            side_files.remove(filepath)

    def _remove_old_side_files(self, path: Any) -> None:
        """Remove side files of older checkpoints that ``path`` has overwritten.

        A wrapping ``CheckpointIO`` may not have written yet, so two older ones are kept then.
        """
        stems = self._stems.setdefault(str(path), [])
        stem = side_files.stem_of(path, self.local_workers.first.step)
        if stem not in stems:
            stems.append(stem)
        wrapped = hasattr(self.checkpoint_io, "checkpoint_io")  # type: ignore[attr-defined]
        del stems[: -3 if wrapped else -1]
        if self.local_rank == 0:  # type: ignore[attr-defined]
            side_files.remove(path, keep=stems)
