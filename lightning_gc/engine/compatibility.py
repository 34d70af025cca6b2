"""Which memory and scheme go with which compressor: defaults and refusals."""

from __future__ import annotations

from lightning_gc.compressors import Compressor, PerParameter, SizeSwitch
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.memories import MEMORIES, Memory
from lightning_gc.schemes import AllGather, AllReduce, Scheme, TwoShot


def combine(
    compressor: Compressor, memory: Memory | None = None, scheme: Scheme | None = None
) -> tuple[Compressor, Memory, Scheme]:
    """Fill in what is left out and refuse what cannot work.

    Defaults: the memory that the compressor names, else ``Residual()`` for biased compressors and
    ``NoMemory()`` for unbiased ones; ``AllReduce()`` where linear or with rounds of its own,
    ``TwoShot()`` for quantisers, ``AllGather()`` for the rest.

    Raises:
        ValueError: a scheme that cannot carry the compressor, a memory that corrects momentum
            with a compressor that leaves no error to correct, or one that feeds errors back with
            a compressor whose result is no mean.
    """
    if memory is None:
        name = compressor.default_memory or ("none" if compressor.unbiased else "residual")
        memory = MEMORIES[name]()
    if scheme is None:
        if compressor.linear or compressor.averages:
            scheme = AllReduce()
        else:
            scheme = TwoShot() if compressor.kind == "quantiser" else AllGather()
    scheme.check(compressor)
    if memory.corrects_momentum and compressor.unbiased:
        raise ValueError(
            f"{memory!r} corrects the momentum that waits in the error, but {compressor!r} is "
            f"unbiased and leaves none; use NoMemory(), or a biased compressor such as TopK(0.01)."
        )
    if memory.feeds_back and not compressor.conserves:
        raise ValueError(
            f"{memory!r} feeds back what was not sent, but the result of {compressor!r} is no mean "
            f"of what was; use NoMemory(), or EFSignSGD() for signs with error feedback."
        )
    return compressor, memory, scheme


def by_default(compressor: Compressor) -> Compressor:
    """Return what a bare compressor means: layer by layer, small and 1-D tensors dense.

    Compressors that treat every element alike stay as they are, and so does what a user has
    wrapped: ``PerParameter(c)`` compresses every tensor, ``SizeSwitch(c, ...)`` sets other limits.
    Where workers vote, all tensors do.
    """
    if compressor.elementwise or isinstance(compressor, (PerParameter, SizeSwitch)):
        return layerwise(compressor)
    if not compressor.conserves:  # one learning rate for votes and for gradients suits neither
        return PerParameter(compressor)
    return PerParameter(SizeSwitch(compressor))
