"""lightning-gc advise: two workers, from probe to verdict; what it writes trains; how it ends."""

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from lightning_gc import cli
from lightning_gc.advice import session
from lightning_gc.advice.advising import Advice, show, verdict_line
from lightning_gc.advice.prediction import WHOLE, Prediction, Situation, pieces_for, predict
from lightning_gc.advice.report import Verdict, strategy_section
from lightning_gc.advice.session import Session
from lightning_gc.advice.traces import Asked, Trace
from lightning_gc.bench.baselines import BF16, FP16, PLAIN
from lightning_gc.controllers import Chain, Fixed, Plan
from lightning_gc.exchange.timeline import Module
from lightning_gc.transports.link import Link, alike
from lightning_gc.transports.network_model import rate
from lightning_gc.tuning import Method
from tests.processes.test_bench import CONFIG, LOCAL, Line
from tests.support.fitting import unwarned
from tests.support.processes import ROOT, run_in_processes

QUICK = ("--budget-seconds", "10", "--methods", "topk:density=0.05")


class Plain(Line):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), self.rate)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    Path("line.yaml").write_text(CONFIG.replace("test_bench.Line", "test_advise.Plain") + LOCAL)


def run(worker: int, where: str, words: tuple[str, ...], favours: str = "") -> tuple[int, str]:
    """Be one of the workers. ``favours``: the row that measures as the shortest, beyond doubt."""
    os.chdir(where)
    session.ROUNDS, session.MOST, session.STEPS = 1, 4, 2  # seconds are of no interest here
    measured = Session.measure

    def measure(self: Session, rows: list[Prediction]) -> Mapping[str, Mapping[str, Any]]:
        found = measured(self, rows)
        for name, row in found.items():
            factor = 0.1 if favours and name.startswith(favours) else 1.0
            seconds = factor * row["seconds"]
            row |= {"seconds": seconds, "low": seconds, "high": seconds}
        return found

    Session.measure = measure  # type: ignore[method-assign, assignment]
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said), unwarned():
        code = cli.main(["advise", *words])
    return code, said.getvalue()


@pytest.mark.processes
@pytest.mark.usefixtures("folder")
@pytest.mark.nightly
def test_from_probe_to_a_file_that_trains() -> None:
    words = ("line.yaml", *QUICK)
    (code, said), (other, silence) = run_in_processes(run, 2, os.getcwd(), words, "topk")
    assert code == other == cli.OK, said
    assert silence == ""
    found = json.loads(Path("runs/advice/line.advised.json").read_text())
    assert {PLAIN, FP16} < set(found["measured"])
    predicted = {row["name"]: row for row in found["predicted"]}
    for name, row in found["measured"].items():
        if name != FP16:
            assert predicted[name]["nbytes"] == pytest.approx(row["bytes"], rel=0.01)
    assert {row["every"] for row in found["predicted"]} == {1, 8, 32}
    assert found["verdict"]["choice"].startswith("topk:density=0.05")
    assert "Use topk:density=0.05" in said
    assert "To tune again: the learning rate" in said
    assert " Without tuning: " in said
    assert "Next: lightning-gc fit" in said
    assert Path("runs/advice/line.advised.svg").read_text().startswith("<?xml")
    section = yaml.safe_load(Path("runs/advice/line.advised.yaml").read_text())["trainer"][
        "strategy"
    ]
    assert section["class_path"] == "lightning_gc.CompressedDDPStrategy"
    assert section["init_args"]["compressor"]["init_args"] == {"density": 0.05}
    run_in_processes(fit, 2, os.getcwd())


def fit(worker: int, where: str) -> None:
    os.chdir(where)
    sys.path.insert(0, where)
    with unwarned():
        assert cli.main(["fit", "runs/advice/line.advised.yaml"]) == cli.OK


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.usefixtures("folder")
def test_another_cluster_is_predicted_only() -> None:
    words = ("line.yaml", *QUICK, "--workers", "8", "--link", "1mbit")
    (code, said), _ = run_in_processes(run, 2, os.getcwd(), words)
    assert code == cli.OK, said
    assert "No verdict, because nothing was measured" in said
    found = json.loads(Path("runs/advice/line.advised.json").read_text())
    assert (found["measured"], found["verdict"], found["workers"]) == ({}, None, 8)
    assert not Path("runs/advice/line.advised.yaml").exists()
    # 33 kB twice over 1 Mbit/s, not less, and a twentieth of them with top-k.
    seconds = {row["name"]: row["seconds"] for row in found["predicted"]}
    assert seconds[PLAIN] > 2 * 7 / 8 * 4 * (128 * 64 + 64) * 8 / 1e6
    assert seconds["topk:density=0.05"] < seconds[PLAIN]


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.usefixtures("folder")
def test_a_worker_that_dies_ends_it_with_a_sentence() -> None:
    text = Path("line.yaml").read_text()
    Path("line.yaml").write_text(text.replace("{}", "{dies_in: UnsynchronisedStrategy}", 1))
    words = ("line.yaml", *QUICK, "--timeout", "20")
    ((code, said),) = run_in_processes(run, 2, os.getcwd(), words, wait_for=1)
    assert code == cli.FAILED
    assert "lightning-gc: Worker 0 cannot continue with the module by itself." in said
    assert "has died" in said
    assert "Traceback" not in said


@pytest.mark.processes
@pytest.mark.nightly
@pytest.mark.usefixtures("folder")
def test_ctrl_c_leaves_a_sentence_and_no_process() -> None:
    """As a terminal sends it: to the whole group of processes at once."""
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    started = subprocess.Popen(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"),
            *("-m", "lightning_gc", "advise", "line.yaml", "--budget-seconds", "60"),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment,
        start_new_session=True,
    )
    assert started.stdout is not None
    for line in started.stdout:
        if line.startswith("link: "):
            break
    os.killpg(started.pid, signal.SIGINT)
    _, said = started.communicate(timeout=60)
    assert said.count("lightning-gc: Stopped. Nothing was written.") == 1
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            os.killpg(started.pid, 0)
        except ProcessLookupError:
            break
        time.sleep(0.1)
    else:
        pytest.fail("a process is left")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--methods", "local"], "local has local steps"),
        (["--link", "fast"], "Write it as 1gbit"),
        (["--workers", "1"], "at least 2 exchange gradients"),
        (["--budget-seconds", "1"], "give 10 or more"),
        (["--methods", "topkk"], "'topkk' is not a compressor"),
        ([], "torchrun --nproc-per-node 2 -m lightning_gc advise"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_is_wrong_is_said_in_a_sentence(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    said: str,
) -> None:
    if words:
        place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
        for name, value in (place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}).items():
            monkeypatch.setenv(name, value)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    assert cli.main(["advise", "line.yaml", *words]) == cli.USAGE
    assert said in capsys.readouterr().err


def advice(verdict: Verdict | None = None) -> Advice:
    """Return what two workers might find on a slow link, where local steps are the shortest."""
    nbytes = (4 << 20,) * 10
    pieces = pieces_for(nbytes)

    def traces(share: float) -> list[Trace]:
        return [
            Trace(2, (Asked("Mean", int(share * sum(nbytes[i] for i in piece))),), (0.001, 0.001))
            for piece in pieces
        ]

    situation = Situation(
        Module(0.05, 0.1, 0.01),
        tuple(map(str, range(10))),
        nbytes,
        tuple(0.01 * (i + 1) for i in range(10)),
        pieces,
        {WHOLE: traces(1.0), "cast": traces(0.5)},
        WHOLE,
        2,
        alike(Link(0.1, 100.0)),
    )
    rows = tuple(predict(situation, {}))
    seconds = {"cast": 1.0, PLAIN: 2.0} if verdict else {}
    measured = {n: {"seconds": s, "low": s, "high": s, "bytes": 1} for n, s in seconds.items()}
    methods, sections = {"cast": Method("cast")}, {"model": {"class_path": "m.M"}}
    return Advice(
        rows, measured, verdict, verdict, situation, methods, {}, sections, {"devices": 2}, {}
    )


def test_files_have_names_of_their_own(tmp_path: Path) -> None:
    """Also where they are written beside the configuration, and for names with several dots."""
    found = advice(Verdict("cast", "it is shorter", True))
    configs = [tmp_path / name for name in ("config.yaml", "lm-1.5.yaml", "lm-1.6.yaml")]
    for config in configs:
        config.write_text("# mine")
        show(found, config, tmp_path)
        assert config.read_text() == "# mine"
    written = {path.name for path in tmp_path.iterdir()} - {config.name for config in configs}
    assert written == {
        f"{config.stem}.advised.{kind}"
        for config in configs
        for kind in ("md", "json", "svg", "yaml")
    }


def test_the_table_has_the_best_row_of_each_method() -> None:
    """Of three bucket sizes of each; plain DDP is there, also where nothing was measured."""
    for verdict in (None, Verdict("cast", "it is shorter", True)):
        without = [name for name, *_ in advice(verdict).table()[1] if "every" not in name]
        assert sorted(without) == ["cast", PLAIN, *([] if verdict else [BF16])]
        local = [name for name, *_ in advice(verdict).table()[1] if "every" in name]
        assert [name.partition(",")[0] for name in local] == ["cast", WHOLE]


def test_local_steps_are_never_suggested(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = advice()
    assert found.rows[0].every > 1
    show(found, tmp_path / "line.yaml", tmp_path)
    assert "The shortest predicted step is torch bf16 hook's" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("verdict", "words"),
    [
        (Verdict(None, "the best method took longer.", True), "Do nothing: the best"),
        (Verdict(None, "too noisy to tell.", False), "No verdict: too noisy"),
        (Verdict("cast", "it is shorter.", True), "Use cast: it is shorter. Accuracy"),
    ],
)
def test_the_verdict_is_the_first_and_the_last_line(
    verdict: Verdict, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    show(advice(verdict), tmp_path / "line.yaml", tmp_path)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == last
    assert first.startswith(f"Verdict: {words}")
    assert ("To tune again: nothing." in first) == (verdict.choice == "cast")


def test_a_suggestion_that_needs_tuning_has_another_verdict_beside_it() -> None:
    use = Verdict("cast", "it is shorter.", True)
    methods = {"cast": Method("cast", "topk")}  # named otherwise: the class decides
    found = replace(advice(use), methods=methods, untuned=Verdict(None, "no gain.", True))
    assert verdict_line(found).endswith(" Without tuning: Do nothing: no gain.")
    assert "Without tuning" not in verdict_line(advice(use))


@pytest.mark.parametrize(
    ("controller", "written"),
    [
        (
            Fixed(0.05),
            {"class_path": "lightning_gc.controllers.Fixed", "init_args": {"level": 0.05}},
        ),
        (
            Chain(Fixed(0.05), Plan({"*.bias": 0.03, "*": 0.007}), 1),
            {
                "class_path": "lightning_gc.controllers.Chain",
                "init_args": {
                    "first": {
                        "class_path": "lightning_gc.controllers.Fixed",
                        "init_args": {"level": 0.05},
                    },
                    "then": {
                        "class_path": "lightning_gc.controllers.Plan",
                        "init_args": {"levels": {"*.bias": 0.03, "*": 0.007}},
                    },
                    "at_epoch": 1,
                },
            },
        ),
    ],
)
def test_a_method_keeps_its_controller(controller: Any, written: Any) -> None:
    row = Prediction("x", "x", None, (), 1, 1.0, 1.0)
    section = strategy_section(row, Method("x", "topk", controller=controller), {})
    assert section["init_args"]["controller"] == written


def test_rates() -> None:
    assert [rate(t, "") for t in ("1gbit", "2.5Gbit", "100mbit", "50 Mbit")] == [
        1.0,
        2.5,
        0.1,
        0.05,
    ]
