"""The benchmark of a link whose speed changes: workers end together, and no run is lost."""

import sys
import time
import types
from pathlib import Path
from typing import Any

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import varying_link  # type: ignore[import-not-found,unused-ignore]
from varying_link import Course, Step


def test_workers_end_together_where_only_one_clock_is_over() -> None:
    strategy = types.SimpleNamespace(
        levels=lambda: {"weight": 0.1}, reduce_boolean_decision=lambda over, all: True
    )
    trainer = types.SimpleNamespace(strategy=strategy, should_stop=False)
    course = Course(90.0, changes=False)
    course._began = course._last = time.perf_counter()
    course.on_train_batch_end(trainer, None, {"loss": 1.0})
    assert trainer.should_stop
    assert course.steps[-1].at < 90
    varying_link.check_length(course.steps, most=2)
    with pytest.raises(RuntimeError, match="1 steps were over before the time; --most-steps"):
        varying_link.check_length(course.steps, most=1)


def test_an_abort_costs_the_run_that_was_under_way(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[tuple[str, int, tuple[str, ...]]] = []

    def measure(options: Any, arm: str, seed: int, *more: str) -> list[Step]:
        if len(ran) == 3:
            ran.append(("aborted", 0, ()))
            raise RuntimeError("a worker has died")
        ran.append((arm, seed, more))
        return [Step(at, 0.5 + len(ran), 1.0, 0.1) for at in range(90)]

    monkeypatch.setattr(varying_link, "measure", measure)
    monkeypatch.setattr(varying_link, "check_privileges", lambda what: None)
    words = [
        "x",
        "--out",
        str(tmp_path),
        "--kept",
        str(tmp_path / "runs.json"),
        "--arms",
        "0.1",
        "0.01",
        "--seeds",
        "0",
        "1",
    ]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(RuntimeError, match="died"):
        varying_link.main()
    varying_link.main()
    assert [each[:2] for each in ran] == [
        *(("0.1", 0), ("0.1", 0), ("0.01", 0), ("aborted", 0)),
        *(("0.1", 1), ("0.01", 1)),
    ]
    assert len({more[-1] for _, _, more in ran if len(more) == 2 and "target" in more[1]}) == 1
    assert len(list(tmp_path.glob("varying_link_*.md"))) == 1
    monkeypatch.setattr(sys, "argv", [*words, "--spare", "0.5"])
    varying_link.main()
    assert len(ran) == 11  # other options, other runs
