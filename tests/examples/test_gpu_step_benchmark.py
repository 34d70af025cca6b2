"""A measurement on a GPU that was ended continues with the turns that are missing."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import gpu_step
from gpu_step import Case, Turn


class Ended(Exception):
    """A lent machine is taken back."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """Let no turn be measured; return which ones would have been."""
    found: list[tuple[str, int]] = []

    def measure(case: Case, number: int, where: str, batch: int, steps: int) -> Turn:
        if len(found) == 3:
            raise Ended
        found.append((case.name, number))
        traced = (9.0, 8.0, {"kernel": 7.0 + len(found)}) if number == 1 else ()
        return Turn(
            case.name, number, where, [0.05] * steps, [0.04] * steps, 2.0, "4 of 4", *traced
        )

    monkeypatch.setattr(gpu_step, "measure", measure)
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.get_device_name", lambda: "NVIDIA Nothing")
    monkeypatch.setattr("torch.cuda.nccl.version", lambda: (2, 28, 9))
    return found


def call(folder: Path, *more: str) -> None:
    methods = ["--methods", "no synchronisation", "plain DDP", "QSGD(4)"]
    where = ["--rows", str(folder / "rows" / "rows.jsonl"), "--out", str(folder)]
    gpu_step.main([*methods, *where, "--buckets", "25", "--rounds", "2", "--steps", "2", *more])


TURNS = [
    (name, number)
    for number in (1, 2)
    for name in (
        *("no synchronisation", "plain DDP, buckets of 25 MiB", "plain DDP"),
        *("QSGD(4), buckets of 25 MiB", "QSGD(4)"),
    )
]


def test_it_continues(
    tmp_path: Path, measured: list[tuple[str, int]], capsys: pytest.CaptureFixture[str]
) -> None:
    done = []
    for _ in range(3):
        with pytest.raises(Ended):
            call(tmp_path)
        done += measured
        measured.clear()
    call(tmp_path)
    assert done + measured == TURNS
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(TURNS) + 1
    assert lines[4] == (
        "QSGD(4): 50.0 ms a step, 40.0 of the host; the GPU works 8.0 in 9 operations; "
        "4 of 4 buckets recorded"
    )
    assert lines[-1].startswith("10 turns of 5 cases are in ")
    (page,) = tmp_path.glob("gpu_step_*.md")
    assert "| QSGD(4) | 50.0 | +0.0 | 40.0 | 9 | 8.0 | 4 of 4 | 2.00 | +0.00 |" in page.read_text()
    measured.clear()
    call(tmp_path)
    assert not measured


def test_what_was_not_written_is_measured_again(
    tmp_path: Path, measured: list[tuple[str, int]]
) -> None:
    with pytest.raises(Ended):
        call(tmp_path)
    rows = tmp_path / "rows" / "rows.jsonl"
    text = rows.read_text()
    rows.write_text(text[: text.rindex('"gib"')])
    measured.clear()
    with pytest.raises(Ended):
        call(tmp_path)
    assert measured == TURNS[2:5]
    measured.clear()
    with pytest.raises(Ended):
        call(tmp_path)
    assert measured == TURNS[5:8], "the line that was cut off must not spoil the next one"


@pytest.mark.parametrize("changed", ["sources", "machine", "steps"])
def test_turns_of_other_sources_do_not_count(
    changed: str, tmp_path: Path, measured: list[tuple[str, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(Ended):
        call(tmp_path)
    measured.clear()
    monkeypatch.setattr(gpu_step, "sources", lambda: "other" if changed == "sources" else "same")
    if changed == "machine":
        monkeypatch.setattr(gpu_step, "machine", lambda: ["GPU 0: another one"])
    with pytest.raises(Ended):
        call(tmp_path, *(["--steps", "3"] if changed == "steps" else []))
    assert measured == TURNS[:3]


def test_a_turn_is_read_as_it_was_written(tmp_path: Path) -> None:
    turn = Turn("Cast()", 2, "here", [0.1], [0.2], 3.0, "", 4.0, 5.0, {"kernel": 6.0})
    (tmp_path / "rows").write_text(json.dumps(asdict(turn)))
    assert gpu_step.kept(tmp_path / "rows", "here") == {("Cast()", 2): turn}
    assert gpu_step.kept(tmp_path / "rows", "there") == {}
    assert gpu_step.kept(tmp_path / "none", "here") == {}
