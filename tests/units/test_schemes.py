"""What schemes count: the elements and bytes of the first encoding, once."""

import torch

from lightning_gc import QSGD, AllGather, TopK, TwoShot
from lightning_gc.compressors import Codec
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
