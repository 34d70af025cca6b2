"""Make an environment and put packages into it: with pip, or with uv where it is installed."""

from __future__ import annotations

import abc
import os
import platform
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.matrix.combination import NotHere

ROOT = Path(__file__).parents[2]


def run(command: list[str], log: Path, cwd: Path, seconds: int) -> bool:
    """Run a command, its output at the end of a log; return whether it succeeded in time.

    Without ``PYTHONPATH``, by which pip and Python would find the tree in place of the wheel.
    """
    free = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with log.open("a") as out:
        out.write(f"\n$ {' '.join(command)}\n")
        out.flush()
        try:
            return not subprocess.run(
                command, cwd=cwd, env=free, stdout=out, stderr=out, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            out.write(f"ended after {seconds} s\n")
            return False


@dataclass(frozen=True)
class Installer(abc.ABC):
    """Fills one environment.

    Attributes:
        environment: its folder.
        log: file that all commands write to.
    """

    environment: Path
    log: Path

    @property
    def python(self) -> str:
        """The environment's interpreter."""
        return str(self.environment / "bin" / "python")

    @abc.abstractmethod
    def make(self, version: str) -> None:
        """Make the environment; NotHere if there is no such Python."""

    @abc.abstractmethod
    def torch(self, wanted: str) -> list[str]:
        """Return what to install for ``"==2.6.0"`` or ``""``, without CUDA where that is a choice.

        Raises:
            NotHere: there is none.
        """

    @abc.abstractmethod
    def command(self, action: str) -> list[str]:
        """Return the beginning of a command, such as ``install``, for this environment."""

    def install(self, *what: str) -> None:
        """Install, or NotHere."""
        if not run([*self.command("install"), *what], self.log, ROOT, 1800):
            raise NotHere(f"cannot be installed: {' '.join(what)}; see {self.log}")

    def uninstall(self, package: str) -> None:
        """Remove a package, whoever depends on it."""
        run([*self.command("uninstall"), package], self.log, ROOT, 100)


class Pip(Installer):
    """With venv and pip, and the interpreters of this machine."""

    def make(self, version: str) -> None:
        found = shutil.which(f"python{version}")
        if found is None or not run([found, "--version"], self.log, ROOT, 30):
            raise NotHere(f"no python{version} on this machine")
        if not run([found, "-m", "venv", str(self.environment)], self.log, ROOT, 200):
            raise NotHere(f"python{version} makes no environment; see {self.log}")

    def torch(self, wanted: str) -> list[str]:
        if platform.system() != "Linux" or platform.machine() != "x86_64":
            return [f"torch{wanted}"]
        # Without the local version pip would take the build for CUDA, several gigabytes.
        small = f"torch{wanted}+cpu"
        dry = [*self.command("install"), "--dry-run", "--no-deps", small]
        if not wanted or not run(dry, self.log, ROOT, 600):
            raise NotHere(f"no CPU build of torch{wanted or ' newest'} among pip's sources")
        return [small]

    def command(self, action: str) -> list[str]:
        options = {"install": ["-q", "--disable-pip-version-check"], "uninstall": ["-q", "-y"]}
        return [self.python, "-m", "pip", action, *options[action]]


class Uv(Installer):
    """With uv, which brings interpreters, and CPU builds of torch by ``UV_TORCH_BACKEND=cpu``."""

    def make(self, version: str) -> None:
        if not run(
            ["uv", "venv", "-q", "--python", version, str(self.environment)], self.log, ROOT, 600
        ):
            raise NotHere(f"uv has no Python {version}; see {self.log}")

    def torch(self, wanted: str) -> list[str]:
        return [f"torch{wanted}"]

    def command(self, action: str) -> list[str]:
        return ["uv", "pip", action, "-q", "--python", self.python]


class Own(Pip):
    """The Python that runs this, with the torch that it brings: of a distribution, say."""

    def make(self, version: str) -> None:
        more = [sys.executable, "-m", "venv", "--system-site-packages", str(self.environment)]
        if not run(more, self.log, ROOT, 200):
            raise NotHere(f"{sys.executable} makes no environment; see {self.log}")

    def torch(self, wanted: str) -> list[str]:
        return []


def default() -> type[Installer]:
    """Return uv where it is told to take CPU builds, else pip."""
    return Uv if shutil.which("uv") and os.environ.get("UV_TORCH_BACKEND") else Pip
