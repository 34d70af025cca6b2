"""``tune --tensorboard``: each final run's curves, and a page HPARAMS with what differs."""

from pathlib import Path
from typing import Any

import optuna
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from lightning_gc import cli
from lightning_gc.tuning import tune, write_curves
from lightning_gc.tuning.curves import FILE, differing, is_rate
from lightning_gc.tuning.studies import RULES
from tests.support.fitting import unwarned
from tests.support.tuning import experiment

ROOT = "_hparams_/experiment"


@pytest.fixture(scope="module")
def studies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, optuna.Study]:
    folder = tmp_path_factory.mktemp("curves")
    with unwarned():
        rules = experiment(seeds=(0, 1), trials=2, seed=5)  # dense and topk have other winners
        return tune(rules, ["topk"], folder / "study.journal")


def events(folder: Path) -> EventAccumulator:
    return EventAccumulator(str(folder)).Reload()


def hparams(folder: Path, tag: str) -> Any:
    return HParamsPluginData.FromString(events(folder).summary_metadata[tag].plugin_data.content)


def test_every_final_run_has_what_the_model_logged(
    studies: dict[str, optuna.Study], tmp_path: Path
) -> None:
    files = write_curves("toy", studies, tmp_path)
    runs = {file.parent.relative_to(tmp_path / "toy").as_posix() for file in files[1:]}
    kinds = ("dense", "topk", "topk (dense's)", "dense (topk's)")
    assert runs == {f"{kind}/seed_{seed}" for kind in kinds for seed in (0, 1)}
    (record, *_) = [
        r for k, r in studies["topk"].user_attrs.items() if k.startswith("final/tuned/") and r
    ]
    found = events(tmp_path / "toy" / "topk" / "seed_0")
    assert [e.value for e in found.Scalars("loss")] == pytest.approx(record["curve"])
    assert [e.step for e in found.Scalars("loss")] == [0, 1]
    assert [e.value for e in found.Scalars("other")] == [1.0, 1.0]  # the model's own
    assert found.Scalars("test")[0].value == pytest.approx(record["test"])
    assert found.Scalars("~compression/ratio")[0].value == pytest.approx(record["ratio"])
    tags = found.Tags()["scalars"]
    assert sorted(tags)[-2:] == ["~compression/bytes", "~compression/ratio"]  # after the user's


def test_the_page_of_hyper_parameters_begins_with_what_decides(
    studies: dict[str, optuna.Study], tmp_path: Path
) -> None:
    write_curves("toy", studies, tmp_path)
    columns = hparams(tmp_path / "toy", ROOT).experiment
    infos = sorted(columns.hparam_infos, key=lambda info: info.name)  # as TensorBoard does
    names = [info.display_name for info in infos]
    # The winner may be the first trial, which has dense's.
    assert [name for name in names if name != "x"] == ["method", "compressor.density"]
    metrics = [info.display_name for info in columns.metric_infos]
    assert metrics == ["loss", "test", "ratio", "bytes"]
    session = hparams(tmp_path / "toy/topk (dense's)/seed_1", "_hparams_/session_start_info")
    found = session.session_start_info.hparams
    assert "topk (dense's)" in [value.string_value for value in found.values()]


@pytest.mark.parametrize(
    ("name", "found"),
    [
        *[(name, True) for name in ("lr", "model.lr", "optim/LR", "base_learning_rate")],
        *[(name, False) for name in ("dropout_rate", "lr_decay", "color", "gc/compressor")],
    ],
)
def test_what_counts_as_a_learning_rate(name: str, found: bool) -> None:
    assert is_rate(name) == found


def test_settings_that_are_everywhere_the_same_are_left_out() -> None:
    rows = [
        {"dropout": 0.1, "model.learning_rate": 1.0, "seed": 0, "lr": 2.0},
        {"dropout": 0.1, "model.learning_rate": 2.0, "seed": 1, "lr": 1.0, "density": 0.01},
    ]
    assert differing(rows) == ["model.learning_rate", "lr", "seed", "density"]


def test_a_later_call_replaces_the_files(studies: dict[str, optuna.Study], tmp_path: Path) -> None:
    files = write_curves("toy", studies, tmp_path)
    before = [file.read_bytes() for file in files]
    mine = tmp_path / "toy" / "dense" / "seed_0" / "events.out.tfevents.1.mine"
    mine.write_bytes(b"mine")
    assert write_curves("toy", studies, tmp_path) == files
    assert [file.read_bytes() for file in files] == before
    assert mine.read_bytes() == b"mine"
    assert {file.name for file in files} == {FILE}


def test_records_of_earlier_versions_have_their_metric(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="old/dense")
    study.tell(study.ask(), 1.0)
    record = {"source": "tuned", "seed": 0, "params": {}, "curve": [3.0, 2.0], "test": None}
    study.set_user_attr("final/tuned/0/0", record | {"validation": 2.0, "diverged": False})
    write_curves("old", {"dense": study}, tmp_path)
    found = events(tmp_path / "old" / "dense" / "seed_0")
    assert [e.value for e in found.Scalars("metric")] == [3.0, 2.0]


def test_a_test_metric_with_the_name_of_the_validation_metric_is_another_chart(
    tmp_path: Path,
) -> None:
    study = optuna.create_study(study_name="one/dense")
    study.set_user_attr(RULES, {"metric": "loss", "test_metric": "loss", "mode": "min"})
    study.tell(study.ask(), 1.0)
    record = {"source": "tuned", "seed": 0, "params": {}, "curve": [3.0, 2.0], "test": 5.0}
    study.set_user_attr("final/tuned/0/0", record | {"validation": 2.0, "diverged": False})
    write_curves("one", {"dense": study}, tmp_path)
    found = events(tmp_path / "one" / "dense" / "seed_0")
    assert [e.value for e in found.Scalars("loss")] == [3.0, 2.0]
    assert [e.value for e in found.Scalars("loss (test)")] == [5.0]


def test_without_final_runs_nothing_is_written(tmp_path: Path) -> None:
    study = optuna.create_study(study_name="new/dense")
    assert write_curves("new", {"dense": study}, tmp_path / "logs") == []
    assert not (tmp_path / "logs").exists()


def test_the_command_refuses_a_file_in_place_of_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a").touch()
    with pytest.raises(SystemExit):
        cli.main(["tune", "config.yaml", "--tensorboard", str(tmp_path / "a")])
    assert "is a file; give the name of a folder" in capsys.readouterr().err
