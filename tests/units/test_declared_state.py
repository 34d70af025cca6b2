"""State of compressors, and levels, that are loaded must be as they are declared."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from lightning_gc import PowerSGD, SignSGD, TopK, VarianceCriterion
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.core.saved_state import NOTHING, Number, Numbers
from lightning_gc.engine.engine import compressor_state
from lightning_gc.engine.levels import RequestedLevels
from lightning_gc.testing import Lockstep
from tests.support.damaged_leaves import replaced
from tests.support.instances import ALL

SHAPES = {"w": (24, 96), "b": (19,)}


def kept_by(compressor: Compressor) -> dict[str, Any]:
    """Return what is kept of each parameter after some steps; nothing of most compressors."""
    lockstep = Lockstep(1, compressor)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        given = {n: torch.randn(shape, generator=generator) for n, shape in SHAPES.items()}
        lockstep.step([given])
    kept: dict[str, Any] = lockstep.engines[0].state_dict()["compressor"]
    return kept


def stateful() -> Iterator[tuple[Compressor, dict[str, Any]]]:
    for compressor in ALL:
        if compressor.keeps(SHAPES["w"]) != NOTHING:  # else a law of the contract would see it
            yield compressor, kept_by(compressor)


def test_every_leaf_that_is_replaced_is_refused() -> None:
    """By another type, shape or number, or missing; in every compressor that keeps state."""
    kinds = set()
    for compressor, kept in stateful():
        structure = compressor_state(compressor, SHAPES)
        structure.check(kept)
        assert kept or compressor.level == 1.0, compressor  # at density 1 nothing need be kept
        kinds.add(type(compressor.method).__name__)
        for what, damaged in replaced(kept):
            try:
                structure.check(damaged)
            except ValueError:
                continue
            raise AssertionError(f"{compressor!r}: {what} was accepted")
    assert kinds >= {"PowerSGD", "GradZip", "GradiVeQ", "ModelTopK", "ReusedThreshold"}
    assert "VarianceCriterion" in kinds


def test_state_of_a_compressor_that_declares_none_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"w is .*`keeps` declares no state"):
        compressor_state(TopK(0.1), SHAPES).check({"w": {"steps": 3}})


@pytest.mark.parametrize("levels", [(1e300, {}), (2.0, {}), ("0.1", {}), (0.1, {"w": -1.0}), 0.1])
def test_levels_outside_the_knobs_range_are_refused(levels: Any) -> None:
    RequestedLevels(layerwise(TopK(0.1))).check((0.1, {"w": None}))
    with pytest.raises(ValueError, match="levels"):
        RequestedLevels(layerwise(TopK(0.1))).check(levels, "levels")


def test_levels_that_cannot_be_set_are_refused() -> None:
    """Of a compressor without a knob."""
    RequestedLevels(SignSGD()).check(None)
    RequestedLevels(SignSGD()).check((None, {}))
    with pytest.raises(ValueError, match="the compressor has no knob"):
        RequestedLevels(SignSGD()).check((0.1, {}), "levels")


def test_wrappers_declare_what_the_compressor_inside_keeps() -> None:
    assert layerwise(PowerSGD(2)).keeps((8, 4)) == PowerSGD(2).keeps((8, 4))
    shape = (6, 5)
    assert layerwise(VarianceCriterion()).keeps(shape) == VarianceCriterion().keeps(shape)


@pytest.mark.parametrize(
    ("structure", "value", "why"),
    [
        (Number(0, 1), 2, "is 2, not a finite number in 0..1"),
        (Number(low=1, whole=True), 1.5, "is 1.5, not a whole number of at least 1"),
        (Number(high=3), True, "is True, not a finite number of at most 3"),
        (Numbers((2, (1, 3))), torch.zeros(2, 4), r"has shape \(2, 4\), not \(2, 1..3\)"),
        (Numbers((2,)), torch.zeros(2, 1), r"has shape \(2, 1\), not \(2\)"),
        (Numbers((1,), low=0), -torch.ones(1), "has numbers in -1..-1, not numbers of at least 0"),
        (Numbers((1,), dtype=torch.float64), torch.ones(1), "is of torch.float32, not"),
    ],
)
def test_numbers_and_tensors_in_a_range(structure: Any, value: Any, why: str) -> None:
    with pytest.raises(ValueError, match=f"the state {why}"):
        structure.check(value)
