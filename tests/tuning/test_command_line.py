"""The command line tunes, reports, fits and lists, and refuses bad input with an exit code."""

import contextlib
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import optuna
import pytest
import yaml

from lightning_gc import COMPRESSORS, MEMORIES, SCHEMES, cli
from lightning_gc.advice.prediction import METHODS
from lightning_gc.bench.baselines import DEFAULT
from lightning_gc.kernels import dispatch
from lightning_gc.methods import catalogue
from lightning_gc.methods.catalogue import FAMILIES, START
from lightning_gc.tuning import open_storage
from lightning_gc.tuning.experiment import load_experiment
from lightning_gc.tuning.failure_detector import counts
from tests.support.fitting import unwarned
from tests.support.processes import run_in_processes
from tests.support.tuning import Bowl

ROOT = Path(__file__).parents[2]
CONFIG = """
model:
  class_path: tests.support.tuning.Bowl
  init_args: {x: 0.5}
data:
  class_path: tests.support.tuning.Data
trainer: {accelerator: cpu, max_epochs: 1, num_sanity_val_steps: 0, log_every_n_steps: 1}
tune:
  name: toy
  metric: loss
  test_metric: test
  trials: 2
  seeds: [0]
  workers: 2
  network: {bandwidth_gbps: 1.0}
  space:
    model.x: {low: 0, high: 1}
  methods:
    topk_10x: {compressor: topk, fixed: {density: 0.1}}
    cast:
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "toy.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def run(*words: str) -> int:
    with unwarned():
        try:
            return cli.main(words)
        except SystemExit as end:  # argparse's way
            return int(end.code or 0)


def test_tune_then_report(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("tune", "toy.yaml", "--workers", "4") == cli.OK
    said = capsys.readouterr().out
    assert said.startswith("Plan: 3 methods x 2 trials, then 7 final runs.")
    assert re.search(r"\[(\d+)/\1\] cast", said)
    for part in ("Ctrl-C is safe", "model.x=", "\nNext: lightning-gc report"):
        assert part in said
    assert said.count("trial 0 complete") == 3
    assert "\r" not in said
    assert "\x1b" not in said
    journal = str(Path("runs", "tune", "toy.journal"))
    study = optuna.load_study(study_name="toy/topk_10x", storage=open_storage(journal))
    assert set(study.best_params) == {"model.x"}
    assert study.user_attrs["rules"]["workers"] == 4
    assert study.user_attrs["rules"]["space"] == {"model.x": [0.0, 1.0, "linear"]}
    assert run("report", "--storage", journal, "--out", "out") == cli.OK
    assert (folder / "out" / "report.html").is_file()
    *_, finding, last = capsys.readouterr().out.splitlines()
    assert finding.startswith("cast ends")
    assert last.startswith(f"Report: {Path('out', 'report.html')} and ")
    assert run("tune", "toy.yaml", "--workers", "4") == cli.OK
    assert "All have ended before." in capsys.readouterr().out


def test_compressors_are_chosen_by_name_or_as_the_file_calls_them(folder: Path) -> None:
    words = ("--compressor", "topk_10x", "qsgd", "--trials", "1", "--no-finals")
    assert run("tune", "toy.yaml", "--storage", "j", *words) == cli.OK
    names = optuna.get_all_study_names(storage=open_storage("j"))
    assert sorted(names) == ["toy/dense", "toy/qsgd", "toy/topk_10x"]


def test_fit_is_lightnings_own(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    extra = ["--trainer.logger", "false", "--trainer.enable_checkpointing", "false"]
    strategy = ["--trainer.strategy", "lightning_gc.SimulatedDDPStrategy"]
    strategy += ["--trainer.strategy.compressor", "topk", "--trainer.strategy.workers", "2"]
    assert run("fit", "toy.yaml", *extra, *strategy) == cli.OK
    assert run("fit", "toy.yaml", *extra, "--model.cliff", "zero") == cli.USAGE


def test_fit_of_any_file_of_lightnings(folder: Path) -> None:
    """Without a section ``tune``, and with one of LightningCLI's that tuning does not have."""
    sections = yaml.safe_load(Path("toy.yaml").read_text())
    del sections["tune"]
    quiet = {"logger": False, "enable_checkpointing": False}
    sections |= {"trainer": sections["trainer"] | quiet, "ckpt_path": None}
    Path("plain.yaml").write_text(yaml.safe_dump(sections))
    assert run("fit", "plain.yaml") == cli.OK
    assert run("tune", "plain.yaml") == cli.USAGE


def test_fit_that_ctrl_c_ends(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lightning answers by ignoring further ones, and with exit code 1."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bowl, "training_step", interrupted)
    handler = signal.getsignal(signal.SIGINT)
    try:
        code = run("fit", "toy.yaml", "--trainer.logger", "false")
    finally:
        signal.signal(signal.SIGINT, handler)
    assert code == cli.INTERRUPTED


def test_list_has_one_line_per_class(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert run("list") == cli.OK
    lines = capsys.readouterr().out.splitlines()
    start, _, listed = "\n".join(lines).partition("\nCompressors\n")
    assert start.startswith("Start here\n")
    assert all(row.code.strip("`").split("(")[0] in start for row in START)
    names = [line.split()[0] for line in listed.splitlines() if line.startswith("  ")]
    assert {*COMPRESSORS, *MEMORIES, *SCHEMES, "accordion"} <= set(names)
    assert all(names.count(name) == 1 for name in COMPRESSORS)
    assert max(map(len, lines)) <= 80
    assert run("list", "schemes", "memories") == cli.OK
    said = capsys.readouterr().out
    assert said.index("Schemes") < said.index("Memories")
    assert "ompressors" not in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("tune toy.yaml", "Stopped. Finished trials are kept. Repeat the command to resume."),
        ("report --storage x", "Stopped."),
        ("schema", "Stopped."),
        ("list", "Stopped."),
        ("check", "Stopped."),
        ("advise", "Stopped. No measurement is kept."),
        ("bench toy.yaml", "Stopped. No measurement is kept."),
        ("rendezvous --roll r.jsonl", "Stopped. Rounds until now are in r.jsonl. Repeat the"),
    ],
)
def test_ctrl_c_says_what_is_kept(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, words: str, said: str
) -> None:
    def pressed(options: Any) -> int:
        raise KeyboardInterrupt

    pressed.__name__ = f"_{words.split()[0]}"
    monkeypatch.setattr(cli, pressed.__name__, pressed)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert run(*words.split()) == cli.INTERRUPTED
    shown = capsys.readouterr().err
    assert shown.startswith(said)
    assert ("kept" in shown) == ("kept" in said)


def test_a_rendezvous_that_is_terminated_says_so(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(
        "lightning_gc.elastic.rendezvous.serve",
        lambda *_, **__: signal.raise_signal(signal.SIGTERM),
    )
    assert run("rendezvous") == cli.TERMINATED
    assert "Stopped. Rounds until now are in roll.jsonl." in capsys.readouterr().err
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(
    ("words", "package"),
    [
        ("tune toy.yaml", "optuna"),
        ("report --storage toy.yaml", "matplotlib"),
        ("fit toy.yaml", "jsonargparse"),
        ("schema", "jsonargparse"),
        ("bench toy.yaml", "jsonargparse"),
        ("advise toy.yaml", "matplotlib"),
    ],
)
def test_a_missing_extra_is_named(
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: str,
    package: str,
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda name: None if name == package else name)
    assert run(*words.split()) == cli.USAGE
    shown = capsys.readouterr().err
    assert f"This command needs {package}, not installed here." in shown
    assert "pip install 'lightning-gc[tune]'" in shown


def test_what_only_describes_compiles_no_kernel(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a new machine, where numba's kernels take half a minute of CPU time."""
    asked: list[str] = []
    monkeypatch.setattr(dispatch.host, "_works", {})
    monkeypatch.setattr(dispatch.host, "_first_answer", asked.append)
    catalogue.wire_bits.cache_clear()
    for words in ("list", "list --wide", "list wire waits", "schema", "check"):
        assert run(*words.split()) == cli.OK
    words = "advise --params 124M --step-ms 45 --link 1gbit --workers 4"
    assert run(*words.split()) == cli.OK
    assert catalogue.wire_bits.cache_info().misses > 10
    assert asked == []


def test_list_wide_has_all_declarations(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("list", "--wide", "compressors") == cli.OK
    said = capsys.readouterr().out
    for name in (*COMPRESSORS, "error bound", "tuned", "density: "):
        assert name in said


JUDGED = ["tune none.yaml", "tune bytes", "tune list.yaml", "tune toy.yml", "fit none.yaml"]
JUDGED += ["bench none.yaml", "advise none.yaml", "list wires", "tuen", "tune toy.yaml --colour"]
JUDGED += ["report --storage none", "rendezvous --secret-file none", "rendezvous --secret-file ."]
JUDGED += ["check --nnodes 2", "check --nnodes 2 --node-rank 7 --master-addr 10.0.0.1"]
JUDGED += ["advise", "advise --params 124X --step-ms 45 --link 1gbit --workers 4"]
JUDGED += ["advise --params 124M --step-ms 45 --link 1gb --workers 4"]
CODE = """
import contextlib, io, sys
from lightning_gc import cli
for request in sys.argv[1:]:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = cli.main(request.split())
        except SystemExit as end:
            code = end.code
    assert code == cli.USAGE, request
    assert "Traceback" not in said.getvalue()
    heavy = {"torch", "numpy", "optuna", "pytorch_lightning", "lightning"} & sys.modules.keys()
    assert not heavy, (request, heavy)
"""


def test_a_wrong_request_is_refused_before_torch_is_imported(folder: Path) -> None:
    Path("bytes").write_bytes(bytes(range(256)))
    Path("list.yaml").write_text("- 1")
    Path("toy.yml").write_text(CONFIG.replace("trainer:", "trainr:"))
    command = [sys.executable, "-c", CODE, *JUDGED]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert ended.returncode == 0, ended.stderr


def test_the_families_of_the_help_are_those_of_the_catalogue() -> None:
    assert ("start", *FAMILIES, "combinations") == cli.LISTED


def test_help_explains(capsys: pytest.CaptureFixture[str]) -> None:
    said = ""
    for words in ([], ["tune"], ["report"], ["fit"], ["list"]):
        assert run(*words, "--help") == cli.OK
        asked = capsys.readouterr().out
        assert run("help", *words) == cli.OK
        assert capsys.readouterr().out == asked
        said += asked
    assert "Exit codes: 0 done" in said
    assert "in its own study" in said


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["tune", "toy.yaml", "--compressor", "topkk"], "'topkk' is not a compressor"),
        (["tune", "none.yaml"], "none.yaml cannot be read"),
        (["tune", "toy.yaml", "--trials", "0"], "trials=0): it must be 1 or more"),
        (["tune", "toy.yaml", "--storage", "x://y"], "x://y is not the URL of a database"),
        (["report", "--storage", "fresh"], "The journal fresh does not exist"),
        (["report"], "--storage"),
        (["report", "--storage", "toy.yaml"], "Name a journal that lightning-gc tune has made."),
        (["report", "--storage", "bytes"], "Name a journal that lightning-gc tune has made."),
        (["report", "--storage", "."], "does not exist"),
        (["tune", "toy.yaml", "--metric", "x"], "unrecognized arguments: --metric x"),
        ([], "COMMAND"),
        (["tune", "toy.yaml", "--compressor", "topkk"], "(did you mean 'topk'?). lightning-gc"),
        (["tune", "."], ". cannot be read"),
        (["tune", "bytes"], "bytes is not valid YAML"),
        (["fit", "bytes"], "bytes is not valid YAML"),
        (["bench", "toy.yaml", "--out", "bytes/x"], "bytes is a file; give the name of a folder"),
        (["report", "--storage", "x", "--out", "bytes"], "bytes is a file; give the name of a"),
        (["advise", "--out", "bytes"], "bytes is a file; give the name of a folder"),
        (["schema", "no_module"], "The module no_module does not exist"),
        (["list", "wires"], "'wires' is not a family (did you mean 'wire'?)"),
        (["tuen", "toy.yaml"], "'tuen' is not a command (did you mean 'tune'?)"),
        (["tune", "toy.yaml", "--compresor", "topk"], "(did you mean '--compressor'?)"),
        (["--wide", "list"], "unrecognized arguments: --wide (did you mean '--wide'?)"),
        (["rendezvous", "--port", "65536"], "'65536' is not a number from 0 to 65535"),
        (["rendezvous", "--port", "-1"], "'-1' is not a number from 0 to 65535"),
        (["rendezvous", "--secret-file", "none"], "none cannot be read"),
        (["rendezvous", "--secret-file", "."], "Make it by: openssl rand -base64 32 >"),
        (["rendezvous", "--secret-file", "bytes"], "bytes cannot be read"),
        (["rendezvous", "--secret-file", "empty"], "empty is empty. Write a long random text"),
        (["rendezvous", "--port", "0", "--roll", "bytes"], "bytes, line 1, is not a round"),
        (["rendezvous", "--port", "0", "--roll", "."], "is not a file"),
        (["rendezvous", "--port", "0", "--roll", "bytes/roll"], "cannot be written"),
    ],
)
def test_what_is_wrong_is_said_in_a_sentence(
    folder: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    Path("bytes").write_bytes(bytes(range(256)))
    Path("empty").write_text("\n")
    assert run(*words) == cli.USAGE
    shown = capsys.readouterr().err
    assert said in shown
    assert "Traceback" not in shown
    assert Path("bytes").read_bytes() == bytes(range(256))


@pytest.mark.parametrize(
    "words", [["list", "--wide"], pytest.param(["list"], marks=pytest.mark.nightly)]
)
def test_a_reader_that_stops_reading_gets_no_traceback(words: list[str]) -> None:
    """As ``| head`` does."""
    reads, writes = os.pipe()
    os.close(reads)
    command = [sys.executable, "-m", "lightning_gc", *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with open(writes, "wb") as pipe:
        ended = subprocess.run(
            command, stdout=pipe, stderr=subprocess.PIPE, timeout=60, env=environment
        )
    assert (ended.returncode, ended.stderr) == (cli.FAILED, b"")


def test_a_port_in_use_is_a_failure_that_names_the_process(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_gc.elastic.rendezvous.TAKEN", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        words = ("rendezvous", "--port", str(other.getsockname()[1]))
        assert run(*words) == cli.FAILED
    assert f"is in use by process {os.getpid()} (" in capsys.readouterr().err


def test_a_storage_that_is_down_is_a_failure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("report", "--storage", "postgresql+psycopg://me:pw@127.0.0.1:1/x") == cli.FAILED
    assert "Is the server up" in capsys.readouterr().err


def test_a_mistake_in_the_model_is_a_failure(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change("x: 0.5", "x: 0.5, slope: .nan")
    change("low: 0", "low: 0.5")
    assert run("tune", "toy.yaml", "--storage", "j") == cli.FAILED  # every trial diverges
    assert "topk_10x has no result, because no trial has completed" in capsys.readouterr().out


def change(old: str, new: str) -> None:
    path = Path("toy.yaml")
    assert old in path.read_text()
    path.write_text(path.read_text().replace(old, new))


def test_the_help_names_the_default_methods(capsys: pytest.CaptureFixture[str]) -> None:
    for command, methods in (("bench", DEFAULT), ("advise", METHODS)):
        assert run(command, "--help") == cli.OK
        said = " ".join(capsys.readouterr().out.split())
        listed = said.partition("scheme=two_shot (default: ")[2].partition(")")[0]
        for method in methods:
            name, _, fields = method.partition(":")
            assert all(part in listed for part in (name, *fields.split(",")))
        assert "YAML as for lightning-gc fit" in said


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("model.x:", "model.y:", "'y' is not accepted"),
        ("model.x:", "optimizer.x:", "optimizer.x cannot be tuned"),
        ("model.x:", "model.init_args.x:", "tune.space: write model.x, not model.init_args.x."),
        ("{low: 0, high: 1}", "7", "model.x: 7 is not a range"),
        ("trials: 2", "trials: two", "two"),
        ("metric: loss", "metrik: loss", "metrik"),
        (
            "support.tuning.Bowl",
            "support.tuning.Bwl",
            "class_path tests.support.tuning.Bwl cannot be",
        ),
        ("fixed: {density: 0.1}", "fixed: {density: 7}", "leaves the range of its knob"),
        ("bandwidth_gbps: 1.0", "topology: star", "star"),
        ("max_epochs: 1", "devices: auto", "trainer.devices='auto'"),
        ("max_epochs: 1", "strategy: ddp", "trainer.strategy='ddp'"),
        ("max_epochs: 1", "accumulate_grad_batches: 3", "accumulate_grad_batches=3"),
        ("tune:", "tuning:", "has no section tune. It has model, data, trainer, tuning. Add one"),
        ("topk, fixed", "lightning_gc.TopKK, fixed", "TopKK does not exist (did you mean 'TopK'?)"),
        ("trainer: {", "trainer: [", "is not valid YAML"),
        ("trainer:", "trainr:", "a section 'trainr'"),
    ],
)
def test_files_that_cannot_be_are_refused_before_the_first_trial(
    folder: Path, old: str, new: str, said: str
) -> None:
    change(old, new)
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - said is looked for below
        load_experiment("toy.yaml")
    assert said in str(caught.value)


def test_places_are_found_through_init_args_and_in_the_trainer(folder: Path) -> None:
    change("model.x: {low: 0, high: 1}", "{model.x: [0.25], trainer.max_epochs: [3]}")
    experiment, _ = load_experiment("toy.yaml")
    model, data, trainer = experiment.build(
        optuna.trial.FixedTrial({"model.x": 0.25, "trainer.max_epochs": 3})
    )
    assert (model.x, trainer["max_epochs"], trainer["log_every_n_steps"]) == (0.25, 3, 1)
    assert type(data).__name__ == "Data"


class PressesCtrlC(io.StringIO):
    """Does so shortly after the second trial has been shown."""

    def write(self, text: str) -> int:
        if "trial 1 " in text:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        return super().write(text)


def interrupted(worker: int, folder: Path, words: list[str]) -> tuple[int, str]:
    os.chdir(folder)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    said = io.StringIO()
    with contextlib.redirect_stdout(PressesCtrlC()), contextlib.redirect_stderr(said), unwarned():
        code = cli.main(words)
    return code, said.getvalue()


def forked(folder: Path, words: list[str]) -> tuple[int, str]:
    (ended,) = run_in_processes(interrupted, 1, folder, words)
    return ended  # type: ignore[no-any-return]


def started(folder: Path, words: list[str]) -> tuple[int, str]:
    """By a user, in a terminal."""
    with subprocess.Popen(
        [sys.executable, "-m", "lightning_gc", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if "trial 1 " in line:
                break
        time.sleep(0.1)
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    return process.returncode, said


@pytest.mark.processes
@pytest.mark.parametrize("tune", [forked, pytest.param(started, marks=pytest.mark.nightly)])
def test_ctrl_c_leaves_a_study_that_goes_on(folder: Path, tune: Any) -> None:
    change("trials: 2", "trials: 400")
    code, said = tune(folder, ["tune", "toy.yaml", "--storage", "j", "--compressor", "cast"])
    assert code == cli.INTERRUPTED
    assert "Repeat the command to resume" in said
    assert "Traceback" not in said
    study = optuna.load_study(study_name="toy/dense", storage=open_storage("j"))
    done = sum(map(counts, study.trials))
    assert done >= 2
    words = ["--storage", "j", "--compressor", "cast", "--no-finals", "--trials", str(done + 1)]
    assert run("tune", "toy.yaml", *words) == cli.OK
