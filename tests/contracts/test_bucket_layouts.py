"""Means do not depend on which parameters share a bucket: its size changes no bits."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from lightning_gc import Cast
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.low_rank.gradzip import GradZip
from lightning_gc.exchange import Compression
from lightning_gc.testing.contracts import cases
from lightning_gc.transports import Simulated
from tests.support.instances import FIRST, ONE_EACH

WORKERS, STEPS = 3, 3
TOLERANCES: dict[type[Compressor], float] = {
    # Cuts the bucket into shards; the error of a second rounding stays with the shard's owner.
    Cast: 2**-6,
    # Multiplies matrices of a bucket at once, and their number decides the order of sums.
    GradZip: 1e-5,
}
"""Compressor -> absolute difference of means that buckets may cause."""
SHAPES = {"a": (48, 64), "b": (64,), "c": (80, 40), "d": (33, 34), "e": (40,)}


def means(compressor: Compressor, layout: Sequence[str]) -> dict[str, Tensor]:
    """Return the last step's means by name, with the parameters of each word in one bucket."""
    configuration = Compression(compressor).configured("this test")
    engines = [configuration.engine(worker, WORKERS) for worker in range(WORKERS)]
    transport = Simulated(WORKERS)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        draw = torch.Generator().manual_seed(step)
        own = [{n: torch.randn(s, generator=draw) for n, s in SHAPES.items()} for _ in engines]
        for names in layout:
            shapes = {name: SHAPES[name] for name in names}
            flats = [torch.cat([grads[name].reshape(-1) for name in names]) for grads in own]
            weights = {name: torch.ones(shape) for name, shape in shapes.items()}
            transport.run(
                [
                    engine.flow(flat, shapes, weights=weights if engine.reads_weights else None)
                    for engine, flat in zip(engines, flats, strict=True)
                ]
            )
            pieces = flats[0].split([torch.Size(shape).numel() for shape in shapes.values()])
            found |= {name: piece.clone() for name, piece in zip(names, pieces, strict=True)}
        engines[0].advance()
        for engine in engines[1:]:
            engine.advance(decoder=engines[0])
    return found


@pytest.mark.parametrize(
    "compressor",
    [pytest.param(c, marks=() if c in ONE_EACH else pytest.mark.nightly) for c in FIRST],
    ids=cases.label,
)
def test_means_by_name(compressor: Compressor) -> None:
    first, *others = (means(compressor, layout) for layout in (["abcde"], ["ab", "cde"], "abcde"))
    allowed = TOLERANCES.get(type(compressor))
    for other in others:
        for name, mean in first.items():
            if allowed is None:
                assert torch.equal(other[name], mean), name
            else:
                torch.testing.assert_close(other[name], mean, rtol=0.0, atol=allowed)
