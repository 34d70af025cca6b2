"""A file's section tune: methods may be a list of names; other shapes are refused by their key."""

from typing import Any

import pytest

from lightning_gc.methods import yaml_config
from lightning_gc.tuning import Method
from lightning_gc.tuning.experiment import load_experiment


def sections(**changes: Any) -> dict[str, Any]:
    """Return a file's sections; ``changes`` are of its section tune, by name."""
    tune = {"name": "toy", "metric": "loss", "space": {"model.x": [0.5]}}
    model = {"class_path": "tests.support.tuning.Bowl", "init_args": {"x": 0.5}}
    data = {"class_path": "tests.support.tuning.Data"}
    trainer = {"accelerator": "cpu", "max_epochs": 1}
    return {"model": model, "data": data, "trainer": trainer, "tune": tune | changes}


@pytest.mark.parametrize("given", [["topk", "qsgd"], {"topk": None, "qsgd": {}}])
def test_methods_may_be_a_list_of_names(given: Any) -> None:
    _, methods = load_experiment(sections(methods=given))
    assert methods == [Method("topk"), Method("qsgd")]
    assert list(yaml_config.methods_in(sections(methods=given))) == ["topk", "qsgd"]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"methods": "topk"}, "tune.methods: 'topk' has no keys. Write some, such as topk: {}, or"),
        ({"methods": [{"topk": {}}]}, "tune.methods: [{'topk': {}}] has no keys"),
        ({"methods": {"topk": 3}}, "tune.methods"),
        ({"space": "model.x"}, "tune.space"),
        ({"space": {"model.x": {"low": "a", "high": 1}}}, "model.x: {'low': 'a', 'high': 1} is no"),
    ],
)
def test_other_shapes_are_refused_by_their_key(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - said is looked for below
        load_experiment(sections(**changes))
    assert said in str(caught.value)


@pytest.mark.parametrize("section", ["tune", "trainer"])
@pytest.mark.parametrize("given", ["abc", ["a"], 3])
def test_a_section_without_keys_is_refused(section: str, given: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"^{section}: .* has no keys. Write some, such as \w+: \w+\.$"
    ):
        load_experiment(sections() | {section: given})
