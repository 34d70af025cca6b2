"""Kinds of faults: what happens to one worker at a random step, and what must follow."""

from __future__ import annotations

import os
import random
import resource
import signal
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar
from unittest import mock

import pytorch_lightning as pl

from lightning_gc.compressors import Codec
from tests.soak.plan import TIMEOUT
from tests.soak.worker import Rows

if TYPE_CHECKING:
    from tests.soak.launch import Run


@dataclass(frozen=True)
class Fault:
    """Something that happens to worker ``victim`` when it begins step ``step``.

    A subclass overrides ``callback``, for what happens inside of the process, or ``strike``, for
    what is done to it from outside, or both.

    Attributes:
        survives: the run goes on, to the end of an undisturbed one.
        weight: how often it is drawn.
    """

    victim: int
    step: int
    seed: int

    survives: ClassVar[bool] = False
    weight: ClassVar[float] = 1.0

    def callback(self) -> pl.Callback | None:
        """Return the callback that brings the fault, in the victim's process."""
        return None

    def strike(self, run: Run) -> None:
        """Do it from outside; the victim has just begun its step."""

    def clean_up(self, run: Run) -> None:
        """End what may stay; the others have had their time."""

    def __str__(self) -> str:
        return f"{type(self).__name__}, worker {self.victim}, step {self.step}"

    @property
    def draw(self) -> random.Random:
        return random.Random(self.seed)


class AtStep(pl.Callback):
    """Calls ``act(trainer)`` when a step begins, once."""

    def __init__(self, step: int, act: Any) -> None:
        self.step, self.act = step, act

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step >= self.step and self.act is not None:
            act, self.act = self.act, None
            act(trainer)


class Kill(Fault):
    """SIGKILL."""

    weight = 2.0

    def strike(self, run: Run) -> None:
        time.sleep(self.draw.uniform(0, 0.1))
        run.signal(self.victim, signal.SIGKILL)


class Freeze(Fault):
    """SIGSTOP, for ever."""

    weight = 0.5

    def strike(self, run: Run) -> None:
        time.sleep(self.draw.uniform(0, 0.1))
        run.signal(self.victim, signal.SIGSTOP)

    def clean_up(self, run: Run) -> None:
        run.signal(self.victim, signal.SIGKILL)


class Pause(Fault):
    """SIGSTOP, and SIGCONT before the others' patience ends."""

    survives = True

    def strike(self, run: Run) -> None:
        time.sleep(self.draw.uniform(0, 0.1))
        run.signal(self.victim, signal.SIGSTOP)
        time.sleep(self.draw.uniform(0.1, TIMEOUT / 4))
        run.signal(self.victim, signal.SIGCONT)


class Terminate(Fault):
    """SIGTERM, as a scheduler sends it."""

    def strike(self, run: Run) -> None:
        run.signal(self.victim, signal.SIGTERM)


class TerminateAll(Fault):
    """SIGTERM to all workers, as a scheduler sends it that takes the machines back."""

    def strike(self, run: Run) -> None:
        for worker in range(len(run.processes)):
            run.signal(worker, signal.SIGTERM)


class Interrupt(Fault):
    """Ctrl-C on one worker only."""

    def strike(self, run: Run) -> None:
        run.signal(self.victim, signal.SIGINT)


class InterruptAll(Fault):
    """Ctrl-C in a terminal: on all workers."""

    def strike(self, run: Run) -> None:
        for worker in range(len(run.processes)):
            run.signal(worker, signal.SIGINT)


class KillAll(Fault):
    """SIGKILL to all workers, one after the other, as when a machine goes down."""

    def strike(self, run: Run) -> None:
        order = list(range(len(run.processes)))
        self.draw.shuffle(order)
        for worker in order:
            run.signal(worker, signal.SIGKILL)


class Slow(Fault):
    """A step that takes a third of the timeout."""

    survives = True

    def callback(self) -> pl.Callback:
        return AtStep(self.step, lambda trainer: time.sleep(TIMEOUT / 3))


class Raises(Fault):
    """An exception in any part of a step, of a validation or of the data."""

    weight = 4.0

    def callback(self) -> pl.Callback:
        kind = self.draw.choice([RuntimeError, MemoryError, SystemExit, ValueError])
        part = self.draw.choice(list(PARTS))

        def act(trainer: pl.Trainer) -> None:
            PARTS[part](trainer, kind(f"broken on purpose, in {part}"))

        return AtStep(self.step, act)


def break_callback(trainer: Any, error: BaseException) -> None:
    raise error


def break_compressor(trainer: Any, error: BaseException) -> None:
    method = trainer.strategy.compressor.method
    name = random.Random(str(error)).choice(["encode", "decode"])
    name = name if isinstance(method, Codec) else "rounds"
    mock.patch.object(type(method), name, side_effect=error).start()


def break_optimizer(trainer: Any, error: BaseException) -> None:
    for optimizer in trainer.optimizers:
        mock.patch.object(type(optimizer), "step", side_effect=error).start()


def break_backward(trainer: Any, error: BaseException) -> None:
    def hook(_: Any) -> None:
        raise error

    next(iter(trainer.lightning_module.parameters())).register_hook(hook)


def break_validation(trainer: Any, error: BaseException) -> None:
    mock.patch.object(type(trainer.lightning_module), "validation_step", side_effect=error).start()


def break_data(trainer: Any, error: BaseException) -> None:
    Rows.broken = True


def break_saving(trainer: Any, error: BaseException) -> None:
    mock.patch("torch.save", side_effect=error).start()


def break_controller(trainer: Any, error: BaseException) -> None:
    if trainer.strategy.controller is None:
        raise error
    mock.patch.object(type(trainer.strategy.controller), "decide", side_effect=error).start()


PARTS = {
    "a callback": break_callback,
    "the compressor": break_compressor,
    "the optimizer": break_optimizer,
    "the backward pass": break_backward,
    "the validation": break_validation,
    "the data": break_data,
    "a checkpoint": break_saving,
    "the controller": break_controller,
}


class FullDisk(Fault):
    """No file of this worker can become longer than a few bytes."""

    def callback(self) -> pl.Callback:
        def act(trainer: pl.Trainer) -> None:
            size = self.draw.choice([0, 100, 4096])
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))

        return AtStep(self.step, act)


class KillWhileSaving(Fault):
    """SIGKILL within milliseconds of the beginning of a checkpoint."""

    weight = 2.0

    def callback(self) -> pl.Callback:
        def act(trainer: Any) -> None:
            strategy, save = trainer.strategy, trainer.strategy.save_checkpoint

            def doomed(*args: Any, **kwargs: Any) -> None:
                wait = self.draw.uniform(0, 0.03)
                kill = lambda: os.kill(os.getpid(), signal.SIGKILL)  # noqa: E731
                threading.Timer(wait, kill).start()
                save(*args, **kwargs)

            strategy.save_checkpoint = doomed

        return AtStep(self.step, act)


class Exits(Fault):
    """The process ends without a word, as by the system's out-of-memory killer."""

    def callback(self) -> pl.Callback:
        return AtStep(self.step, lambda trainer: os._exit(self.draw.choice([0, 1, 137])))


class LinkBlinks(Fault):
    """The victim's link is down for a while, and up again before the others' patience ends."""

    survives = True
    weight = 0.5

    def strike(self, run: Run) -> None:
        run.link(self.victim, "down")
        time.sleep(self.draw.uniform(0.1, TIMEOUT / 6))
        run.link(self.victim, "up")


class LinkGoes(Fault):
    """The victim's link is down, and stays so."""

    weight = 0.5

    def strike(self, run: Run) -> None:
        run.link(self.victim, "down")


class Damage(KillAll):
    """All are killed; of the newest checkpoint a file is damaged, so an older one is needed."""

    weight = 2.0


class OtherNumber(KillAll):
    """All are killed; the run goes on with another number of workers."""

    weight = 1.0


KINDS: tuple[type[Fault], ...] = (
    Kill,
    Freeze,
    Pause,
    Terminate,
    TerminateAll,
    Interrupt,
    InterruptAll,
    KillAll,
    Slow,
    Raises,
    FullDisk,
    KillWhileSaving,
    Exits,
    LinkBlinks,
    LinkGoes,
    Damage,
    OtherNumber,
)
LINKS = (LinkBlinks, LinkGoes)
