"""NarrowResidual: its formats are those of NumPy's, its errors are kept, and nothing drifts."""

import gc
import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import pytest
import torch
from torch import Tensor

from lightning_gc import QSGD, ErrorFeedback, HardThreshold, NarrowResidual, TopK
from lightning_gc.engine import Engine
from lightning_gc.memories.storage import BFloat16, Int8Blocks, Storage
from lightning_gc.testing import Lockstep
from lightning_gc.testing.contracts import cases
from lightning_gc.testing.contracts.memory import stored
from tests.support.engines import step_alone

Array = np.ndarray
SHAPES = {"matrix": (40, 13), "bias": (19,), "scalar": ()}


def gradients(step: int, workers: int = 2) -> list[dict[str, Tensor]]:
    g = torch.Generator().manual_seed(step)
    return [{n: torch.randn(s, generator=g) for n, s in SHAPES.items()} for _ in range(workers)]


def alive() -> list[Tensor]:
    """Return all tensors; ``isinstance`` would touch what warns when it is touched."""
    gc.collect()
    return [thing for thing in gc.get_objects() if issubclass(type(thing), Tensor)]


def int8_blocks(x: Array, words: Array) -> Array:
    """One block of 32 after the other, in float64: the least step with which codes fit."""
    found = []
    for block, drawn in zip(x.reshape(-1, 32), words.reshape(-1, 32), strict=True):
        k = -126
        while np.abs(block).max() > 127 * 2.0**k:
            k += 1
        found.append(np.floor(block / 2.0**k + (drawn + 0.5) / 65536) * 2.0**k)
    return np.concatenate(found)


def bfloat16(x: Array, words: Array) -> Array:
    """Neighbours in bfloat16 from exponents; up with the probability that the distance gives."""
    step = 2.0 ** (np.floor(np.log2(np.abs(x))) - 7)
    below = np.floor(np.abs(x) / step)
    up = (np.abs(x) / step - below) * 65536 + words >= 65536
    return np.sign(x) * (below + up) * step


@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
def test_formats_in_numpy(scale: float) -> None:
    draw = np.random.default_rng(0)
    x = (scale * draw.standard_normal(320) * 10 ** draw.uniform(-4, 0, 320)).astype(np.float32)
    words = draw.integers(0, 65536, 320)
    for storage, expected in ((Int8Blocks(), int8_blocks), (BFloat16(), bfloat16)):
        kept = storage.rounded(torch.tensor(x), torch.tensor(words, dtype=torch.int32))
        wanted = expected(x.astype(np.float64), words)
        np.testing.assert_array_equal(storage.restored(kept).double().numpy(), wanted)


@pytest.mark.parametrize("largest", [127.0, 127.75, 128.0, 2.0**-140, 3.3e38])
def test_ends_of_the_range(largest: float) -> None:
    """The largest of a block is never out of reach, and never beyond float32."""
    x = torch.linspace(-1, 1, 32) * largest
    storage = Int8Blocks()
    restored = [stored(storage, x, seed) for seed in range(300)]
    for drawn in restored:
        assert drawn.isfinite().all()
        assert ((drawn - x).abs() < storage.step(x)).all()
    ends = [float((drawn[-1] - x[-1]) / storage.step(x)[-1]) for drawn in restored]
    assert abs(sum(ends) / 300) <= 4 * 0.5 / math.sqrt(300)  # a step's half at most, on either side


@pytest.mark.parametrize("storage", [Int8Blocks(), BFloat16()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("word", [0, 1, 65534, 65535])
def test_what_has_been_restored_stays(storage: Storage, word: int) -> None:
    """Whatever is drawn."""
    restored = stored(storage, torch.randn(320, generator=torch.Generator().manual_seed(0)), 0)
    words = torch.full((320,), word, dtype=torch.int32)
    assert torch.equal(storage.restored(storage.rounded(restored, words)), restored)


def test_beyond_the_range() -> None:
    """127 · 2^121 is the largest number: the last hundredth of float32 is cut off, not infinite."""
    x = torch.full((32,), torch.finfo(torch.float32).max)
    assert (stored(Int8Blocks(), x, 0) == 127 * 2.0**121).all()
    assert (stored(BFloat16(), x, 0) == torch.finfo(torch.bfloat16).max).all()


@pytest.mark.parametrize("memory", NarrowResidual.examples(), ids=str)
@pytest.mark.parametrize("compressor", [TopK(0.1), QSGD(4)], ids=str)
def test_each_step_is_that_of_error_feedback(
    memory: NarrowResidual, compressor: TopK | QSGD
) -> None:
    """From stored errors on it is ``ErrorFeedback``; then an element moves less than a step."""
    narrow = Lockstep(2, compressor, memory)
    for step in range(6):
        wide = Lockstep(2, compressor, ErrorFeedback(decay=memory.decay))
        for mine, other in zip(narrow.engines, wide.engines, strict=True):
            other.load_state_dict(mine.state_dict())
        results = [lockstep.step(gradients(step)) for lockstep in (narrow, wide)]
        for name in SHAPES:
            assert torch.equal(results[0].mean[name], results[1].mean[name])
            for worker, engine in enumerate(narrow.engines):
                left = results[1].errors[worker][name].reshape(-1)
                padded = torch.nn.functional.pad(left, (0, -left.numel() % 32))
                room = memory.stored.step(padded)[: left.numel()]
                moved = (engine.errors()[name].reshape(-1) - left).abs()
                assert (moved <= room).all()
                assert moved.any() or name != "matrix"


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "most"), [("int8", 1.1), ("bfloat16", 2.01)])
def test_bytes_kept_of_a_parameter(dtype: Literal["int8", "bfloat16"], most: float) -> None:
    """Of all tensors that are left after a step, but the gradient's."""
    shapes = {"embedding": (1000, 64), "weight": (300, 65), "bias": (300,), "norm": (64,)}
    numel = sum(math.prod(shape) for shape in shapes.values())
    engine = Engine(TopK(0.01), NarrowResidual(dtype))
    before = {id(tensor) for tensor in alive()}
    for _ in range(2):
        step_alone(engine, **{name: torch.randn(shape) for name, shape in shapes.items()})
    left = [tensor for tensor in alive() if id(tensor) not in before]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in left}
    assert numel < sum(storages.values()) <= most * numel


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["int8", "bfloat16"])
def test_small_gradients_beside_a_large_error_add_up(dtype: Literal["int8", "bfloat16"]) -> None:
    """Rounded to the nearest, none of them would ever be seen: a step is 1/64, or 1/256 of 1.

    Nothing is sent. 1,000 steps of 1/1,000 are 1 on average, ± 0.125 for each element in int8.
    """
    engine = Engine(HardThreshold(1000.0), NarrowResidual(dtype))
    small = torch.full((320,), 1e-3)
    small[::32] = 0
    first = small.clone()
    first[::32] = 1
    step_alone(engine, w=first)
    for _ in range(999):
        step_alone(engine, w=small.clone())
    error = engine.errors()["w"]
    assert (error[::32] == 1).all()
    grown = error[small > 0]
    assert abs(float(grown.mean()) - 1) < 4 * 0.125 / math.sqrt(grown.numel())


@pytest.mark.slow
def test_nothing_is_lost_on_average() -> None:
    """What is neither applied nor in the error, over seeds of the rounding alone."""

    def lost(seed: int) -> Tensor:
        lockstep = Lockstep(2, TopK(0.1), NarrowResidual(), seed=seed)
        gap = torch.zeros(SHAPES["matrix"], dtype=torch.float64)
        for step in range(5):
            made = gradients(step)
            gap += sum(m["matrix"].double() for m in made) / 2
            gap -= lockstep.step(made).mean["matrix"]
        return gap - sum(engine.errors()["matrix"].double() for engine in lockstep.engines) / 2

    assert lost(0).norm() > 0
    assert cases.unbiased(lost, torch.zeros(SHAPES["matrix"]), 200)


def test_buckets_that_change_keep_each_error_as_it_is() -> None:
    engine = Engine(TopK(0.1), NarrowResidual())
    step_alone(engine, a=torch.randn(33), b=torch.randn(7, 5), c=torch.randn(64))
    before = {name: error.clone() for name, error in engine.errors().items()}
    step_alone(engine, a=torch.zeros(33), c=torch.zeros(64))
    step_alone(engine, b=torch.zeros(7, 5))
    for name, error in engine.errors().items():
        assert torch.equal(error, before[name]), name


def test_a_skipped_step_gives_the_errors_back() -> None:
    """fp16: the scaler skips the optimizer's step after an overflow."""
    engine = Engine(TopK(0.1), NarrowResidual())
    engine.loss_scaling.revocable = True
    step_alone(engine, w=torch.randn(100))
    before = engine.state_dict()["memory"]["w"]["error"]
    step_alone(engine, w=torch.full((100,), math.inf))
    assert torch.equal(engine.state_dict()["memory"]["w"]["error"], before)


def test_another_memory_goes_on_from_its_errors() -> None:
    narrow, wide = Engine(TopK(0.1), NarrowResidual()), Engine(TopK(0.1), ErrorFeedback())
    step_alone(narrow, w=torch.randn(100))
    wide.load_state_dict(narrow.state_dict())
    assert torch.equal(wide.errors()["w"], narrow.errors()["w"])


def test_refusals() -> None:
    with pytest.raises(ValueError, match=r"dtype='int4'.*use 'int8' or 'bfloat16'"):
        NarrowResidual("int4")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="decay"):
        NarrowResidual(decay=0.0)


@dataclass(frozen=True)
class Rescaled(NarrowResidual):
    lr_aware = True


def test_what_is_rescaled_is_not_stored_in_fewer_bits() -> None:
    with pytest.raises(ValueError, match=r"Rescaled.*keep them in float32"):
        Engine(TopK(0.1), Rescaled())
