"""Registries: which classes have a name, what an unknown name is told, and public paths."""

from dataclasses import dataclass

import pytest

from lightning_gc import COMPRESSORS, PerParameter, SizeSwitch, TopK
from lightning_gc.compressors import Compressor
from lightning_gc.core.registry import concrete, did_you_mean, make, path_of, required_fields


class Base:
    pass


@dataclass
class Ready(Base):
    size: int = 1


@dataclass
class Wraps(Base):
    inner: Base
    size: int = 1


def test_classes_that_need_an_argument_have_no_name() -> None:
    assert required_fields(Wraps) == {"inner"}
    Ready.__module__, Wraps.__module__ = "mine.ready", "mine.wraps"
    assert concrete({"Ready": Ready, "Wraps": Wraps}, Base) == {"ready": Ready}
    assert not {PerParameter, SizeSwitch} & set(COMPRESSORS.values())


def test_a_preset_in_its_familys_file_names_itself() -> None:
    preset = type("Preset", (Ready,), {"registry_name": "old", "__module__": "mine.ready"})
    assert concrete({"Ready": Ready, "Preset": preset}, Base) == {"ready": Ready, "old": preset}


def test_an_unknown_name_is_told_the_closest_one() -> None:
    with pytest.raises(ValueError, match=r"'topkk' is not a compressor \(did you mean 'topk'\?\)"):
        make("compressor", "topkk", COMPRESSORS, Compressor)
    assert did_you_mean("xyz", COMPRESSORS) == ""


def test_public_paths() -> None:
    assert path_of(TopK) == "lightning_gc.compressors.TopK"
    assert path_of(Base) == f"{__name__}.Base"
