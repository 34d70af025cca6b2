"""One worker: it compresses as several do, so that a run on one device tells the same; it warns."""

from __future__ import annotations

import warnings

from lightning_gc.compressors import Compressor


def warn_of_one_worker(compressor: Compressor, alone: str, what: str, fix: str) -> None:
    """Warn that nothing is gained, unless the compressor changes nothing either.

    Args:
        compressor: with its wrappers.
        alone: who there is only one of, and between whom nothing is sent.
        what: is compressed.
        fix: what to do.
    """
    if not compressor.traits.exact:
        warnings.warn(
            f"{alone}, but {what} are still compressed, which slows training and saves nothing; "
            f"{fix}.",
            stacklevel=2,
        )
