"""NonzeroBlocks sends exactly the blocks that NumPy finds, and leaves nothing."""

import numpy as np
import pytest
import torch

from lightning_gc import NonzeroBlocks
from lightning_gc.core import elias_fano
from tests.support.codecs import KINDS, apply, each_kind


@each_kind
@pytest.mark.parametrize("size", [1, 7, 64, 512])
def test_blocks(kind: str, size: int) -> None:
    x = KINDS[kind].clone()
    x[100:200] = 0
    sent, left, (values, positions) = apply(NonzeroBlocks(size), x)
    np.testing.assert_array_equal(sent, x.numpy())
    assert not left.any()
    size = min(size, 300)
    blocks = [x.numpy()[start : start + size] for start in range(0, 300, size)]
    wanted = sum(bool(block.any()) for block in blocks)
    assert values.numel() == wanted * size
    assert positions.numel() == elias_fano.coded_bytes(wanted, len(blocks))


def test_what_is_not_a_number_is_sent() -> None:
    x = torch.zeros(20)
    x[7] = torch.nan
    sent, left, _ = apply(NonzeroBlocks(4), x)
    assert np.isnan(sent[7])
    assert not left.any()


def test_what_fills_up_the_last_block_is_ignored() -> None:
    codec = NonzeroBlocks(4)
    x = torch.ones(6)
    payload = codec.encode(x.clone(), None)  # type: ignore[arg-type]
    payload[0][6:] = 5.0
    out = torch.zeros(6)
    codec.decode(payload, out, 1.0, None)  # type: ignore[arg-type]
    assert torch.equal(out, x)
