"""Checkpoints of a small simulated run, ways to damage their side files, and what a resume does.

A resume either is refused, by the name of a file and with everything as it was, or it restores a
state of which every bit can be compared.
"""

import random
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch

from lightning_gc import LocalMomentum, PerParameter, PowerSGD
from lightning_gc.controllers import Accordion
from lightning_gc.core.saved_state import checksum, with_checksum
from lightning_gc.lightning.for_pytorch_lightning import CompressionMonitor, SimulatedDDPStrategy
from tests.support.fitting import Crashed, quiet_trainer, unwarned
from tests.support.models import PlainSGD, common_batches
from tests.support.resuming import side_files

POWER = PowerSGD(2, min_ratio=0.0)
STEP = 3
NAME = "last.ckpt"


class Saves(pl.Callback):
    """Saves a checkpoint after a step, and ends the run."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_start(self, trainer: Any, *_: Any) -> None:
        if trainer.strategy.engine.step == self.step:
            trainer.save_checkpoint(self.path)
            raise Crashed


def strategy(workers: int = 2, **options: Any) -> Any:
    """Return one with all kinds of state: two buffers, the compressor's, a controller's."""
    options = {"controller": Accordion(low=4, high=1, interval=1, threshold=0.2)} | options
    memory = LocalMomentum()
    return SimulatedDDPStrategy(PerParameter(POWER), memory, workers=workers, **options)


def save(
    folder: Path, name: str = NAME, step: int = STEP, workers: int = 2, **options: Any
) -> Path:
    """Train a few steps and save; return the checkpoint."""
    path = folder / name if isinstance(folder, Path) else f"{folder}/{name}"
    torch.manual_seed(0)
    callbacks = [CompressionMonitor(), Saves(path, step)]
    trainer = quiet_trainer(strategy(workers, **options), callbacks=callbacks)
    with unwarned():
        try:
            trainer.fit(PlainSGD(), common_batches(60, 4))
        except Crashed:
            return path
    raise AssertionError("the run has not been ended")


class Ends(pl.Callback):
    """Ends a run before its first step."""

    def on_train_batch_start(self, *_: Any) -> None:
        raise Crashed


def resume(path: Path, workers: int = 2, weights_only: bool | None = None, **options: Any) -> str:
    """Resume, and return a checksum of all that has been restored.

    Raises:
        RuntimeError: the checkpoint is refused; nothing has been changed then.
    """
    monitor, ours = CompressionMonitor(), strategy(workers, **options)
    torch.manual_seed(1)
    trainer = quiet_trainer(ours, callbacks=[monitor, Ends()])
    safely: Any = {} if weights_only is None else {"weights_only": weights_only}
    with unwarned():
        try:
            trainer.fit(PlainSGD(), common_batches(60, 4), ckpt_path=path, **safely)
        except Crashed:
            return checksum(state_of(ours, monitor))
        except RuntimeError:
            fresh = {"memory": {}, "compressor": {}, "learning_rates": {}, "step": 0}
            assert all(engine.state_dict() == fresh for engine in ours.engines)
            assert ours.control_loop is None or ours.control_loop.decision is None
            assert all(not any(vars(sums.epoch).values()) for sums in monitor._sums)
            raise
    raise AssertionError("the run has not been ended")


def state_of(ours: Any, monitor: Any) -> Any:
    control = ours.control_loop
    return {
        "engines": [engine.state_dict() for engine in ours.engines],
        "levels": dict(ours.levels()),
        "control": control and control.state_dict({}),
        "statistics": control and [each.own_state() for each in control.statistics],
        "monitor": [sums.own_state() for sums in monitor._sums],
    }


def outcome(path: Path, **options: Any) -> tuple[str, str]:
    """Return how a resume ends, ``("refused", why)`` or ``("restored", checksum)``."""
    try:
        return "restored", resume(path, **options)
    except RuntimeError as error:
        return "refused", str(error)


def flip(file: Path, draw: random.Random) -> int:
    """Flip one bit of a file; return which."""
    content = bytearray(file.read_bytes())
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)
    return bit


Edit = Callable[[Any], Any]
"""Changes the content of a side file in place, or returns another."""


def _within(tree: Any, names: Sequence[Any]) -> Any:
    for name in names:
        tree = tree[name]
    return tree


def _set(*place: Any) -> Edit:
    """Return an edit that sets what lies at a place: names, then the new value."""
    *names, last, value = place

    def edit(own: Any) -> None:
        _within(own, names)[last] = value

    return edit


def _drop(*names: str) -> Edit:
    def edit(own: Any) -> None:
        del _within(own, names[:-1])[names[-1]]

    return edit


def _change(*place: Any) -> Edit:
    """Return an edit that replaces a value by a function of it: names, then the function."""
    *names, function = place

    def edit(own: Any) -> None:
        tree = _within(own, names[:-1])
        tree[names[-1]] = function(tree[names[-1]])

    return edit


def _poisoned(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def poison(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[tensor.numel() // 2] = value
        return tensor

    return poison


NAN, INFINITY = float("nan"), float("inf")
WEIGHT = ("averaged", "memory", "body.0.weight")
ERROR = (*WEIGHT, "error")
Q = ("compressor", "body.0.weight", "q")

MALFORMED: Mapping[str, Edit] = {
    **{f"no {name}": _drop(name) for name in ("format", "worker", "averaged", "compressor")},
    "no memory": _drop("averaged", "memory"),
    "no bytes": _drop("averaged", "controller", "bytes"),
    "no tally": _drop("averaged", "controller", "tally"),
    "no sums": _drop("averaged", "controller", "observer", "sums"),
    "no totals of the epoch": _drop("averaged", "monitor", "epoch"),
    "an unknown name": _set("colour", "red"),
    "an unknown total": _set("averaged", "monitor", "total", "colour", 1.0),
    "a format in words": _set("format", "one"),
    "format 99": _set("format", 99),
    "the other worker": _change("worker", lambda worker: 1 - worker),
    "worker 1.0": _change("worker", float),
    "an error of NaN": _change(*ERROR, _poisoned(NAN)),
    "an error of infinity": _change(*ERROR, _poisoned(INFINITY)),
    "an error of minus infinity": _change(*ERROR, _poisoned(-INFINITY)),
    "a velocity of NaN": _change(*WEIGHT, "momentum", _poisoned(NAN)),
    "errors of integers": _change(*ERROR, torch.Tensor.long),
    "errors of booleans": _change(*ERROR, torch.Tensor.bool),
    "complex errors": _change(*ERROR, lambda t: t.to(torch.complex64)),
    "errors in a list": _change(*ERROR, torch.Tensor.tolist),
    "no errors but a number": _set(*ERROR, 0.0),
    "no errors but None": _set(*ERROR, None),
    "a list for a parameter": _set(*WEIGHT, []),
    "a list for the memory": _set("averaged", "memory", []),
    "a number as a parameter's name": _set("averaged", "memory", 0, {}),
    "a factor of NaN": _change(*Q, _poisoned(NAN)),
    "a factor of infinity": _change(*Q, _poisoned(INFINITY)),
    "a text for a factor": _set(*Q, "q"),
    "a factor of integers": _change(*Q, torch.Tensor.long),
    "a factor of more rows": _change(*Q, lambda t: torch.cat([t, t])),
    "a flat factor": _change(*Q, torch.Tensor.flatten),
    "no factor": _change(*Q[:2], lambda kept: {"other": kept["q"]}),
    "a list for the compressor": _set("compressor", []),
    "a text for a parameter's state": _set("compressor", "body.0.weight", "q"),
    "bytes of NaN": _set("averaged", "controller", "bytes", NAN),
    "bytes in words": _set("averaged", "controller", "bytes", "many"),
    "a count of None": _set("averaged", "controller", "tally", "elements", None),
    "a count of infinity": _set("averaged", "controller", "tally", "sent", INFINITY),
    "sums of integers": _change(
        "averaged", "controller", "observer", "sums", "body.0.weight", torch.Tensor.int
    ),
    "squares in words": _set("averaged", "controller", "observer", "squares", "none"),
    "a total in words": _set("averaged", "monitor", "total", "steps", "three"),
    "a list for the monitor": _set("averaged", "monitor", [1, 2]),
    "nothing in it": dict.clear,
    "a list": lambda own: [own],
    "a tensor": lambda own: torch.ones(3),
    "a number": lambda own: 3,
    "None": lambda own: "None",
}
"""What no version may load, with or without checksums."""

FOREIGN: Mapping[str, Edit] = {
    **{f"no {name}": _drop(name) for name in ("workers", "run", "stem", "sha256")},
    "three workers": _set("workers", 3),
    "another run": _set("run", "0" * 8),
    "another step": _change("stem", lambda stem: stem.replace("-step3-", "-step4-")),
    "another save": _change("stem", lambda stem: stem + "0"),
    "an older format": _set("format", 1),
    "no parameter": _drop(*WEIGHT),
    "no buffer": _drop(*WEIGHT, "momentum"),
    "a new parameter": _set("averaged", "memory", "new", {"error": torch.zeros(2)}),
    "a new buffer": _set(*WEIGHT, "new", torch.zeros(2)),
    "errors transposed": _change(*ERROR, lambda t: t.t().contiguous()),
    "errors flat": _change(*ERROR, lambda t: t.flatten()),
    "a parameter with another's errors": _change(*ERROR, lambda t: t.t()[:2].contiguous()),
}
"""What can be told since files carry what they belong to."""

SLIGHT: Mapping[str, Edit] = {
    "one error": _change(*ERROR, _poisoned(1e-3)),
    "errors of zero": _change(*ERROR, torch.zeros_like),
    "errors in double precision": _change(*ERROR, torch.Tensor.double),
    "no errors at all": _set("averaged", "memory", {}),
    "another factor": _change(*Q, lambda t: -t),
    "more bytes": _change("averaged", "controller", "bytes", lambda n: n + 1),
    "more steps": _change("averaged", "monitor", "total", "steps", lambda n: n + 1),
}
"""What is well formed, and only a checksum can tell."""


def edit(file: Path, change: Edit, anew: bool = False) -> None:
    """Change a side file's content; ``anew``: and its checksum."""
    own = torch.load(file, weights_only=True)
    changed = change(own)
    own = own if changed is None else changed
    if anew and isinstance(own, dict) and "sha256" in own:
        own = with_checksum({name: value for name, value in own.items() if name != "sha256"})
    torch.save(own, file)


def files_of(path: Path) -> list[Path]:
    """Return the side files of a checkpoint, in order of the workers."""
    return [file for name, file in side_files(path.parent).items() if name.startswith(path.name)]


def main_edited(path: Path, change: Edit, anew: bool = True) -> None:
    """Change our part of a checkpoint; ``anew``: and its checksum, if it has one."""
    saved = torch.load(path, weights_only=True)
    main = saved["lightning_gc"]
    change(main)
    if anew and "sha256" in main:
        saved["lightning_gc"] = with_checksum({n: v for n, v in main.items() if n != "sha256"})
    torch.save(saved, path)


def without_record(path: Path) -> None:
    """Make it a checkpoint whose workers could not tell each other their checksums."""
    main_edited(path, lambda main: main.update(files=[None] * main["workers"]))


def put(there: Path, here: Path) -> None:
    """Put another file in the place of a side file."""
    shutil.copyfile(there, here)
