"""Compatibility: defaults for memory and scheme; refuse combinations that cannot work."""

from __future__ import annotations

from lightning_gc.compressors import Collective, Compressor
from lightning_gc.compressors.base import Traits, Waits
from lightning_gc.core.registry import make
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.schemes import AllGather, AllGatherOrTwoShot, AllReduce, Scheme, TwoShot


def combine(
    compressor: Compressor, memory: Memory | None = None, scheme: Scheme | None = None
) -> tuple[Compressor, Memory, Scheme | None]:
    """Fill in default memory and scheme, and refuse combinations that cannot work.

    Memory: the one that the compressor names, else ``ErrorFeedback()`` for biased compressors and
    ``NoMemory()`` for unbiased ones. Scheme: ``AllReduce()`` for linear compressors, ``TwoShot()``
    for votes, ``AllGatherOrTwoShot()`` for other quantisers and ``Lossless()``, ``AllGather()`` for
    the rest, none for a ``Collective``.

    Raises:
        ValueError: the scheme's ``check`` refuses the compressor, or the memory's refuses either.
    """
    traits = compressor.traits
    if memory is None:
        default = traits.default_memory or ("none" if traits.unbiased else "error_feedback")
        memory = make("memory", default, MEMORIES, Memory)
    if scheme is not None:
        scheme.check(compressor)
    elif not isinstance(compressor.method, Collective):
        scheme = _default_scheme(traits)
    memory.check(compressor, scheme)
    return compressor, memory, scheme


def _default_scheme(traits: Traits) -> Scheme:
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
