"""Deliberate faults: those listed in ``planted.toml``, and the files that each one changes."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path

PLANTED = Path(__file__).with_name("planted.toml")


@dataclass(frozen=True)
class Edit:
    """One change of one file: ``old``, which must be there exactly once, becomes ``new``."""

    file: str
    old: str
    new: str


@dataclass(frozen=True)
class Fault:
    """A deliberate mistake.

    Attributes:
        id: a short name.
        area: the part of the program that it is in.
        wrong: one sentence on what the program then does wrong.
        tests: pytest selections that could see it, the cheapest first.
        edits: the changes, one in most cases.
        missed: for a fault that no test finds today: which test should.
    """

    id: str
    area: str
    wrong: str
    tests: tuple[str, ...]
    edits: tuple[Edit, ...]
    missed: str = ""


class CannotPlant(ValueError):
    """The text to change does not occur exactly once, or the result would not compile."""


def load(path: Path = PLANTED) -> list[Fault]:
    """Read the list of faults, and refuse one that contradicts itself."""
    faults = []
    for entry in tomllib.loads(path.read_text(encoding="utf-8"))["fault"]:
        edits = [entry, *entry.pop("also", ())]
        made = tuple(Edit(*(edit.pop(name) for name in ("file", "old", "new"))) for edit in edits)
        faults.append(Fault(**entry | {"tests": tuple(entry["tests"]), "edits": made}))
    names = [fault.id for fault in faults]
    if len(set(names)) != len(names) or not all(fault.tests for fault in faults):
        raise ValueError(f"{path.name}: every fault needs a name of its own, and tests.")
    return faults


def changed_files(fault: Fault, tree: Path) -> dict[str, str]:
    """Return path -> text of the files that the fault changes; nothing is written.

    Raises:
        CannotPlant: the tree no longer has the text to change, or the result would not compile.
    """
    texts: dict[str, str] = {}
    for edit in fault.edits:
        path = tree / edit.file
        if not path.is_file():
            raise CannotPlant(f"{edit.file} is not there")
        text = texts.get(edit.file) or path.read_text(encoding="utf-8")
        if (times := text.count(edit.old)) != 1:
            raise CannotPlant(f"the text to change is in {edit.file} {times} times, not once")
        texts[edit.file] = text.replace(edit.old, edit.new)
        try:
            compile(texts[edit.file], edit.file, "exec")
        except SyntaxError as error:
            raise CannotPlant(f"{edit.file} would be no Python: {error}") from error
    return texts
