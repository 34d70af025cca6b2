"""LoCo's errors are the moving average that NumPy computes, to a step of their format."""

import numpy as np
import pytest
import torch

from lightning_gc import QSGD, LoCo, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases


def gradients(step: int) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(step)
    return [{"w": torch.randn(96, generator=draw)} for _ in range(2)]


@pytest.mark.parametrize("compressor", [TopK(0.1), QSGD(3)], ids=str)
@pytest.mark.parametrize("memory", LoCo.examples(), ids=str)
def test_formula(memory: LoCo, compressor: Compressor) -> None:
    two = Lockstep(2, compressor, memory)
    errors = [np.zeros(96, np.float64) for _ in range(2)]
    for step in range(7):
        given = gradients(step)
        x = [e + g["w"].double().numpy() for e, g in zip(errors, given, strict=True)]
        result = two.step(given)
        sent = result.mean["w"].double().numpy()
        averages = []
        for worker, engine in enumerate(two.engines):
            kept = engine.errors()["w"]
            left = result.errors[worker]["w"].double().numpy()  # of the round: the new average
            if (step + 1) % memory.every == 0:
                assert not kept.any()
            else:
                unsent = (left - memory.beta * errors[worker]) / (1 - memory.beta)
                averages.append(x[worker] - unsent)
                distance = memory.stored.step(result.errors[worker]["w"])
                assert ((kept - result.errors[worker]["w"]).abs() <= distance).all()
            errors[worker] = kept.double().numpy()
        if averages:  # what was sent is what the average lacks
            assert np.allclose(np.mean(averages, 0), sent, atol=1e-5)


def test_it_is_kept_in_a_byte_and_resumes() -> None:
    assert LoCo().stored.bytes_per_element == 1.03125
    one, other = Lockstep(2, QSGD(4), LoCo(every=5)), Lockstep(2, QSGD(4), LoCo(every=5))
    for step in range(8):
        if step == 4:
            for mine, theirs in zip(one.engines, other.engines, strict=True):
                mine.load_state_dict(theirs.state_dict())
        results = [lockstep.step(cases.gradients(2, step)) for lockstep in (one, other)]
    for name, mean in results[0].mean.items():
        assert torch.equal(mean, results[1].mean[name])


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: LoCo(beta=1.0), r"beta=1.0.*\[0, 1\)"),
        (lambda: LoCo(every=0), "every=0.*1 or more"),
        (lambda: LoCo(dtype="int4"), "'int8' or 'bfloat16'"),  # type: ignore[arg-type]
    ],
)
def test_mistakes(make: type[LoCo], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        make()
