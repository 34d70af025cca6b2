"""Resuming with changed settings says what changed, and keeps what still fits."""

from typing import Any

import pytest
import torch

from lightning_gc.checkpoint.worker_state import WorkerState, changes
from lightning_gc.core.saved_state import average, each_tensor, reduced

SAME = {"compressor": "TopK(density=0.1)", "memory": "ErrorFeedback()", "controller": "None"}
SHAPES: dict[str, tuple[int, ...]] = {"a": (2, 3), "b": (4,)}


def own(**shapes: tuple[int, ...]) -> WorkerState:
    memory = {name: {"error": torch.ones(shape)} for name, shape in shapes.items()}
    return WorkerState({}, {"memory": memory}, ({"compressor": {"a": {"q": 1}}},))


def test_nothing_is_said_where_nothing_has_changed() -> None:
    found = changes(SAME, SAME, own(**SHAPES), SHAPES)
    assert found.sentences == []
    assert found.same_controller
    assert set(found.memory) == {"a", "b"}
    assert found.compressor == {"a": {"q": 1}}


def test_another_model_is_told_parameter_by_parameter() -> None:
    found = changes(SAME, SAME, own(a=(2, 3), b=(5,), c=(1,)), {**SHAPES, "d": (2,)})
    assert set(found.memory) == {"a"}
    assert found.sentences == [
        "Parameters removed, their errors are dropped: c.",
        "Parameters of another shape, their errors begin at zero: b.",
        "Parameters new, their errors begin at zero: d.",
        "Parameters that keep errors: a.",
    ]


@pytest.mark.parametrize("what", SAME)
def test_every_change_has_a_sentence(what: str) -> None:
    found = changes(SAME, {**SAME, what: "Other()"}, own(**SHAPES), SHAPES)
    (sentence,) = found.sentences
    assert sentence.startswith(f"{what.capitalize()} {SAME[what]} is now Other(): ")
    assert set(found.memory) == {"a", "b"}
    assert bool(found.compressor) == (what != "compressor")
    assert found.same_controller == (what != "controller")


def test_another_compressor_of_weights_is_told() -> None:
    """Checkpoints without compressed weights do not name one."""
    eight = {**SAME, "weights": "Int8()"}
    for before, now, named in (
        (SAME, eight, "None is now Int8()"),
        (eight, SAME, "Int8() is now None"),
    ):
        found = changes(before, now, own(**SHAPES), SHAPES)
        assert found.sentences == [f"Weights' compressor {named}: exact weights are kept."]
        assert found.same_controller
        assert set(found.memory) == {"a", "b"}
    assert not changes(eight, eight, own(**SHAPES), SHAPES).sentences


def test_errors_are_not_said_to_be_kept_and_dropped() -> None:
    """A new compressor brings its default memory, which may keep other buffers, or none."""
    other = {"compressor": "QSGD(bits=4)", "memory": "NoMemory()", "controller": "None"}
    assert changes(SAME, other, own(**SHAPES), SHAPES, ()).sentences == [
        "Compressor TopK(density=0.1) is now QSGD(bits=4): its own state is reset.",
        "Memory ErrorFeedback() is now NoMemory(): error is dropped. To keep the errors, give a "
        "memory with an error buffer, such as ErrorFeedback().",
    ]
    momentum = {**other, "memory": "MomentumCorrection()"}
    buffers = ("error", "velocity")
    assert changes(SAME, momentum, own(**SHAPES), SHAPES, buffers).sentences[1] == (
        "Memory ErrorFeedback() is now MomentumCorrection(): "
        "error is kept, velocity is zero at first."
    )
    none = WorkerState({}, {}, ({"compressor": {}},))
    assert changes(other, {**other, "compressor": "Cast()"}, none, SHAPES, ()).sentences == [
        "Compressor QSGD(bits=4) is now Cast(): there are no errors to keep."
    ]
    assert changes(other, SAME, none, SHAPES).sentences == [
        "Compressor QSGD(bits=4) is now TopK(density=0.1).",
        "Memory NoMemory() is now ErrorFeedback(): error is zero at first.",
    ]


def test_the_mean_of_trees_and_what_is_missing_counts_as_zeros() -> None:
    trees: list[Any] = [
        {"x": {"y": torch.tensor([1.0, 2.0], dtype=torch.bfloat16)}, "n": 4},
        {},
        {"x": {"y": torch.tensor([5.0, 0.0])}, "n": 2.0},
        {"x": {"y": torch.tensor([2.0, 2.0])}, "n": 0},
    ]
    mean = average(trees)
    assert mean["x"]["y"].tolist() == [2.0, 1.0]
    assert mean["x"]["y"].dtype == torch.float32
    assert mean["n"] == 1.5
    assert average([{}, {}]) == {}


def test_trees_are_walked_whole() -> None:
    tree = {"a": {"b": torch.ones(2), "n": 3}, "s": "text"}
    assert each_tensor(tree, lambda t: t * 2)["a"]["b"].tolist() == [2, 2]
    assert tree["a"]["b"].tolist() == [1, 1]  # type: ignore[index, attr-defined]
    assert each_tensor(tree, lambda t: t)["s"] == "text"
    halved = reduced({"a": {"b": torch.ones(2), "n": 3}}, lambda t: t / 2)
    assert halved["a"]["b"].tolist() == [0.5, 0.5]
    assert halved["a"]["n"] == 1.5
