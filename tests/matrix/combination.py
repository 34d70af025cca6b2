"""What is tried, as ``combinations.toml`` lists it: versions together, and projects of others."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONSTRAINTS = ROOT / "constraints.txt"


class NotHere(Exception):
    """What a combination needs cannot be had on this machine; the message says what."""


@dataclass(frozen=True)
class Combination:
    """Versions that are tried together.

    Attributes:
        name: of the combination.
        python: version of Python, ``"3.11"``.
        torch: version, ``"tested"`` or ``"newest"``.
        package: ``"pytorch-lightning"`` or ``"lightning"``.
        lightning: version of that, or ``"newest"``.
        others: further requirements.
        tests: that pytest runs with these versions only.
    """

    name: str
    python: str
    torch: str
    package: str
    lightning: str
    others: list[str] = field(default_factory=list)
    tests: list[str] = field(default_factory=list)

    @property
    def torch_version(self) -> str:
        """As pip wants it after the name: ``"==2.6.0"``, or ``""`` for the newest."""
        if self.torch == "tested":
            return tested_torch()
        return "" if self.torch == "newest" else f"=={self.torch}"

    @property
    def requirements(self) -> list[str]:
        """Return Lightning and what else has a version."""
        version = "" if self.lightning == "newest" else f"=={self.lightning}"
        return [f"{self.package}{version}", *self.others]


@dataclass(frozen=True)
class Project:
    """A project of others whose own classes train with compressed gradients.

    Attributes:
        name: of the project, ``"project-..."``.
        script: in the folder ``projects``; it trains.
        requirements: what pip installs, each the newest that the tested versions allow.
        unpinned: packages of constraints.txt that the project needs in other versions.
    """

    name: str
    script: str
    requirements: list[str]
    unpinned: list[str] = field(default_factory=list)

    @property
    def constraints(self) -> str:
        """Return the text of constraints.txt without the unpinned packages."""
        lines = CONSTRAINTS.read_text().splitlines(keepends=True)
        return "".join(line for line in lines if line.partition("==")[0] not in self.unpinned)


def tested_torch() -> str:
    """Return the version of constraints.txt, ``"==2.13.0"``."""
    lines = CONSTRAINTS.read_text().splitlines()
    return next(line for line in lines if line.startswith("torch==")).removeprefix("torch")


def combinations() -> list[Combination]:
    """Return all, in the order of the file."""
    named = _listed().items()
    return [Combination(name, **fields) for name, fields in named if name != "projects"]


def projects() -> list[Project]:
    """Return all, in the order of the file."""
    named = _listed()["projects"].items()
    return [Project(f"project-{name}", **fields) for name, fields in named]


def _listed() -> dict[str, Any]:
    return tomllib.loads((ROOT / "tests" / "matrix" / "combinations.toml").read_text())
