"""QSGD's kernels match torch bit for bit, and in distribution where they draw numbers."""

import math
from importlib.metadata import version
from typing import Any

import pytest
import torch

from lightning_gc import QSGD
from lightning_gc.core import payload_validation
from lightning_gc.core.bit_packing import packed_bytes, unpack
from lightning_gc.kernels import quantise
from lightning_gc.kernels.dispatch import MAX_NUMEL, fused
from tests.support.bucket_kernels import philox
from tests.support.kernel_device import DEVICE, INTERPRETED, here, marks, same, some, tensors

pytestmark = marks
TILE = 1024
SIZES = [1, 7, 8, 9, TILE, 2 * TILE + 13]
BITS = [2, 3, 4, 7, 8, 9, 16]
SEED = (7 << 40) + 12345


def norms_of(x: torch.Tensor, size: int) -> torch.Tensor:
    return quantise.in_blocks(x, size).abs().amax(1)


@pytest.mark.parametrize("numel", some(SIZES, (1, 9, 2 * TILE + 13)))
@pytest.mark.parametrize("bits", BITS)
def test_there_and_back(numel: int, bits: int) -> None:
    """Its own numbers are Philox's, so the kernel is the reference with these."""
    for i, (name, x) in enumerate(tensors(numel).items()):
        size = min(numel, (1, 7, 64, 512)[(i + bits) % 4])
        norms = norms_of(x, size)
        noise = torch.zeros(norms.numel() * size)
        noise[:numel] = philox(SEED + i, numel)
        ours, theirs = here(x), x.clone()
        assert fused(ours, "levels")
        generator = torch.Generator(DEVICE).manual_seed(SEED + i)
        packed = quantise.quantise(ours, here(norms), size, bits, generator)
        wanted = quantise.quantise_reference(theirs, norms, size, bits, noise)
        assert same(packed, wanted)
        assert same(ours, theirs)

        # The interpreter of older versions rounds a product before it is added: one without loss.
        scale = 1.0 if name in ("tiny", "huge") else 0.25
        ours, theirs = here(x.roll(1)), x.roll(1)
        quantise.dequantise(packed, here(norms), size, bits, ours, scale, payload_validation.codes)
        quantise.dequantise_reference(
            wanted, norms, size, bits, theirs, scale, payload_validation.codes
        )
        assert same(ours, theirs)


def test_given_numbers_are_used() -> None:
    x, noise = tensors(TILE)["normal"], torch.full((TILE,), 0.25)
    norms, ours, theirs = norms_of(x, 64), here(x), x.clone()
    packed = quantise.quantise(ours, here(norms), 64, 4, here(noise))
    assert same(packed, quantise.quantise_reference(theirs, norms, 64, 4, noise))
    assert same(ours, theirs)


@pytest.mark.parametrize("bits", [2, 4, 7])
def test_the_first_tile_of_the_largest_tensor(bits: int) -> None:
    """Which need not be there: a tile that is told of as many elements as there may be."""
    from lightning_gc.kernels.gpu.levels import TILE, average_tiles, round_tiles
    from lightning_gc.kernels.gpu.prepared_launch import EXACT

    x, numel = tensors(TILE)["normal"], MAX_NUMEL - 1
    norms, left, out = here(norms_of(x, TILE)), x.clone(), torch.zeros(TILE)
    wanted = quantise.quantise_reference(left, norms.cpu(), TILE, bits, torch.full((TILE,), 0.5))
    quantise.dequantise_reference(
        wanted, norms.cpu(), TILE, bits, out, 1.0, payload_validation.codes
    )
    ours, packed, sums = here(x), here(torch.zeros_like(wanted)), here(torch.zeros(TILE))
    tiles = here(torch.zeros(1, 2, dtype=torch.int32))
    part = here(torch.tensor([[0, 0, 0, numel, numel, 0, 0, 0, 0]]))
    kind: dict[str, Any] = {"MEAN": False, "BITS": bits, "TILE": TILE, **EXACT}
    # One norm for all: the block is as large as the tensor.
    round_tiles[(1,)](
        *(ours, ours, 1.0, 1.0, ours, tiles, part, part, 0, numel),
        *(norms.view(torch.int32), 1, packed, 0, here(norms), 0, norms, norms, packed, 0, -1),
        **kind,
        **{"ADD": False, "KEEP": True, "NEAREST": True, "BLOCK": 0},
    )
    read = packed, 0, 0, norms, 0, 0, 1, 1.0, sums, norms, 0, 0
    average_tiles[(1,)](*read, tiles, part, numel, FRESH=False, **kind)
    assert same(packed, wanted)
    assert same(ours, left)
    assert same(sums, out)


@pytest.mark.parametrize("bits", [2, 5, 8, 16])
def test_without_numbers_it_rounds_to_the_nearest(bits: int) -> None:
    for x in tensors(TILE + 13).values():
        norms, ours, theirs = norms_of(x, 100), here(x), x.clone()
        packed = quantise.quantise(ours, here(norms), 100, bits, None)
        assert same(packed, quantise.quantise_reference(theirs, norms, 100, bits, None))
        assert same(ours, theirs)


def test_codes_fall_as_often_as_they_should() -> None:
    """Chi-square over two levels a value, and the mean within 4 σ, for kernel and reference."""
    numel, bits, s = 40_000, 4, 7
    values = torch.tensor([0.05, -0.31, 0.5, -0.77, 0.99])
    x = values.repeat(numel // 5)
    norms = torch.ones(-(-numel // 500))
    for run in (quantise.quantise, quantise.quantise_reference):
        device = DEVICE if run is quantise.quantise else "cpu"
        generator = torch.Generator(device).manual_seed(SEED)
        left = x.clone().to(device)
        packed = run(left, norms.to(device), 500, bits, generator)
        levels = unpack(packed.cpu(), bits, numel).view(-1, 5) - s
        chi_square = 0.0
        for i, value in enumerate(values.tolist()):
            low = math.floor(abs(value) * s)
            up = abs(value) * s - low
            high = int((levels[:, i].abs() == low + 1).sum())
            assert int((levels[:, i].abs() == low).sum()) + high == len(levels)
            chi_square += (high - len(levels) * up) ** 2 / (len(levels) * up * (1 - up))
            spread = math.sqrt(up * (1 - up) / len(levels)) / s
            mean = levels[:, i].double().mean().item() / s
            assert abs(mean - value) < 4 * spread
        assert chi_square < 20.5  # 5 degrees of freedom: exceeded once in a thousand
        # A number per element: neighbours draw independently of each other.
        up = levels.abs() > (values.abs() * s).floor()
        assert torch.corrcoef(up.T.double()).fill_diagonal_(0).abs().max() < 0.05
        sums = torch.zeros(numel, device=device).add_(left)
        quantise.dequantise(
            packed, norms.to(device), 500, bits, sums, 1.0, payload_validation.codes
        )
        assert torch.allclose(sums.cpu(), x, atol=1e-6)


def test_steps_and_workers_draw_other_numbers() -> None:
    from lightning_gc.testing.contracts import cases

    x = tensors(1000)["normal"].to(DEVICE)
    codec, first = QSGD(4), cases.bucket_of(x)
    codes = [codec.encode(x.clone(), first)[0] for _ in range(2)]
    assert torch.equal(*codes)
    assert not torch.equal(codes[0], codec.encode(x.clone(), first.again())[0])


@pytest.mark.parametrize("scale", [1 / 3, -0.1])
def test_any_weight(scale: float) -> None:
    """Product and sum round once, as torch's do; not in the interpreter of older versions."""
    x = tensors(3000)["normal"]
    norms, size = norms_of(x, 64), 64
    noise = torch.rand(norms.numel() * size, generator=torch.Generator().manual_seed(0))
    packed = quantise.quantise_reference(x.clone(), norms, size, 4, noise)
    ours, theirs = here(x), here(x)
    arrived = (here(packed), here(norms))
    quantise.dequantise(*arrived, size, 4, ours, scale, payload_validation.codes)
    quantise.dequantise_reference(*arrived, size, 4, theirs, scale, payload_validation.codes)
    if INTERPRETED and not rounds_once():
        assert torch.allclose(ours, theirs, rtol=2.0**-22, atol=2.0**-22)
    else:
        assert same(ours, theirs)


def rounds_once() -> bool:
    """Whether both the interpreter and torch on this processor have a fused multiply-add."""
    major, minor = (int(part) for part in version("triton").split(".")[:2])
    return (major, minor) >= (3, 9) and torch.backends.cpu.get_cpu_capability() != "DEFAULT"


@pytest.mark.parametrize("bits", [2, 4, 8, 9])
def test_a_code_that_no_encoder_makes_becomes_nan(bits: int) -> None:
    packed = torch.full((packed_bytes(100, bits),), 255, dtype=torch.uint8, device=DEVICE)
    out = torch.zeros(100, device=DEVICE)
    quantise.dequantise(
        packed, torch.ones(1, device=DEVICE), 100, bits, out, 1.0, payload_validation.codes
    )
    assert out.isnan().all()
