"""``lightning-gc tune`` ends well for every registered compressor, with its own memory."""

from pathlib import Path

import optuna
import pytest

from lightning_gc import COMPRESSORS, cli
from lightning_gc.tuning import open_storage
from lightning_gc.tuning.failure_detector import counts
from lightning_gc.tuning.final_runs import TRANSFERRED, TUNED, final_records, shares
from tests.support.fitting import unwarned

CONFIG = """
model: {class_path: tests.support.tuning.Bowl}
data: {class_path: tests.support.tuning.Data}
trainer: {accelerator: cpu, max_epochs: 1, num_sanity_val_steps: 0, log_every_n_steps: 1}
tune:
  name: toy
  metric: loss
  test_metric: test
  trials: 2
  sampler: random
  seeds: [0]
  workers: 2
  space: {model.x: {low: 0, high: 1}}
"""
BY_DAY = ("dgc", "ecqsgd", "signum")  # their memories are searched too


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.nightly] * (n not in BY_DAY)) for n in COMPRESSORS]
)
def test_a_compressor_is_tuned_and_run_with_denses_settings(name: str, tmp_path: Path) -> None:
    config, journal = tmp_path / "toy.yaml", tmp_path / "toy.journal"
    config.write_text(CONFIG)
    with unwarned():
        words = ["tune", str(config), "--compressor", name, "--storage", str(journal)]
        assert cli.main(words) == cli.OK
    storage = open_storage(journal)
    dense, study = (
        optuna.load_study(study_name=f"toy/{method}", storage=storage) for method in ("dense", name)
    )
    assert [sum(map(counts, each.trials)) for each in (dense, study)] == [2, 2]
    assert all(trial.state.name == "COMPLETE" for trial in study.trials)
    records = {each["source"]: each for each in final_records(study, dense)}
    own = records[TUNED]
    moved = own if shares(study, dense) else records[TRANSFERRED]
    # The method's own fields, its memory's too, are as tuned; the rest is the dense winner's.
    assert own["params"] == study.best_params
    assert moved["params"] == {**study.best_params, **dense.best_params}
    memory = [parameter for parameter in own["params"] if parameter.startswith("memory.")]
    assert bool(memory) == (name in BY_DAY)
