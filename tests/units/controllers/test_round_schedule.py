"""RoundSchedule sets H by epoch, beside a controller of levels, and only where there are rounds."""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import Cast, CompressedFabricStrategy, GrowingRounds, TopK, attach
from lightning_gc.control.control_loop import decision_of
from lightning_gc.controllers import (
    Accordion,
    Chain,
    Controller,
    Decision,
    Needs,
    Observation,
    RoundSchedule,
    Schedule,
)
from lightning_gc.lightning.for_pytorch_lightning import (
    CompressedDDPStrategy,
    CompressedHSDPStrategy,
    LocalStepsStrategy,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
)
from tests.support.replay import replay

RUN = [Observation(epoch - 1, max_epochs=6) for epoch in range(6)]


def test_one_h_an_epoch_and_the_last_one_stays() -> None:
    found = replay(RoundSchedule((1, 8, 32)), RUN)
    assert [each.every for each in found] == [1, 8, 32, 32, 32, 32]
    assert all(each.keeps_levels for each in found)
    assert found[1].reason == "H = 8, 2 of 3 on the schedule."


def test_equal_parts_of_the_run_beside_a_controller_of_levels() -> None:
    both = RoundSchedule((1, 8, 32), by="progress", levels=Schedule((0.5, 0.1)))
    found = replay(both, RUN)
    assert [each.every for each in found] == [1, 1, 8, 8, 32, 32]
    assert [each.level for each in found] == [0.5, 0.1, 0.1, 0.1, 0.1, 0.1]
    assert not any(each.keeps_levels for each in found)


def test_what_is_needed_is_that_of_both() -> None:
    levels = Accordion(low=0.5, high=0.1, interval=2)
    assert RoundSchedule((4, 2), levels=levels).needs == levels.needs | Needs(rounds=(2, 4))
    chained = Chain(RoundSchedule((1,)), RoundSchedule((4, 8)), at_epoch=1)
    assert chained.needs.rounds == (1, 4, 8)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"every": ()}, "at least one number"),
        ({"every": (4, 0)}, "0 is not a number of optimizer steps"),
        ({"every": (4, 2.5)}, "2.5 is not a number"),
        ({"every": (True,)}, "True is not a number"),
        ({"every": (4,), "by": "step"}, "'epoch' or 'progress'"),
    ],
)
def test_settings_that_cannot_work(settings: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValueError, match=rf"RoundSchedule\(.*{sentence}"):
        RoundSchedule(**settings)


@pytest.mark.parametrize(
    "strategy",
    [CompressedDDPStrategy, CompressedFabricStrategy, CompressedHSDPStrategy],
)
def test_strategies_without_rounds_refuse_it(strategy: Any) -> None:
    with pytest.raises(ValueError, match=r"RoundSchedule.*use LocalStepsStrategy"):
        strategy(TopK(0.01), controller=RoundSchedule((4,)))
    with pytest.raises(ValueError, match="use LocalStepsStrategy"):
        SimulatedDDPStrategy(TopK(0.01), workers=2, controller=RoundSchedule((4,)))


def test_attach_refuses_it() -> None:
    module: Any = object.__new__(DistributedDataParallel)
    nn.Module.__init__(module)
    module.module, module.process_group = nn.Linear(2, 2), None
    module.static_graph = module.find_unused_parameters = False
    optimizer = torch.optim.SGD(module.module.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"attach\(.*use LocalStepsStrategy"):
        attach(module, TopK(0.01), controller=RoundSchedule((4,)), optimizers=optimizer)


@pytest.mark.parametrize("strategy", [LocalStepsStrategy, SimulatedLocalStepsStrategy])
@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"every": 8, "delay": 4}, "delay=3 or"),
        ({"every": 8, "fragments": 5}, "use fragments=4 or fewer"),
        ({"every": GrowingRounds(0.1)}, "both set the steps of a round"),
    ],
)
def test_an_h_that_does_not_fit_the_plan_is_refused(
    strategy: Any, settings: dict[str, Any], sentence: str
) -> None:
    more = {"workers": 2} if strategy is SimulatedLocalStepsStrategy else {}
    with pytest.raises(ValueError, match=sentence):
        strategy(Cast(), controller=RoundSchedule((8, 4)), **settings, **more)


def test_a_compressor_without_a_knob_will_do() -> None:
    LocalStepsStrategy(Cast(), controller=RoundSchedule((8, 4)))
    with pytest.raises(ValueError, match="has no level"):
        LocalStepsStrategy(Cast(), controller=RoundSchedule((8, 4), levels=Schedule((0.1,))))


def test_an_h_that_was_not_declared_is_refused() -> None:
    class Undeclared(Controller):
        def init(self) -> dict[str, Any]:
            return {}

        def decide(
            self, observation: Observation, state: dict[str, Any]
        ) -> tuple[Decision, dict[str, Any]]:
            return Decision(None, every=3), state

    with pytest.raises(ValueError, match=r"Undeclared sets H = 3.*Needs\(rounds=\(3,\)\)"):
        decision_of(Undeclared(), RUN[0], {})
