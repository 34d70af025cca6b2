"""Compress layer by layer, as the papers do."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import Compressor, dense
from lightning_gc.compressors.wrappers.wrapper import Wrapper
from lightning_gc.flow import Flow, together

if TYPE_CHECKING:
    from lightning_gc.schemes.base import Scheme


@dataclass(frozen=True)
class PerParameter(Wrapper):
    """Run the inner compressor on each parameter of a bucket by itself.

    The conversations of all parameters are merged, so a bucket still costs one message a round.
    A controller may set a level of its own for every parameter.

    Args:
        inner: what compresses one parameter.

    Communication pattern:
        As the inner one's, with the payloads of all parameters in one message.

    Example:
        >>> from lightning_gc import PerParameter, TopK
        >>> PerParameter(TopK(0.01)).level
        0.01
    """

    inner: Compressor

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: Scheme) -> Flow:
        """Run one inner flow per parameter, side by side."""
        flows = []
        for name, start, stop in bucket.spans():
            part, x, y = bucket.part(name, start, stop), buffer[start:stop], out[start:stop]
            level = bucket.levels.get(name, self.inner.level)
            if level is None and name in bucket.levels:
                flows.append(dense(x, y))
            elif stop > start:
                flows.append(_at(self.inner, level).flow(part, x, y, scheme))
        yield from together(flows)


@functools.lru_cache(maxsize=4096)
def _at(compressor: Compressor, level: float | None) -> Compressor:
    """Return ``compressor`` at ``level``, made once: levels change per epoch, flows per step."""
    return compressor if level is None or level == compressor.level else compressor.at(level)


def layerwise(compressor: Compressor) -> Compressor:
    """Return ``compressor`` at the default granularity: per parameter, where that matters."""
    if compressor.elementwise or isinstance(compressor, PerParameter):
        return compressor
    return PerParameter(compressor)
