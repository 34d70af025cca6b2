"""A combination of versions, as ``combinations.toml`` lists them."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]


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
    """

    name: str
    python: str
    torch: str
    package: str
    lightning: str
    others: list[str] = field(default_factory=list)

    @property
    def torch_version(self) -> str:
        """As pip wants it after the name: ``"==2.6.0"``, or ``""`` for the newest."""
        if self.torch == "tested":
            lines = (ROOT / "constraints.txt").read_text().splitlines()
            return next(line for line in lines if line.startswith("torch==")).removeprefix("torch")
        return "" if self.torch == "newest" else f"=={self.torch}"

    @property
    def requirements(self) -> list[str]:
        """Return Lightning and what else has a version."""
        version = "" if self.lightning == "newest" else f"=={self.lightning}"
        return [f"{self.package}{version}", *self.others]


def combinations() -> list[Combination]:
    """Return all, in the order of the file."""
    text = (ROOT / "tests" / "matrix" / "combinations.toml").read_text()
    return [Combination(name, **fields) for name, fields in tomllib.loads(text).items()]
