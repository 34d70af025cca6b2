"""The runner says what it skips, and ends with 1 if a check fails or takes too long."""

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


def test_what_needs_a_gpu_is_skipped(tmp_path: Path) -> None:
    outcome = runner.run(runner.CHECKS[1], gpus=0)
    assert (outcome.verdict, outcome.detail) == ("skipped", "needs 1 GPU, found 0")
