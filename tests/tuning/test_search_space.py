"""Search spaces follow the compressors' declarations; contradictions are refused."""

import contextlib
import dataclasses
import importlib.util
import io
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import optuna
import pytest

from lightning_gc import (
    COMPRESSORS,
    QSGD,
    ErrorFeedback,
    HardThreshold,
    Identity,
    MomentumCorrection,
    PerParameter,
    SizeSwitch,
    TopK,
    cli,
)
from lightning_gc.compressors import Choice, Codec, Knob, Range
from lightning_gc.compressors.base import Traits
from lightning_gc.methods.method import as_json, declared, parse, parse_all, traits_of
from lightning_gc.tuning import Method, RoundPlan
from tests.support.processes import run_in_processes

DEMO = Path(__file__).parents[2] / "configs" / "demo.yaml"


@dataclass(frozen=True)
class Plugin(Codec):
    """A compressor of a user's own: two fields that are tuned, one that is not."""

    share: float = 0.1
    shape: str = "round"
    silent: bool = False

    traits = Traits(
        "sparsifier",
        knob=Knob("share", low=0.01, high=1.0),
        space=(Choice("shape", ("round", "square")),),
    )

    encode = decode = bound = wire = None  # type: ignore[assignment]


def drawn(method: Method, number: int = 0) -> dict[str, Any]:
    sampler = optuna.samplers.RandomSampler(seed=number)
    trial = optuna.create_study(sampler=sampler).ask()
    method.suggest_compressor(trial)
    method.suggest_memory(trial)
    return trial.params


@pytest.mark.parametrize("name", sorted(COMPRESSORS))
def test_every_registered_compressor_can_be_drawn_from_its_declaration(name: str) -> None:
    cls = COMPRESSORS[name]
    method = Method(name)
    fields = [entry.field for entry in declared(cls)]
    knob = traits_of(cls).knob
    assert knob is None or knob.field in fields or "level" in fields
    for number in range(5):
        params = drawn(method, number)
        given = {n.partition(".")[2]: v for n, v in params.items() if n.startswith("compressor.")}
        assert list(given) == fields
        compressor = method.make_compressor(given)
        if knob is not None:
            level = given.get(knob.field, given.get("level"))
            assert isinstance(level, int | float)
            assert knob.clamp(level) == level == compressor.level


def test_a_plug_in_is_searched_without_a_word_about_it_elsewhere() -> None:
    method = Method("mine", Plugin)
    assert [entry.field for entry in method.tuned] == ["shape", "share"]
    share = method.tuned[1]
    assert isinstance(share, Range)
    assert (share.low, share.high, share.scale) == (0.01, 1.0, "log")
    assert set(drawn(method)) == {"compressor.share", "compressor.shape"}
    assert Method("by_path", f"{__name__}.Plugin").compressor_class is Plugin


def test_dense_is_identity_and_has_nothing_to_search() -> None:
    assert Method("dense").compressor_class is Identity
    assert Method("dense").tuned == ()


def test_fixed_fields_are_not_drawn_and_users_narrow_ranges() -> None:
    narrow = Method("qsgd", fixed={"block_size": 64}, space=(parse("bits", [2, 4]),))
    assert set(drawn(narrow)) == {"compressor.bits"}
    assert drawn(narrow)["compressor.bits"] in (2, 4)
    trial = optuna.trial.FixedTrial({"compressor.bits": 4})
    assert narrow.suggest_compressor(trial) == QSGD(bits=4, block_size=64)


def test_memories_are_searched_too() -> None:
    """The momentum belongs to what is tuned; an instance is what its user wants."""
    assert "memory.momentum" in drawn(Method("dgc"))
    assert 0.5 <= drawn(Method("sign_sgd", memory="local_momentum"))["memory.momentum"] <= 0.99
    assert set(drawn(Method("dgc", memory=MomentumCorrection(0.7)))) == {"compressor.density"}
    narrow = Method("dgc", memory_space=(parse("momentum", {"low": 0.2, "high": 0.3}),))
    assert 0.2 <= drawn(narrow)["memory.momentum"] <= 0.3
    mine = Method("dgc", memory=MomentumCorrection(clip=1.0), memory_space=narrow.memory_space)
    trial = optuna.trial.FixedTrial({"memory.momentum": 0.25})
    assert mine.suggest_memory(trial) == MomentumCorrection(0.25, clip=1.0)
    assert Method("topk").suggest_memory(trial) == ErrorFeedback()


def test_local_steps_are_searched_if_asked_for() -> None:
    assert Method("qsgd").suggest_rounds(optuna.trial.FixedTrial({})) is None
    method = Method(
        "qsgd",
        rounds=RoundPlan(delay=1),
        rounds_space=parse_all({"every": [4, 16], "fragments": [1, 2]}),
    )
    trial = optuna.trial.FixedTrial({"rounds.every": 16, "rounds.fragments": 2})
    assert method.suggest_rounds(trial) == RoundPlan(16, delay=1, fragments=2)


def test_the_smallest_tensor_that_is_compressed_is_a_setting_of_the_method() -> None:
    trial = optuna.trial.FixedTrial({})
    made = Method("topk", fixed={"density": 0.1}, min_numel=0).suggest_compressor(trial)
    assert made == PerParameter(TopK(0.1))
    made = Method("topk", fixed={"density": 0.1}, min_numel=9).suggest_compressor(trial)
    assert made == PerParameter(SizeSwitch(TopK(0.1), 9))
    assert Method("topk", fixed={"density": 0.1}).suggest_compressor(trial) == TopK(0.1)
    with pytest.raises(ValueError, match=r"Method\(min_numel=1\): SignSGD.* every tensor"):
        Method("sign_sgd", min_numel=1)


def test_spaces_are_written_down_as_plain_values() -> None:
    assert as_json(declared(QSGD)) == {
        "bits": [2, 8, "linear", "integer"],
        "block_size": [64, 256, 1024, 4096],
    }


@pytest.mark.parametrize(
    ("attempt", "value", "fix"),
    [
        (lambda: Method("topkk"), "'topkk'", "topk"),
        (lambda: Method("x", "no.such.Module"), "'no.such.Module'", "cannot be imported"),
        (lambda: Method("x", "lightning_gc.ErrorFeedback"), "'lightning_gc.ErrorFeedback'", "list"),
        (lambda: Method("a/b", "topk"), "'a/b'", "use letters"),
        (lambda: Method("topk", fixed={"densty": 1}), "'densty'", "fields are density"),
        (lambda: Method("topk", fixed={"density": 2.0}), "to 2", "1e-05 to 1"),
        (lambda: Method("topk", fixed={"density": "x"}), "'x'", "is a number"),
        (lambda: Method("topk", space=(Range("density", 0, 0.1),)), "from 0 ", "Choose within"),
        (lambda: Method("topk", space=(Range("density", 0.1, 3),)), "to 3", "Choose within"),
        (lambda: Method("topk", space=(Choice("density", (0.1, 7)),)), "to 7", "Choose within"),
        (lambda: Method("qsgd", space=(Range("bits", 2, 8),)), "QSGD.bits", "integer: true"),
        (lambda: Method("qsgd", space=(Choice("norm", ("l1",)),)), "norm='l1'", "use 'max'"),
        (lambda: Method("dense", space=(Range("bits", 2, 8),)), "'bits'", "no fields"),
        (
            lambda: Method("topk", fixed={"density": 0.1}, space=(Range("density", 0.1, 1),)),
            "density",
            "Do one",
        ),
        (lambda: Method("dgc", memory="error_fedback"), "'error_fedback'", "'error_feedback'"),
        (lambda: Method("topk", scheme="gather"), "'gather'", "'all_gather'"),
        (lambda: Method("topk", scheme="all_reduce"), "AllReduce()", "Use AllGather()"),
        (lambda: Method("topk", memory_space=(Range("m", 0, 1),)), "'m'", "fields are decay"),
        (lambda: Method("dgc", memory_space=(Range("momentum", 0, 1),)), "=1", "use 0.9"),
        (lambda: Method("qsgd", rounds_space=(Range("H", 1, 2),)), "'H'", "fields are every"),
        (lambda: Method("qsgd", rounds_space=parse_all({"every": [8, 0]})), "=0", "use 32"),
        (lambda: Range("a", 2, 1), "2 to 1", "is not a range"),
        (lambda: Range("a", 0, 1, scale="log"), "from 0", "above 0"),
        (lambda: Range("a", 0, 1, scale="cubic"), "'cubic'", "'linear'"),  # type: ignore[arg-type]
        (lambda: Range("a", 0.5, 1, integer=True), "0.5", "integers"),
        (lambda: Choice("a", ()), "a: ", "has no values"),
        (lambda: Choice("a", ([],)), "[]", "use numbers"),  # type: ignore[arg-type]
        (lambda: parse("a", 3), "3 is not a range", "{low: 1, high: 50}"),
        (lambda: parse("a", {"low": 1}), "'low': 1", "{low: 1, high: 50}"),
        (lambda: parse("a", {"low": 1, "high": None}), "None", "{low: 1, high: 50}"),
        (lambda: parse("a", {"low": "b", "high": 1}), "a: {'low': 'b'", "{low: 1, high: 50}"),
        (lambda: parse("a", {"low": 1, "high": 2, "step": 1}), "'step'", "scale: log"),
    ],
)
def test_refusals_name_value_and_fix(attempt: Any, value: str, fix: str) -> None:
    with pytest.raises(ValueError, match=re.escape(fix)) as caught:
        attempt()
    assert value in str(caught.value)


def test_a_declaration_that_leaves_the_knob_is_refused() -> None:
    class Wide(HardThreshold):
        wide = Range("threshold", 1e-5, 1e31, scale="log")
        traits = dataclasses.replace(HardThreshold.traits, space=(wide,))

    with pytest.raises(ValueError, match="leaves the range of its knob"):
        declared(Wide)


def tune_without_optuna(worker: int) -> tuple[int, str]:
    for name in [name for name in sys.modules if name.startswith("lightning_gc.tuning")]:
        del sys.modules[name]
    find, said = importlib.util.find_spec, io.StringIO()
    hidden = mock.patch.object(
        importlib.util, "find_spec", lambda name, *a: None if name == "optuna" else find(name, *a)
    )
    with hidden, contextlib.redirect_stderr(said):
        return cli.main(["tune", str(DEMO)]), said.getvalue()


@pytest.mark.processes
def test_the_extra_is_named_where_optuna_is_missing() -> None:
    """That the library does not import it by itself is looked at in the wheel."""
    ((code, said),) = run_in_processes(tune_without_optuna, 1)
    assert code == cli.FAILED
    assert "needs optuna, which is not installed" in said
    assert "lightning-gc[tune]" in said


def test_knobs_are_narrowed_for_tuning_where_the_whole_range_is_not_sensible() -> None:
    (density,) = declared(TopK)
    assert isinstance(density, Range)
    assert density.high < TopK.traits.knob.high  # type: ignore[union-attr]
