"""Users' mistakes, one a row: what they write, and the sentence that they get, when they write it.

``...`` stands for any words. What can be known at construction is said there; the mistakes that
only a fit can show are in tests of their own.
"""

import inspect
import re
import warnings
from functools import partial
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from lightning_fabric import Fabric
from lightning_fabric.strategies import STRATEGY_REGISTRY

import lightning_gc
from lightning_gc import controllers
from lightning_gc.control.control_loop import decision_of
from lightning_gc.controllers import Controller, Decision, Observation
from lightning_gc.core.settings import CheckedCalls
from lightning_gc.lightning import for_lightning
from tests.support.fitting import fit, quiet_trainer, unwarned
from tests.support.models import Plain, common_batches

MISTAKES = [
    # compressors by name and class
    (
        "CompressedDDPStrategy('TopK')",
        "'TopK' is not a compressor (did you mean 'topk'?); give ...: TopK().",
    ),
    (
        "CompressedDDPStrategy('top_k')",
        "'top_k' is not a compressor (did you mean 'topk'?); give ...: TopK().",
    ),
    (
        "CompressedDDPStrategy('TopK(0.01)')",
        "'TopK(0.01)' is not a compressor (did you mean 'topk'?); give that name, or an "
        "instance: TopK().",
    ),
    (
        "CompressedDDPStrategy('power-sgd')",
        "'power-sgd' is not a compressor (did you mean 'powersgd'?); ...: PowerSGD().",
    ),
    ("CompressedDDPStrategy(TopK)", "TopK is a class; give an instance of it: TopK()."),
    (
        "CompressedDDPStrategy(PerParameter)",
        "PerParameter is a class; give ...PerParameter(inner=...).",
    ),
    (
        "CompressedDDPStrategy(TopK(), memory=ErrorFeedback)",
        "ErrorFeedback is a class; give ...: ErrorFeedback().",
    ),
    ("CompressedDDPStrategy(TopK(), scheme=AllGather)", "AllGather is a class; ...: AllGather()."),
    (
        "CompressedDDPStrategy(TopK(), memory='Residuals')",
        "'Residuals' is not a memory (did you mean 'error_feedback'?); ...: ErrorFeedback().",
    ),
    (
        "CompressedDDPStrategy(TopK(), memory='ef')",
        "'ef' is not a memory (did you mean 'error_feedback'?); ...: ErrorFeedback().",
    ),
    ("CompressedDDPStrategy(TopK(), memory='error_feedback')", None),
    (
        "CompressedDDPStrategy(TopK(), memory='ErrorFeedback')",
        "'ErrorFeedback' is not a memory (did you mean 'error_feedback'?); ...: ErrorFeedback().",
    ),
    (
        "SimulatedDDPStrategy('TopK', workers=2)",
        "'TopK' is not a compressor (did you mean 'topk'?); give ...: TopK().",
    ),
    (
        "CompressedDDPStrategy('wavelet')",
        "'wavelet' is not a compressor; give an instance, such as QSGD(), or a name. lightning-gc "
        "list compressors prints all names.",
    ),
    (
        "CompressedDDPStrategy(None)",
        "None is not a compressor; give an instance, such as QSGD(), or a name. ...",
    ),
    (
        "CompressedDDPStrategy({'bits': 4})",
        "an object of dict is not a compressor; give an instance, such as QSGD(), or a name. ...",
    ),
    # numbers
    (
        "TopK('1%')",
        "TopK(density='1%'): density is a number; write 0.01, without quotes.",
    ),
    ("TopK('0.05')", "TopK(density='0.05'): density is a number; write 0.05, without quotes."),
    ("QSGD('four')", "QSGD(bits='four'): bits is a number; write 4, without quotes."),
    (
        "ErrorFeedback(decay='90 %')",
        "ErrorFeedback(decay='90 %'): decay is a number; write 0.9, ...",
    ),
    (
        "NetworkModel(bandwidth_gbps='10 Gbit')",
        "NetworkModel(bandwidth_gbps='10 Gbit'): bandwidth_gbps is a number; write 10.0, ...",
    ),
    (
        "controllers.TotalErrorBudget(budget='1%', initial=0.1)",
        "TotalErrorBudget(budget='1%'): budget is a number; write 0.01, without quotes.",
    ),
    (
        "controllers.DynamicBitWidth(loss_delta='0.1')",
        "DynamicBitWidth(loss_delta='0.1'): loss_delta is a number; write 0.1, without quotes.",
    ),
    (
        "MomentumCorrection(clip='one')",
        "MomentumCorrection(clip='one'): clip is a number; write 0.01, without quotes.",
    ),
    (
        "controllers.Chain(FIXED, FIXED, at_epoch='one')",
        "Chain(at_epoch='one'): at_epoch is a number; write 1, without quotes.",
    ),
    ("CSER(every=2.0)", None),  # as a file may have it
    ("TopK(density=1.0)", None),  # all of it: allowed
    ("TopK(1.0)", None),
    (
        "TopK(1)",
        "TopK(1): density is a share, and 1 sends every element. Write TopK(0.01) for one "
        "percent, or density=1.0 for all.",
    ),
    ("QSGD(0.01)", "QSGD(bits=0.01): bits is a whole number; use 4."),
    (
        "TopK(1.5)",
        "TopK(density=1.5): density, the share of elements sent, ...; use 0.01 ...",
    ),
    # keyword arguments
    (
        "CompressedDDPStrategy(TopK(), memmory=ErrorFeedback())",
        "CompressedDDPStrategy(memmory=...): unknown argument (did you mean 'memory'?).",
    ),
    (
        "CompressedDDPStrategy(TopK(), find_unused_params=True)",
        "CompressedDDPStrategy(find_unused_params=...): unknown argument (did you mean "
        "'find_unused_parameters'?).",
    ),
    (
        "CompressedDDPStrategy(TopK(), density=0.01)",
        "CompressedDDPStrategy(density=...): unknown argument; give an instance: "
        "TopK(density=0.01).",
    ),
    (
        "CompressedDDPStrategy('qsgd', bits=4)",
        "CompressedDDPStrategy(bits=...): unknown argument; give an instance: QSGD(bits=4).",
    ),
    (
        "SimulatedLocalStepsStrategy('topk', workers=2, density=0.1)",
        "SimulatedLocalStepsStrategy(density=...): ...; give an instance: TopK(density=0.1).",
    ),
    (
        "CompressedDDPStrategy('topk', colour=4)",
        "CompressedDDPStrategy(colour=...): unknown argument.",
    ),
    (
        "LocalStepsStrategy(QSGD(4), H=8)",
        "LocalStepsStrategy(H=...): unknown argument (did you mean 'every'?).",
    ),
    ("CompressedDDPStrategy(QSGD(4), H=8)", "CompressedDDPStrategy(H=...): unknown argument."),
    ("CompressedDDPStrategy(TopK(), bucket_cap_mb=1, start_method='fork', timeout=None)", None),
    (
        "SimulatedDDPStrategy(TopK(), workers=2, devise='cpu')",
        "SimulatedDDPStrategy(devise=...): unknown argument (did you mean 'device'?).",
    ),
    (
        "CompressedDDPStrategy(TopK(), error_feedback=False)",
        "CompressedDDPStrategy(error_feedback=...): unknown argument; memory=NoMemory() turns it "
        "off, memory=ErrorFeedback() on.",
    ),
    (
        "SimulatedLocalStepsStrategy(QSGD(4), workers=2, error_feedback=True)",
        "SimulatedLocalStepsStrategy(error_feedback=...): ...; memory=NoMemory() turns it off, ...",
    ),
    (
        "CompressedFabricStrategy(TopK(), error_feedback=False)",
        "CompressedFabricStrategy(error_feedback=...): ...; memory=NoMemory() turns it off, ...",
    ),
    ("TopK(k=100)", "TopK(k=...): unknown argument (did you mean 'density'?)."),
    ("TopK(ratio=0.01)", "TopK(ratio=...): unknown argument (did you mean 'density'?)."),
    (
        "TopK(colour=4)",
        "TopK(colour=...): unknown argument; it takes density, value_dtype and selection.",
    ),
    ("TwoShot(colour=4)", "TwoShot(colour=...): unknown argument; it takes none."),
    ("ErrorFeedback(decai=0.9)", "ErrorFeedback(decai=...): ... (did you mean 'decay'?)."),
    (
        "NetworkModel(bandwidth='1gbit')",
        "NetworkModel(bandwidth=...): unknown argument (did you mean 'bandwidth_gbps'?).",
    ),
    (
        "CompressionMonitor(every=10)",
        "CompressionMonitor(every=...): unknown argument; Trainer(log_every_n_steps=...) says how "
        "often it logs.",
    ),
    ("CompressionMonitor(10)", "CompressionMonitor was given 1 without a name; it takes none."),
    (
        "TopK(0.01, 'float32', 'exact', 4)",
        "TopK was given 4 without a name; it takes at most 3: density, value_dtype and selection.",
    ),
    (
        "TopK(0.01, density=0.1)",
        "TopK(density=...): the first arguments, without a name, give it already.",
    ),
    (
        "CompressedDDPStrategy()",
        "CompressedDDPStrategy needs compressor; write CompressedDDPStrategy(compressor=QSGD(4)).",
    ),
    ("attach(MODULE)", "attach needs a compressor; write attach(module, QSGD(4))."),
    (
        "LocalSteps(MODULE, QSGD(4), SGD, every=2)",
        "LocalSteps: the order is model, optimizer, compressor; write LocalSteps(model, optimizer, "
        "QSGD(4)).",
    ),
    (
        "CompressedDDPStrategy(QSGD(4), timeout=60)",
        "CompressedDDPStrategy(timeout=60): give a timedelta; write timeout=timedelta(seconds=60).",
    ),
    ("CompressedFabricStrategy(QSGD(4), timeout=60)", "CompressedFabricStrategy(timeout=60): ..."),
    ("CompressedFSDPStrategy(QSGD(4), timeout=60)", "CompressedFSDPStrategy(timeout=60): ..."),
    ("LocalStepsStrategy(QSGD(4), timeout=60)", "LocalStepsStrategy(timeout=60): ..."),
    ("attach(MODULE, QSGD(4), timeout=60)", "attach(timeout=60): give a timedelta; ..."),
    (
        "CompressedDDPStrategy(QSGD(4)).state_key",
        "CompressedDDPStrategy is a strategy, not a callback; write "
        "Trainer(strategy=CompressedDDPStrategy(...)).",
    ),
    (
        "SimulatedDDPStrategy(TopK(0.01))",
        "SimulatedDDPStrategy needs workers; write SimulatedDDPStrategy(..., workers=...).",
    ),
    (
        "SimulatedLocalStepsStrategy()",
        "SimulatedLocalStepsStrategy needs compressor; write ...(compressor=QSGD(4)).",
    ),
    ("CompressedFabricStrategy()", "CompressedFabricStrategy needs compressor; write ..."),
    ("SizeSwitch()", "SizeSwitch needs inner; write SizeSwitch(inner=...)."),
    # what messages show
    (
        "CompressedDDPStrategy(TopK(0.01), scheme=AllReduce())",
        "AllReduce() averages payloads, but payloads of TopK(0.01) are not linear: ...",
    ),
    (
        "CompressedDDPStrategy(SignSGD(), memory=ErrorFeedback(decay=0.9))",
        "ErrorFeedback(decay=0.9) feeds back what was not sent, but the result of SignSGD() is ...",
    ),
    # callbacks and networks
    (
        "Trainer(callbacks=[CompressionMonitor], logger=False)",
        "Trainer(callbacks=[CompressionMonitor]): that is a class; give an instance of it, "
        "CompressionMonitor().",
    ),
    ("SimulatedDDPStrategy(TopK(), workers=2, network='1gbit')", None),
    (
        "SimulatedDDPStrategy(TopK(), workers=2, network='1 GB/s')",
        "SimulatedDDPStrategy(network=...): '1 GB/s' is not a rate (did you mean 8gbit?). ...",
    ),
    # controllers
    ("CompressedDDPStrategy(QSGD(4), controller='dqsgd')", None),
    (
        "CompressedDDPStrategy(TopK(), controller='accordion')",
        "Accordion needs low and high; write Accordion(low=..., high=...).",
    ),
    (
        "LocalStepsStrategy(TopK(), controller='Accordeon')",
        "'Accordeon' is not a controller (did you mean 'accordion'?); give an instance: "
        "Accordion(low=..., high=...).",
    ),
    (
        "CompressedFabricStrategy(QSGD(4), controller='dqsdg')",
        "'dqsdg' is not a controller (did you mean 'dqsgd'?); give that name, or an instance: ...",
    ),
    ("controllers.Accordion()", "Accordion needs low and high; write ..."),
    (
        "CompressedDDPStrategy(TopK(), controller=controllers.Accordion)",
        "CompressedDDPStrategy(controller=Accordion): that is a class; give an instance of it, "
        "Accordion(...).",
    ),
    (
        "CompressedDDPStrategy(TopK(), controller=0.01)",
        "CompressedDDPStrategy(controller=0.01): give an instance, such as ...Fixed(0.01), ...",
    ),
    (
        "decision_of(Halves(), Observation(0), {})",
        "Halves.decide returned 0.5; it returns a pair, the decision and its new state: "
        "`return Decision(0.5), state`.",
    ),
    (
        "decision_of(Forgets(), Observation(0), {})",
        "Forgets.decide returned Decision(level=0.1); it returns a pair, the decision and its new "
        "state: `return Decision(0.1), state`.",
    ),
    (
        "decision_of(Asks(), Observation(0, metrics={'loss': 1.0, 'val_loss': 2.0}), {'seen': 1})",
        "Asks.decide asks for 'val_los', which does not exist (did you mean 'val_loss'?). "
        "observation.metrics has loss, val_loss; its state has seen.",
    ),
    # strategies for the Trainer
    (
        "Trainer(strategy='compressed_ddp_top_k', devices=2, accelerator='cpu')",
        "There is no strategy 'compressed_ddp_top_k'; did you mean "
        "strategy='compressed_ddp_topk'? lightning-gc list compressors prints all methods.",
    ),
    ("Trainer(strategy='compressed_ddp_TopK', devices=2, accelerator='cpu')", None),  # is lowered
    (
        "Trainer(strategy='compressed_ddp_power_sgd', devices=2, accelerator='cpu')",
        "There is no strategy 'compressed_ddp_power_sgd'; ...='compressed_ddp_powersgd'?...",
    ),
    (
        "Trainer(strategy='compressed_fsdp_qsdg', devices=2, accelerator='cpu')",
        "There is no strategy 'compressed_fsdp_qsdg'; ...strategy='compressed_fsdp_qsgd'?...",
    ),
    (
        "Trainer(strategy='local_step', devices=2, accelerator='cpu')",
        "There is no strategy 'local_step'; did you mean strategy='local_steps'?...",
    ),
    (
        "Fabric(strategy='compressed_ddp_top_k', devices=2, accelerator='cpu')",
        "There is no strategy 'compressed_ddp_top_k'; ...strategy='compressed_ddp_topk'?...",
    ),
    (
        "Trainer(strategy='ddp_spwan', devices=2, accelerator='cpu')",
        "You selected an invalid strategy name: `strategy='ddp_spwan'`...",  # Lightning's own words
    ),
    (
        "Trainer(strategy=the_others.CompressedDDPStrategy(TopK()), accelerator='cpu')",
        "This CompressedDDPStrategy is for lightning.pytorch, but it was given to "
        "pytorch_lightning. For pytorch_lightning: `from "
        "lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy`. For "
        "lightning.pytorch: `from lightning_gc.lightning.for_lightning import "
        "CompressedDDPStrategy`.",
    ),
]


class Halves(Controller):
    """Returns a number, which seems natural."""

    returns: Any = 0.5

    def init(self) -> dict[str, Any]:
        return {}

    def decide(self, observation: Observation, state: dict[str, Any]) -> Any:
        return self.returns


class Forgets(Halves):
    """Returns no state."""

    returns = Decision(0.1)


class Asks(Halves):
    """Reads a metric that nobody logs."""

    def decide(self, observation: Observation, state: dict[str, Any]) -> Any:
        return Decision(observation.metrics["val_los"]), state


@pytest.mark.parametrize(("code", "sentence"), MISTAKES, ids=[code for code, _ in MISTAKES])
def test_each_gets_its_sentence(code: str, sentence: str | None) -> None:
    names = {name: getattr(lightning_gc, name) for name in lightning_gc.__all__}
    names |= {"controllers": controllers, "the_others": for_lightning, "Trainer": pl.Trainer}
    names |= {"FIXED": controllers.Fixed(0.1), "Fabric": Fabric}
    linear = torch.nn.Linear(2, 2)
    names |= {"MODULE": linear, "SGD": torch.optim.SGD(linear.parameters(), lr=0.1)}
    names |= {"Halves": Halves, "Forgets": Forgets, "Asks": Asks}
    names |= {"Observation": Observation, "decision_of": decision_of}
    if sentence is None:
        eval(code, names)  # noqa: S307 - the rows above
        return
    with pytest.raises(ValueError, match=r".") as caught:
        eval(code, names)  # noqa: S307 - the rows above
    pattern = ".*".join(re.escape(part) for part in sentence.split("..."))
    literal = re.escape(sentence)
    said = str(caught.value)
    assert re.fullmatch(f"{pattern}|{literal}", said, re.DOTALL), said


@pytest.mark.parametrize("name", sorted({*lightning_gc.__all__, *vars(controllers)["__all__"]}))
def test_no_public_class_refuses_an_argument_in_pythons_words(name: str) -> None:
    """Each class, called with an argument that it does not know, and with 1 as a share."""
    cls: Any = getattr(lightning_gc, name, None) or getattr(controllers, name)
    given = cls
    if not isinstance(cls, CheckedCalls) or inspect.isabstract(cls):
        assert name in PYTHONS_WORDS or not isinstance(cls, type) or inspect.isabstract(cls)
        return
    takes = list(inspect.signature(cls).parameters)
    own = list(inspect.signature(given.__init__).parameters)[1:]
    assert set(own) <= set(takes)
    assert [each for each in takes if each in own] == own
    with pytest.raises(ValueError, match=rf"^{cls.__name__}(\(colour=\.\.\.\): unknown| needs )"):
        cls(colour=4)
    if takes[:1] == ["density"]:
        with pytest.raises(ValueError, match=r"density is a share, and 1 sends every element"):
            cls(1)
        assert cls(density=1.0).density == 1.0


PYTHONS_WORDS = {
    "Candidate",
    "Curve",
    "Decision",
    "ExchangeRecord",
    "LocalSteps",
    "Sender",
    "Needs",
}
PYTHONS_WORDS |= {"Candidate", "Observation", "Point", "Roll", "Together", "Weighed"}
"""Classes that only controllers make, and those that check their arguments themselves."""


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("Topk", "from lightning_gc import TopK"),
        ("ErrorFeedBack", "from lightning_gc import ErrorFeedback"),
        ("TotalErrorBudget", "from lightning_gc.controllers import TotalErrorBudget"),
        ("Acordion", "from lightning_gc.controllers import Accordion"),
    ],
)
def test_a_misspelt_import_says_what_to_write(name: str, meant: str) -> None:
    said = f"has no attribute '{name}'; did you mean `{meant}`"
    with pytest.raises(ImportError, match=said):
        exec(f"from lightning_gc import {name}")
    with pytest.raises(AttributeError, match=said):
        getattr(lightning_gc, name)
    assert not hasattr(lightning_gc, name)


@pytest.mark.parametrize(
    ("package", "name", "meant"),
    [
        ("compressors", "Topk", "TopK"),
        ("controllers", "Acordion", "Accordion"),
        ("memories", "ErorFeedback", "ErrorFeedback"),
        ("schemes", "TwoShots", "TwoShot"),
        ("testing", "LockStep", "Lockstep"),
    ],
)
def test_a_misspelt_import_of_a_package_too(package: str, name: str, meant: str) -> None:
    said = f"has no attribute '{name}'; did you mean `from lightning_gc.{package} import {meant}`"
    with pytest.raises(ImportError, match=said):
        exec(f"from lightning_gc.{package} import {name}")
    found = __import__(f"lightning_gc.{package}", fromlist=["_"])
    assert not hasattr(found, name)
    with pytest.raises(ImportError):
        exec(f"from lightning_gc.{package} import base_of_nothing")
    exec("from lightning_gc.controllers import level_plan")  # a submodule is still found


def test_two_monitors_are_refused_when_training_begins() -> None:
    monitors = [lightning_gc.CompressionMonitor(), lightning_gc.CompressionMonitor()]
    strategy = lightning_gc.SimulatedDDPStrategy(lightning_gc.TopK(0.1), workers=2)
    with unwarned(), pytest.raises(ValueError, match=r"two CompressionMonitors.*; give one\."):
        fit(strategy, Plain, lambda: common_batches(48, 4), callbacks=monitors)


class Adam(Plain):
    """Trained by AdamW.

    Args:
        momentum: β₁.
        optimizer: its class.
    """

    def __init__(self, momentum: float = 0.9, optimizer: Any = torch.optim.AdamW) -> None:
        super().__init__()
        self.momentum, self.optimizer = momentum, optimizer

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters(), betas=(self.momentum, 0.999))


WARNED = (
    "Adam's momentum cost sparsifiers and low-rank methods such as {} 0.3 to 0.5 nats: write "
    "betas=(0.0, 0.999), and tune the learning rate again."
)


@pytest.mark.parametrize(
    ("strategy", "model", "shown"),
    [
        ("SimulatedDDPStrategy(TopK(0.01), workers=2)", Adam, "TopK(0.01)"),
        ("SimulatedDDPStrategy(PowerSGD(1), workers=2)", Adam, "PowerSGD(1)"),
        (
            "SimulatedDDPStrategy(TopK(0.01), workers=2)",
            partial(Adam, optimizer=torch.optim.Adam),
            "TopK(0.01)",
        ),
        ("SimulatedDDPStrategy(TopK(0.01), workers=2)", partial(Adam, 0.0), None),
        ("SimulatedDDPStrategy(TopK(0.01), workers=2)", Plain, None),
        ("SimulatedDDPStrategy(TopK(0.5), workers=2)", Adam, None),  # too many bytes
        ("SimulatedDDPStrategy(QSGD(4), workers=2)", Adam, None),
        ("SimulatedDDPStrategy(TopK(0.01), memory=NoMemory(), workers=2)", Adam, None),
        ("SimulatedLocalStepsStrategy(TopK(0.01), workers=2, every=2)", Adam, None),
    ],
)
def test_adams_momentum_with_few_bytes_is_warned_of_once(
    strategy: str, model: Any, shown: str | None
) -> None:
    names = {name: getattr(lightning_gc, name) for name in lightning_gc.__all__}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(eval(strategy, names), model, lambda: common_batches(48, 4))  # noqa: S307 - rows
    found = [str(each.message) for each in caught if "momentum" in str(each.message)]
    assert found == ([WARNED.format(shown)] if shown else [])


def test_names_that_lightnings_messages_advise() -> None:
    """Every name of Lightning's for ``ddp``, with the same arguments, for ours."""
    registry = pl.strategies.StrategyRegistry
    theirs = {name: registry[name]["init_params"] for name in registry if name.startswith("ddp")}
    assert len(theirs) >= 12
    for name, arguments in theirs.items():
        suffix = name.removeprefix("ddp")
        for ours, compressor in (("compressed_ddp", "cast"), ("compressed_ddp_topk", "topk")):
            given = registry[ours + suffix]["init_params"]
            assert {"start_method": "popen"} | given == arguments | {"compressor": compressor}
    strategy: Any = registry.get("compressed_ddp_notebook_find_unused_parameters_true")
    assert strategy._start_method == "fork"
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}


def test_few_names_are_listed_and_all_are_answered() -> None:
    """Each kind, and DDP with each method; other methods and launchers work without a line."""
    registry: Any = pl.strategies.StrategyRegistry
    listed = {name for name in registry if name in registry.ours}
    kinds = {"compressed_hsdp", "compressed_fsdp", "local_steps", "diloco", "sparseloco"}
    methods = {f"compressed_ddp_{name}" for name in (*lightning_gc.COMPRESSORS, "auto")}
    assert listed == kinds | methods | {"compressed_ddp"}
    assert set(registry.available_strategies()) == set(registry)
    for name in registry.ours - listed:
        assert name in registry
        assert name in registry.available_strategies()
        assert registry[name]["strategy_name"] == name
    for name in ("compressed_ddp_topk_spawn", "local_steps_spawn"):
        assert registry.get(name)._start_method == "spawn"
    assert type(registry.get("compressed_hsdp_topk")).__name__ == "CompressedHSDPStrategy"
    with pytest.raises(ValueError, match="did you mean strategy='compressed_ddp_topk'"):
        registry.get("compressed_ddp_top_k")
    assert registry.get("compressed_ddp_top_k", 5) == 5
    with pytest.raises(KeyError, match="'nonsense' not found in registry"):
        registry.get("nonsense")
    fabrics: Any = STRATEGY_REGISTRY
    assert {name for name in fabrics if name in fabrics.ours} == methods | {"compressed_ddp"}


class LazyNet(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = torch.nn.LazyLinear(4)

    def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.lazy(batch)


class Idle(Plain):
    def configure_optimizers(self) -> Any:
        return None


FITS = (
    "CompressedDDPStrategy(QSGD(4))",
    "SimulatedDDPStrategy(QSGD(4), workers=2)",
    "SimulatedLocalStepsStrategy(QSGD(4), workers=2, every=2)",
)


@pytest.mark.parametrize("code", FITS)
def test_lazy_modules_get_a_sentence_and_no_optimizer_is_needed(code: str) -> None:
    """Torch's own words name no module of the user's; a fit without optimizer runs as on one."""
    names = {name: getattr(lightning_gc, name) for name in lightning_gc.__all__}
    with unwarned():
        fit(eval(code, names), Idle, common_batches(2, 4))  # noqa: S307 - the rows above
        with pytest.raises(ValueError, match="lazy is LazyLinear, whose tensors have no shape"):
            fit(eval(code, names), LazyNet, common_batches(2, 4))  # noqa: S307 - the rows above


def test_lazy_modules_are_validated_as_on_one_device() -> None:
    """Their first batch gives them a shape, which nobody compares there."""
    with unwarned():
        strategy = lightning_gc.SimulatedDDPStrategy(lightning_gc.QSGD(4), workers=2)
        trainer = quiet_trainer(strategy)
        assert trainer.validate(LazyNet(), common_batches(2, 4), verbose=False) is not None
