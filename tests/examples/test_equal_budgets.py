"""The comparison at equal tuning budgets: every method's own draws, winners with fresh seeds."""

import dataclasses
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from lightning_gc import COMPRESSORS, PerParameter
from lightning_gc.engine.compatibility import combine
from lightning_gc.memories import MEMORIES
from lightning_gc.methods.method import declared

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import equal_budgets
import equal_budgets_methods as methods
import equal_budgets_models as models
import equal_budgets_page as page
import equal_budgets_points as points
from equal_budgets_models import MODELS
from equal_budgets_points import BEST, TARGETS
from tune_language_model import Text

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "papers" / "equal_budgets.py"


def test_every_compressor_and_every_memory_has_a_study() -> None:
    assert set(COMPRESSORS) < set(methods.METHODS)
    used = {type(method.memory_and_scheme()[0]) for method in methods.METHODS.values()}
    assert used == set(MEMORIES.values())
    winners = {
        (cell["method"], cell["model"]) for cell in equal_budgets.cells(1) if cell["draw"] == BEST
    }
    assert winners == {(name, model) for name in methods.METHODS for model in MODELS}


@pytest.mark.parametrize("name", methods.METHODS)
def test_what_is_declared_is_drawn_and_makes_a_method(name: str) -> None:
    cls = methods.METHODS[name].compressor_class
    for model in MODELS:
        fields = {entry.field for entry in methods.space(name, model)}
        assert {entry.field for entry in declared(cls)} <= {f.rpartition(".")[2] for f in fields}
        for draw in range(4):
            settings = methods.drawn(name, model, draw, 4)
            assert set(settings) == fields
            built = methods.build(name, settings)
            assert settings.get("level", built.compressor.level) == built.compressor.level
            assert isinstance(built.compressor, PerParameter) == settings.get("every_tensor", False)
            combine(built.compressor, built.memory, built.scheme)
            momentum = settings.get("momentum", 0.0)
            assert built.memory is not None
            built.memory.check_optimizer({"momentum": momentum})  # else it says so


def test_draws_are_a_methods_own_and_come_again() -> None:
    draws = [methods.drawn("topk", "lstm", draw, 8) for draw in range(8)]
    assert draws == [methods.drawn("topk", "lstm", draw, 8) for draw in range(8)]
    low, high = MODELS["lstm"].rates
    parts = [8 * math.log(draw["rate"] / low) / math.log(high / low) for draw in draws]
    assert sorted(map(int, parts)) == list(range(8))  # each eighth once
    assert sorted(draw["every_tensor"] for draw in draws) == [False] * 4 + [True] * 4
    others = [("gaussian_k", "lstm"), ("topk_ef21", "lstm"), ("identity", "lstm")]
    rates = {tuple(methods.drawn(*other, draw, 8)["rate"] for draw in range(8)) for other in others}
    assert len({*rates, tuple(draw["rate"] for draw in draws)}) == 4


def test_a_memory_that_must_add_weight_decay_does(monkeypatch) -> None:
    found = {}

    def train(cell, method):
        found[method.memory.__class__.__name__] = (cell.get("weight_decay"), method.memory)
        return {}

    monkeypatch.setitem(models.MODELS, "resnet", dataclasses.replace(MODELS["resnet"], train=train))
    for name in ("dgc", "topk"):
        settings = methods.drawn(name, "resnet", 0, 1)
        models.train({"model": "resnet"}, settings, methods.build(name, settings))
    assert found["ErrorFeedback"][0] is None
    decay, memory = found["MomentumCorrection"]
    assert (decay, memory.weight_decay) == (0.0, MODELS["resnet"].decay)


@pytest.mark.parametrize("name", ["dgc", "topk_global_momentum", "topk_saef"])
def test_steps_with_a_memorys_momentum_are_as_long_as_others(name: str) -> None:
    for model, suited in (("lstm", 0.0), ("resnet", 0.9)):
        low, high = MODELS[model].rates
        for draw in range(8):
            found = methods.drawn(name, model, draw, 8)
            assert low <= found["rate"] * (1 - suited) / (1 - found["memory.momentum"]) <= high
    low, high = MODELS["transformer"].rates  # AdamW divides by it
    assert all(
        low <= methods.drawn(name, "transformer", draw, 8)["rate"] <= high for draw in (0, 1)
    )


def test_a_guess_at_equal_odds_is_what_the_models_are_asked_for() -> None:
    words = len(Text(None, batch=4, bptt=4).corpus.words)
    for model in ("lstm", "transformer"):  # another version of Python has other documentation
        assert math.exp(MODELS[model].guess) == pytest.approx(words, rel=0.2)
    assert math.exp(MODELS["resnet"].guess) == pytest.approx(10)


def test_directions_have_rates_of_their_own() -> None:
    for name in ("sign_sgd", "signum"):
        assert methods.drawn(name, "lstm", 0, 1)["rate"] <= MODELS["lstm"].directions[1]
    assert methods.drawn("ef_sign_sgd", "lstm", 0, 1)["rate"] >= MODELS["lstm"].rates[0]


def test_winners_have_fresh_seeds_and_depend_on_all_draws_of_their_study() -> None:
    cells = equal_budgets.cells(3, 5)
    draws = [cell for cell in cells if cell["draw"] != BEST]
    winners = [cell for cell in cells if cell["draw"] == BEST]
    assert {cell["seed"] for cell in draws} == {equal_budgets.SEARCH}
    assert {cell["seed"] for cell in winners} == {1, 2, 3}
    assert len(draws) == 5 * len(methods.METHODS) * len(MODELS)
    some = [cell for cell in winners if cell["method"] == "qsgd" and cell["seed"] == 3]
    assert len(some) == len(TARGETS) * len(MODELS)
    for cell in some:
        needed = equal_budgets.before(cell)
        assert [each["draw"] for each in needed] == [0, 1, 2, 3, 4]
        assert all(each in draws for each in needed)
        assert {(each["method"], each["model"]) for each in needed} == {("qsgd", cell["model"])}
    assert equal_budgets.before(draws[0]) == []


def test_a_winner_is_the_best_draw_of_a_ratio_and_run_once(monkeypatch) -> None:
    ran = []

    def run(cell, settings):
        ran.append(settings)
        return {"loss": 1.0, "ratio": 40.0}

    monkeypatch.setattr(equal_budgets, "run", run)
    draws = [
        {"draw": 0, "loss": 1.0, "ratio": 10.0, "settings": "all bytes"},
        {"draw": 5, "loss": 1.5, "ratio": 0.9, "settings": "more than dense"},
        {"draw": 1, "loss": 2.0, "ratio": 40.0, "settings": "few bytes"},
        {"draw": 2, "loss": 3.0, "ratio": 50.0, "settings": "worse"},
        {"draw": 3, "loss": None, "ratio": 500.0, "settings": "diverges"},
        {"draw": 4, "loss": None, "ratio": None, "settings": "ends in an error"},
    ]
    found = {
        target: equal_budgets.train({"draw": BEST, "target": target, "before": draws}, None)
        for target in TARGETS
    }
    assert ran == ["all bytes", "few bytes"]
    assert {target: row["pick"] for target, row in found.items()} == {
        0: 0,
        8: 0,
        30: 1,
        100: None,
        300: None,
    }
    assert {target: row["as"] for target, row in found.items() if row["pick"] == 0} == {
        0: None,
        8: 0,
    }


def test_a_method_that_sends_more_than_dense_has_a_winner() -> None:
    draws = [{"draw": 0, "loss": 1.0, "ratio": 0.9}]
    assert points.chosen(draws, points.ANY) == draws[0]
    assert points.chosen(draws, 8) is None


def test_a_run_that_ends_in_an_error_has_lost_and_says_why(monkeypatch) -> None:
    def train(cell, settings, method):
        raise ValueError("rank 9 of 8")

    monkeypatch.setattr(models, "train", train)
    cell = {"method": "topk", "model": "lstm", "draw": 0, "draws": 2, "seed": 0}
    row = equal_budgets.train(cell, None)
    assert (row["loss"], row["error"]) == (math.inf, "ValueError: rank 9 of 8")
    row |= {"loss": None, "ratio": None}  # as in the file
    assert points.chosen([row], 1) is None
    assert "model lstm, method topk, draw 0, seed 0: ValueError: rank 9 of 8" in page.errors(
        [cell | row]
    )
    good = {"seed": 1, "loss": 2.0, "ratio": 9.0, "bytes": 1.0, "pick": 0, "as": None}
    winners = [cell | row | each | {"draw": BEST, "target": 8} for each in ({"seed": 2}, good)]
    winners[0] |= {"pick": 0, "as": None}
    found = points.point(winners, "lstm", "topk", 8)
    assert found is not None
    assert found.losses == {1: 2.0, 2: math.inf}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_two_methods_from_draws_to_the_page(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--draws", "2", "--seeds", "2"]
    command += ["--set", "epochs=1", "steps=5", "--only", "method=identity", "method=topk"]
    command += ["--jobs", "2", "--out", str(tmp_path)]
    for _ in range(2):  # the second one has nothing to do
        done = subprocess.run(command, capture_output=True, text=True, timeout=500, check=False)
        assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("*.jsonl")
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert len(rows) == 2 * len(MODELS) * (2 + 2 * len(TARGETS))
    sent = {
        (row["cell"]["method"], row["cell"]["model"]): row["figures"]["ratio"]
        for row in rows
        if row["cell"]["draw"] == 0
    }
    assert statistics.fmean(sent["identity", model] for model in MODELS) == 1.0
    assert all(sent["topk", model] > 4 for model in MODELS)
    assert {file.suffix for file in tmp_path.iterdir()} == {".jsonl", ".md", ".svg", ".html"}
