"""Each sentence of the table of combinations is what a user gets who gives these settings."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
from torch import nn
from torch.optim.adam import Adam

from lightning_gc import (
    DGC,
    EF21,
    QSGD,
    AllGather,
    AllReduce,
    Cast,
    CompressedDDPStrategy,
    CompressedFSDPStrategy,
    Elastic,
    ErrorFeedback,
    GrowingRounds,
    HardThreshold,
    Hierarchical,
    InnerMoments,
    Int8,
    LocalMomentum,
    LocalSteps,
    LocalStepsStrategy,
    Menu,
    MomentumCorrection,
    NoMemory,
    OuterSGD,
    PowerSGD,
    Sender,
    SignSGD,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
    SizeSwitch,
    SparseReduce,
    StepAhead,
    TopK,
    TwoShot,
    Unequal,
    Uniform,
    VarianceCriterion,
    WeightDifferences,
)
from lightning_gc.attachment.attached import Setup
from lightning_gc.attachment.attached_rounds import Given, Shards
from lightning_gc.compressors.sparsifiers.model_topk import ModelTopK
from lightning_gc.controllers import (
    DQSGD,
    Accordion,
    Auto,
    BandwidthAware,
    Budget,
    CongestionAIMD,
    DynamicBitWidth,
    Fixed,
    GainSearch,
    LayerBudget,
    RoundSchedule,
    TotalError,
    TotalErrorBudget,
)
from lightning_gc.core.combinations import RULES, judge, shown
from lightning_gc.engine.compatibility import combine
from lightning_gc.exchange import Compression, WayIn
from lightning_gc.exchange.validation import check_controller
from lightning_gc.local_steps import RoundPlan
from lightning_gc.memories.storage import BFloat16
from lightning_gc.methods.catalogue import markdown, plain
from lightning_gc.sharded.shard_validation import (
    check_tensor_parallel,
)
from lightning_gc.sharded.unit_scatters import ReduceScatter
from lightning_gc.testing import Lockstep
from lightning_gc.tuning import Experiment

ELASTIC = Elastic("127.0.0.1:1")
LATE = Unequal(grace=1.0)
SCALER: Any = type("Scaler", (), {"is_enabled": lambda self: True})()


@dataclass(frozen=True)
class Rounded(ErrorFeedback):
    """Stores errors in bfloat16 and rescales them."""

    lr_aware: bool = True

    @property
    def stored(self) -> BFloat16:
        return BFloat16()


def rounds(compressor: Any = "qsgd", **settings: Any) -> Callable[[], object]:
    return lambda: LocalStepsStrategy(compressor, **settings)


def simulated(**settings: Any) -> Callable[[], object]:
    return lambda: SimulatedLocalStepsStrategy(QSGD(4), **settings)


def loop(**settings: Any) -> Callable[[], object]:
    model: Any = nn.Linear(2, 2)
    return lambda: LocalSteps(model, Adam(model.parameters()), QSGD(4), **settings)


def fsdp(gradients: Any = "qsgd", **settings: Any) -> Callable[[], object]:
    return lambda: CompressedFSDPStrategy(gradients, **settings)


def shards(scaler: Any = None, **settings: Any) -> Callable[[], object]:
    configuration = Compression(QSGD(4)).configured("attach")
    plan = RoundPlan(island=2, **settings)
    given = Given(configuration, None, scaler=scaler)
    return lambda: Shards(nn.Linear(2, 2), 2).refuse(plan, given)


def hooked(memory: Any) -> Callable[[], object]:
    way = WayIn("attach")
    compression = Compression(TopK(0.1), memory).resolved(way)
    return lambda: Setup.of_loop(way, compression, [], nn.Linear(2, 2))


def controlled(controller: Any, compressor: Any, memory: Any = None, **more: Any) -> Any:
    memory = combine(compressor, memory)[1]
    return lambda: check_controller(controller, compressor, memory, "attach", **more)


def experiment(**settings: Any) -> Experiment:
    return Experiment(name="e", build=lambda trial: (), metric="loss", **settings)


def said(place: str, **given: Any) -> Callable[[], object]:
    """What needs a Trainer, several processes or shards: judged without them."""
    return lambda: judge(place, "Owner", **given)


THREE = Menu({"a": DGC(), "b": TopK(0.01), "c": QSGD(4)})
TRACED = BandwidthAware((8, 4), 0.1, trace="trace.jsonl")
CASES: Mapping[str, tuple[Callable[[], object], ...]] = {
    "Memory": (
        lambda: combine(TopK(), Rounded()),
        lambda: Lockstep(2, VarianceCriterion(), memory=NoMemory()),
        lambda: combine(SignSGD(), ErrorFeedback()),
    ),
    "MomentumCorrection": (
        lambda: combine(QSGD(), MomentumCorrection()),
        lambda: combine(PowerSGD(), MomentumCorrection()),
        lambda: combine(TopK(), MomentumCorrection(), Hierarchical()),
    ),
    "Menu": (lambda: combine(THREE),),
    "Scheme": (
        lambda: combine(PowerSGD(), scheme=AllGather()),
        lambda: combine(TopK(), scheme=AllReduce()),
        lambda: combine(VarianceCriterion(), scheme=TwoShot()),
    ),
    "Hierarchical and TwoHop": (lambda: combine(SignSGD(), scheme=Hierarchical()),),
    "SparseReduce": (lambda: combine(QSGD(), scheme=SparseReduce()),),
    "min_numel": (
        lambda: CompressedDDPStrategy(SizeSwitch(TopK()), min_numel=5),
        lambda: CompressedDDPStrategy(Cast(), min_numel=5),
    ),
    "Optimizer": (
        lambda: LocalMomentum().check_optimizer({"betas": (0.9, 0.99)}),
        lambda: MomentumCorrection().check_optimizer({"weight_decay": 1e-4}),
    ),
    "Training loop": (
        hooked(StepAhead()),
        said("Training loop", memory=StepAhead(), way="manual optimization", optimizers=()),
        hooked(ErrorFeedback(lr_aware=True)),
        said("Training loop", memory=ErrorFeedback(lr_aware=True), way="Fabric", optimizers=()),
    ),
    "Decisions": (said("Decisions", name="controller", given=Fixed(0.1), optimizers=[]),),
    "Controller": (
        controlled(TotalErrorBudget(1.0), HardThreshold(0.1), NoMemory()),
        controlled(RoundSchedule((4,)), TopK(), rounds=False),
    ),
    "Controller and level": (controlled(Fixed(0.1), Cast()), controlled(Fixed(3.0), TopK())),
    "Accordion": (controlled(Accordion(low=0.01, high=0.25), TopK()),),
    "DynamicBitWidth": (
        controlled(DynamicBitWidth(((0.5, 0.01), (0.6, 0.1), (0.7, 0.01)), mode="max"), TopK()),
    ),
    "GainSearch": (controlled(GainSearch((0.01, 0.1)), TopK()),),
    "BandwidthAware": (
        controlled(BandwidthAware((0.2, 0.1), 1.0), HardThreshold(0.1)),
        controlled(BandwidthAware((0.01, 0.1), 1.0), TopK()),
    ),
    "CongestionAIMD": (controlled(CongestionAIMD(0.1, 0.2, 0.1), HardThreshold(0.1)),),
    "DQSGD and AdaQS": (controlled(DQSGD(), TopK()),),
    "Controllers of a threshold": (controlled(TotalError(), TopK()),),
    "Auto": (
        controlled(Auto(), TopK()),
        fsdp("auto"),
        rounds("auto"),
        lambda: CompressedDDPStrategy("auto", controller=Accordion(low=2, high=1)),
        lambda: CompressedDDPStrategy("auto_rounding", controller=Auto(THREE)),
    ),
    "weights_controller": (
        fsdp(weights_controller=Fixed(8)),
        fsdp(weights=WeightDifferences(), weights_controller=Fixed(8)),
        fsdp(weights=Int8(), weights_controller=Fixed(8)),
        fsdp(weights=Uniform(8), weights_controller=LayerBudget()),
        fsdp(weights=Uniform(8), weights_controller=Fixed(8), controller=TRACED),
    ),
    "Local steps": (
        rounds(every=4, fragments=5),
        rounds(every=9, fragments=3, delay=3),
        rounds(moments=InnerMoments(), delay=1),
        rounds(island=2, unequal=Unequal()),
        rounds(unequal=LATE, delay=1),
        rounds(unequal=LATE, fragments=2),
        rounds(unequal=LATE, moments=InnerMoments()),
    ),
    "Budget of local steps": (rounds(every=Budget(), controller=RoundSchedule((1, 2))),),
    "Local steps exchange differences of weights": (
        rounds(SignSGD()),
        rounds(memory=ErrorFeedback(lr_aware=True)),
        rounds(memory=StepAhead()),
        rounds(TopK(), memory=MomentumCorrection(), outer=OuterSGD.diloco()),
        rounds(HardThreshold(0.1), controller=TotalErrorBudget(1.0)),
        rounds(every=GrowingRounds(0.1), controller=RoundSchedule((8, 4))),
    ),
    "LocalSteps": (
        loop(every=Budget()),
        loop(elastic=ELASTIC, timeout=timedelta(seconds=1)),
        loop(unequal=Unequal(pace="measured")),
        loop(unequal=Unequal(pace="equal", weigh="tokens")),
    ),
    "Local steps between processes": (rounds(unequal=LATE),),
    "Local steps of a model in shards": (
        shards(elastic=ELASTIC),
        shards(SCALER),
    ),
    "Elastic local steps": (
        rounds(elastic=ELASTIC, fragments=2),
        rounds(elastic=ELASTIC, moments=InnerMoments()),
        rounds(elastic=ELASTIC, unequal=Unequal(pace="equal")),
        rounds(elastic=ELASTIC, controller=Fixed(4)),
        rounds(elastic=ELASTIC, verify=1),
        rounds(elastic=ELASTIC, scheme="hierarchical"),
    ),
    "Models in shards": (said("Models in shards", controller=LayerBudget()),),
    "Tensor-parallel ranks": (lambda: check_tensor_parallel("attach", 2, ModelTopK()),),
    "FSDP": (fsdp(None), fsdp(workers_per_node=2)),
    "FSDP's shards": (
        lambda: ReduceScatter().check(PowerSGD()),
        lambda: ReduceScatter().check(VarianceCriterion()),
        lambda: ReduceScatter().check(SignSGD()),
    ),
    "FSDP's errors": (fsdp(memory=ErrorFeedback()), fsdp(TopK())),
    "attach to a model in shards": (said("attach to a model in shards", scaler=SCALER),),
    "attach to a model in shards without replicas": (
        said("attach to a model in shards without replicas", name="scheme", value=TwoShot()),
    ),
    "attach to another module": (said("attach to another module", name="hops", value=2),),
    "DistributedDataParallel": (
        lambda: CompressedDDPStrategy(TopK(), ddp_comm_hook=print),  # type: ignore[call-arg]
        lambda: CompressedDDPStrategy(TopK(), mixed_precision=object()),  # type: ignore[call-arg]
    ),
    "Arguments of DistributedDataParallel": (
        rounds(island=2, ddp_comm_hook=print),
        rounds(find_unused_parameters=True),
    ),
    "static_graph": (said("static_graph", static_graph=True, automatic=False, old=True),),
    "LocalSteps and the module": (said("LocalSteps and the module", automatic=False),),
    "LocalSteps and callbacks": (
        said("LocalSteps and callbacks", names={"ModelPruning"}, callback="ModelPruning"),
        said("LocalSteps and callbacks", names={"WeightAveraging"}, callback="EMA"),
    ),
    "Elastic Trainer": (said("Elastic Trainer", plan=RoundPlan(elastic=ELASTIC), max_steps=-1),),
    "Local steps of a sharded module": (
        said("Local steps of a sharded module", plan=RoundPlan(island=2), state="mean"),
    ),
    "Simulated workers": (lambda: SimulatedDDPStrategy(TopK(), workers=2, verify=1),),
    "Simulated local steps": (
        simulated(workers=2, elastic=ELASTIC),
        simulated(speeds=(1.0, 0.5), roll="roll.jsonl"),
        simulated(workers=3, speeds=(1.0, 0.5)),
        simulated(workers=2, unequal=LATE),
    ),
    "Experiment": (
        lambda: experiment(budget=1.0, objective="pareto"),
        lambda: experiment(workers=2, devices=2),
        said("Experiment", of=experiment(devices=2), has_groups=False, platform="win32"),
    ),
    "Trainer of an experiment": (
        lambda: experiment(workers=2, trainer={"accumulate_grad_batches": 3}),
    ),
    "Sender": (lambda: Sender(TopK(), StepAhead()), lambda: Sender(TopK(), EF21())),
    "Compressors of a Menu": (
        lambda: Menu({"a": THREE, "b": Cast()}),
        lambda: Menu({"a": SignSGD(), "b": Cast()}),
        lambda: Menu({"a": ModelTopK(), "b": Cast()}),
    ),
}


def pattern(sentence: str) -> str:
    """The sentence with anything for its values."""
    return "".join(
        ".+?" if part.startswith("{") else re.escape(part)
        for part in re.split(r"(\{[^}]*\})", sentence)
    )


ROWS = [(place, number) for place, rules in RULES.items() for number in range(len(rules))]


@pytest.mark.parametrize(("place", "number"), ROWS, ids=str)
def test_settings_that_do_not_go_together_are_refused(place: str, number: int) -> None:
    """By the row's own sentence, so each row has a call that reaches it."""
    sentence = list(RULES[place])[number]
    with pytest.raises(ValueError, match=rf"(?s)\A{pattern(sentence)}\Z"):
        CASES[place][number]()


def test_each_sentence_names_a_fix() -> None:
    """After a semicolon or a full stop, or it names what is to be given."""
    for rules in RULES.values():
        for sentence in rules:
            assert re.search(r"[;.] \w|give ", sentence), sentence
            assert sentence.endswith("."), sentence


def test_the_table_shows_names_for_values() -> None:
    for rules in RULES.values():
        for sentence in rules:
            assert "{" not in shown(sentence)
    table, text = markdown("combinations"), plain("combinations", 120)
    assert len(table.splitlines()) == len(ROWS) + 2
    assert "| Elastic local steps | " in table
    assert "elastic=..., moments=...: a worker that joins" in text
