"""Compatibility: defaults for memory and scheme; refuse combinations that cannot work."""

from __future__ import annotations

from lightning_gc.compressors import Collective, Compressor, PerParameter, SizeSwitch
from lightning_gc.compressors.traits import Traits
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.schemes import AllGather, AllGatherOrTwoShot, AllReduce, Scheme, TwoShot


def combine(
    compressor: Compressor, memory: Memory | None = None, scheme: Scheme | None = None
) -> tuple[Compressor, Memory, Scheme | None]:
    """Fill in default memory and scheme, and refuse combinations that cannot work.

    Memory: the one that the compressor names, else ``Residual()`` for biased compressors and
    ``NoMemory()`` for unbiased ones. Scheme: ``AllReduce()`` for linear compressors, ``TwoShot()``
    for votes, ``AllGatherOrTwoShot()`` for other quantisers, ``AllGather()`` for the rest, none for
    a ``Collective``.

    Raises:
        ValueError: the scheme's ``check`` refuses the compressor, or the memory's refuses either.
    """
    traits = compressor.traits
    if memory is None:
        memory = MEMORIES[traits.default_memory or ("none" if traits.unbiased else "residual")]()
    if scheme is not None:
        scheme.check(compressor)
    elif not isinstance(compressor.method, Collective):
        scheme = _default_scheme(traits)
    memory.check(compressor, scheme)
    return compressor, memory, scheme


def _default_scheme(traits: Traits) -> Scheme:
    if traits.linear:
        return AllReduce()
    if traits.kind != "quantiser":
        return AllGather()
    # The second encoding of ``TwoShot`` makes a majority of votes, which a mean is not.
    return AllGatherOrTwoShot() if traits.conserves else TwoShot()


def by_default(compressor: Compressor) -> Compressor:
    """Wrap a bare compressor so that it works layer by layer, with small and 1-D tensors dense.

    Elementwise compressors are not wrapped, nor is what a user has wrapped: ``PerParameter(c)``
    compresses every tensor, ``SizeSwitch(c, ...)`` sets other limits. Compressors that vote
    (``conserves`` is False) compress all tensors.
    """
    traits = compressor.traits
    if traits.elementwise or isinstance(compressor, (PerParameter, SizeSwitch)):
        return layerwise(compressor)
    if not traits.conserves:  # one learning rate for votes and for gradients suits neither
        return PerParameter(compressor)
    return PerParameter(SizeSwitch(compressor))
