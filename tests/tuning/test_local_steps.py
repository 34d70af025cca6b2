"""Studies over the number of local steps: what is drawn trains with it, and bytes tell."""

from pathlib import Path
from typing import Any

import optuna
import pytest
import torch

from lightning_gc import Together
from lightning_gc.methods.method import parse_all
from lightning_gc.tuning import Method, RoundPlan, trial
from lightning_gc.tuning.early_stopping import EarlyStopping
from tests.support.tuning import Data, Denser, bowl, compare, denser, experiment


def test_h_is_drawn_and_bytes_fall_with_it(tmp_path: Path) -> None:
    """Two epochs of a step: with H = 1 two exchanges, with H = 2 one."""
    method = Method("cast", rounds=RoundPlan(), rounds_space=parse_all({"every": [1, 2]}))
    studies = compare(tmp_path / "study.journal", method, build=denser, trials=5)
    trials = studies["cast"].trials
    sent = {trial.params["rounds.every"]: trial.user_attrs["wire_bytes"] for trial in trials}
    assert sent == {1: pytest.approx(2 * sent[2]), 2: sent[2]}


def test_h_is_drawn_before_real_workers_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """They have no access to the study, only to what was drawn."""
    method = Method("cast", rounds_space=parse_all({"every": [1, 2]}))
    rules = experiment(bowl, workers=1, devices=2)
    given: list[set[str]] = []
    monkeypatch.setattr(trial, "fit_in_subprocess", lambda *args: given.append(set(args[2])))
    trial.train(EarlyStopping(rules, method), optuna.create_study().ask(), seed=0)
    assert given == [{"compressor.dtype", "rounds.every", "x"}]


class Two(Denser):
    """Trained by two optimizers as one."""

    def configure_optimizers(self) -> Any:
        weight, bias = self.net.parameters()
        return Together([torch.optim.SGD([weight], 0.01), torch.optim.AdamW([bias], 0.01)])


def two(trial: optuna.trial.BaseTrial) -> tuple[Any, Any]:
    return Two(), Data()


def test_several_optimizers_as_one_are_studied(tmp_path: Path) -> None:
    """With gradients in each step, and with local steps."""
    methods = Method("cast"), Method("local", "cast", rounds=RoundPlan(2))
    studies = compare(tmp_path / "study.journal", *methods, build=two, trials=2)
    for name in ("cast", "local"):
        assert [trial.state.name for trial in studies[name].trials] == ["COMPLETE"] * 2
