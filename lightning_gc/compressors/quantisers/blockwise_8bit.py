"""Blockwise8Bit: base class of quantisers with one byte an element and a few numbers a block."""

from __future__ import annotations

from lightning_gc.compressors.quantisers.blockwise_codes import BLOCK_SIZES as BLOCK_SIZES
from lightning_gc.compressors.quantisers.blockwise_codes import BlockwiseCodes
from lightning_gc.compressors.quantisers.blockwise_codes import (
    check_block_size as check_block_size,
)


class Blockwise8Bit(BlockwiseCodes):
    """Rounds the elements of each block to 256 values, which depend on a few numbers of the block.

    Subclasses write ``code`` and ``values``, and say ``coding`` and ``numbers``; see
    ``BlockwiseCodes``.
    """

    bits = 8
