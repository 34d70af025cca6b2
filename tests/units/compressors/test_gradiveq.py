"""GradiVeQ matches principal components in NumPy, over cycles, for several workers."""

import numpy as np
import pytest
import torch

from lightning_gc import GradiVeQ
from lightning_gc.testing import Lockstep

SHAPE, SLICE, RANK, EVERY, DENSE = (9, 11), 8, 3, 5, 2
CODEC = GradiVeQ(RANK, SLICE, EVERY, DENSE)


def gradient(step: int, worker: int) -> np.ndarray:
    """Slices of few directions, and noise."""
    common = np.random.default_rng(0).standard_normal((4, SLICE)) * [[3], [2], [1], [0.5]]
    draw = np.random.default_rng((step, worker))
    rows = draw.standard_normal((13, 4)) @ common + 0.1 * draw.standard_normal((13, SLICE))
    flat: np.ndarray = rows.reshape(-1)[:99].astype(np.float32)
    return flat.reshape(SHAPE)


def in_rows(flat: np.ndarray) -> np.ndarray:
    return np.pad(flat.reshape(-1).astype(np.float64), (0, -99 % SLICE)).reshape(-1, SLICE)


@pytest.mark.parametrize("workers", [1, 3])
def test_a_loop_in_numpy(workers: int) -> None:
    lockstep = Lockstep(workers, CODEC)
    errors = [np.zeros(SHAPE) for _ in range(workers)]
    moment = np.zeros((SLICE, SLICE))
    for step in range(2 * EVERY + 1):
        given = [gradient(step, worker) for worker in range(workers)]
        result = lockstep.step([{"w": torch.tensor(g)} for g in given])
        xs = [error + g for error, g in zip(errors, given, strict=True)]
        if step % EVERY < DENSE:
            wanted = np.stack(xs).mean(0)
            errors = [np.zeros(SHAPE) for _ in xs]
            moment = moment * (step % EVERY > 0)
            rows = in_rows(wanted)
            moment = moment + rows.T @ rows / np.square(rows).sum()
        else:
            basis = np.linalg.eigh(moment)[1][:, -RANK:]
            sent = [(in_rows(x) @ basis @ basis.T).reshape(-1)[:99].reshape(SHAPE) for x in xs]
            wanted = np.stack(sent).mean(0)
            errors = [x - s for x, s in zip(xs, sent, strict=True)]
        scale = np.abs(wanted).max()
        np.testing.assert_allclose(result.mean["w"].numpy(), wanted, rtol=1e-3, atol=1e-4 * scale)
        for found, error in zip(result.errors, errors, strict=True):
            np.testing.assert_allclose(found["w"].numpy(), error, rtol=1e-3, atol=1e-3 * scale)


def test_slices_of_few_directions_leave_little() -> None:
    lockstep = Lockstep(1, GradiVeQ(4, SLICE, EVERY, DENSE))
    for step in range(DENSE + 1):
        given = torch.tensor(gradient(step, 0))
        result = lockstep.step([{"w": given}])
    left = result.errors[0]["w"].view(-1)[: 12 * SLICE]  # without the slice that is filled up
    assert float(left.norm() / given.norm()) < 0.1


def test_a_resumed_run_goes_on() -> None:
    """In the dense steps, and after them."""
    for resumed_at in (1, 3):
        straight, resumed = (Lockstep(2, CODEC) for _ in range(2))
        for step in range(resumed_at):
            straight.step([{"w": torch.tensor(gradient(step, w))} for w in range(2)])
        for old, new in zip(straight.engines, resumed.engines, strict=True):
            new.load_state_dict(old.state_dict())
        for step in range(resumed_at, 5):
            made = [{"w": torch.tensor(gradient(step, w))} for w in range(2)]
            assert torch.equal(straight.step(made).mean["w"], resumed.step(made).mean["w"])


def test_a_network_that_is_idle_in_the_dense_steps_is_learnt_later() -> None:
    """Two of them in turns; of zeros alone no basis is made, and errors do not grow."""
    lockstep = Lockstep(1, GradiVeQ(RANK, SLICE, every=4, dense_steps=1))
    fixed = torch.tensor(gradient(0, 0))
    applied = torch.zeros_like(fixed)
    for step in range(38):  # the last one is dense
        given = fixed if step % 2 else torch.zeros_like(fixed)
        result = lockstep.step([{"w": given}])
        applied += result.mean["w"]
    torch.testing.assert_close(applied, 19 * fixed, rtol=1e-3, atol=1e-3)


def test_bytes() -> None:
    lockstep = Lockstep(2, CODEC)
    made = [{"w": torch.tensor(gradient(0, w))} for w in range(2)]
    sent = [lockstep.step(made).wire_bytes[0] for _ in range(EVERY)]
    assert sent[0] - sent[-1] == 4 * (99 - 13 * RANK)
    assert sent[:DENSE] == [sent[0]] * DENSE
    assert sent[DENSE:] == [sent[-1]] * (EVERY - DENSE)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="every=10"):
        GradiVeQ(every=10)
    with pytest.raises(ValueError, match="slice_size=1"):
        GradiVeQ(slice_size=1)
