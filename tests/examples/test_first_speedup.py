"""The program of the page "Your first speedup": two workers, simulated or over a slow link."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.examples import Ended, as_script, forked_script

EXAMPLE = Path(__file__).parents[2] / "examples" / "first_speedup.py"
MAY_MAKE_LINKS = os.geteuid() == 0 and bool(shutil.which("ip")) and bool(shutil.which("tc"))


def compared(
    folder: Path, *options: str, run: Callable[..., Ended] = as_script
) -> dict[str, list[float]]:
    """Return seconds per step, megabytes per step and loss of each strategy."""
    done = run("first_speedup", options, folder=folder)
    assert done.code == 0, done.out + done.err
    said = r"Compared with (\w+) a step is \S+ times as fast, with \S+ times fewer bytes\."
    assert re.findall(said, done.out) == ["ddp", "ddp_fp16_hook"]
    rows = re.findall(r"^(\w*ddp\w*) +(\S+) +(\S+) +(\S+)$", done.out, re.M)
    return {name: [float(figure) for figure in figures] for name, *figures in rows}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--after", "typo"], "typo is not a strategy; give a name such as"),
        (
            ["--after", "compressed_ddp_topq"],
            "topq is not a strategy; give a name such as compressed_ddp_topk.",
        ),
        (["--steps", "0"], "--steps 0: give 4 or more, such as 100."),
        (["--mbit", "nan"], "--mbit nan: give a number above 0, such as 200."),
    ],
)
def test_options_are_judged_before_training(
    words: list[str],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sys, "argv", ["first_speedup.py", *words])
    program = runpy.run_path(str(EXAMPLE), run_name="example")
    with pytest.raises(SystemExit) as end:
        program["parse"]()
    assert end.value.code == 2
    assert said in " ".join(capsys.readouterr().err.split())


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["images", pytest.param("text", marks=pytest.mark.nightly)])
def test_simulated_workers_show_what_compression_saves(kind: str, tmp_path: Path) -> None:
    options = ["--simulate", "--model", kind, "--steps", "6", "--after", "compressed_ddp_qsgd"]
    rows = compared(tmp_path, *options, "--mbit", "10", run=forked_script)
    (seconds, mbytes, loss), (faster, fewer, other) = rows["ddp"], rows["compressed_ddp_qsgd"]
    assert mbytes / fewer > 7
    assert seconds > faster  # 20 MB take 17 s here
    assert mbytes / rows["ddp_fp16_hook"][1] == pytest.approx(2, rel=0.01)
    assert abs(loss - other) < 0.1 * loss
    assert (tmp_path / "first_speedup.png").stat().st_size > 10_000


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.skipif(not MAY_MAKE_LINKS, reason="needs root, ip and tc, to make a slow link")
def test_two_processes_over_a_slow_link(tmp_path: Path) -> None:
    rows = compared(tmp_path, "--steps", "12", "--after", "compressed_ddp_qsgd", "--mbit", "100")
    (seconds, mbytes, _), (faster, fewer, _) = rows["ddp"], rows["compressed_ddp_qsgd"]
    assert mbytes == pytest.approx(20.8, rel=0.03)  # counted by the network interface
    assert mbytes / fewer > 7
    assert mbytes / rows["ddp_fp16_hook"][1] == pytest.approx(2, rel=0.03)
    assert seconds > faster


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.skipif(not MAY_MAKE_LINKS, reason="needs root, ip and tc, to make a slow link")
def test_sigterm_removes_the_link(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, str(EXAMPLE), "--steps", "1000"],
        stdout=subprocess.PIPE,
        text=True,
        cwd=tmp_path,
    ) as started:
        assert started.stdout is not None

        def spaces() -> int:
            listed = subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True)
            return listed.stdout.count(f"speedup{started.pid}-")

        try:
            for line in started.stdout:
                if line.startswith("Training with"):
                    break
            while spaces() < 2 and started.poll() is None:
                time.sleep(0.1)
            started.terminate()
            assert started.wait(timeout=60) == 1
            assert spaces() == 0
        finally:
            started.kill()
