"""What LocalStepsStrategy refuses when it is made, what it warns of, and its names."""

import inspect
from typing import Any

import pytest
from pytorch_lightning.strategies import StrategyRegistry
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import (
    QSGD,
    ErrorFeedback,
    Identity,
    OuterSGD,
    TopK,
)
from lightning_gc.lightning.fabric_for_pytorch_lightning import CompressedFabricStrategy
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy, LocalStepsStrategy
from lightning_gc.lightning.local_steps_strategy import warn_of_few_rounds
from lightning_gc.memories import MomentumCorrection


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"every": 0}, r"every=0\): give the number of optimizer steps"),
        ({"every": True}, "every=True"),
        ({"every": 2.5}, r"every=2\.5"),
        ({"delay": -1}, r"delay=-1\): give the number of steps"),
        ({"every": 4, "delay": 4}, "use delay=3 or less"),
        ({"outer": "sgd"}, r"outer='sgd'\): give an instance, such as OuterSGD\(\)"),
        ({"outer": None}, r"give an instance, such as OuterSGD\(\)"),
        ({"moments": True}, r"give an instance, such as InnerMoments\(\)"),
        ({"merge": "replace"}, "use 'rebase' or 'mix'"),
        ({"show": "mine"}, "use 'common' or 'local'"),
        ({"memory": MomentumCorrection(weight_decay=1e-4)}, r"use memory=ErrorFeedback\(\)"),
        ({"find_unused_parameters": True}, "is for DistributedDataParallel"),
        ({"static_graph": True}, "is for DistributedDataParallel"),
        ({"ddp_comm_hook": print}, "is for DistributedDataParallel"),
        ({"model_averaging_period": 4}, "is for DistributedDataParallel"),
        ({"evry": 4}, "did you mean 'every'"),
        ({"state": "all"}, "use 'full', 'mean' or 'off'"),
        ({"verify": -1}, "LocalStepsStrategy"),
    ],
    ids=str,
)
def test_what_cannot_be(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        LocalStepsStrategy(**{"compressor": TopK(0.1)} | arguments)


@pytest.mark.parametrize("name", ["broadcast_buffers", "forward_sync_buffers"])
def test_how_ddp_shares_buffers_is_for_strategies_with_ddp(name: str) -> None:
    """The second name is torch's from 2.13 on; an older one does not know it."""
    given: dict[str, Any] = {name: False}
    known = name in inspect.signature(DistributedDataParallel.__init__).parameters
    for strategy in (CompressedDDPStrategy, CompressedFabricStrategy):
        if known:
            assert strategy(TopK(0.1), **given)._ddp_kwargs == given
        else:
            with pytest.raises(ValueError, match="unknown argument"):
                strategy(TopK(0.1), **given)
    with pytest.raises(ValueError, match=r"is for DistributedDataParallel|unknown argument"):
        LocalStepsStrategy(TopK(0.1), **given)


def test_names() -> None:
    made = {
        name: StrategyRegistry.get(name)
        for name in ("local_steps", "diloco", "sparseloco", "diloco_spawn", "sparseloco_notebook")
    }
    assert all(isinstance(each, LocalStepsStrategy) for each in made.values())
    assert made["diloco"].plan.outer == OuterSGD(0.7, 0.9, True)
    assert made["diloco"].plan.every == 100
    assert made["diloco"].compressor.method == Identity()
    assert made["sparseloco"].memory == ErrorFeedback(decay=0.95)
    assert made["sparseloco"].plan.outer == OuterSGD()
    assert made["diloco_spawn"]._start_method == "spawn"


def test_a_sparsifier_needs_rounds(recwarn: pytest.WarningsRecorder) -> None:
    """0.8 expected sends of an element trained, 0.2 did not; below 1 there is a warning."""
    warn_of_few_rounds("LocalStepsStrategy", TopK(0.01), 3200, 32)
    warn_of_few_rounds("LocalStepsStrategy", QSGD(4), 10, 10)
    warn_of_few_rounds("LocalStepsStrategy", TopK(0.01), None, 32)
    assert not recwarn
    with pytest.warns(UserWarning, match=r"every=1000\): the run has 20 steps.*every=2, say"):
        warn_of_few_rounds("LocalStepsStrategy", QSGD(4), 20, 1000)
    with pytest.warns(UserWarning, match=r"20 rounds.*0.01 of the elements.*0.05 or more.*every=6"):
        warn_of_few_rounds("LocalStepsStrategy", TopK(0.01), 640, 32)
    with pytest.warns(
        UserWarning, match=r"1 round\. .* harm training\. Use a quantiser, .*, a smaller every"
    ):
        warn_of_few_rounds("LocalStepsStrategy", TopK(0.01), 8, 8)
    with pytest.warns(UserWarning, match=r"Use .* QSGD\(4\), every=2 or less, or more steps\.$"):
        warn_of_few_rounds("LocalStepsStrategy", TopK(0.01), 200, 200)
