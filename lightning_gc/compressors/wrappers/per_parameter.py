"""PerParameter: run a compressor on each parameter of a bucket by itself, as the papers do."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Self

from torch import Tensor

from lightning_gc.bucket import Bucket
from lightning_gc.compressors.base import CodecScheme, Compressor, dense
from lightning_gc.compressors.wrappers.wrapper import Wrapper
from lightning_gc.flow import Flow, together


@dataclass(frozen=True)
class PerParameter(Wrapper):
    """Run the inner compressor on each parameter of a bucket by itself.

    A bucket still costs one message a round. A controller may set a level for each parameter.

    Args:
        inner: what compresses one parameter.
        levels: pairs of parameter name and level, where it is not the inner one's; None sends the
            parameter uncompressed.
        others_dense: send parameters that are not in ``levels`` uncompressed.

    Communication pattern:
        As the inner one's, with the payloads of all parameters in one message.

    Example:
        >>> from lightning_gc import PerParameter, TopK
        >>> PerParameter(TopK(0.01)).level
        0.01
    """

    inner: Compressor
    levels: tuple[tuple[str, float | None], ...] = field(default=(), repr=False)
    others_dense: bool = field(default=False, repr=False)

    @functools.cached_property
    def _level_by_name(self) -> dict[str, float | None]:
        return dict(self.levels)

    def flow(self, bucket: Bucket, buffer: Tensor, out: Tensor, scheme: CodecScheme | None) -> Flow:
        others = None if self.others_dense else self.inner
        flows = []
        for name, start, stop in bucket.spans():
            if stop == start:
                continue
            inner = others
            if name in self._level_by_name:
                inner = _at(self.inner, self._level_by_name[name])
            if inner is not None:
                inner = _for_shape(inner, bucket.shapes[name])
            part, own, mean = bucket.part(name, start, stop), buffer[start:stop], out[start:stop]
            flows.append(dense(own, mean) if inner is None else inner.flow(part, own, mean, scheme))
        yield from together(flows)

    def with_levels(self, levels: Mapping[str, float | None], *, dense: bool) -> Self:
        return dataclasses.replace(self, levels=tuple(levels.items()), others_dense=dense)


# Levels change per epoch and shapes never; flows are made in every step.
@functools.lru_cache(maxsize=4096)
def _at(compressor: Compressor, level: float | None) -> Compressor | None:
    if level is None:
        return None
    return compressor if level == compressor.level else compressor.at(level)


@functools.lru_cache(maxsize=4096)
def _for_shape(compressor: Compressor, shape: tuple[int, ...]) -> Compressor | None:
    return compressor.for_shape(shape)


def layerwise(compressor: Compressor) -> Compressor:
    """Return ``compressor`` per parameter, unless it is elementwise."""
    if compressor.traits.elementwise or isinstance(compressor, PerParameter):
        return compressor
    return PerParameter(compressor)
