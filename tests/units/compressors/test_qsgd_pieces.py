"""Encoding a large tensor piece by piece gives the bits of encoding it whole."""

import pytest
import torch

from lightning_gc.core import payload_validation
from lightning_gc.kernels import quantise


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 7, 8, 9])
@pytest.mark.parametrize("block_size", [7, 512, 1000])
@pytest.mark.parametrize("numel", [0, 1, 65_536, 3 * 65_536, 200_001])
def test_pieces_are_the_whole(bits: int, block_size: int, numel: int) -> None:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(numel, generator=generator)
    norms = x.new_zeros(-(-numel // block_size))
    if numel:
        norms = quantise.in_blocks(x, block_size).abs().amax(dim=1)
        x[numel // 2] = float("nan")
    uniform = torch.rand(len(norms) * block_size, generator=generator)
    for noise in (torch.Generator(), uniform, None):
        taken, expected = x.clone(), x.clone()
        codes = []
        for how, buffer in ((quantise.quantise, taken), (quantise.quantise_reference, expected)):
            if isinstance(noise, torch.Generator):
                noise.manual_seed(2)
            codes.append(how(buffer, norms, block_size, bits, noise))
        assert torch.equal(*codes)
        torch.testing.assert_close(taken, expected, rtol=0, atol=0, equal_nan=True)
    found, wanted = torch.ones(numel), torch.ones(numel)
    rest = (norms, block_size, bits)
    quantise.dequantise(codes[0], *rest, found, 0.5, payload_validation.codes)
    quantise.dequantise_reference(codes[0], *rest, wanted, 0.5, payload_validation.codes)
    assert torch.equal(found, wanted)
