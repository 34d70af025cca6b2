"""Configuration: compressor, memory, scheme and seed, with defaults filled in and checked."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_gc.compressors import COMPRESSORS, Compressor
from lightning_gc.engine import Engine
from lightning_gc.engine.compatibility import by_default, combine
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.registry import make
from lightning_gc.schemes import SCHEMES, Scheme


@dataclass(frozen=True)
class Configuration:
    """Settings that must be equal on all workers. Made by ``configure``.

    Attributes:
        compressor: with its wrappers.
        memory: as given, or the compressor's default.
        scheme: as given, or the default; None if the compressor runs its own communication.
        seed: of private random numbers.
    """

    compressor: Compressor
    memory: Memory
    scheme: Scheme | None
    seed: int

    def engine(self, worker: int, workers: int) -> Engine:
        """Return the engine of one of ``workers`` workers."""
        parts = self.compressor, self.memory, self.scheme
        return Engine(*parts, worker=worker, workers=workers, seed=self.seed)

    def neighbours(self, workers: int) -> int:
        """Return how many consecutive workers are a node, as the scheme knows them."""
        return 1 if self.scheme is None else self.scheme.neighbours(workers)

    def in_words(self) -> dict[str, str]:
        """Return ``{name: repr}`` of the settings."""
        return {name: repr(value) for name, value in vars(self).items()}


def configure(
    owner: str,
    compressor: Compressor | str,
    memory: Memory | str | None,
    scheme: Scheme | str | None,
    seed: int,
) -> Configuration:
    """Look names up, fill in defaults, and refuse combinations that cannot work.

    Args:
        owner: the class or function with these arguments, for error messages.
        compressor: an instance, or a name from the registry; a bare one works layer by layer.
        memory: likewise; None is the compressor's default.
        scheme: likewise.
        seed: of private random numbers.

    Raises:
        ValueError: a combination that cannot work, an unknown name, a seed that is no integer.
    """
    if not isinstance(seed, int):
        raise ValueError(f"{owner}(seed={seed!r}): the seed is a whole number.")
    compressor = make("compressor", compressor, COMPRESSORS, Compressor)
    if memory is not None:
        memory = make("memory", memory, MEMORIES, Memory)
    if scheme is not None:
        scheme = make("scheme", scheme, SCHEMES, Scheme)
    return Configuration(*combine(by_default(compressor), memory, scheme), seed)
