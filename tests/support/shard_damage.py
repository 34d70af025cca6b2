"""Checkpoints of models in shards: saves by two real ranks, damages of any file, and restores.

A restore is tried many times within one fit, by the strategy's ``load_checkpoint``: Lightning loads
weights and optimizers in it, and this library errors. Before each, weights are sevens and there are
no errors, so what is restored, and what is touched, is seen at once.
"""

from __future__ import annotations

import random
import shutil
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from lightning_gc import QSGD, PerParameter, TopK
from lightning_gc.controllers import Accordion
from lightning_gc.core.saved_state import checksum
from tests.support.fsdp import fsdp
from tests.support.hsdp import Sharded, fit_sharded, hsdp

RANKS = 2
SEVEN = 7.0
STATE = "lightning_gc_state"


def of_hsdp(replicas: int = 2, **options: Any) -> Any:
    """Return a strategy with errors, a controller and its statistics."""
    controller = Accordion(low=0.2, high=0.05, interval=1)
    return hsdp(PerParameter(TopK(0.05)), replicas, controller=controller, **options)


def of_fsdp(**options: Any) -> Any:
    return fsdp(QSGD(8), **options)


class Saves(pl.Callback):
    """Saves after the second and the third step, under two names."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        name = {2: "a.ckpt", 3: "b.ckpt"}.get(trainer.global_step)
        if name:
            trainer.save_checkpoint(self.folder / name)


def save(rank: int, make: Callable[[], Any], folder: Path, seed: int = 0) -> None:
    """Train three steps and save."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_sharded(rank, make(), 3, _module(seed), ranks=RANKS, callbacks=[Saves(folder)])
    dist.barrier()


def _module(seed: int) -> Callable[[], Any]:
    return lambda: Sharded(adam=True, seed=seed)


class Tries(pl.Callback):
    """Restores again and again when training begins; notes how each try ends.

    Args:
        path: where each checkpoint lies when it is restored.
        prepare: each makes, on rank 0, what lies there.
    """

    def __init__(self, path: Path, prepare: Sequence[Callable[[], Any]], **options: Any) -> None:
        self.path, self.prepare, self.options = path, prepare, options
        self.outcomes: list[tuple[str, str]] = []

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        for prepare in self.prepare:
            if trainer.global_rank == 0:
                prepare()
            dist.barrier()
            self.outcomes.append(self._outcome(trainer.strategy, pl_module))
            dist.barrier()

    def _outcome(self, strategy: Any, module: Any) -> tuple[str, str]:
        for param in module.parameters():
            local(param).fill_(SEVEN)
        strategy.engine.reset(0)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loaded = strategy.load_checkpoint(self.path, **self.options)
        except (Exception, CheckpointException) as error:  # torch's is no Exception
            touched = strategy.engine.step or strategy.engine.state_dict()["memory"]
            touched = touched or any(bool((local(p) != SEVEN).any()) for p in module.parameters())
            ours = type(error) is RuntimeError and "could not use the" in str(error)
            how = "refused" if ours and not touched else "touched" if ours else "traceback"
            return how, f"{type(error).__name__}: {error}"
        return "restored", _digest(strategy, module, loaded)


def local(param: Any) -> torch.Tensor:
    """Return a rank's part of a parameter, outside of autograd."""
    return (param.to_local() if hasattr(param, "to_local") else param).detach()


def _digest(strategy: Any, module: Any, loaded: Any) -> str:
    """Return a checksum of all that a restore has set."""
    control = strategy.control_loop
    optimizers = [
        {f"{i} {n}": local(v) if isinstance(v, torch.Tensor) else v for n, v in state.items()}
        for optimizer in strategy.optimizers
        for i, state in enumerate(optimizer.state.values())
    ]
    counters = {name: value for name, value in loaded.items() if name != "lightning_gc"}
    return checksum(
        {
            "weights": [local(param).clone() for param in module.parameters()],
            "optimizers": optimizers,
            "engine": strategy.engine.state_dict(),
            "levels": repr(sorted(strategy.levels().items())),
            "control": control and control.state_dict({}),
            "statistics": [each.own_state() for each in control.statistics] if control else [],
            "counters": repr(counters),
        }
    )


def tried(
    rank: int,
    make: Callable[[], Any],
    path: Path,
    prepare: Sequence[Callable[[], Any]],
    **options: Any,
) -> list[tuple[str, str]]:
    """Return how restores by a strategy end: refused, or restored with a checksum of the state.

    Or "touched", if it was refused late, or "traceback", if the exception is not this library's.
    """
    tries = Tries(path, prepare, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fit_sharded(rank, make(), 1, _module(1), ranks=RANKS, callbacks=[tries])
    return tries.outcomes


@dataclass(frozen=True)
class Damage:
    """A kind of damage, the files that it is done to, and a seed."""

    kind: str
    files: tuple[str, ...]
    seed: int

    def do(self, path: Path, saves: dict[str, Path]) -> None:
        """Put the checkpoint ``a`` to ``path``, damaged."""
        copy(saves["a"], path)
        draw = random.Random(self.seed)
        if self.kind == "swapped":
            one, other = (within(path, name) for name in self.files)
            before = one.read_bytes()
            one.write_bytes(other.read_bytes())
            other.write_bytes(before)
            return
        for name in self.files:
            file = within(path, name)
            content = bytearray(file.read_bytes())
            if self.kind == "missing":
                file.unlink()
                continue
            if self.kind == "flip":
                bit = draw.randrange(8 * len(content))
                content[bit // 8] ^= 1 << bit % 8
            elif self.kind == "error":
                error = _largest(file)
                content[content.index(error) + len(error) // 2] ^= 1
            elif self.kind == "cut":
                del content[draw.randrange(len(content)) :]
            elif self.kind == "zeros":
                at = draw.randrange(len(content))
                content[at : at + 64] = bytes(len(content[at : at + 64]))
            elif self.kind == "grown":
                content += draw.randbytes(draw.randrange(1, 100))
            elif self.kind == "empty":
                content.clear()
            elif self.kind == "text":
                content = bytearray(b"step,loss\n1,0.5\n")
            elif self.kind == "noise":
                content = bytearray(draw.randbytes(len(content)))
            elif self.kind.startswith("of "):
                content = bytearray(within(saves[self.kind.removeprefix("of ")], name).read_bytes())
            elif self.kind == "another file":
                others = [n for n in files_of(saves["a"]) if n != name and _alike(n, name)]
                content = bytearray(within(saves["a"], draw.choice(others)).read_bytes())
            else:
                raise AssertionError(self.kind)
            file.write_bytes(content)


def _largest(file: Path) -> bytes:
    """Return the bytes of the largest tensor of errors in a rank's file; none if there is none."""
    tensors = torch.load(file, weights_only=True)["tensors"].values()
    return max((t.numpy().tobytes() for t in tensors), key=len, default=b"")


def _alike(one: str, other: str) -> bool:
    """Return whether one file could be mistaken for the other."""
    return one.rpartition(".")[2] == other.rpartition(".")[2]


def files_of(path: Path) -> list[str]:
    """Return the files that this library must watch; ``*`` is the name of a save."""
    if path.is_dir():
        own = [p.name for p in sorted(path.iterdir()) if p.is_file()]
    else:
        own = []
    return own + [f"{STATE}/*/{p.name}" for p in sorted(_folder(path).iterdir())]


def within(path: Path, name: str) -> Path:
    """Return the file of a checkpoint with a name of ``files_of``."""
    if name.startswith(STATE):
        return _folder(path) / name.rpartition("/")[2]
    return path / name


def _folder(path: Path) -> Path:
    parent = (path if path.is_dir() else path.parent) / STATE
    (found,) = parent.glob(f"{path.name if path.is_file() else '?'}*-step*/")
    return found


def copy(saved: Path, path: Path) -> None:
    """Put a checkpoint in the place of another, under its name."""
    if path.parent.exists():
        shutil.rmtree(path.parent)
    if saved.is_dir():
        shutil.copytree(saved, path)
        return
    path.parent.mkdir(parents=True)
    shutil.copyfile(saved, path)
    there = path.parent / STATE / _folder(saved).name
    shutil.copytree(_folder(saved), there)


def damages(path: Path, each: int, seed: int) -> list[Damage]:
    """Return damages of every file: ``each`` of those drawn, one of each other kind."""
    draw, found = random.Random(seed), list[Damage]()
    names = files_of(path)
    ranks = [name for name in names if "rank" in name and _largest(within(path, name))]
    found += [Damage("error", (name,), 0) for name in ranks]
    for name in names:
        drawn = ["flip"] * 2 * each + ["cut", "zeros", "grown"] * each
        kinds = [*drawn, "empty", "missing", "text", "noise", "of b", "of c"]
        if any(other != name and _alike(other, name) for other in names):
            kinds.append("another file")
        found += [Damage(kind, (name,), draw.randrange(1 << 30)) for kind in kinds]
    alike = [pair for pair in combinations(names, 2) if _alike(*pair)]
    found += [Damage("swapped", pair, 0) for pair in alike]
    top = tuple(name for name in names if not name.startswith(STATE))
    weights = tuple(name for name in top if name != "meta.pt")
    state = tuple(name for name in names if name.startswith(STATE))
    for group in filter(None, (weights, state, tuple(n for n in state if "rank" in n), top)):
        found += [Damage(kind, group, 0) for kind in ("of b", "of c")]
    return found


def counted(
    outcomes: Sequence[tuple[str, str]], done: Sequence[Damage], whole: str
) -> tuple[Counter[tuple[str, str]], list[str]]:
    """Return how many tries of which kind ended in which way, and those that ended wrongly.

    Each must be refused by the name of a file that was damaged, or restore every bit.
    """
    counts: Counter[tuple[str, str]] = Counter()
    wrong = []
    for damage, (how, said) in zip(done, outcomes, strict=True):
        if how == "restored" and said != whole:
            how = "silent"
        elif how == "refused" and not any(n.rpartition("/")[2] in said for n in damage.files):
            how = "unnamed"
        counts[damage.kind, how] += 1
        if how not in ("refused", "restored"):
            wrong.append(f"{how}: {damage}: {said[:400]}")
    return counts, wrong
