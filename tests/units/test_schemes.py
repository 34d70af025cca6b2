"""What schemes count, and which one quantisers have."""

import pytest
import torch

from lightning_gc import QSGD, AllGather, SignSGD, TopK, TwoShot
from lightning_gc.compressors import Codec
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep


def test_the_second_encoding_is_not_counted() -> None:
    """Of two-shot schemes; a payload's bytes per element are the compressor's, not the scheme's."""
    codecs: list[Codec] = [QSGD(4, 64), TopK(0.1)]
    for codec in codecs:
        for scheme in (AllGather(), TwoShot()):
            pair = Lockstep(2, codec, None, scheme)
            pair.step([{"w": torch.randn(32, 64)} for _ in range(2)])
            tally = pair.engines[0].statistics.tally
            whole = sum(field.nbytes for field in codec.wire(2048))
            assert tally.elements == 2048
            assert abs(tally.payload_bytes - whole) <= 0.02 * whole


def stepped(workers: int, scheme: Scheme | None) -> tuple[torch.Tensor, list[int], int]:
    """Return mean, bytes sent and encodings of a step of QSGD."""
    draw = torch.Generator().manual_seed(0)
    group = Lockstep(workers, QSGD(4, 64), None, scheme)
    chosen = group.engines[0].scheme
    assert chosen is not None
    result = group.step([{"w": torch.randn(32, 64, generator=draw)} for _ in range(workers)])
    return result.mean["w"], result.wire_bytes, chosen.encodings(workers)


@pytest.mark.parametrize(("workers", "like"), [(1, AllGather()), (2, AllGather()), (3, TwoShot())])
def test_two_workers_gather_and_more_use_shards(workers: int, like: Scheme) -> None:
    mean, sent, encodings = stepped(workers, None)
    expected, *counts = stepped(workers, like)
    assert torch.equal(mean, expected)
    assert [sent, encodings] == counts


def test_votes_are_counted_by_shards_between_two_as_well() -> None:
    """A mean of two signs that differ would be zero, which is no vote."""
    assert Lockstep(2, SignSGD()).engines[0].scheme == TwoShot()
