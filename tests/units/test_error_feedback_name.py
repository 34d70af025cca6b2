"""``ErrorFeedback`` was called ``Residual``: code and names of then still work."""

import pytest

import lightning_gc
from lightning_gc import (
    ErrorFeedback,
    Residual,
    SimulatedDDPStrategy,
    TopK,
    memories,
)
from lightning_gc.engine.compatibility import combine
from lightning_gc.methods.yaml_config import methods_in

OLD = "Residual(decay=0.9, lr_aware=False, gain=1.0)"


def test_the_old_name_is_the_same_class_without_a_warning() -> None:
    assert Residual is ErrorFeedback is memories.Residual is lightning_gc.Residual
    assert repr(Residual(0.9)) == OLD.replace("Residual", "ErrorFeedback")
    assert "Residual" in lightning_gc.__all__


def test_the_registry_has_it_once_and_takes_both_names() -> None:
    assert "error_feedback" in memories.MEMORIES
    assert "residual" not in memories.MEMORIES
    for name in ("residual", "error_feedback"):
        made = SimulatedDDPStrategy(TopK(0.1), memory=name, workers=2)
        assert made.memory == ErrorFeedback()
    assert combine(TopK(0.1))[1] == ErrorFeedback()


@pytest.mark.parametrize("path", ["", "lightning_gc.", "lightning_gc.memories."])
def test_yaml_files_of_then_are_read(path: str) -> None:
    for memory in (f"{path}Residual", {"class_path": f"{path}Residual"}):
        methods = methods_in({"tune": {"methods": {"topk": {"memory": memory}}}})
        assert methods["topk"].memory == ErrorFeedback()
