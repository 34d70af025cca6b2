"""The size of DDP's buckets on CUDA follows from the model's size, by the timeline of a step."""

import math
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_gc.advice.description import MODELS
from lightning_gc.exchange.bucketing import (
    MIB,
    RECORDED,
    WRITTEN,
    cap_on_cuda,
    caps,
    layout,
    step_seconds,
)
from tests.support.replay import patient

MODEL = st.lists(st.sampled_from([MIB // 64, 3 * MIB, 9 * MIB, 27 * MIB, 150 * MIB]), max_size=60)


def gradients(model: str) -> list[int]:
    return [4 * math.prod(shape) for shape in MODELS[model]().values()][::-1]


def count(nbytes: Sequence[int], cap: float | None) -> int:
    return len(layout(nbytes, caps(cap)))


@pytest.mark.parametrize(
    ("model", "cap", "buckets", "usual"),
    [("gpt2", 100, 4, 13), ("resnet50", 50, 2, 5), ("llama-1b", 200, 19, 90)],
)
def test_known_models(model: str, cap: int, buckets: int, usual: int) -> None:
    nbytes = gradients(model)
    assert cap_on_cuda(nbytes, WRITTEN) == cap
    assert (count(nbytes, cap), count(nbytes, None)) == (buckets, usual)
    assert cap_on_cuda(nbytes, RECORDED) is None


@pytest.mark.parametrize(
    ("model", "cap", "cost", "gain"), [("gpt2", 100, 1.08, 0.80), ("resnet50", 50, 1.14, 0.74)]
)
def test_what_it_may_cost_and_gain(model: str, cap: float, cost: float, gain: float) -> None:
    """As docs/gpus.md says, for exchanges of up to five backward passes."""

    def relative(cap: float, host: float) -> list[float]:
        theirs, ours = (
            [sum(nbytes[i] for i in bucket) for bucket in layout(nbytes, caps(each))]
            for each in (None, cap)
        )
        paces = [pace / 50 for pace in range(250)]
        return [step_seconds(ours, host, p) / step_seconds(theirs, host, p) for p in paces]

    nbytes = gradients(model)
    assert max(relative(cap, 0.0)) == pytest.approx(cost, abs=0.005)
    assert max(relative(25, 0.0)) <= 1.05
    assert max(relative(cap, WRITTEN)) <= 1.0
    assert min(relative(cap, WRITTEN)) == pytest.approx(gain, abs=0.006)


@patient
@given(MODEL, st.lists(st.floats(0, 0.01), min_size=2, max_size=2))
def test_a_slower_host_never_gets_more_buckets(nbytes: list[int], hosts: list[float]) -> None:
    few, many = (count(nbytes, cap_on_cuda(nbytes, host)) for host in sorted(hosts, reverse=True))
    assert few <= many <= count(nbytes, None)


@patient
@given(st.lists(st.integers(0, 64 << 10), max_size=16))
def test_a_model_within_the_first_bucket_keeps_the_default(nbytes: list[int]) -> None:
    assert cap_on_cuda(nbytes, WRITTEN) is None
