"""Memories match their formulas in NumPy, for several workers, step by step."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from lightning_gc import (
    DGC,
    DIANA,
    QSGD,
    SAEF,
    ErrorFeedback,
    ErrorReset,
    GlobalMomentum,
    Hierarchical,
    Identity,
    LocalMomentum,
    MomentumCorrection,
    PowerSGD,
    SignSGD,
    StepAhead,
    TopK,
    WeightedError,
)
from lightning_gc.engine import Engine
from lightning_gc.testing import Lockstep
from tests.support.memories import (
    DENSITY,
    SHAPES,
    STEPS,
    WORKERS,
    averaged,
    compare,
    gradients,
    run,
    top,
    zeros,
)


@pytest.mark.parametrize(("decay", "gain"), [(1.0, 1.0), (0.8, 1.0), (0.9, 0.5)])
def test_residual(decay: float, gain: float) -> None:
    e, expected = zeros(), []
    for step in range(STEPS):
        made, mean = gradients(step), {}
        for name in SHAPES:
            sent = []
            for i in range(WORKERS):
                x = decay * e[i][name] + gain * made[i][name]
                sent.append(np.where(top(x), x, 0))
                e[i][name] = x - sent[-1]
            mean[name] = averaged(sent)
        expected.append(mean)
    compare(run(ErrorFeedback(decay, gain=gain))[0], expected)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("clip", [None, 3.0])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_momentum_correction(nesterov: bool, clip: float | None, decay: float) -> None:
    """Two accumulators, both zero where something is sent. Worker 1 has no gradient at times."""
    weights = {n: np.random.default_rng(99).standard_normal(s) for n, s in SHAPES.items()}
    u, v, expected = zeros(), zeros(), []
    for step in range(STEPS):
        idle = (1,) if step % 3 == 2 else ()
        made, mean = gradients(step, idle), {}
        for name in SHAPES:
            sent = []
            for i in range(WORKERS):
                if name == "w" and i in idle:
                    sent.append(np.zeros(SHAPES[name]))
                    continue
                g = made[i][name]
                if clip is not None:
                    g = g * min(1, clip / np.sqrt(WORKERS) / np.linalg.norm(g))
                g = g + decay * weights[name]
                if nesterov:
                    u[i][name] = 0.9 * (u[i][name] + g)
                    v[i][name] = v[i][name] + u[i][name] + g
                else:
                    u[i][name] = 0.9 * u[i][name] + g
                    v[i][name] = v[i][name] + u[i][name]
                mask = top(v[i][name])
                sent.append(np.where(mask, v[i][name], 0))
                v[i][name] = np.where(mask, 0, v[i][name])
                u[i][name] = np.where(mask, 0, u[i][name])
            mean[name] = averaged(sent)
        expected.append(mean)
    memory = MomentumCorrection(0.9, nesterov, clip, decay)
    means, engines = run(memory, idle=lambda s: (1,) if s % 3 == 2 else (), weights=weights)
    compare(means, expected)
    for i, engine in enumerate(engines):
        kept = engine.state_dict()["memory"]["w"]
        np.testing.assert_allclose(kept["error"].numpy(), v[i]["w"], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(kept["momentum"].numpy(), u[i]["w"], rtol=1e-4, atol=1e-5)


def test_what_is_sent_whole_and_rounded_keeps_its_momentum() -> None:
    """What rounding leaves in the error is no element that waits."""
    exact, rounded = (
        run(MomentumCorrection(0.9), TopK(1.0, value_dtype=dtype))[0]
        for dtype in ("float32", "bfloat16")
    )
    for one, other in zip(exact, rounded, strict=True):
        np.testing.assert_allclose(one["w"], other["w"], rtol=0.02, atol=0.02)


@pytest.mark.parametrize("nesterov", [False, True])
def test_momentum_correction_of_everything_is_momentum_sgd(nesterov: bool) -> None:
    """Density 1: the trajectory of torch's SGD of the mean gradient."""
    weight = torch.nn.Parameter(torch.zeros(SHAPES["w"]))
    sgd = torch.optim.SGD([weight], lr=1.0, momentum=0.9, nesterov=nesterov)
    means, _ = run(MomentumCorrection(0.9, nesterov), TopK(1.0))
    ours = np.zeros(SHAPES["w"])
    for step in range(STEPS):
        weight.grad = torch.tensor(averaged([made["w"] for made in gradients(step)])).float()
        sgd.step()
        ours -= means[step]["w"]
        np.testing.assert_allclose(ours, weight.detach().numpy(), rtol=1e-5, atol=1e-5)


def test_nothing_is_lost_of_velocities() -> None:
    """The law of its docstring, with a velocity that is followed from outside."""
    u, given, sent = zeros(), np.zeros(SHAPES["w"]), np.zeros(SHAPES["w"])
    lockstep = Lockstep(WORKERS, TopK(DENSITY), MomentumCorrection(0.9))
    for step in range(STEPS):
        made = gradients(step)
        result = lockstep.step([{n: torch.tensor(g).float() for n, g in m.items()} for m in made])
        sent += result.mean["w"].numpy()
        for i in range(WORKERS):
            u[i]["w"] = 0.9 * u[i]["w"] + made[i]["w"]
            given += u[i]["w"] / WORKERS
            u[i]["w"][result.errors[i]["w"].numpy() == 0] = 0  # has been sent
    left = averaged([engine.errors()["w"].double().numpy() for engine in lockstep.engines])
    np.testing.assert_allclose(sent + left, given, rtol=1e-4, atol=1e-4)


def test_global_momentum() -> None:
    """The paper's rule, which looks at two models, under plain SGD with rate η."""
    rate, beta = 0.05, 0.7
    weights = [{n: np.zeros(s) for n, s in SHAPES.items()} for _ in range(2)]  # before, now
    e, expected = zeros(), []
    for step in range(STEPS):
        made, mean = gradients(step), {}
        for name in SHAPES:
            sent, motion = [], weights[1][name] - weights[0][name]
            for i in range(WORKERS):
                x = e[i][name] + made[i][name] - beta / rate * motion
                sent.append(np.where(top(x), x, 0))
                e[i][name] = x - sent[-1]
            mean[name] = averaged(sent)
            weights[0][name] = weights[1][name].copy()
            weights[1][name] = weights[1][name] - rate * mean[name]
        expected.append(mean)
    compare(run(GlobalMomentum(beta))[0], expected)


def test_global_momentum_is_common_to_workers_that_rest() -> None:
    """Worker 1 has no gradient in steps 3 to 5; what has been applied is the same for all."""
    _, engines = run(GlobalMomentum(0.7), idle=lambda step: (1,) if 3 <= step <= 5 else ())
    first, *others = [engine.state_dict()["memory"]["w"]["applied"] for engine in engines]
    assert first.any()
    assert all(torch.equal(first, other) for other in others)


def test_local_momentum_with_votes() -> None:
    m, expected = zeros(), []
    for step in range(STEPS):
        made = gradients(step)
        for i in range(WORKERS):
            for name in SHAPES:
                m[i][name] = 0.9 * m[i][name] + 0.1 * made[i][name]
        expected.append({n: np.sign(sum(np.sign(m[i][n]) for i in range(WORKERS))) for n in SHAPES})
    compare(run(LocalMomentum(0.9), SignSGD())[0], expected)


def test_local_momentum_with_values() -> None:
    """Votes know no length: what is sent must be the average itself."""
    m, expected = zeros(), []
    for step in range(STEPS):
        made, mean = gradients(step), {}
        for name in SHAPES:
            for i in range(WORKERS):
                m[i][name] = 0.9 * m[i][name] + 0.1 * made[i][name]
            mean[name] = averaged([np.where(top(w[name]), w[name], 0) for w in m])
        expected.append(mean)
    compare(run(LocalMomentum(0.9))[0], expected)


def test_error_reset_sends_all_in_every_third_step() -> None:
    e, expected = zeros(), []
    for step in range(STEPS):
        made, mean = gradients(step), {}
        for name in SHAPES:
            sent = []
            for i in range(WORKERS):
                x = e[i][name] + made[i][name]
                sent.append(x if step % 3 == 2 else np.where(top(x), x, 0))
                e[i][name] = x - sent[-1]
            mean[name] = averaged(sent)
        expected.append(mean)
    means, engines = run(ErrorReset(every=3))
    compare(means, expected)
    assert not any(error.any() for engine in engines for error in engine.errors().values())


@pytest.mark.parametrize("every", [1, 4])
def test_step_ahead_averages_errors(every: int) -> None:
    """At the end of every n-th step, so that the next forward pass is at the common error."""
    e, expected = zeros(), []
    for step in range(STEPS):
        made, mean = gradients(step), {}
        for name in SHAPES:
            sent = []
            for i in range(WORKERS):
                x = e[i][name] + made[i][name]
                sent.append(np.where(top(x), x, 0))
                e[i][name] = x - sent[-1]
            mean[name] = averaged(sent)
            if (step + 1) % every == 0:
                common = averaged([e[i][name] for i in range(WORKERS)])
                for i in range(WORKERS):
                    e[i][name] = common
        expected.append(mean)
    means, engines = run(StepAhead(average_every=every))
    compare(means, expected)
    first, *others = (engine.errors()["w"] for engine in engines)  # after the 12th step
    assert first.any()
    assert all(torch.equal(other, first) for other in others)


@pytest.mark.parametrize(("alpha", "beta"), [(0.2, 0.9), (1.0, 1.0), (0.5, 0.0)])
def test_weighted_error(alpha: float, beta: float) -> None:
    """``h_t = β·h_{t−1} + (g_{t−1} − q_{t−1})``, ``q_t = C(g_t + α·h_t)``."""
    h, before, expected = zeros(), zeros(), []
    for step in range(STEPS):
        made, mean = gradients(step), {}
        for name in SHAPES:
            sent = []
            for i in range(WORKERS):
                h[i][name] = beta * h[i][name] + before[i][name]
                x = made[i][name] + alpha * h[i][name]
                sent.append(np.where(top(x), x, 0))
                before[i][name] = made[i][name] - sent[-1]
            mean[name] = averaged(sent)
        expected.append(mean)
    compare(run(WeightedError(alpha, beta))[0], expected)


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ErrorFeedback(gain=0.0), "gain"),
        (lambda: MomentumCorrection(1.0), "momentum"),
        (lambda: MomentumCorrection(clip=0.0), "clip"),
        (lambda: MomentumCorrection(masking="all"), "use 'sent'"),  # type: ignore[arg-type]
        (lambda: MomentumCorrection(weight_decay=-1.0), "weight_decay"),
        (lambda: GlobalMomentum(-0.1), "momentum"),
        (lambda: LocalMomentum(1.0), "momentum"),
        (lambda: ErrorReset(0), "every"),
        (lambda: StepAhead(1.5), "alpha"),
        (lambda: StepAhead(average_every=-1), "average_every"),
        (lambda: WeightedError(alpha=0.0), "alpha"),
        (lambda: DIANA(0.0), "alpha"),
        (lambda: SAEF(1.0), "momentum"),
        (lambda: Engine(QSGD(), MomentumCorrection()), "unbiased"),
        (lambda: Engine(Identity(), MomentumCorrection()), "unbiased"),
        (lambda: Engine(PowerSGD(2), MomentumCorrection()), "use LocalMomentum"),
        (lambda: Engine(DGC(), scheme=Hierarchical(2)), "encodes means of several workers"),
        (lambda: Engine(SignSGD(), ErrorFeedback()), "EFSignSGD"),
        (lambda: Engine(SignSGD(), ErrorReset()), "EFSignSGD"),
    ],
)
def test_refusals(make: Callable[[], Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        make()


def test_weight_decay_needs_weights() -> None:
    with pytest.raises(ValueError, match=r"Engine\.flow\(weights=\.\.\.\)"):
        run(MomentumCorrection(weight_decay=0.1))
