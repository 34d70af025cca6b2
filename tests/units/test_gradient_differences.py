"""EF21, DIANA and SAEF match their formulas in NumPy, and keep their means."""

from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import DIANA, EF21, QSGD, SAEF, AllGather, TopK, TwoShot
from lightning_gc.memories import Memory
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from tests.support.memories import (
    SHAPES,
    STEPS,
    TOP,
    WORKERS,
    averaged,
    compare,
    gradients,
    run,
    top,
    zeros,
)


@pytest.mark.parametrize(("memory", "alpha"), [(EF21(), 1.0), (DIANA(0.3), 0.3)])
def test_gradient_differences(memory: Memory, alpha: float) -> None:
    """``c = C(g − h)``, ``h + mean c`` is applied, ``h += α·c``; worker 1's g is 0 at times."""
    h, expected = zeros(), []
    for step in range(STEPS):
        idle = (1,) if step % 4 == 3 else ()
        made, mean = gradients(step, idle), {}
        for name in SHAPES:
            before = averaged([h[i][name] for i in range(WORKERS)])
            sent = []
            for i in range(WORKERS):
                x = made[i][name] - h[i][name]
                sent.append(np.where(top(x), x, 0))
                h[i][name] = h[i][name] + alpha * sent[-1]
            mean[name] = before + averaged(sent)
        expected.append(mean)
    means, engines = run(memory, idle=lambda s: (1,) if s % 4 == 3 else ())
    compare(means, expected)
    for i, engine in enumerate(engines):
        kept = engine.state_dict()["memory"]["w"]
        np.testing.assert_allclose(kept["estimate"].numpy(), h[i]["w"], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_ef21_with_momentum(beta: float) -> None:
    """``m = (1 − β)·m + β·g``, ``h += C(m − h)``; the first step is sent whole."""
    h, m, expected = zeros(), zeros(), []
    for step in range(STEPS):
        made, mean = gradients(step, (1,) if step % 4 == 3 else ()), {}
        for name in SHAPES:
            for i in range(WORKERS):
                m[i][name] = (
                    (1 - beta) * m[i][name] + beta * made[i][name] if step else made[i][name]
                )
                x = m[i][name] - h[i][name]
                h[i][name] = h[i][name] + (np.where(top(x), x, 0) if step else x)
            mean[name] = averaged([h[i][name] for i in range(WORKERS)])
        expected.append(mean)
    means, engines = run(EF21(beta), idle=lambda s: (1,) if s % 4 == 3 else ())
    compare(means, expected)
    for i, engine in enumerate(engines):
        kept = engine.state_dict()["memory"]["w"]
        for buffer, wanted in (("estimate", h), ("average", m)):
            np.testing.assert_allclose(kept[buffer].numpy(), wanted[i]["w"], rtol=1e-4, atol=1e-5)
        gap = m[i]["w"] - h[i]["w"]  # the law: what compression has left
        np.testing.assert_allclose(kept["error"].numpy(), gap, rtol=1e-4, atol=1e-5)


def test_ef21_averages_gradients_that_are_noise() -> None:
    """Of pure noise it applies β / (2 − β) of the variance, if all is sent."""
    sizes = {}
    for memory in (EF21(), EF21(0.05)):
        lockstep, found = Lockstep(1, TopK(0.99), memory), []
        for step in range(200):
            drawn = torch.randn(100, generator=cases.generator(step))
            found.append(float(lockstep.step([{"w": drawn}]).mean["w"].square().mean()))
        sizes[memory] = np.mean(found[100:])
    assert sizes[EF21(0.05)] / sizes[EF21()] == pytest.approx(0.05 / 1.95, rel=0.2)


def test_ef21_with_momentum_of_a_bad_step_keeps_its_average() -> None:
    lockstep = Lockstep(WORKERS, TOP, EF21(0.3))
    states = []
    for step in range(4):
        made = gradients(step)
        made[2]["w"][3, 3] *= np.inf if step == 3 else 1
        lockstep.step([{n: torch.tensor(g).float() for n, g in m.items()} for m in made])
        states.append([e.state_dict()["memory"]["w"]["average"].clone() for e in lockstep.engines])
    assert all(torch.equal(*pair) for pair in zip(states[2], states[3], strict=True))
    assert not torch.equal(states[1][0], states[2][0])


def test_ef21_takes_the_momentum_from_the_optimizer() -> None:
    EF21().check_optimizer({"momentum": 0.95})
    EF21(0.1).check_optimizer({"momentum": 0.0, "betas": (0.0, 0.999)})
    for group in ({"momentum": 0.95}, {"betas": (0.9, 0.999)}):
        with pytest.raises(ValueError, match="SGD or Muon with momentum=0"):
            EF21(0.1).check_optimizer(group)
    with pytest.raises(ValueError, match=r"EF21\(momentum=0\).* use 0.1"):
        EF21(0)


def test_diana_is_right_on_average() -> None:
    """With an unbiased compressor, in a step that has estimates of earlier ones."""
    made = [{"w": torch.randn(60, generator=cases.generator(i))} for i in range(2)]

    def draw(seed: int) -> torch.Tensor:
        lockstep = Lockstep(2, QSGD(2, 16), DIANA(0.3), seed=seed)
        for _ in range(3):
            last = lockstep.step(made)
        return last.mean["w"]

    assert cases.unbiased(draw, (made[0]["w"] + made[1]["w"]) / 2, 200)


@pytest.mark.parametrize("memory", [EF21(), EF21(0.3), DIANA(0.3)], ids=str)
@pytest.mark.parametrize("compressor", [TOP, QSGD(4)], ids=str)
@pytest.mark.parametrize("scheme", [AllGather(), TwoShot()], ids=str)
def test_common_estimate_is_the_mean_of_all(memory: Memory, compressor: Any, scheme: Any) -> None:
    """Also after a step with a gradient that is not finite, and one with a worker without any."""
    lockstep = Lockstep(WORKERS, compressor, memory, scheme)
    for step in range(STEPS):
        made = gradients(step, idle=(1,) if step == 7 else ())
        made[2]["w"][3, 3] *= np.inf if step == 5 else 1
        result = lockstep.step([{n: torch.tensor(g).float() for n, g in m.items()} for m in made])
        assert result.mean["w"].isfinite().all() == (step != 5)
        states = [engine.state_dict()["memory"] for engine in lockstep.engines]
        for name in SHAPES:
            common = states[0][name]["mean_estimate"].numpy()
            mean = averaged([state[name]["estimate"].double().numpy() for state in states])
            np.testing.assert_allclose(common, mean, rtol=1e-4, atol=1e-5)
            assert common.any()


@pytest.mark.parametrize(
    ("memory", "compressor"), [(EF21(), TopK(0.5)), (DIANA(0.25), QSGD(8))], ids=str
)
def test_a_gradient_that_has_become_zero_is_followed(memory: Memory, compressor: Any) -> None:
    """A hinge: −1 below 1, then exactly 0. An estimate that rested would be applied for ever."""
    lockstep, weights = Lockstep(2, compressor, memory), torch.zeros(4)
    for _ in range(300):
        grad = torch.where(weights < 1, -1.0, 0.0)
        weights -= 0.1 * lockstep.step([{"w": grad.clone()}, {"w": grad.clone()}]).mean["w"]
    assert bool((weights < 1.6).all()), weights
    assert not lockstep.step([{"w": torch.zeros(4)}] * 2).mean["w"].any()


def test_gradient_differences_of_steady_gradients_vanish() -> None:
    """EF21 ends at the mean gradient, exactly up to float32, though workers' gradients differ."""
    lockstep, made = Lockstep(WORKERS, TOP, EF21()), gradients(0)
    wanted = averaged([m["w"] for m in made])
    for _ in range(15):
        result = lockstep.step([{n: torch.tensor(g).float() for n, g in m.items()} for m in made])
    np.testing.assert_allclose(result.mean["w"].numpy(), wanted, rtol=1e-5, atol=1e-6)


def test_saef() -> None:
    """The survey's equations 24 to 30, in units of the update at rate η.

    Worker 1 has no gradient at times: it sends nothing, and has its part in the mean error.
    """
    rate, mu = 0.5, 0.6
    e, m, expected = zeros(), zeros(), []
    for step in range(STEPS):
        idle = (1,) if step % 4 == 3 else ()
        made, mean = gradients(step, idle), {}
        for name in SHAPES:
            common = averaged([e[i][name] for i in range(WORKERS)])
            sent = []
            for i in range(WORKERS):
                m[i][name] = mu * m[i][name] + made[i][name]
                delta = common + rate * m[i][name]
                sends = top(delta) & (name != "w" or i not in idle)
                sent.append(np.where(sends, delta, 0))
                e[i][name] = delta - sent[-1]
            mean[name] = averaged(sent) / rate
        expected.append(mean)
    compare(run(SAEF(mu), idle=lambda s: (1,) if s % 4 == 3 else ())[0], expected)
