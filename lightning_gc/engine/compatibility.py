"""Compatibility: defaults for memory and scheme; refuse combinations that cannot work."""

from __future__ import annotations

from collections.abc import Sequence

from lightning_gc.compressors import Collective, Compressor
from lightning_gc.compressors.base import Waits
from lightning_gc.compressors.wrappers.menu import Menu, chosen_of, compressors_of
from lightning_gc.core.combinations import judge
from lightning_gc.core.registry import make
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.schemes import (
    SCHEMES,
    AllGather,
    AllGatherOrTwoShot,
    AllReduce,
    Scheme,
    TwoShot,
)


def combine(
    compressor: Compressor, memory: Memory | None = None, scheme: Scheme | None = None
) -> tuple[Compressor, Memory, Scheme | None]:
    """Fill in default memory and scheme, and refuse combinations that cannot work.

    Memory: the one that the compressor names, else ``ErrorFeedback()`` for biased compressors and
    ``NoMemory()`` for unbiased ones. Scheme: ``AllReduce()`` for linear compressors, ``TwoShot()``
    for votes, ``AllGatherOrTwoShot()`` for other quantisers and ``Lossless()``, ``AllGather()`` for
    the rest, none for a ``Collective``. A ``Menu`` has the memory that its biased compressors name,
    and no scheme, since each choice has its own.

    Raises:
        ValueError: the scheme's ``check`` refuses the compressor, or the memory's refuses either;
            compressors of a menu have different default memories.
    """
    entries = compressors_of(compressor)
    memory = memory or make("memory", _default_memory(compressor, entries), MEMORIES, Memory)
    for choice in choices_of(compressor):
        own, entry = scheme or default_scheme(choice), chosen_of(choice)
        if own is not None:
            own.check(entry)
        memory.check(entry, own)
    return compressor, memory, scheme or (default_scheme(compressor) if len(entries) == 1 else None)


def _default_memory(compressor: Compressor, entries: Sequence[Compressor]) -> str:
    named = {entry: entry.traits.default_memory for entry in entries}
    found = {
        entry: name or ("none" if entry.traits.unbiased else "error_feedback")
        for entry, name in named.items()
    }
    several = sorted({*found.values()} - {"none"}) or ["none"]
    theirs = ", ".join(f"{entry} has {name!r}" for entry, name in found.items())
    judge("Menu", compressor=compressor, several=len(several) > 1, theirs=theirs)
    return several[0]


def choices_of(compressor: Compressor) -> list[Compressor]:
    """Return a menu at each of its choices; of another compressor, itself."""
    if not isinstance(compressor, Menu):
        return [compressor]
    return [compressor.at(place) for place, _ in enumerate(compressor.names, 1)]


def default_scheme(compressor: Compressor) -> Scheme | None:
    """Return a compressor's scheme, where none is given beside it; None for a ``Collective``."""
    if isinstance(compressor, Menu):
        own = dict(compressor.schemes).get(compressor.names[compressor.level - 1])
        if own is not None:
            found: Scheme = make("scheme", own, SCHEMES, Scheme)
            return found
        compressor = compressor.chosen
    if isinstance(compressor.method, Collective):
        return None
    traits = compressor.traits
    if traits.linear:
        return AllReduce()
    if traits.kind not in ("dense", "quantiser"):
        return AllGather()
    # The second encoding of ``TwoShot`` makes a majority of votes, which a mean is not.
    return AllGatherOrTwoShot() if traits.conserves else TwoShot()


def waits_of_step(compressor: Compressor, scheme: Scheme | None, workers: int) -> Waits:
    """Return how often the exchange of one tensor makes a worker wait, apart from its messages."""
    encodings, own = (1, 0) if scheme is None else (scheme.encodings(workers), scheme.waits)
    each = compressor.waits
    return Waits(encodings * each.least + own, encodings * each.limit + own)
