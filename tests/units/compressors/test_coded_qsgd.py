"""CodedQSGD rounds as QSGD's formula in NumPy does, and its payload is that of few elements."""

import numpy as np
import pytest
import torch

from lightning_gc import CodedQSGD
from lightning_gc.testing import Lockstep
from tests.support.codecs import KINDS, apply, each_kind


@each_kind
@pytest.mark.parametrize("levels", [1, 4, 1000])
def test_multiples_next_to_each_element(kind: str, levels: int) -> None:
    """Of ``‖x‖/s``, and the same for a receiver; or an element as it is, where it is large."""
    x = KINDS[kind].double().numpy()
    unit = np.linalg.norm(x) / levels
    for step in range(5):
        sent, left, payload = apply(CodedQSGD(levels), KINDS[kind], step=step)
        np.testing.assert_allclose(left, x - sent, rtol=1e-4, atol=1e-6 * np.abs(x).max())
        if not x.any():
            assert not sent.any()
            continue
        np.testing.assert_allclose(payload[0].numpy(), unit, rtol=1e-6)
        ratio, number = x / unit, sent / unit
        whole = np.abs(number - ratio) <= 1e-5 * np.abs(ratio)
        down = np.abs(number - np.floor(ratio)) <= 1e-5 * np.maximum(1, np.abs(ratio))
        up = np.abs(number - np.floor(ratio) - 1) <= 1e-5 * np.maximum(1, np.abs(ratio))
        assert (whole | down | up).all()


def test_the_variance_is_that_of_the_formula() -> None:
    """``Σ f·(1 − f)`` squared steps, over draws."""
    x = KINDS["normal"]
    unit = float(x.double().norm()) / 8
    fractions = (x.double().numpy() / unit) % 1
    wanted = unit**2 * (fractions * (1 - fractions)).sum()
    errors = [np.square(apply(CodedQSGD(8), x, step=step)[1]).sum() for step in range(400)]
    assert abs(np.mean(errors) - wanted) < 4 * np.std(errors) / 20


@pytest.mark.parametrize("levels", [1, 10, 100])
def test_few_elements_are_sent(levels: int) -> None:
    x = torch.randn(100_000, generator=torch.Generator().manual_seed(0))
    _, _, payload = apply(CodedQSGD(levels), x)
    sent = CodedQSGD(levels).sent(payload, x.numel())
    assert sent < levels * (levels + np.sqrt(x.numel()))
    assert sum(t.numel() * t.element_size() for t in payload) < 3 * sent + 64


def test_what_is_not_finite_is_sent() -> None:
    for bad in (torch.inf, torch.nan):
        x = KINDS["normal"].clone()
        x[17] = bad
        sent, _, _ = apply(CodedQSGD(8), x)
        assert not np.isfinite(sent[17])


def test_refusals() -> None:
    with pytest.raises(ValueError, match="levels=0"):
        CodedQSGD(0)


@pytest.mark.parametrize("levels", [1, 4])
def test_four_workers_report_finite_errors_of_finite_means(levels: int) -> None:
    """W times the error of the second encoding leaves float32; it was added to the owner's."""
    lockstep = Lockstep(4, CodedQSGD(levels))
    for _ in range(2):
        result = lockstep.step([{"w": torch.full((101,), 1e38)}] * 4)
        assert result.mean["w"].isfinite().all()
        assert all(error["w"].isfinite().all() for error in result.errors)
