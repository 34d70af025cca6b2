"""Kernels that select, code and add give the bits of torch's operations."""

from importlib.util import find_spec

import pytest
import torch

from lightning_gc import ChunkedTopK, HardThreshold, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.base import Codec
from lightning_gc.compressors.joint import Part, joined
from lightning_gc.core import elias_fano
from lightning_gc.core.bucket import Bucket
from lightning_gc.kernels import dispatch
from tests.support.kernel_device import INTERPRETED, same, tensors

pytestmark = [
    pytest.mark.skipif(find_spec("numba") is None, reason="needs the extra fast: numba"),
    pytest.mark.skipif(INTERPRETED, reason="Triton's interpreter comes first"),
]
CODECS: list[Codec] = [
    *(TopK(0.01), TopK(0.3), TopK(1.0), TopK(0.02, "bfloat16")),
    *(TopK(0.05, selection="sampled"), HardThreshold(0.0), HardThreshold(1.5)),
    *(ChunkedTopK(), ChunkedTopK(0.3, 7), ChunkedTopK(0.02, 20_000)),
]
NUMEL = 40_000


def parts(codec: Compressor) -> tuple[Part, ...]:
    """Return parts with a gap between them, of one element, and of fewer and more than a chunk."""
    spans = [(0, 1), (3, 20), (20, 1044), (1050, 4000), (4000, NUMEL - 1)]
    return tuple(Part(codec, f"p{i}", *span, i) for i, span in enumerate(spans))


def bucket(step: int) -> Bucket:
    shapes = {f"p{part.place}": (part.numel,) for part in parts(CODECS[0])}
    return Bucket(torch.zeros(NUMEL), shapes, step=step)


@pytest.mark.parametrize("codec", CODECS, ids=repr)
def test_host_chooses_as_torch_does(codec: Codec, monkeypatch: pytest.MonkeyPatch) -> None:
    """Payload and error are equal, for every kind of number."""
    joint = joined(parts(codec))
    kinds = tensors(NUMEL) | {"ties": tensors(NUMEL)["normal"].mul(2).round()}
    for step, x in enumerate(kinds.values()):
        results = []
        for numba in (True, False):
            with monkeypatch.context() as patched:
                if not numba:
                    patched.setattr(dispatch.host, "works", lambda family: False)
                left = x.clone()
                values, coded = joint.encode(left, bucket(step))
                results.append((values.float(), coded, left))
        assert all(same(ours, theirs) for ours, theirs in zip(*results, strict=True))


@pytest.mark.parametrize(("chosen", "numel"), [(1, 1), (3, 4), (50, 4000), (4000, 4001)])
def test_impossible_positions_are_refused(chosen: int, numel: int) -> None:
    """Any byte may be damaged: what is accepted ascends below ``numel``, as torch decodes it."""
    from lightning_gc.kernels.host import sparse

    draw = torch.Generator().manual_seed(numel)
    positions = torch.randperm(numel, generator=draw)[:chosen].sort().values
    coded = elias_fano.encode(positions, numel)
    assert torch.equal(sparse.code(positions, numel), coded)
    refused = 0
    for at in range(len(coded)):
        damaged = coded.clone()
        damaged[at] ^= 1 << at % 8
        found = sparse.places(damaged, chosen, numel)
        if found is None:
            refused += 1
            continue
        assert torch.equal(found, elias_fano.decode(damaged, chosen, numel))
        assert bool((found[1:] > found[:-1]).all())
        assert int(found[-1]) < numel
    assert refused
    found = sparse.places(coded, chosen, numel)
    assert found is not None
    assert torch.equal(found, positions)


def test_positions_that_repeat_are_refused() -> None:
    from lightning_gc.kernels.host import sparse

    coded = elias_fano.encode(torch.tensor([5, 5, 9]), 100)
    assert sparse.places(coded, 3, 100) is None
