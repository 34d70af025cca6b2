"""Of Fabric: what each worker has besides the weights, in a file beside Fabric's checkpoint."""

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
    """Saves and restores the state of attached modules with a checkpoint of Fabric's.

    Each worker writes its own state first, then worker 0 the checkpoint, which names these files:
    a kill leaves the old checkpoint with its files, or the new one with all of its own.

    Args:
        handles: name in the checkpoint -> handle of that module.
        checkpoint_io: writes and reads files.
        device: one that the group's backend can send from.
        worker: this process's worker.
        workers: W.
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
        """Write this worker's state, and by ``write`` the checkpoint of ``state``.

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
        """Load this worker's state of the checkpoint at ``path``.

        Args:
            path: of the checkpoint.
            left: what has not been loaded yet; our part is taken out.
            off: errors begin at zero.

        Raises:
            RuntimeError: on all workers, if one cannot read its own.
            ValueError: on all workers, if states cannot be used, as those of other workers.
        """
        main = left.pop(KEY, None)
        if not self.handles:
            if main is not None and not off:
                warnings.warn(
                    f"{path} has the errors of {', '.join(main['modules'])}, but no module that "
                    f"Fabric has set up is loaded, so they are not restored; call fabric.load "
                    f"after fabric.setup.",
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
                f"it has the errors of {main['workers']} workers, and here are {self.workers}; to "
                f"begin with errors at zero, use CompressedFabricStrategy(..., state='off')"
            )
        others = [name for name in self.handles if name not in main["modules"]]
        if others:
            raise ValueError(f"it has none of {', '.join(others)}, but {main['modules']}")
        target = side_files.path_of(path, main["stem"], self.worker, self.workers)
        if not side_files.exists(target):
            raise FileNotFoundError(f"{target} is not there; move it together with the checkpoint")
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
        """Act; if one worker cannot, all raise."""

        def acted() -> str:
            act()
            return ""

        gather = partial(
            gather_text, transport=Distributed(purpose="a checkpoint"), device=self.device
        )
        all_or_raise({self.worker: explaining(problem, acted)}, self.workers, gather)


def _call(where: Any, write: Callable[[Any], None]) -> None:
    write(where)  # writes nothing, for this is not worker 0, but takes part in what is collective
