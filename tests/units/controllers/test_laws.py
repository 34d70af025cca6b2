"""Every controller keeps the laws of controllers: pure decisions, plain state, clear refusals."""

import ast
import copy
import dataclasses
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lightning_gc.controllers
import lightning_gc.core.combinations
import lightning_gc.core.refusal
import lightning_gc.core.registry
import lightning_gc.core.settings
from lightning_gc.controllers import (
    DQSGD,
    Accordion,
    AdaQS,
    Auto,
    BandwidthAware,
    Budget,
    BytesBudget,
    Candidate,
    Chain,
    CongestionAIMD,
    Controller,
    Curve,
    Decision,
    DynamicBitWidth,
    ExchangeRecord,
    Fixed,
    GainSearch,
    LayerBudget,
    Needs,
    Observation,
    Plan,
    Point,
    RoundSchedule,
    Schedule,
    TotalError,
    TotalErrorBudget,
    Weighed,
)
from lightning_gc.lightning.monitor.callback import level_figures
from lightning_gc.lightning.monitor.totals import Totals
from lightning_gc.transports.network_model import NetworkModel
from tests.support.replay import outcome, patient, through_a_checkpoint, through_json

CONTROLLERS: list[Controller] = [
    Fixed(0.01),
    Fixed(None),
    Schedule((0.5, None, 0.1)),
    Schedule((0.5, 0.1), by="progress"),
    Schedule.dgc_warmup(),
    Plan({"a*": 0.5, "*": None}),
    Accordion(low=0.5, high=0.1, interval=1),
    Accordion(low=None, high=0.1, interval=3, threshold=0.2),
    Accordion(low=0.5, high=0.1, interval=2, granularity="model"),
    Accordion(low=0.5, high=0.1, interval=2, detector="minibatch"),
    Accordion(low=0.5, high=0.1, interval=1, decay=1.0),
    DynamicBitWidth(patience=2),
    DynamicBitWidth(patience=1, release_at_last=False),
    DynamicBitWidth(loss_delta=None, allow_decrease=True, release_epochs=2, patience=1),
    TotalError(k_min=0.001),
    TotalErrorBudget(0.05),
    TotalErrorBudget(0.05, initial=1e-3),
    Chain(Schedule.dgc_warmup(0.1), Accordion(low=0.5, high=0.1, interval=1), at_epoch=3),
    Chain(DynamicBitWidth(), TotalErrorBudget(0.1), at_epoch=2),
    LayerBudget(reference=0.1, levels=(0.01, 0.1, 0.5)),
    LayerBudget(reference=0.1, levels=(0.01, 0.1), relative=True, interval=2),
    BytesBudget(500, levels=(0.01, 0.1, 0.5), first=0.1),
    BytesBudget(500, levels=(0.01, 0.1), first=0.1, relative=True, interval=2),
    BandwidthAware((0.5, 0.1, 0.01), step_seconds=1.0),
    CongestionAIMD(seconds=0.5, first=0.1),
    GainSearch((0.5, 0.1, 0.01)),
    DQSGD(bits=5, alpha=0.9),
    AdaQS(bits=2, factor=1.5),
    Auto(),
    Auto(every=4),
    Budget(),
    Budget(0.5, shortest=3, longest=50, levels=Accordion(low=0.5, high=0.1, interval=1)),
    RoundSchedule((1, 8)),
    RoundSchedule((8, 2), by="progress", levels=Accordion(low=0.5, high=0.1, interval=1)),
]
NUMBER = st.floats(0, 1e6) | st.sampled_from([0.0, 1.0])
ANY = NUMBER | st.sampled_from([float("nan"), float("inf")])  # of what is measured or logged


POINTS = st.tuples(ANY, NUMBER)


@st.composite
def curves(draw: st.DrawFn) -> dict[str, Curve]:
    levels = (0.01, 0.1, 0.5)
    return {
        name: Curve(draw(NUMBER), tuple(Point(level, *draw(POINTS)) for level in levels))
        for name in draw(st.sampled_from(["", "a", "ab"]))
    }


CANDIDATES = tuple(Candidate(level, name, 0.0) for level, name in ((1, "a"), (2, "b"), (None, "c")))
WEIGHED = st.none() | st.builds(
    lambda seconds, more: Weighed(
        seconds, tuple(c._replace(step_seconds=m) for c, m in zip(CANDIDATES, more, strict=True))
    ),
    NUMBER,
    st.tuples(*[st.floats(-1, 1)] * 3),
)
RECORDS = st.builds(ExchangeRecord, st.integers(0, 6), NUMBER, NUMBER)


@st.composite
def observations(draw: st.DrawFn, epoch: int, max_epochs: int | None) -> Observation:
    """An epoch as a run may hand it over; now and then a metric or the end is missing."""
    metrics = {"val_accuracy": draw(ANY), "train_loss": draw(ANY), "other": 1.0}
    if draw(st.integers(0, 9)) == 0:
        del metrics["val_accuracy"]
    num_elements = draw(st.integers(1, 10**9))
    return Observation(
        epoch,
        learning_rate=draw(NUMBER),
        next_learning_rate=draw(NUMBER),
        metrics=metrics,
        step_metrics=draw(st.sampled_from([(), ("other", "train_loss")])),
        gradient_norms={name: draw(ANY) for name in "ab"} if epoch >= 0 else {},
        error_norms={"a": draw(NUMBER)},
        total_error=draw(NUMBER),
        steps=draw(st.integers(0, 100)),
        each_step=tuple(draw(st.lists(NUMBER, max_size=8))),
        weighed=draw(WEIGHED),
        total_error_update=draw(NUMBER),
        sizes={name: draw(st.integers(1, 10**6)) for name in "ab"},
        resumed=draw(st.booleans()),
        num_elements=num_elements,
        num_compressed=draw(st.integers(0, num_elements)),
        sent_elements=draw(NUMBER),
        max_epochs=max_epochs,
        progress=max_epochs and (epoch + 1) / max_epochs,
        gradient_noise=draw(NUMBER),
        gradient_squared=draw(NUMBER),
        gradient_dissimilarity=draw(NUMBER),
        error_curves=draw(curves()) if epoch >= 0 else {},
        step_seconds=draw(NUMBER),
        exchanges=tuple(draw(st.lists(RECORDS, max_size=3))),
        bandwidth_gbps=draw(NUMBER),
        link_r2=draw(st.floats(-1, 1)),
    )


@st.composite
def runs(draw: st.DrawFn) -> list[Observation]:
    seen = draw(st.integers(0, 7))
    end = draw(st.none() | st.integers(seen + 1, 12))
    return [draw(observations(epoch, end)) for epoch in range(-1, seen)]


often = pytest.mark.parametrize("examples", [20, pytest.param(500, marks=pytest.mark.nightly)])


def hold(examples: int, law: Callable[[list[Observation]], None]) -> None:
    """Hold a law on runs: by day the same ones, at night others."""
    drawn = given(runs())(law)
    settings(patient, max_examples=examples, derandomize=examples < 100)(drawn)()


@pytest.mark.slow
@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
@often
def test_law_1_it_is_pure(controller: Controller, examples: int) -> None:
    """Equal inputs, equal outcomes; a copy of the controller is as good; inputs are not changed."""
    twin = pickle.loads(pickle.dumps(controller))  # noqa: S301

    def law(run: list[Observation]) -> None:
        state = controller.init()
        assert state == controller.init()
        for observation in run:
            shown, new = outcome(controller, observation, state)
            for again in (controller, twin):
                assert outcome(again, *copy.deepcopy((observation, state)))[0] == shown
            state = new

    hold(examples, law)


@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
@pytest.mark.parametrize(
    "way",
    [pytest.param(through_json, marks=pytest.mark.nightly), through_a_checkpoint],
    ids=lambda f: f.__name__,
)
@often
def test_law_2_its_state_travels(controller: Controller, way: Any, examples: int) -> None:
    """Sent or saved after every epoch, nothing is decided otherwise."""

    def law(run: list[Observation]) -> None:
        straight, travelled = controller.init(), way(controller.init())
        for observation in run:
            shown, straight = outcome(controller, observation, straight)
            same, travelled = outcome(controller, observation, travelled)
            assert same == shown
            travelled = way(travelled)

    hold(examples, law)


@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
def test_law_3_it_cannot_count_workers(controller: Controller) -> None:
    assert not [f.name for f in dataclasses.fields(Observation) if "worker" in f.name]
    assert isinstance(controller.needs, Needs)


@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
def test_it_is_a_frozen_value(controller: Any) -> None:
    name = dataclasses.fields(controller)[0].name
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(controller, name, None)
    for twin in (copy.deepcopy(controller), dataclasses.replace(controller)):
        assert twin == controller
        assert hash(twin) == hash(controller)
        assert repr(twin) == repr(controller)
        assert twin.needs == controller.needs


@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
def test_every_decision_gives_a_reason(controller: Controller) -> None:
    seen = {"val_accuracy": 0.5, "train_loss": 1.0}
    norms, state = {"a": 1.0}, controller.init()
    for epoch in range(-1, 5):
        observation = Observation(
            epoch,
            metrics=seen,
            gradient_norms=norms,
            num_elements=100,
            num_compressed=100,
            max_epochs=9,
            progress=(epoch + 1) / 9,
            steps=7,
            sent_elements=70,
        )
        decision, state = controller.decide(observation, state)
        assert isinstance(decision, Decision)
        assert decision.reason.endswith(".")
        assert all(isinstance(value, int | float) for value in decision.figures.values())


ONES = Totals(**{field.name: 1 for field in dataclasses.fields(Totals)})
MONITORED = {
    *ONES.averages(2),
    *ONES.averages(2, NetworkModel()),
    *level_figures({"a": 0.1, "b": None}),
    *("drift", "outer_step", "rounds", "round_steps"),  # of local steps
    *("workers_on_time", "least_steps", "most_steps", "predicted_seconds"),
}


@pytest.mark.parametrize("controller", CONTROLLERS, ids=repr)
@pytest.mark.parametrize("examples", [5, pytest.param(500, marks=pytest.mark.nightly)])
def test_its_figures_are_not_logged_by_the_monitor_too(
    controller: Controller, examples: int
) -> None:
    """Two meanings would make one curve: figures stand beside the monitor's, under its prefix."""

    def law(run: list[Observation]) -> None:
        state = controller.init()
        for observation in run:
            try:
                decision, state = controller.decide(observation, state)
            except ValueError:  # of a metric that is missing
                continue
            assert not MONITORED & decision.figures.keys()

    hold(examples, law)


def test_every_controller_is_in_the_table() -> None:
    exported = {
        vars(lightning_gc.controllers)[n] for n in vars(lightning_gc.controllers)["__all__"]
    }
    policies = {c for c in exported if issubclass(c, Controller)} - {Controller}
    assert {type(controller) for controller in CONTROLLERS} == policies


MODULES = sorted(Path(lightning_gc.controllers.__file__).parent.glob("*.py"))


BASES = (  # held to the same rule
    *(lightning_gc.core.settings, lightning_gc.core.registry),
    *(lightning_gc.core.combinations, lightning_gc.core.refusal),
)


@pytest.mark.parametrize(
    "path", [*MODULES, *(Path(str(base.__file__)) for base in BASES)], ids=lambda path: path.name
)
def test_standard_library_only(path: Path) -> None:
    allowed = {base.__name__ for base in BASES}
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert node.level <= 1
            names = [] if node.level else [node.module or ""]
        outside = {name.partition(".")[0] for name in names if name not in allowed}
        assert outside <= sys.stdlib_module_names
