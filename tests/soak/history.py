"""Play a history: a plan, several faults one after the other, restarts; compare the end."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lightning_gc.checkpoint.side_files import FOLDER
from tests.soak.faults import KINDS, LINKS, Damage, Fault, OtherNumber
from tests.soak.launch import End, Run, children
from tests.soak.plan import EPOCHS, STEPS, Plan, draw_plan
from tests.soak.worker import epochs, steps
from tests.support.resuming import differences

ROUNDS = 3  # faults of a history


@dataclass(frozen=True)
class Outcome:
    """What a fault has led to.

    Attributes:
        kind: of the fault.
        fault: in words.
        others: how the other workers ended: ``"ended"``, ``"named"`` (an error that names a
            worker), ``"plain"`` (another error), ``"killed"``.
        seconds: until the last worker had ended.
        then: the restart, in words.
    """

    kind: str
    fault: str
    others: tuple[str, ...]
    seconds: float
    then: str


def play(seed: int, folder: Path, spaces: list[str] | None = None) -> Iterator[Outcome]:
    """Play the history of a seed; AssertionError for what must not be."""
    draw = random.Random(f"history {seed}")
    plan = draw_plan(seed)
    before = children()
    undisturbed = ended(Run(plan, made(folder / "undisturbed")).play(), "the undisturbed run")
    (folder / "plan.txt").write_text(f"{plan}\n")
    disturbed = made(folder / "disturbed")
    before |= children()  # the fork server
    over = False
    for number in range(ROUNDS):
        fault = draw_fault(plan, draw, disturbed, bool(spaces))
        linked = spaces[: plan.workers] if spaces and isinstance(fault, LINKS) else None
        ends = Run(plan, disturbed, fault, spaces=linked).play()
        assert not children() - before, f"{fault}: processes are left: {children() - before}"
        over = all(end.how == "ended" for end in ends)
        if fault.survives or over:
            compare(undisturbed, ended(ends, str(fault)), str(fault))
            then = "the same end"
            over = True
        else:
            then = after(plan, fault, disturbed, draw, undisturbed)
        others = tuple(sorted(map(kind_of, others_of(ends, fault))))
        longest = max(end.seconds for end in ends)
        yield Outcome(type(fault).__name__, str(fault), others, round(longest, 1), then)
        if isinstance(fault, OtherNumber) and not over:
            return
        if over and number < ROUNDS - 1:
            shutil.rmtree(disturbed)
            made(disturbed)
    if not over:
        compare(undisturbed, ended(Run(plan, disturbed).play(), "the last restart"), "the restart")


def draw_fault(plan: Plan, draw: random.Random, folder: Path, linked: bool) -> Fault:
    """Return a fault at a step that is still to come."""
    kinds = [kind for kind in KINDS if linked or kind not in LINKS]
    kind = draw.choices(kinds, [kind.weight for kind in kinds])[0]
    done = (max(epochs(folder), default=-1) + 1) * STEPS
    left = [step for step in steps() if step > done] or [EPOCHS * STEPS - 1]
    return kind(draw.randrange(plan.workers), draw.choice(left), draw.randrange(1 << 30))


def others_of(ends: list[End], fault: Fault) -> list[End]:
    return [end for worker, end in enumerate(ends) if worker != fault.victim]


def kind_of(end: End) -> str:
    """Return how a worker ended, and of an error whether it names a worker."""
    if end.how != "failed":
        return end.how
    return "named" if "orker" in str(end.left).rstrip().rpartition("\n")[2] else "plain"


def after(
    plan: Plan, fault: Fault, folder: Path, draw: random.Random, undisturbed: list[dict[str, Any]]
) -> str:
    """Do what follows a fault besides a restart; return it in words."""
    if isinstance(fault, Damage) and epochs(folder):
        return refused(plan, folder, draw)
    if isinstance(fault, OtherNumber):
        return conserved(plan, folder, draw)
    return f"goes on after epoch {max(epochs(folder), default=-1)}"


def refused(plan: Plan, folder: Path, draw: random.Random) -> str:
    """Damage a side file of the newest checkpoint; it must be refused, by its name, by all."""
    last = max(epochs(folder))
    files = sorted((folder / FOLDER).glob(f"epoch={last}*"))
    if not files:
        return "it has no side files"
    file = draw.choice(files)
    content = bytearray(file.read_bytes())
    how = draw.choice(["bit", "cut", "random", "gone", "empty"])
    if how == "bit":
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    elif how == "cut":
        del content[draw.randrange(len(content)) :]
    elif how == "random":
        content[:] = draw.randbytes(len(content))
    elif how == "empty":
        content.clear()
    if how == "gone":  # is said, and its errors count as zero: take the checkpoint away as well
        file.unlink()
    else:
        file.write_bytes(content)
        ends = Run(plan, folder).play()
        if how == "bit" and all(end.how == "ended" for end in ends):
            return f"{file.name}, {how}: where nobody reads it; the end is compared"
        assert all(end.how == "failed" for end in ends), f"{file.name}, {how}: it was loaded"
        silent = [w for w, end in enumerate(ends) if file.name not in str(end.left)]
        assert not silent, f"{file.name}, {how}: workers {silent} do not name it: {ends}"
    epochs(folder)[last].unlink()
    for each in files:
        each.unlink(missing_ok=True)
    return f"{file.name}, {how}: refused; goes on after epoch {max(epochs(folder), default=-1)}"


def conserved(plan: Plan, folder: Path, draw: random.Random) -> str:
    """Go on with another number of workers: the mean of the errors must be the same."""
    if not epochs(folder):
        return "nothing was saved"
    ends = Run(plan, copied(folder, "same")).play()
    same = [end["first errors"] for end in ended(ends, "as many workers")]
    number = draw.choice([n for n in range(1, 5) if n != plan.workers])
    found = ended(Run(plan, folder, workers=number).play(), f"{number} workers")
    other = [end["first errors"] for end in found]
    for name in same[0]:
        old, new = (np.mean([errors[name] for errors in each], 0) for each in (same, other))
        scale = np.abs(old).max() + 1e-12
        assert np.abs(old - new).max() <= 1e-6 * scale, f"{name}: the errors' mean has changed"
    return f"{plan.workers} workers are now {number}; the errors' mean is kept"


def ended(ends: list[End], what: str) -> list[dict[str, Any]]:
    """Return what the workers of a run have left that must have come to its end."""
    for worker, end in enumerate(ends):
        assert end.how == "ended", f"{what}: worker {worker} {end.how}: {end.left}"
    return [end.left for end in ends]


def compare(wanted: list[dict[str, Any]], found: list[dict[str, Any]], what: str) -> None:
    different = differences(wanted, found)
    assert not different, f"{what}: another end: {different}"


def made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def copied(folder: Path, name: str) -> Path:
    target = folder.with_name(name)
    subprocess.run(["cp", "-a", str(folder), str(target)], check=True, timeout=60)
    return target
