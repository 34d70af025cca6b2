"""The tuning report contains all tables and plots, with the figures of the studies."""

import csv
import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import optuna
import pytest
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from lightning_gc.tuning import open_storage, report
from lightning_gc.tuning.final_runs import RETURNED, TRANSFERRED, TUNED
from lightning_gc.tuning.report import find_studies, findings
from lightning_gc.tuning.studies import RULES
from lightning_gc.tuning.tables import ReportTable, tables

TABLES = [
    *("results", "winners", "metric_against_ratio", "tuned_parameters"),
    *("cpu_seconds", "convergence", "epochs_to_converge", "importance"),
    *("final_runs", "settings"),
]
PLOTS = [
    *("metric_against_ratio", "transfer", "tuned_learning_rate", "tuned_compressor.density"),
    *("cpu_seconds", "convergence", "epochs_to_converge", "importance"),
]


def add_study(
    storage: BaseStorage,
    name: str,
    ratio: float,
    best_rate: float,
    seeds: Sequence[int] = (0, 1),
    moved: float = 10,
    returned: float = 10,
    busy: float = 1.0,
) -> None:
    """Add a study of ten trials, with final runs.

    Args:
        storage: of all studies.
        name: of the method.
        ratio: of bytes.
        best_rate: the learning rate with the lowest perplexity.
        seeds: of final runs.
        moved: how much higher the perplexity is with dense's hyper-parameters.
        returned: how much higher it is of dense training with the method's.
        busy: seconds for each CPU second.
    """
    study = optuna.create_study(study_name=f"made_up/{name}", storage=storage)
    study.set_user_attr(RULES, {"metric": "perplexity", "mode": "min", "workers": 4})
    trials = 10
    for i in range(trials):
        trial = study.ask()
        rate = trial.suggest_float("learning_rate", 1, 50, log=True)
        if name != "dense":
            trial.suggest_float("compressor.density", 0.001, 0.1, log=True)
        attrs: dict[str, Any] = {
            "ratio": ratio + i / 100,
            "wire_bytes": 1e9 / ratio,
            "curve": [200.0, 150.0, 100 + abs(rate - best_rate)],
            "best_epoch": 2,
            "epochs": 3,
            "epoch_cpu_seconds": [1.0 + i, 2.0 + i, 3.0 + i],
            "epoch_seconds": [busy * (second + i) for second in (1.0, 2.0, 3.0)],
        }
        for key, value in attrs.items():
            trial.set_user_attr(key, value)
        study.tell(trial, 100 + abs(rate - best_rate))
    for state, key in ((TrialState.FAIL, "error"), (TrialState.FAIL, "lost")):
        trial = study.ask()
        trial.set_user_attr(key, "diverged")
        study.tell(trial, state=state)
    winner, baseline = study.best_trial.number, _dense_winner(storage)
    more = {TUNED: 0.0, TRANSFERRED: moved, RETURNED: returned}
    for seed, source in itertools.product(seeds, more):
        off = source != TUNED
        if off and name == "dense":
            continue
        key = f"final/{source}/{winner}{f'-{baseline}' if off else ''}/{seed}"
        record = {"source": source, "seed": seed, "diverged": False, "params": {}}
        test = 100.0 + seed + more[source]
        study.set_user_attr(key, record | {"validation": 90.0, "test": test})


def _dense_winner(storage: BaseStorage) -> int:
    return optuna.load_study(study_name="made_up/dense", storage=storage).best_trial.number


@pytest.fixture(scope="module")
def storage(tmp_path_factory: pytest.TempPathFactory) -> BaseStorage:
    storage = open_storage(tmp_path_factory.mktemp("report") / "study.journal")
    add_study(storage, "dense", 1.0, 20.0)
    add_study(storage, "topk", 50.0, 10.0)
    return storage


def rows(folder: Path, name: str) -> list[dict[str, str]]:
    with (folder / "tables" / f"{name}.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def test_every_table_and_plot_is_written_and_the_page_stands_alone(
    storage: BaseStorage, tmp_path: Path
) -> None:
    files = report(storage, tmp_path)
    assert all(path.is_file() for path in files)
    assert sorted(p.stem for p in (tmp_path / "tables").iterdir()) == sorted(TABLES)
    assert sorted(p.stem for p in (tmp_path / "plots").iterdir()) == sorted(PLOTS)
    page, text = (tmp_path / "report.html").read_text(), (tmp_path / "report.md").read_text()
    assert page.count('src="data:image/svg+xml;base64,') == len(PLOTS)
    assert not re.search(r'(src|href)="(?!data:)', page)
    for name in PLOTS:
        assert f"](plots/{name}.svg)" in text
    assert "| dense |" in text
    assert "| 100.5 ± 0.71 | 110.5 ± 0.71 | 2 |" in text
    assert "made_up" in page
    runs = [line for line in text.splitlines() if re.match(r"\| \w+ \| \w+'s \| \d+ \|", line)]
    # Dense has two seeds. Each method has two with its own hyper-parameters and two with dense's,
    # and dense two with the method's.
    assert len(runs) == 2 + 6 * (len(find_studies(storage)[1]) - 1)
    assert "| dense | topk's | 1 |" in text
    assert "| all | workers | 4 |" in text  # once, as all studies share it


@pytest.mark.parametrize("name", ["report.md", "report.html", "tables/results.csv"])
def test_files_of_the_user_are_not_overwritten(
    storage: BaseStorage, tmp_path: Path, name: str
) -> None:
    mine = tmp_path / name
    mine.parent.mkdir(exist_ok=True)
    mine.write_text("my notes")
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="is not of a report and would be overwritten"):
        report(storage, tmp_path)
    assert mine.read_text() == "my notes"
    assert sorted(tmp_path.rglob("*")) == before
    mine.unlink()
    for _ in range(2):  # its own files may be overwritten
        report(storage, tmp_path)


def test_one_seed_has_no_deviation_and_bytes_have_one_format(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "study.journal")
    add_study(storage, "dense", 1_359.168, 20.0, seeds=(0,))  # 735,744 bytes
    add_study(storage, "topk", 43_956.04, 10.0, seeds=(0,))  # 22,750 bytes
    add_study(storage, "qsgd", 2e6, 10.0, seeds=(0,))  # 500 bytes
    report(storage, tmp_path)
    text = (tmp_path / "report.md").read_text()
    assert "±" not in text
    assert "| 100 | 110 | 1 |" in text
    for nbytes in ("735,744", "22,750", "500"):
        assert f"| {nbytes} |" in text
    assert not re.search(r"\de\+\d", text)
    assert [row["test_spread"] for row in rows(tmp_path, "results")] == ["", "", ""]


def test_tables_say_what_the_studies_know(storage: BaseStorage, tmp_path: Path) -> None:
    report(storage, tmp_path)
    dense, topk = rows(tmp_path, "results")
    assert (dense["method"], topk["method"]) == ("dense", "topk")
    assert float(topk["test"]) == 100.5
    assert float(topk["test_with_dense_hyper_parameters"]) == 110.5
    assert (topk["complete"], topk["pruned"], topk["failed"]) == ("10", "0", "1")
    winners = rows(tmp_path, "winners")
    assert [row["parameter"] for row in winners if row["method"] == "topk"] == [
        "learning_rate",
        "compressor.density",
    ]
    scatter = rows(tmp_path, "metric_against_ratio")
    assert len(scatter) == 20
    # Of two trials on the front, the one that compresses more is worse.
    front = [(float(r["ratio"]), float(r["metric"])) for r in scatter if r["on_front"] == "True"]
    assert front
    assert all((a[0] < b[0]) == (a[1] < b[1]) for a, b in itertools.pairwise(sorted(front)))
    assert len(rows(tmp_path, "tuned_parameters")) == 3 + 6  # a third of ten, and two parameters
    spent = [row for row in rows(tmp_path, "cpu_seconds") if row["method"] == "topk"]
    assert [row["cpu_seconds"] for row in spent] == [f"{2.0 + int(r['trial'])}" for r in spent]
    assert len(spent) == 3
    assert [row["metric"] for row in rows(tmp_path, "convergence")][:2] == ["200.0", "150.0"]
    assert {row["parameter"] for row in rows(tmp_path, "importance")} == {
        "learning_rate",
        "compressor.density",
    }


def test_of_a_front_too_it_is_a_good_metric_that_parameters_explain() -> None:
    """Good is high here: what makes it high is ``a``, what makes it low ``b``."""
    study = optuna.create_study(
        directions=["maximize", "minimize"],
        sampler=optuna.samplers.RandomSampler(seed=0),
    )
    for _ in range(60):
        trial = study.ask()
        a, b = trial.suggest_float("a", 0, 1), trial.suggest_float("b", 0, 1)
        study.tell(trial, [9.0 if a > 0.8 else b, 1.0])
    table = tables({"dense": study})["importance"]
    found = {row["parameter"]: row["importance"] for row in table.rows}
    assert found["a"] > found["b"]


def test_the_same_studies_make_the_same_files(storage: BaseStorage, tmp_path: Path) -> None:
    for once in ("a", "b"):
        report(storage, tmp_path / once)
    for path in (tmp_path / "a").rglob("*.*"):
        assert path.read_bytes() == (tmp_path / "b" / path.relative_to(tmp_path / "a")).read_bytes()


def test_an_experiment_without_a_finished_trial_has_a_report_too(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "j")
    optuna.create_study(study_name="empty/dense", storage=storage)
    report(storage, tmp_path / "out")
    assert rows(tmp_path / "out", "results")[0]["complete"] == "0"


def test_what_is_not_there_is_named_with_what_is(storage: BaseStorage, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no experiment 'other'\. It holds made_up"):
        report(storage, tmp_path, "other")
    with pytest.raises(ValueError, match=r"The journal .* does not exist"):
        report(tmp_path / "fresh.journal", tmp_path)
    assert not (tmp_path / "fresh.journal").exists()
    (tmp_path / "empty.journal").touch()
    with pytest.raises(ValueError, match="It holds none"):
        report(tmp_path / "empty.journal", tmp_path)


def test_headings_are_written_not_generated(storage: BaseStorage, tmp_path: Path) -> None:
    report(storage, tmp_path)
    page = (tmp_path / "report.html").read_text()
    found = re.findall(r"<h2>(.*?)</h2>", page)
    assert "CPU time per epoch" in found
    assert "Best values of learning_rate" in found
    assert "Best values of compressor.density" in found
    assert page.index("topk ends at") < page.index("<h2>Results</h2>")


def test_a_study_in_which_tuning_lost_says_so(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "study.journal")
    add_study(storage, "dense", 1.0, 20.0, seeds=(0, 1, 2))
    add_study(storage, "topk", 50.0, 10.0, seeds=(0, 1, 2), moved=-60)
    report(storage, tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text()
    own = "it needs more trials (101 tuned, 41 with dense&#x27;s hyper-parameters)"
    assert f"topk is not tuned to its end: {own}, at 50" in page
    assert "its study has not been tuned to its end" in page  # above the picture
    assert "The gain from tuning" not in page


def test_a_study_in_which_dense_missed_the_best_rate_gives_no_verdict(tmp_path: Path) -> None:
    storage = open_storage(tmp_path / "study.journal")
    add_study(storage, "dense", 1.0, 20.0, seeds=(0, 1, 2))
    add_study(storage, "qsgd", 8.0, 20.0, seeds=(0, 1, 2))
    add_study(storage, "topk", 50.0, 10.0, seeds=(0, 1, 2), returned=-60)
    report(storage, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    better = "it reaches 41 ± 1 with topk's hyper-parameters, 101 ± 1 with its own"
    for method in ("qsgd", "topk"):
        said = f"{method} ends at 101 ± 1 (no verdict: dense is not tuned to its end, {better})"
        assert said in text


@pytest.mark.parametrize(
    ("busy", "said"), [(1.0, False), (3.0, True)], ids=["as before", "got busy in the middle"]
)
def test_seconds_of_runs_at_different_times_are_not_compared(
    tmp_path: Path, busy: float, said: bool
) -> None:
    storage = open_storage(tmp_path / "study.journal")
    add_study(storage, "dense", 1.0, 20.0)
    add_study(storage, "topk", 50.0, 10.0, busy=busy)
    report(storage, tmp_path / "out")
    text = (tmp_path / "out" / "report.md").read_text()
    assert "## Seconds per step\n\nNot compared, because the runs" in text
    assert ("one run took 3 times as long as another for the same CPU time" in text) == said
    assert "lightning-gc bench measures methods in turns" in text


def result(test: Any, spread: float | None = 1.0, seeds: int = 3, **changes: Any) -> dict[str, Any]:
    row = {"validation": 90.0, "test": test, "test_spread": spread, "seeds": seeds, "ratio": 50.0}
    row |= {"complete": 8, "pruned": 3, "failed": 1}
    moved = {"test_with_dense_hyper_parameters": test, "test_with_dense_hyper_parameters_spread": 1}
    return row | moved | changes


def moved(test: Any, spread: float | None = 1.0) -> dict[str, Any]:
    key = "test_with_dense_hyper_parameters"
    return {key: test, f"{key}_spread": spread}


def returned(test: Any, spread: float | None = 1.0) -> dict[str, Any]:
    key = "dense_with_its_hyper_parameters"
    return {key: test, f"{key}_spread": spread}


@pytest.mark.parametrize(
    ("dense", "other", "said"),
    [
        (result(100.0), result(101.0), "ends within the spread of dense over 3 seeds"),
        (result(100.0), result(103.0), "ends 3 % above dense, more than the spread over 3 seeds"),
        (result(100.0), result(101.5), "ends within"),  # less than two standard errors
        (result(100.0), result(101.5, seeds=9), "ends within"),  # three seeds of dense
        (result(100.0, seeds=9), result(101.5, seeds=9), "ends 1.5 % above dense, more than"),
        (result(100.0), result(50.0), "ends 50 % below dense, more than"),
        (result(100.0), result(300.0), "ends at 3 times dense's 100, more than"),
        (result(0.0), result(5.0), "ends 5 above dense (5 against 0), more than"),
        # Near zero: a share of dense's would be of its noise.
        (result(0.5), result(9.0), "ends 8.5 above dense (9 against 0.5), more than"),
        (result(-0.5), result(9.0), "ends 9.5 above dense (9 against -0.5), more than"),
        (result(100.0, None, 1), result(101.0, None, 1), "ends at 101, dense at 100 (no verdict"),
        (result(100.0, None, 1), result(101.0, None, 1), "from 12 trials and 1 seed; 10 and 3 are"),
        (result(100.0), result(50.0, complete=1, pruned=1), "no verdict from 3 trials and 3 seeds"),
        (result(None, None, 0), result(None, None, 0), "ends at 90 in its best trial, dense at 90"),
        (result(100.0), result(103.0, **moved(90.0)), "its end: it needs more trials (103 tuned,"),
        (result(100.0), result(103.0, **moved(102.0)), "ends 3 % above dense"),  # by its spread
        (result(100.0), result(103.0, **moved("diverged")), "ends 3 % above dense"),
        (result(100.0), result(90.0, **moved(100.5)), "(within it with dense's hyper-parameters)"),
        (
            result(100.0),
            result(90.0, **returned(91.0)),
            "no verdict: dense is not tuned to its end",
        ),
        (result(100.0), result(90.0, **returned(99.0)), "ends 10 % below dense, more than"),
        (result(100.0), result(90.0, **returned(91.0, None)), "ends 10 % below dense, more than"),
        (result(100.0), result(103.0, **moved(90.0), complete=1), "is not tuned to its end"),
        # Of one seed nobody knows the noise.
        (result(100.0), result(103.0, None, 1, **moved(90.0, None)), "(no verdict from 12 trials"),
        (result(100.0), result("diverged", None), "diverged in a final run"),
        (result("diverged", None), result(100.0), "cannot be compared, because dense diverged"),
        (result(100.0, validation=None), result(100.0), "cannot be compared, because dense has"),
        (result(100.0), result(100.0, validation=None), "has no result, because no trial"),
        (result(100.0), result(100.0, ratio=0.5), "seeds, at 2x more bytes."),
        (result(100.0), result(100.0, ratio=1.01), "seeds, at as many bytes."),
        (result(100.0), result(100.0, ratio=43_956.04), "at 43,956x fewer bytes."),
        (result(100.0), result(100.0, ratio=None), "over 3 seeds."),
    ],
)
def test_a_finding_claims_what_the_data_show(
    storage: BaseStorage, dense: dict[str, Any], other: dict[str, Any], said: str
) -> None:
    _, studies = find_studies(storage)
    rows = ({"method": "dense", **dense}, {"method": "topk", **other})
    (finding,) = findings(studies, ReportTable(tuple(rows[0]), rows))
    assert finding.startswith("topk ")
    assert said in finding
