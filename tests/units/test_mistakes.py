"""Users' mistakes, one a row: what they write, and the sentence that they get, when they write it.

``...`` stands for any words. What can be known at construction is said there; the mistakes that
only a fit can show are in tests of their own.
"""

import re
from typing import Any

import pytest
import pytorch_lightning as pl
from lightning_fabric import Fabric
from lightning_fabric.strategies import STRATEGY_REGISTRY

import lightning_gc
from lightning_gc import controllers
from lightning_gc.control.control_loop import decision_of
from lightning_gc.controllers import Controller, Observation
from lightning_gc.lightning import for_lightning

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
    ("CompressedDDPStrategy(TopK(), memory='residual')", None),  # its old name
    ("CompressedDDPStrategy(TopK(), memory=Residual())", None),
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
        "'wavelet' is not a compressor; give ..., or one of the names ...'topk'...",
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
        "TopK(1.5)",
        "TopK(density=1.5): density is the share of elements sent and ...; use 0.01 ...",
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
    # controllers
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

    def init(self) -> dict[str, Any]:
        return {}

    def decide(self, observation: Observation, state: dict[str, Any]) -> Any:
        return 0.5


@pytest.mark.parametrize(("code", "sentence"), MISTAKES, ids=[code for code, _ in MISTAKES])
def test_each_gets_its_sentence(code: str, sentence: str | None) -> None:
    names = {name: getattr(lightning_gc, name) for name in lightning_gc.__all__}
    names |= {"controllers": controllers, "the_others": for_lightning, "Trainer": pl.Trainer}
    names |= {"FIXED": controllers.Fixed(0.1), "Fabric": Fabric}
    names |= {"Halves": Halves, "Observation": Observation, "decision_of": decision_of}
    if sentence is None:
        eval(code, names)  # noqa: S307 - the rows above
        return
    with pytest.raises(ValueError, match=r".") as caught:
        eval(code, names)  # noqa: S307 - the rows above
    pattern = ".*".join(re.escape(part) for part in sentence.split("..."))
    literal = re.escape(sentence)
    said = str(caught.value)
    assert re.fullmatch(f"{pattern}|{literal}", said, re.DOTALL), said


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
    methods = {f"compressed_ddp_{name}" for name in lightning_gc.COMPRESSORS}
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
