"""The random numbers of QSGD's kernels for whole buckets: unbiased, and a part's own."""

import pytest
import torch
from torch import Tensor

from lightning_gc import QSGD
from lightning_gc.compressors.joint import Part, joined
from lightning_gc.core import Bucket
from lightning_gc.core.bit_packing import unpack
from tests.support.kernel_device import here, marks

pytestmark = marks
NUMEL, STEPS = 2048, 60


def encoded(values: dict[str, Tensor], step: int, worker: int = 0) -> dict[str, Tensor]:
    """Return the levels of each parameter of a bucket, by name."""
    codec, parts, stop = QSGD(4), [], 0
    for place, (name, value) in enumerate(values.items()):
        start, stop = stop, stop + value.numel()
        parts.append(Part(codec, name, start, stop, place))
    flat = here(torch.cat(list(values.values())))
    shapes = {name: tuple(value.shape) for name, value in values.items()}
    bucket = Bucket(flat, shapes, step=step, worker=worker)
    codes, _ = joined(tuple(parts)).encode(flat.clone(), bucket)
    cut = codes.cpu().split([part.numel // 2 for part in parts])
    return {part.name: unpack(own, 4, part.numel) - 7 for part, own in zip(parts, cut, strict=True)}


def test_levels_are_unbiased_and_neighbours_independent() -> None:
    """Each value's mean level is within 4 σ, over steps and elements."""
    values = torch.tensor([1.0, 0.05, -0.31, 0.5, -0.77, 0.93, -0.12, 0.66])
    x = values.repeat(NUMEL // 8)
    levels = torch.stack([encoded({"w": x}, step)["w"] for step in range(STEPS)])
    by_value = levels.view(STEPS, -1, 8).double()
    exact = values.double() * 7
    up = exact.abs().frac()
    sigma = (up * (1 - up) / (STEPS * NUMEL // 8)).sqrt()
    assert ((by_value.mean(dim=(0, 1)) - exact).abs() <= 4 * sigma + 1e-6).all()
    raised = (by_value.abs() > exact.abs().floor())[..., 1:]
    # Neighbours, in all steps; then steps, of the elements 0.5.
    for series in (raised.flatten(0, 1), raised[..., 2].T):
        correlation = torch.corrcoef(series.T.double()).fill_diagonal_(0)
        assert correlation.abs().max() < 5 / len(series) ** 0.5


def test_codes_do_not_depend_on_the_bucket() -> None:
    draw = torch.Generator().manual_seed(0)
    values = {name: torch.randn(n, generator=draw) for name, n in (("a", 600), ("b", 2100))}
    both, turned = encoded(values, 5), encoded(dict(reversed(values.items())), 5)
    for name, value in values.items():
        alone = encoded({name: value}, 5)[name]
        assert torch.equal(both[name], alone)
        assert torch.equal(turned[name], alone)


@pytest.mark.parametrize("change", [{"step": 6}, {"worker": 1}], ids=str)
def test_steps_and_workers_draw_other_numbers(change: dict[str, int]) -> None:
    value = {"w": torch.linspace(-1, 1, 1000)}
    given = {"step": 5, "worker": 0}
    assert not torch.equal(encoded(value, **given)["w"], encoded(value, **(given | change))["w"])
