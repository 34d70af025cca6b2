"""Compress layer by layer, as the papers do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.compressor import Compressor
from lightning_gc.compressors.wrapper import Wrapper
from lightning_gc.flow import Flow, together

if TYPE_CHECKING:
    from lightning_gc.schemes.scheme import Scheme


@dataclass(frozen=True)
class PerParameter(Wrapper):
    """Run the inner compressor on each parameter of a bucket by itself.

    The conversations of all parameters are merged, so a bucket still costs one message a round.

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
        yield from together(
            [
                self.inner.flow(
                    bucket.part(name, start, stop), buffer[start:stop], out[start:stop], scheme
                )
                for name, start, stop in bucket.spans()
                if stop > start
            ]
        )


def layerwise(compressor: Compressor) -> Compressor:
    """Return ``compressor`` at the default granularity: per parameter, where that matters."""
    if compressor.elementwise or isinstance(compressor, PerParameter):
        return compressor
    return PerParameter(compressor)
