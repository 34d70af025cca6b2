"""``torch.set_default_device`` and ``set_default_dtype`` change no bit of an exchange."""

import contextlib
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lightning_gc.compressors import Compressor
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts.cases import generator, label
from tests.support.instances import FIRST, ONE_EACH


@contextlib.contextmanager
def defaults(device: str, dtype: torch.dtype) -> Iterator[None]:
    """Set what a program may set; no tensor of the exchange may be made on ``meta``."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            yield
    finally:
        torch.set_default_dtype(before)


def exchanged(compressor: Compressor) -> list[Tensor]:
    """Return what two workers receive, and their errors, of three steps."""
    draw = generator(0)
    alone = Lockstep(2, compressor)
    found: list[Tensor] = []
    for _ in range(3):
        gradients = [
            {
                "matrix": torch.randn(24, 16, generator=draw, dtype=torch.float32, device="cpu"),
                "zeros": torch.zeros(8, dtype=torch.float32, device="cpu"),
            }
            for _ in range(2)
        ]
        result = alone.step(gradients)
        for tensors in (result.mean, *result.errors):
            found.extend(tensor.clone() for tensor in tensors.values())
    return found


@pytest.mark.parametrize(
    "compressor",
    [pytest.param(c, marks=() if c in ONE_EACH else pytest.mark.nightly) for c in FIRST],
    ids=label,
)
def test_an_exchange_does_not_depend_on_them(compressor: Compressor) -> None:
    usual = exchanged(compressor)
    with defaults("meta", torch.bfloat16):
        other = exchanged(compressor)
    for one, two in zip(usual, other, strict=True):
        assert one.dtype == two.dtype
        assert torch.equal(one, two)
