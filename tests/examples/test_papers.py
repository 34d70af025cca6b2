"""The frame of the experiments on the papers: what is run again, what is a row, what is said."""

import dataclasses
import json
import math
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.figure import Figure

from lightning_gc import AllGather, ErrorFeedback, HardThreshold, TopK
from lightning_gc.compressors.wrappers.per_parameter import layerwise
from lightning_gc.engine import Engine
from lightning_gc.methods import plot_style
from lightning_gc.testing import Lockstep
from lightning_gc.transports import Simulated

sys.path.append(str(Path(__file__).parents[2] / "benchmarks" / "papers"))

import cell_runs
import frame
import layers
import total_error
import tuned_rate


def experiment(train, cells) -> frame.Experiment:
    return frame.Experiment(
        name="tried",
        about="What is tried.",
        cells=lambda seeds: [{**cell, "seed": seed} for seed in range(seeds) for cell in cells],
        train=train,
        page=lambda rows: frame.spread(frame.values(rows, "loss"), ".1f"),
        claims=lambda rows: [frame.Claim("it is", "1", str(len(rows)), "agrees")],
        draw=draw,
    )


def draw(rows, figure) -> None:
    figure.subplots().plot(frame.values(rows, "loss"))


def start(tried: frame.Experiment, monkeypatch, out: Path, *options: str) -> int:
    monkeypatch.setattr(sys, "argv", ["tried.py", "--out", str(out), "--seeds", "1", *options])
    return frame.main(tried)


def test_only_cells_without_a_row_are_run_and_failures_are_rows(monkeypatch, tmp_path) -> None:
    ran = []

    def train(cell, data):
        ran.append(cell["arm"])
        if cell["arm"] == "bad" and len(ran) < 4:
            raise ValueError("not today")
        return {"loss": math.inf if cell["arm"] == "diverges" else 1.5}

    tried = experiment(train, [{"arm": arm} for arm in ("good", "diverges", "bad")])
    assert start(tried, monkeypatch, tmp_path) == 1
    (page,) = tmp_path.glob("tried_*.md")
    assert "2 of 3 runs" in page.read_text()
    assert "1.5 (1 diverged)" in page.read_text()
    assert "not today" in page.read_text()
    assert start(tried, monkeypatch, tmp_path) == 0
    assert ran == ["good", "diverges", "bad", "bad"]
    assert "3 of 3 runs" in page.read_text()
    assert page.with_suffix(".svg").stat().st_size > 1000
    for line in (tmp_path / "tried.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_settings_are_part_of_a_cell_and_unknown_ones_refused(
    monkeypatch, tmp_path, capsys
) -> None:
    ran = []

    def train(cell, data):
        ran.append(cell["epochs"])
        return {"loss": 1.0}

    tried = experiment(train, [{"epochs": 9}])
    start(tried, monkeypatch, tmp_path)
    start(tried, monkeypatch, tmp_path, "--set", "epochs=1")
    assert ran == [9, 1]
    with pytest.raises(SystemExit):
        start(tried, monkeypatch, tmp_path, "--set", "epoch=1")
    assert "cells have epochs, seed" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("lower", "higher", "said"),
    [
        ([1.0, 1.1, 0.9], [2.0, 2.2, 1.9], "agrees"),
        ([2.0, 2.2, 1.9], [1.0, 1.1, 0.9], "disagrees"),
        ([1.0, 2.0, 3.0], [2.0, 1.0, 3.1], "cannot be told"),
        ([1.0], [2.0], "cannot be told"),
        ([1.0, 1.0], [math.inf, 2.0], "agrees"),
        ([math.inf, 1.0], [math.inf, 2.0], "cannot be told"),
    ],
)
def test_a_verdict_needs_a_difference_beyond_the_spread(lower, higher, said) -> None:
    assert frame.verdict(lower, higher) == said


@pytest.mark.parametrize("compressor", [TopK(0.1), HardThreshold(0.8)])
def test_workers_as_tensors_of_one_engine_are_workers(compressor) -> None:
    """What benchmarks/papers/heterogeneity.py does for speed, under AllGather."""
    workers, d = 4, 60
    apart = Lockstep(workers, layerwise(compressor), ErrorFeedback(), AllGather())
    together = Engine(layerwise(compressor), ErrorFeedback(), AllGather())
    names = [f"worker {i}" for i in range(workers)]
    for step in range(5):
        grads = torch.randn(workers, d, generator=torch.Generator().manual_seed(step))
        mean = apart.step([{"x": grad} for grad in grads]).mean["x"]
        flat = grads.flatten().clone()
        flow = together.flow(flat, dict.fromkeys(names, (d,)))
        together.advance()
        Simulated(1).run([flow])
        torch.testing.assert_close(flat.view(workers, d).mean(0), mean)


def test_a_cell_that_depends_on_another_is_run_after_it_and_given_its_row(
    monkeypatch, tmp_path
) -> None:
    ran = []

    def train(cell, data):
        ran.append((cell["arm"], cell["before"][0]["loss"] if "before" in cell else None))
        return {"loss": 1.0 + len(ran)}

    tried = experiment(train, [{"arm": arm} for arm in ("constant", "dynamic", "none")])
    depends = {"constant": "dynamic"}
    tried = dataclasses.replace(
        tried,
        before=lambda cell: (
            [{**cell, "arm": depends[cell["arm"]]}] if cell["arm"] in depends else []
        ),
    )
    assert start(tried, monkeypatch, tmp_path, "--only", "arm=constant") == 0
    assert ran == [("dynamic", None), ("constant", 2.0)]
    assert start(tried, monkeypatch, tmp_path) == 0
    assert ran[2:] == [("none", None)]


def test_half_a_row_is_not_read_and_its_cell_is_run_again(monkeypatch, tmp_path) -> None:
    tried = experiment(lambda cell, data: {"loss": 1.0}, [{"arm": "a"}, {"arm": "b"}])
    assert start(tried, monkeypatch, tmp_path) == 0
    path = tmp_path / "tried.jsonl"
    whole = path.read_text()
    path.write_text(whole[:-20])  # as another process may see it, or a crash leaves it
    assert [row["arm"] for row in cell_runs.read(path, tried.cells(1))] == ["a"]
    assert start(tried, monkeypatch, tmp_path) == 0
    assert [json.loads(line)["cell"]["arm"] for line in path.read_text().splitlines()] == ["a", "b"]


def test_rows_before_a_date_are_run_again_once(monkeypatch, tmp_path) -> None:
    losses = iter((1.0, 2.0, 3.0))
    tried = experiment(lambda cell, data: {"loss": next(losses)}, [{"arm": "a"}, {"arm": "b"}])
    assert start(tried, monkeypatch, tmp_path) == 0
    path = tmp_path / "tried.jsonl"
    first, second = map(json.loads, path.read_text().splitlines())
    rows = (first | {"date": "2000-01-01"}, second)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    for _ in range(2):
        assert start(tried, monkeypatch, tmp_path, "--since", second["date"]) == 0
    assert [row["loss"] for row in cell_runs.read(path, tried.cells(1))] == [3.0, 2.0]


@pytest.mark.parametrize(("power", "slope"), [(-1.2, -1.5), (0.7, 1.0)])
def test_a_level_is_found_at_which_a_run_sends_so_much(power, slope) -> None:
    tried = []

    def run(level: float) -> dict[str, float]:
        tried.append(level)
        return {"bytes": 5e4 * level**power}

    found = total_error.matched(run, 1.0, 1e3, "bytes", slope)
    assert abs(found["bytes"] / 1e3 - 1) < 0.01
    assert found["factor"] == pytest.approx(tried[-1])
    assert found["tries"] == len(tried) < 7


def test_a_second_command_at_the_same_rows_is_refused(monkeypatch, tmp_path) -> None:
    def train(cell, data):
        with pytest.raises(SystemExit, match=r"Another command is at work on .*tried\.jsonl"):
            start(tried, monkeypatch, tmp_path)
        return {"loss": 1.0}

    tried = experiment(train, [{"arm": "a"}])
    assert start(tried, monkeypatch, tmp_path) == 0
    assert len((tmp_path / "tried.jsonl").read_text().splitlines()) == 1


def ends_in_its_process(cell, data):
    before = [row["loss"] for row in cell.get("before", ())]
    return {"loss": sum(before) + 1.0, "process": os.getpid(), "threads": torch.get_num_threads()}


@pytest.mark.nightly  # starts two interpreters that import everything
def test_several_at_a_time_are_the_same_runs_and_what_depends_on_others_waits(
    monkeypatch, tmp_path
) -> None:
    tried = experiment(ends_in_its_process, [{"arm": arm} for arm in ("last", "a", "b")])
    tried = dataclasses.replace(
        tried, before=lambda cell: [{**cell, "arm": "b"}] if cell["arm"] == "last" else []
    )
    assert start(tried, monkeypatch, tmp_path, "--jobs", "2") == 0
    rows = cell_runs.read(tmp_path / "tried.jsonl", tried.cells(1))
    assert [(row["arm"], row["loss"], row["threads"]) for row in rows] == [
        ("last", 2.0, 1),
        ("a", 1.0, 1),
        ("b", 1.0, 1),
    ]
    assert os.getpid() not in {row["process"] for row in rows}


def test_only_some_values_of_a_setting(monkeypatch, tmp_path) -> None:
    ran = []

    def train(cell, data):
        ran.append(cell["arm"])
        return {"loss": 1.0}

    tried = experiment(train, [{"arm": arm} for arm in ("a", "b", "c")])
    start(tried, monkeypatch, tmp_path, "--only", "arm=a", "arm=c", "seed=0")
    assert ran == ["a", "c"]


def test_cells_of_several_tasks_have_settings_of_their_own(monkeypatch, tmp_path, capsys) -> None:
    ran = []

    def train(cell, data):
        ran.append({name: cell[name] for name in ("hidden", "width") if name in cell})
        return {"loss": 1.0}

    tried = experiment(train, [{"task": "words", "hidden": 8}, {"task": "photos", "width": 4}])
    assert start(tried, monkeypatch, tmp_path, "--only", "width=4") == 0
    assert ran == [{"width": 4}]
    assert start(tried, monkeypatch, tmp_path, "--set", "hidden=2") == 0
    assert ran[1:] == [{"hidden": 2}]
    with pytest.raises(SystemExit):
        start(tried, monkeypatch, tmp_path, "--only", "depth=4")
    assert "cells have task, hidden, seed, width" in capsys.readouterr().err


def test_data_are_demanded_for_tasks_that_need_them(monkeypatch, tmp_path, capsys) -> None:
    monkeypatch.delenv("PAPERS_DATA", raising=False)
    tried = experiment(lambda cell, data: {"loss": 1.0}, [{"task": t} for t in ("words", "cifar")])
    tried = dataclasses.replace(tried, data="a file", free=frozenset({"words"}))
    assert start(tried, monkeypatch, tmp_path, "--only", "task=words") == 0
    with pytest.raises(SystemExit):
        start(tried, monkeypatch, tmp_path)
    assert "--data: a file" in capsys.readouterr().err


def test_bytes_of_a_plan_are_compared_with_the_same_seeds() -> None:
    settings = {"task": "words", "knob": "rank"}
    rows = [
        {**settings, "arm": arm, "seed": seed, "bytes": nbytes * 2**seed, "loss": 1.0}
        for arm, nbytes in (("4", 100), ("plan", 50))
        for seed in range(3)
    ]
    runs = [row for row in rows if row["arm"] == "plan" and row["seed"] > 0]
    assert layers.share(rows, runs) == [0.5, 0.5]
    without = [row for row in rows if (row["arm"], row["seed"]) != ("4", 1)]
    assert layers.share(without, runs) == [0.5]


def test_a_cell_whose_other_one_has_failed_says_so(monkeypatch, tmp_path) -> None:
    def train(cell, data):
        raise ValueError("not today")

    tried = experiment(train, [{"arm": "dynamic"}, {"arm": "constant"}])
    first = {"arm": "dynamic", "seed": 0}
    tried = dataclasses.replace(
        tried, before=lambda cell: [first] if cell["arm"] == "constant" else []
    )
    assert start(tried, monkeypatch, tmp_path) == 1
    rows = [json.loads(line) for line in (tmp_path / "tried.jsonl").read_text().splitlines()]
    assert "on which this cell depends, failed" in rows[1]["figures"]["failed"]


def test_a_rate_is_chosen_with_the_first_seed_and_used_by_the_others(monkeypatch, tmp_path) -> None:
    rates, ran = (0.1, 0.2, 0.4), []
    losses = {("a", 0.1): 3.0, ("a", 0.2): 1.0, ("a", 0.4): math.inf}
    losses |= {("b", 0.1): 2.0, ("b", 0.2): 2.5, ("b", 0.4): 2.1}

    def train(cell, data):
        rate = tuned_rate.rate(cell)
        ran.append((cell["arm"], rate, cell["seed"]))
        return {"loss": losses[cell["arm"], rate] + 0.01 * cell["seed"]}

    tried = dataclasses.replace(
        experiment(train, []),
        cells=lambda seeds: tuned_rate.cells(({"arm": arm} for arm in "ab"), rates, 3),
        before=lambda cell: tuned_rate.trials(cell, rates),
    )
    assert start(tried, monkeypatch, tmp_path, "--only", "arm=a", "rate=tuned") == 0
    assert ran == [("a", 0.1, 0), ("a", 0.2, 0), ("a", 0.4, 0), ("a", 0.2, 1), ("a", 0.2, 2)]
    assert start(tried, monkeypatch, tmp_path) == 0
    assert ran[5:] == [("b", rate, 0) for rate in rates] + [("b", 0.1, 1), ("b", 0.1, 2)]
    rows = cell_runs.read(tmp_path / "tried.jsonl", tried.cells(3))
    chosen = {arm: tuned_rate.runs(rows, arm=arm) for arm in "abc"}
    assert [row["loss"] for row in chosen["a"]] == [1.0, 1.01, 1.02]
    assert [row["seed"] for row in chosen["b"]] == [0, 1, 2]
    assert chosen["c"] == []
    assert [tuned_rate.is_edge(chosen[arm][0], rates) for arm in "ab"] == [False, True]


def test_points_are_named_without_overlap() -> None:
    places: list[Any] = []

    def draw(figure: Figure) -> None:
        axes = figure.subplots()
        axes.set(xlim=(0, 1), ylim=(0, 1))
        frame.label_points(axes, [(0.5, 0.5, "one"), (0.5, 0.51, "two"), (0.5, 0.52, "")])
        figure.draw_without_rendering()
        places.extend(text.get_window_extent() for text in axes.texts)

    plot_style.svg(draw, "tried")
    one, two = places
    assert not one.overlaps(two)
