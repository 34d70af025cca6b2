"""What a journal from somebody else can do, and what it cannot: SECURITY.md."""

import contextlib
import csv
import pickle
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml
from optuna.storages import BaseStorage
from optuna.trial import BaseTrial, create_trial

from lightning_gc.methods import yaml_config
from lightning_gc.methods.method import parse_method
from lightning_gc.tuning import Method, TrialError, open_storage, report
from lightning_gc.tuning.experiment import load_experiment
from lightning_gc.tuning.failure_detector import FailureDetector
from lightning_gc.tuning.final_runs import run_finals
from lightning_gc.tuning.report import file_name
from lightning_gc.tuning.studies import RULES
from lightning_gc.tuning.tables import ReportTable
from tests.support.fitting import unwarned
from tests.support.prepared import MARK, Evil, harmed
from tests.support.tuning import Bowl, Data, compare, experiment

METHODS = ["dense", "@SUM(1)", "=1+1", "+x", "-x", "\tx", "<script>alert(1)</script>"]
NUMBERS = ["x/../../../ESCAPED", "C:\\x", "con", "x", "X", "compressor.density", "n" * 300]
TEXTS = {"choice": "=HYPERLINK(1)", "digits": "-1"}


def hostile(storage: BaseStorage) -> None:
    for method in METHODS:
        study = optuna.create_study(study_name=f"theirs/{method}", storage=storage)
        study.set_user_attr(RULES, {"metric": "@loss", "mode": "min", "workers": 2})
        for i in range(4):
            number = optuna.distributions.FloatDistribution(-9, 9)
            distributions: dict[str, Any] = dict.fromkeys(NUMBERS, number)
            for name, text in TEXTS.items():
                distributions[name] = optuna.distributions.CategoricalDistribution([text])
            study.add_trial(
                create_trial(
                    params=dict.fromkeys(NUMBERS, -1.5 - i) | TEXTS,
                    distributions=distributions,
                    value=-0.5 - i,
                    user_attrs={"curve": [-0.5], "best_epoch": 0, "epochs": 1},
                )
            )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a journal, and its report far below."""
    folder = tmp_path_factory.mktemp("received")
    storage = open_storage(folder / "j")
    hostile(storage)
    with unwarned():  # of letters that a font lacks
        report(folder / "j", folder / "a" / "b" / "report")
    return folder


def test_a_report_stays_in_its_folder_and_has_a_plot_for_each_parameter(folder: Path) -> None:
    out = folder / "a" / "b" / "report"
    outside = [p for p in folder.rglob("*") if p.is_file() and not p.is_relative_to(out)]
    assert outside == [folder / "j"]
    plots = [path.name for path in (out / "plots").iterdir() if path.name.startswith("tuned_")]
    assert len({name.lower() for name in plots}) == len(NUMBERS)
    assert "tuned_compressor.density.svg" in plots
    text = (out / "report.md").read_text()
    assert all(f"](plots/{name})" in text for name in plots)


def test_names_of_files_are_safe_and_no_two_are_the_same() -> None:
    made = file_name("x/a")
    names = [
        *NUMBERS,
        "x_a",
        "x/a",
        "x\\a",
        made,
        made.upper(),
        "..",
        "",
        "a\0b",
        "ü",
        "a b",
        "a\n",
    ]
    files = [file_name(f"tuned_{name}") for name in names]
    assert len(set(files)) == len(files)
    for file in files:
        assert set(file) <= set("abcdefghijklmnopqrstuvwxyz0123456789_.-")
        assert len(file) < 100


def cells(folder: Path) -> Iterator[tuple[str, str, str]]:
    for path in (folder / "a" / "b" / "report" / "tables").iterdir():
        with path.open(newline="") as file:
            for row in csv.DictReader(file):
                yield from ((path.stem, column, cell) for column, cell in row.items())


def test_no_cell_of_a_table_is_a_formula_and_numbers_stay_numbers(folder: Path) -> None:
    found = list(cells(folder))
    for _, _, cell in found:
        if cell.startswith(("=", "+", "-", "@", "\t", "\r")):
            float(cell)
    names = {cell for table, column, cell in found if (table, column) == ("results", "method")}
    assert names == {"dense", "'@SUM(1)", "'=1+1", "'+x", "'-x", "'\tx", METHODS[-1]}
    values = {cell for table, column, cell in found if (table, column) == ("winners", "value")}
    assert values == {"-4.5", "-1", "'=HYPERLINK(1)"}
    assert {c for table, column, c in found if (table, column) == ("results", "validation")} == {
        "-3.5"
    }


@pytest.mark.parametrize("text", ["-1", "+1.5", "-2e-5", "-1E+5", "x-1", "1=1", "", " =1", "'=1"])
def test_texts_that_compute_nothing_stay_as_they_are(text: str) -> None:
    table = ReportTable(("a",), ({"a": text},))
    assert list(csv.DictReader(table.to_csv().splitlines())) == [{"a": text}]


@pytest.mark.parametrize("text", ["=1", "@x", "-1+1", "+cmd|x", "-", "\tx", "\r=1", "\n=1", "-1\n"])
def test_texts_that_might_are_marked(text: str) -> None:
    assert f"'{text}" in ReportTable(("a",), ({"a": text},)).to_csv()


def test_the_page_shows_tags_as_text(folder: Path) -> None:
    page = (folder / "a" / "b" / "report" / "report.html").read_text()
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.fixture
def trap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file behind when its code runs."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "trap.py").write_text(
        "from pathlib import Path\n"
        "from lightning_gc import TopK as Evil\n"
        "Path(__file__).with_name('sprung').touch()\n"
    )
    yield tmp_path / "sprung"
    sys.modules.pop("trap", None)


@pytest.mark.parametrize("where", ["{}/j", "sqlite:///{}/j"], ids=["journal", "database"])
def test_a_storage_runs_no_code(
    tmp_path: Path, trap: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Nor does the attribute that Optuna's CMA-ES sampler unpickles, which no study here uses."""
    storage = where.format(tmp_path)
    study = compare(storage, "topk", trials=1)["topk"]
    study.set_user_attr(RULES, study.user_attrs[RULES] | {"compressor": "trap.Evil"})
    for trial in study.get_trials():
        harm = pickle.dumps(Evil(tmp_path)).hex()
        study._storage.create_new_trial(
            study._study_id,
            create_trial(
                state=optuna.trial.TrialState.COMPLETE,
                params=trial.params,
                distributions=trial.distributions,
                value=0.5,
                system_attrs={"cma:optimizer:0": harm, "cma:n_restarts": 0},
                user_attrs=trial.user_attrs,
            ),
        )
    monkeypatch.setattr(pickle, "loads", lambda *_: pytest.fail("a storage is unpickled"))
    report(storage, tmp_path / "report")
    with pytest.raises(ValueError, match=r"exists with compressor='trap\.Evil'"):
        compare(storage, "topk", trials=1)
    assert not trap.exists()
    assert not harmed(tmp_path)


@pytest.mark.parametrize("tag", ["!!python/object/apply:os.mkdir", "!!python/name:os.mkdir"])
def test_tags_in_yaml_run_no_code(tmp_path: Path, tag: str) -> None:
    """Class paths of a file are imported, nothing else of it is."""
    harm = tmp_path / MARK
    file = tmp_path / "study.yaml"
    file.write_text(f"model: {tag} ['{harm}']\ntune: {{}}\n")
    with pytest.raises(ValueError, match="could not determine a constructor"):
        yaml_config.read_any(file)
    with pytest.raises(yaml.YAMLError, match="could not determine a constructor"):
        parse_method(f"topk:density={tag} ['{harm}']")
    assert not harmed(tmp_path)


YAML = {"model": {"class_path": "trap.Evil"}, "tune": {"name": "x", "metric": "x", "space": {}}}


@pytest.mark.parametrize(
    "use",
    [
        lambda: load_experiment(YAML),
        lambda: Method("mine", "trap.Evil"),
        lambda: Method("trap.Evil"),  # as after --compressor
    ],
)
def test_class_paths_and_dotted_names_do(trap: Path, use: Callable[[], Any]) -> None:
    with contextlib.suppress(ValueError):  # a compressor is no model, but its module has run
        use()
    assert trap.exists()


@pytest.fixture
def study(tmp_path: Path) -> optuna.Study:
    """A study to which somebody has added trials that nobody has made."""
    return optuna.create_study(study_name="toy/dense", storage=open_storage(tmp_path / "j"))


def finals(study: optuna.Study, x: Any, build: Any) -> list[dict[str, Any]]:
    made_up = optuna.distributions.CategoricalDistribution([x])
    study.add_trial(create_trial(params={"x": x}, distributions={"x": made_up}, value=-1.0))
    rules = experiment(build, test_metric=None)
    with unwarned():
        return list(run_finals(rules, Method("dense"), study, study, FailureDetector()))


def test_a_journal_decides_on_the_numbers_of_the_final_runs(study: optuna.Study) -> None:
    def build(trial: BaseTrial) -> Any:
        return Bowl(trial.suggest_float("x", 0, 1)), Data()

    (record,) = finals(study, 1.75, build)
    assert record["validation"] == pytest.approx((1.75 - 0.3) ** 2)


def test_a_journal_adds_nothing_to_a_list_of_choices(study: optuna.Study) -> None:
    def build(trial: BaseTrial) -> Any:
        pytest.fail(trial.suggest_categorical("x", ["mine.Model", "mine.Other"]))

    with pytest.raises(TrialError, match=r"'trap\.Evil' not in"):
        finals(study, "trap.Evil", build)
