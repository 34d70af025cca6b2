"""The runner says what it skips, ends with 1 if a check fails, and continues where it was ended."""

import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.gpu import __main__ as runner

CASES = {
    "passed": "def test(): pass",
    "failed": "def test(): assert 0, 'as planted'",
    "out of time": "import time\ndef test(): time.sleep(60)",
}


@pytest.mark.parametrize("verdict", CASES)
def test_verdicts(
    tmp_path: Path, verdict: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text(CASES[verdict])
    seconds = 2 if verdict == "out of time" else 60
    check = runner.Check("as planted", (str(planted),), seconds=seconds)
    monkeypatch.setattr(runner, "CHECKS", {1: check})
    report = tmp_path / "report.txt"
    assert runner.main(["--only", "1", "--report", str(report)]) == int(verdict != "passed")
    said = report.read_text()
    assert f" 1  {verdict}" in said
    assert verdict in capfd.readouterr().out


def test_what_needs_a_gpu_is_skipped() -> None:
    outcome = runner.run(runner.CHECKS[1], gpus=0)
    assert (outcome.verdict, outcome.detail) == ("skipped", "needs 1 GPU, found 0")


def test_what_was_found_before_the_time_was_up_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted, ready = tmp_path / "test_planted.py", tmp_path / "ready"
    planted.write_text(
        "import pathlib, time\n"
        "def test_first(): assert 0, 'as planted'\n"
        f"def test_second(): pathlib.Path({str(ready)!r}).touch(); time.sleep(600)\n"
    )

    class WhenReady(threading.Thread):
        """Takes the place of a timer."""

        def __init__(self, seconds: float, act: Callable[[], None]) -> None:
            super().__init__(daemon=True)
            self.act = act

        def run(self) -> None:
            while not ready.exists():
                time.sleep(0.01)
            self.act()

        def cancel(self) -> None:
            pass

    monkeypatch.setattr(threading, "Timer", WhenReady)
    outcome = runner.run(runner.Check("", (str(planted),), seconds=500), gpus=0)
    assert outcome.verdict == "out of time"
    assert outcome.detail.startswith("ended after 500 s; 1 failed in ")
    assert "as planted" in outcome.output


PROGRAM = (
    "import pathlib, sys\n"
    "runs = pathlib.Path({folder!r}, 'runs')\n"
    "runs.write_text(runs.read_text() + 'x' if runs.exists() else 'x')\n"
    "print('first: 1 ms', flush=True)\n"
    "print('a word of a library', file=sys.stderr)\n"
    "print('second: 2 ms')\n"
)
Loan = Callable[..., str]


@pytest.fixture
def loan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Loan:
    """Return a function that runs two checks on a loan and returns what is printed."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.replace("{folder!r}", repr(str(tmp_path))))
    failing = tmp_path / "test_failing.py"
    failing.write_text("def test(): assert 0, 'as planted'")
    checks = {
        2: runner.Check("a program", program=(str(program), "{folder}")),
        1: runner.Check("a test", (str(failing),), seconds=60),
        3: runner.Check("of a GPU", gpus=1),
    }
    monkeypatch.setattr(runner, "CHECKS", checks)
    monkeypatch.setattr(runner, "LOAN", checks)
    monkeypatch.setattr(runner, "SHAREABLE", False)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)

    def call(*arguments: str, minutes: float = 9) -> str:
        report = str(tmp_path / "report.txt")
        code = runner.main(["--loan", str(minutes), "--report", report, *arguments])
        assert code == ("failed" in (tmp_path / "report.txt").read_text())
        return capfd.readouterr().out

    return call


def runs(tmp_path: Path) -> int:
    return len((tmp_path / "runs").read_text())


def test_a_loan_continues(tmp_path: Path, loan: Loan) -> None:
    first = loan("--only", "2", "3")
    assert "2: a program … first: 1 ms\n   second: 2 ms\n   passed, second: 2 ms\n" in first
    assert "a word of a library" not in first
    assert "skipped, needs 1 GPU, found 0" in first
    report = tmp_path / "report.txt"
    assert "==== 2: a program\nfirst: 1 ms\nsecond: 2 ms\n" in report.read_text()
    second = loan()
    assert runs(tmp_path) == 1
    assert "1: a test … failed, 1 failed in " in second
    assert "skipped, needs 1 GPU, found 0" in second, "it may have one now"
    third = loan()
    assert "1: a test … " not in third
    said = report.read_text()
    assert " 2  passed " in said
    assert " 1  failed " in said
    assert "as planted" in said


def test_a_loan_repeats_what_it_is_told_to(tmp_path: Path, loan: Loan) -> None:
    loan()
    assert runs(tmp_path) == 1
    assert "1: a test … " not in loan("--again", "2")
    assert runs(tmp_path) == 2
    assert "1: a test … " in loan("--again")
    assert runs(tmp_path) == 3


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("print('first: 1 ms')\nraise ArithmeticError('as planted')")
    outcome = runner.run(runner.Check("", program=(str(program),)), gpus=0)
    assert (outcome.verdict, outcome.detail) == ("failed", "ArithmeticError: as planted")
    assert outcome.output.startswith("first: 1 ms\nTraceback")


def test_results_of_another_machine_do_not_count(
    tmp_path: Path, loan: Loan, monkeypatch: pytest.MonkeyPatch
) -> None:
    loan("--only", "2")
    monkeypatch.setattr(runner, "machine", lambda: ["GPU 0: another one"])
    loan("--only", "2")
    assert runs(tmp_path) == 2


def test_nothing_begins_at_the_end_of_a_loan(tmp_path: Path, loan: Loan) -> None:
    (tmp_path / "report.txt").write_text("")
    assert loan(minutes=0.4).count(": not begun") == 3
    assert not (tmp_path / "runs").exists()


def test_what_a_loan_ends_is_no_result(tmp_path: Path) -> None:
    planted = tmp_path / "test_planted.py"
    planted.write_text(CASES["out of time"])
    check = runner.Check("", (str(planted),), seconds=60)
    outcome = runner.run(check, gpus=0, left=1.0)
    assert outcome.verdict == "interrupted"
    assert runner.results(runner.report({1: outcome})) == {}


def test_a_report_is_read_as_it_was_written() -> None:
    given = {
        17: runner.Outcome("passed", "9 passed in 3.20s", seconds=4.0, sources="0123abcd"),
        20: runner.Outcome("passed", "Cast(): 1 ms", "TopK(): 2 ms\nCast(): 1 ms", 5.0, "4567cdef"),
        2: runner.Outcome("failed", "1 failed", "==== FAILURES ====\nassert 0", 6.0, "4567cdef"),
        3: runner.Outcome("out of time", "ended after 200 s; 5 passed", "...", 210.0, "4567cdef"),
    }
    found = runner.results(runner.report(given))
    assert list(found) == list(given)
    for number, outcome in given.items():
        assert found[number].output.strip() == outcome.output
        for name in ("verdict", "detail", "seconds", "sources"):
            assert getattr(found[number], name) == getattr(outcome, name)


def test_the_order_of_a_loan() -> None:
    """Each check is shorter than alone, and none is for more GPUs than two."""
    assert list(runner.LOAN)[-1] == 21
    for number, check in runner.LOAN.items():
        assert check.seconds <= runner.CHECKS[number].seconds
        assert check.tests == runner.CHECKS[number].tests
        assert check.gpus <= 2
