"""What a study calls the knob: its field, or ``level`` of the compressor inside."""

import dataclasses
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from lightning_gc import QSGD, Induced, Quantised, Rotated, SizeSwitch, TopK
from lightning_gc.compressors import Choice, Codec, Compressor, Knob, Range
from lightning_gc.compressors.base import Traits
from lightning_gc.compressors.wrappers.wrapper import Preset
from lightning_gc.methods.method import declared, traits_of
from lightning_gc.tuning import Method


@dataclass(frozen=True)
class QuantisedDGC(Preset):
    """A user's name for a wrapper with a memory: the knob is a field of both."""

    density: float = 0.01
    memory_name = "momentum_correction"

    @functools.cached_property
    def inner(self) -> Quantised:
        return Quantised(TopK(self.density), QSGD(4, 64))


@dataclass(frozen=True)
class DenserAtFirst(SizeSwitch):
    """A wrapper whose own field is called as the knob inside."""

    inner: Compressor = field(default_factory=lambda: TopK(0.01))
    density: float = 0.25

    @functools.cached_property
    def traits(self) -> Traits:
        inner = self.inner.traits
        return dataclasses.replace(inner, space=(Range("density", 0.2, 0.5), *inner.level_space))


@dataclass(frozen=True)
class ThreeBits(SizeSwitch):
    """A wrapper of a user's own, which says nothing of a search space."""

    inner: Compressor = field(default_factory=lambda: QSGD(3))


@dataclass(frozen=True)
class Levelled(TopK):
    """A selection whose knob is itself called level, and has no range that could be searched."""

    level: float = 0.1  # type: ignore[assignment]

    traits = Traits(
        "sparsifier",
        knob=Knob("level", low=0, high=math.inf),
        space=(Range("level", 0.01, 1.0, "log"),),
    )


@dataclass(frozen=True)
class TwoLevels(TopK):
    """A field called level beside the knob: which of them is the level?"""

    level: float = 0.5  # type: ignore[assignment]


class InducedOfQuantised(Induced):
    """A wrapper of a wrapper, as a user would name it for a study."""

    def __init__(self, biased: Codec | None = None, unbiased: Codec | None = None) -> None:
        super().__init__(biased or Quantised(TopK(0.02)), unbiased or QSGD(2))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("wrapper", "owner"),
    [
        (Quantised, TopK),
        (Induced, TopK),
        (Rotated, QSGD),
        (InducedOfQuantised, TopK),
    ],
)
def test_the_level_inside_has_the_range_of_its_owner(
    wrapper: type[Compressor], owner: type[Compressor]
) -> None:
    knob = traits_of(owner).knob
    assert knob is not None
    (own,) = (entry for entry in declared(owner) if entry.field == knob.field)
    (level,) = (entry for entry in declared(wrapper) if entry.field == "level")
    assert level == dataclasses.replace(own, field="level")
    least = Method("least", wrapper, fixed={"level": knob.low})
    assert "level" not in [entry.field for entry in least.tuned]
    assert least.make_compressor({}).level == knob.low
    with pytest.raises(
        ValueError, match=rf"{knob.field} is a field of the compressor inside\. Call it"
    ):
        Method("other", wrapper, fixed={knob.field: knob.low})
    with pytest.raises(ValueError, match="leaves the range of its knob"):
        Method("other", wrapper, fixed={"level": 2 * knob.high})


def test_a_preset_around_a_wrapper_has_its_own_name_of_the_knob() -> None:
    method = Method("mine", QuantisedDGC)
    assert method.tuned == declared(TopK)
    made = method.make_compressor({"density": 0.02})
    assert made == QuantisedDGC(0.02)
    assert made.level == 0.02


def test_a_wrapper_of_a_users_own_is_searched_by_the_level_inside() -> None:
    method = Method("mine", ThreeBits)
    assert method.tuned == (Range("level", 2, 8, integer=True),)
    assert method.make_compressor({"level": 5}) == ThreeBits(QSGD(5))


def test_a_field_of_a_wrapper_called_as_the_knob_inside_is_another() -> None:
    method = Method("mine", DenserAtFirst)
    assert method.tuned == (Range("density", 0.2, 0.5), Range("level", 1e-4, 0.1, "log"))
    made = method.make_compressor({"density": 0.3, "level": 0.02})
    assert made == DenserAtFirst(TopK(0.02), density=0.3)


def test_a_knob_called_level_that_has_no_range_to_search() -> None:
    assert declared(Levelled) == (Range("level", 0.01, 1.0, "log"),)
    assert Method("own", Levelled, fixed={"level": 0.5}).make_compressor({}) == Levelled(level=0.5)

    class Holder(Quantised):
        def __init__(self, sparsifier: Any = None, quantiser: Any = None) -> None:
            super().__init__(sparsifier or Levelled(), quantiser)

    assert declared(Holder) == declared(Levelled)


def test_a_field_called_level_that_is_not_the_knob_is_refused() -> None:
    with pytest.raises(ValueError, match="has a field level, but its knob is density"):
        Method("mine", TwoLevels)


@pytest.mark.parametrize(("cls", "name"), [(QSGD, "bits"), (Rotated, "level")])
def test_a_fraction_is_no_whole_number(cls: type[Compressor], name: str) -> None:
    for wrong in (2.5, math.inf, math.nan):
        with pytest.raises(ValueError, match=f"{name} takes integers only, not {wrong}"):
            Method("mine", cls, fixed={name: wrong})
    with pytest.raises(ValueError, match=f"{name} takes integers only, not 2.5"):
        Method("mine", cls, space=(Choice(name, (2, 2.5)),))
    assert Method("mine", cls, fixed={name: 3.0}).make_compressor({}).level == 3
