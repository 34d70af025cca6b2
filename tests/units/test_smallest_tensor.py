"""``min_numel``: which tensors are compressed, the same argument in every way to train."""

import inspect
from typing import Any

import pytest

import lightning_gc
from lightning_gc import (
    COMPRESSORS,
    Cast,
    CompressedDDPStrategy,
    CompressedFabricStrategy,
    CompressedFSDPStrategy,
    CompressedHSDPStrategy,
    Identity,
    LocalStepsStrategy,
    PerParameter,
    SignSGD,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
    SizeSwitch,
    TopK,
)
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default

WAYS: list[tuple[Any, dict[str, Any]]] = [
    (CompressedDDPStrategy, {}),
    (CompressedFabricStrategy, {}),
    (CompressedFSDPStrategy, {"memory": "none"}),
    (CompressedHSDPStrategy, {}),
    (LocalStepsStrategy, {}),
    (SimulatedDDPStrategy, {"workers": 2}),
    (SimulatedLocalStepsStrategy, {"workers": 2}),
]


@pytest.mark.parametrize(("way", "more"), WAYS, ids=[way.__name__ for way, _ in WAYS])
def test_every_way_to_train_takes_it(way: Any, more: dict[str, Any]) -> None:
    def made(compressor: Compressor, **given: Any) -> Compressor:
        strategy = way(compressor, **more, **given)
        parts = getattr(strategy, "configuration", strategy)
        found: Compressor = parts.compressor
        return found

    assert made(TopK(0.1)) == PerParameter(SizeSwitch(TopK(0.1), 1024))
    assert made(TopK(0.1), min_numel=1024) == made(TopK(0.1))
    assert made(TopK(0.1), min_numel=0) == made(PerParameter(TopK(0.1))) == PerParameter(TopK(0.1))
    assert made(TopK(0.1), min_numel=9) == PerParameter(SizeSwitch(TopK(0.1), 9))
    with pytest.raises(ValueError, match=r"Strategy\(min_numel=-1\): .* use 1024, or 0 for every"):
        made(TopK(0.1), min_numel=-1)


def test_the_default_is_one_number() -> None:
    ways = [lightning_gc.attach, by_default, *(way for way, _ in WAYS)]
    found = [inspect.signature(way).parameters["min_numel"].default for way in ways]
    assert found == [1024] * len(ways)


@pytest.mark.parametrize(
    ("min_numel", "shapes"),
    [(1024, {(32, 32)}), (1, {(32, 32), (3, 5)}), (0, {(32, 32), (3, 5), (2048,), ()})],
)
def test_small_and_one_dimensional_tensors_are_left_out(min_numel: int, shapes: set[Any]) -> None:
    compressor = by_default(TopK(0.1), min_numel)
    every = [(32, 32), (3, 5), (2048,), ()]
    assert {shape for shape in every if compressor.compresses(shape)} == shapes


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_the_default_is_what_it_was(name: str) -> None:
    """Elementwise ones and votes compress all; the rest what is large and has two dimensions."""
    compressor = COMPRESSORS[name]()
    whole = by_default(compressor)
    if compressor.traits.elementwise:
        assert whole == compressor
    elif not compressor.traits.conserves:
        assert whole == PerParameter(compressor)
    else:
        assert whole == PerParameter(SizeSwitch(compressor, min_numel=1024, min_dims=2))


@pytest.mark.parametrize(
    "compressor",
    [PerParameter(TopK(0.1)), SizeSwitch(TopK(0.1)), PerParameter(SizeSwitch(TopK(0.1), 5))],
    ids=repr,
)
@pytest.mark.parametrize("min_numel", [0, 5])
def test_beside_a_wrapper_of_the_user_it_is_refused(compressor: Any, min_numel: int) -> None:
    said = rf"Strategy\(min_numel={min_numel}\): .* says itself .*; leave min_numel out"
    with pytest.raises(ValueError, match=said):
        CompressedDDPStrategy(compressor, min_numel=min_numel)


@pytest.mark.parametrize("compressor", [Identity(), Cast(), SignSGD()], ids=repr)
def test_of_one_that_compresses_every_tensor_a_limit_is_refused(compressor: Any) -> None:
    with pytest.raises(ValueError, match=r"compresses every tensor; .* give SizeSwitch\("):
        CompressedDDPStrategy(compressor, min_numel=9)
    assert by_default(compressor, 0) == by_default(compressor)


@pytest.mark.parametrize("value", [-1, 0.5, True, "1024", None])
def test_it_is_a_number_of_elements(value: Any) -> None:
    with pytest.raises(ValueError, match="give the number of elements"):
        by_default(TopK(0.1), value)
