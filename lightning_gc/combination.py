"""Which memory and scheme go with which compressor: defaults and refusals."""

from __future__ import annotations

from lightning_gc.compressors import Compressor, PerParameter, SizeSwitch
from lightning_gc.compressors.per_parameter import layerwise
from lightning_gc.memories import Memory, NoMemory, Residual
from lightning_gc.schemes import AllGather, AllReduce, Scheme, TwoShot


def combine(
    compressor: Compressor, memory: Memory | None = None, scheme: Scheme | None = None
) -> tuple[Compressor, Memory, Scheme]:
    """Fill in what is left out and refuse what cannot work.

    Defaults: ``Residual()`` for biased compressors, ``NoMemory()`` for unbiased ones;
    ``AllReduce()`` where linear, ``TwoShot()`` for quantisers, ``AllGather()`` for the rest.

    Raises:
        ValueError: a scheme that cannot carry the compressor, or a memory that corrects momentum
            with a compressor that leaves no error to correct.
    """
    if memory is None:
        memory = NoMemory() if compressor.unbiased else Residual()
    if scheme is None:
        if compressor.linear:
            scheme = AllReduce()
        else:
            scheme = TwoShot() if compressor.kind == "quantiser" else AllGather()
    scheme.check(compressor)
    if memory.corrects_momentum and compressor.unbiased:
        raise ValueError(
            f"{memory!r} corrects the momentum that waits in the error, but {compressor!r} is "
            f"unbiased and leaves none; use NoMemory(), or a biased compressor such as TopK(0.01)."
        )
    return compressor, memory, scheme


def by_default(compressor: Compressor) -> Compressor:
    """Return what a bare compressor means: layer by layer, small and 1-D tensors dense.

    Compressors that treat every element alike stay as they are, and so does what a user has
    wrapped: ``PerParameter(c)`` compresses every tensor, ``SizeSwitch(c, ...)`` sets other limits.
    """
    if compressor.elementwise or isinstance(compressor, (PerParameter, SizeSwitch)):
        return layerwise(compressor)
    return PerParameter(SizeSwitch(compressor))
