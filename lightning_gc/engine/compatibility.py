"""Compatibility: defaults for memory and scheme; refuse combinations that cannot work."""

from __future__ import annotations

from lightning_gc.compressors import Collective, Compressor, PerParameter, SizeSwitch
from lightning_gc.compressors.base import Traits, Waits
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
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


def by_default(
    compressor: Compressor, min_numel: int = MIN_NUMEL, owner: str = "by_default"
) -> Compressor:
    """Wrap a bare compressor so that it works per parameter and sends small tensors uncompressed.

    Three kinds of compressors are not wrapped in a ``SizeSwitch`` and compress every tensor:
    elementwise ones, those whose workers vote (``conserves`` is False), and one that the user has
    put in a ``PerParameter``. A ``SizeSwitch`` of the user's keeps its own limits.

    Args:
        compressor: bare, or in the user's wrappers.
        min_numel: tensors with fewer elements, and 1-D tensors, are sent uncompressed. 0 compresses
            every tensor, also 1-D ones.
        owner: the class or function with this argument, for error messages.

    Raises:
        ValueError: ``min_numel`` is not a number of elements, or is changed where it has no effect.
    """
    if type(min_numel) is not int or min_numel < 0:
        raise ValueError(
            f"{owner}(min_numel={min_numel!r}): give the number of elements from which on a tensor "
            f"is compressed; use {MIN_NUMEL}, or 0 for every tensor."
        )
    traits, changed = compressor.traits, min_numel != MIN_NUMEL
    if isinstance(compressor, PerParameter | SizeSwitch):
        if changed:
            raise ValueError(
                f"{owner}(min_numel={min_numel}): {compressor!r} says itself which tensors are "
                f"compressed; leave min_numel out, or give the compressor without its wrapper."
            )
        return layerwise(compressor)
    if traits.elementwise or not traits.conserves:
        if changed and min_numel:
            raise ValueError(
                f"{owner}(min_numel={min_numel}): {compressor!r} compresses every tensor; leave "
                f"min_numel out, or give SizeSwitch({compressor!r}, min_numel={min_numel})."
            )
        return layerwise(compressor)
    return PerParameter(SizeSwitch(compressor, min_numel) if min_numel else compressor)


def waits_of_step(compressor: Compressor, scheme: Scheme | None, workers: int) -> Waits:
    """Return how often the exchange of one tensor makes a worker wait, apart from its messages."""
    encodings, own = (1, 0) if scheme is None else (scheme.encodings(workers), scheme.waits)
    each = compressor.waits
    return Waits(encodings * each.least + own, encodings * each.limit + own)
