"""Save and restore each worker's error state in a file next to Fabric's checkpoint."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from lightning_gc.attachment.attached import Attached
from lightning_gc.checkpoint import side_files
from lightning_gc.checkpoint.host import KEY
from lightning_gc.checkpoint.side_files import wraps, write_atomically
from lightning_gc.checkpoint.validation import FILE_NAME
from lightning_gc.core.state_structure import ANYTHING, COUNT, TEXT, Listed, Record
from lightning_gc.exchange.peers import all_or_raise, explaining
from lightning_gc.transports.distributed import Distributed, gather_text

FORMAT = 1
_MAIN = Record({"fabric": COUNT, "stem": FILE_NAME, "workers": COUNT, "modules": Listed(TEXT)})
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class FabricCheckpoint:
    """Save and restore the state of attached modules with Fabric's checkpoint.

    Each worker first writes its state to its own file. Then worker 0 writes the checkpoint, which
    names these files. A kill leaves either the old checkpoint or the new one, with all its files.

    Args:
        handles: name in the checkpoint -> handle of the attached module.
        checkpoint_io: writes and reads files.
        device: a device that the group's backend can send from.
        worker: index of this process's worker.
        workers: W, the number of workers.
    """

    handles: Mapping[str, Attached]
    checkpoint_io: Any
    device: torch.device
    worker: int
    workers: int

    def save(
        self,
        path: Any,
        state: dict[str, Any],
        write: Callable[[Any, dict[str, Any]], None],
        storage_options: Any = None,
    ) -> None:
        """Write this worker's file, then the checkpoint of ``state`` by ``write``.

        Raises:
            RuntimeError: on all workers, if one cannot write.
        """
        states = {name: handle.state_dict() for name, handle in self.handles.items()}
        first = next(iter(states.values()))
        stem = side_files.stem_of(path, first["engine"]["step"], first["run"])
        target = side_files.path_of(path, stem, self.worker, self.workers)
        put = partial(self.checkpoint_io.save_checkpoint, states, storage_options=storage_options)
        own = partial(self._put, target, put)
        self._together(f"could not write its errors to {target}, so {path} is not written", own)
        main = {"fabric": FORMAT, "stem": stem, "workers": self.workers, "modules": [*states]}

        def whole(there: Any) -> None:
            write(there, {**state, KEY: main})

        rank0 = partial(self._put if self.worker == 0 else _call, path, whole)
        self._together(f"could not write {path}; if there was one of that name, it is kept", rank0)
        if self.worker == 0 and not wraps(self.checkpoint_io):
            side_files.remove(path, keep=[stem])

    def restore(self, path: Any, left: dict[str, Any], off: bool) -> None:
        """Load this worker's state from the checkpoint at ``path``.

        Args:
            path: path of the checkpoint.
            left: entries of the checkpoint that are not loaded yet. Our part is removed from it.
            off: do not restore; errors begin at zero.

        Raises:
            RuntimeError: on all workers, if one cannot read its file.
            ValueError: on all workers, if a state does not fit this run.
        """
        main = left.pop(KEY, None)
        if not self.handles:
            if main is not None and not off:
                warnings.warn(
                    f"{path} has the errors of {', '.join(main['modules'])}, which are not "
                    f"restored: no module that Fabric has set up is loaded. Call fabric.load after "
                    f"fabric.setup.",
                    stacklevel=4,
                )
            return
        if main is None or off:
            if self.worker == 0 and not off:
                _log.info("%s holds no error state: errors begin at zero.", path)
            for handle in self.handles.values():
                handle.reset()
            return
        found: dict[str, Any] = {}
        self._together(
            f"could not restore the errors of {path}", partial(self._read, path, main, found)
        )
        for name, handle in self.handles.items():
            handle.load_state_dict(found[name])

    def _read(self, path: Any, main: Any, found: dict[str, Any]) -> str:
        _MAIN.check(main)
        if main["fabric"] > FORMAT:
            raise ValueError(f"it has format {main['fabric']}; upgrade lightning_gc")
        if main["workers"] != self.workers:
            raise ValueError(
                f"it has the errors of {main['workers']} workers, but this run has {self.workers}; "
                f"to begin with errors at zero, use CompressedFabricStrategy(..., state='off')"
            )
        others = [name for name in self.handles if name not in main["modules"]]
        if others:
            raise ValueError(f"it has no errors of {', '.join(others)}, only of {main['modules']}")
        target = side_files.path_of(path, main["stem"], self.worker, self.workers)
        if not side_files.exists(target):
            raise FileNotFoundError(f"{target} is missing; move it together with the checkpoint")
        read = side_files.read(target, self.checkpoint_io)
        Record(dict.fromkeys(main["modules"], Record(others=ANYTHING))).check(read)
        found.update(read)
        return ""

    def _put(self, where: Any, write: Callable[[Any], None]) -> None:
        if wraps(self.checkpoint_io):  # it may write in a thread
            write(where)
        else:
            write_atomically(where, write, self.checkpoint_io.remove_checkpoint)

    def _together(self, problem: str, act: Callable[[], Any]) -> None:
        """Call ``act`` on each worker; if it fails on one, raise on all."""

        def acted() -> str:
            act()
            return ""

        gather = partial(
            gather_text, transport=Distributed(purpose="a checkpoint"), device=self.device
        )
        all_or_raise({self.worker: explaining(problem, acted)}, self.workers, gather)


def _call(where: Any, write: Callable[[Any], None]) -> None:
    write(where)  # not worker 0: writes nothing, but takes part in collectives
