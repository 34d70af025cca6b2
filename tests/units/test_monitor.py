"""Figures of the monitor: per step, per epoch, and of levels."""

import csv
import itertools
import logging
import re
import time
import warnings
from argparse import Namespace
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger, TensorBoardLogger
from tensorboard.backend.event_processing.data_provider import MultiplexerDataProvider
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.plugin_event_multiplexer import EventMultiplexer
from tensorboard.context import RequestContext
from tensorboard.plugins.base_plugin import TBContext
from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG
from tensorboard.plugins.hparams import api_pb2, backend_context, list_session_groups
from tensorboard.plugins.hparams.metadata import parse_experiment_plugin_data

from lightning_gc import (
    QSGD,
    AllGather,
    HardThreshold,
    Identity,
    NetworkModel,
    PerParameter,
    PowerSGD,
    RandomK,
    TopK,
)
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.controllers import Schedule
from lightning_gc.lightning.for_pytorch_lightning import (
    CompressionMonitor,
    SimulatedDDPStrategy,
    SimulatedLocalStepsStrategy,
)
from lightning_gc.lightning.monitor.callback import level_figures
from lightning_gc.lightning.monitor.dashboard import _flat
from lightning_gc.lightning.monitor.totals import Totals, summary
from tests.support.fitting import Crashed, fit, unwarned
from tests.support.models import Plain, common_batches


def test_averages_per_step_and_element() -> None:
    totals = Totals(
        steps=4, wire_bytes=800, dense_bytes=1600, elements=400, sent=40, payload_bytes=50, whole=80
    )
    figures = totals.averages(workers=2)
    assert figures == {
        "wire_bytes": 200,
        "dense_bytes": 400,
        "ratio": 2,
        "density": 0.25,  # (40 + 80) of 480
        "compressed_density": 0.1,
        "bits_per_element": 1,  # 400 bits for 400 elements, of which 40 are sent
    }


def test_seconds_of_steps_are_of_those_on_the_clock() -> None:
    totals = Totals(steps=4, clocked_steps=2, step_seconds=3.0)
    assert totals.averages(workers=2)["step_seconds"] == 1.5
    assert "step_seconds" not in totals.averages(workers=2, network=NetworkModel())


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_a_gradient_has_an_encoded_size_whoever_listens(workers: int) -> None:
    with unwarned():
        result = fit(
            SimulatedDDPStrategy(RandomK(0.1), workers=workers),
            Plain,
            lambda: common_batches(48, 4),
            callbacks=[CompressionMonitor()],
        )
    metrics = result["metrics"]
    sizes = [parameter.size for parameter in result["parameters"]]
    compressed = [by_default(RandomK(0.1)).compresses(p.shape) for p in result["parameters"]]
    sent = [round(0.1 * n) if ours else n for n, ours in zip(sizes, compressed, strict=True)]
    assert sorted(set(compressed)) == [False, True]
    assert metrics["compression_epoch/encoded_bytes"] == 4 * sum(sent)
    assert metrics["compression_epoch/encoding_ratio"] == pytest.approx(sum(sizes) / sum(sent))
    assert metrics["compression/total_encoded_bytes"] == 4 * sum(sent) * result["steps"]
    assert metrics["compression/total_encoding_ratio"] == pytest.approx(sum(sizes) / sum(sent))
    assert (metrics["compression/total_wire_bytes"] == 0) == (workers == 1)


@pytest.mark.parametrize(
    ("compressor", "scheme", "workers", "said"),
    [
        (TopK(1.0), None, 2, r"sends 1\.\d\d times what plain DDP would; give a lower density, .*"),
        (
            TopK(0.5),
            AllGather(),
            8,
            r".*: 0\.01 is 1 %, or use another scheme, such as TwoShot\(",
        ),
        (
            QSGD(16),
            AllGather(),
            8,
            r".*; lower the compressor's bits, or use another scheme, such as TwoShot\(",
        ),
        (PowerSGD(40, min_ratio=0.1), None, 2, r".* would; lower the compressor's rank\.$"),
    ],
    ids=str,
)
def test_more_bytes_than_plain_ddp_are_warned_of_once(
    compressor: Any, scheme: Any, workers: int, said: str
) -> None:
    strategy = SimulatedDDPStrategy(PerParameter(compressor), scheme=scheme, workers=workers)
    settings: dict[str, Any] = {"max_epochs": 2, "callbacks": [CompressionMonitor()]}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, Plain, lambda: common_batches(64, 2), **settings)
    (found,) = (str(each.message) for each in caught if "what plain DDP would" in str(each.message))
    assert re.search(said, found), found


def test_more_bytes_in_a_controllers_first_epoch_are_said_to_be_its_levels() -> None:
    controller = Schedule((0.5, 0.01))
    strategy = SimulatedDDPStrategy(
        PerParameter(TopK(0.01)), scheme=AllGather(), workers=8, controller=controller
    )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, Plain, lambda: common_batches(64, 2), callbacks=[CompressionMonitor()])
    (found,) = (str(each.message) for each in caught if "what plain DDP would" in str(each.message))
    assert found.startswith("With its controller's first levels this sends ")


@pytest.mark.parametrize(
    ("compressor", "workers"), [(Identity(), 8), (TopK(0.1), 2), (TopK(1.0), 1)]
)
def test_no_more_bytes_than_plain_ddp(compressor: Any, workers: int) -> None:
    strategy = SimulatedDDPStrategy(PerParameter(compressor), workers=workers)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit(strategy, Plain, lambda: common_batches(64, 2), callbacks=[CompressionMonitor()])
    assert not [each for each in caught if "what plain" in str(each.message)]


def last_line(caplog: pytest.LogCaptureFixture) -> str:
    lines = [r.getMessage() for r in caplog.records if r.name == "pytorch_lightning"]
    (line,) = (line for line in lines if line.startswith("Compression: "))
    return line


@pytest.mark.parametrize(
    ("workers", "kind", "said"),
    [
        (
            2,
            TensorBoardLogger,
            r"RandomK\(0\.1\) sent \d.* instead of \d.* less \(.* than in 16 bits\)\.",
        ),
        (2, None, r".* Totals: trainer\.callback_metrics\.$"),
        (2, CSVLogger, r".* Figures: logs/run$"),
        (1, None, r".* had one worker, which sends nothing\. It encoded .* as .* times less \("),
    ],
)
def test_a_fit_ends_with_one_line(
    workers: int,
    kind: Any,
    said: str,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    settings: dict[str, Any] = {"logger": kind("logs", name="", version="run") if kind else False}
    strategy = SimulatedDDPStrategy(RandomK(0.1), workers=workers)
    with caplog.at_level(logging.INFO, "pytorch_lightning"), unwarned():
        monitor = CompressionMonitor()
        settings |= {"max_epochs": 2, "callbacks": [monitor]}
        metrics = fit(strategy, Plain, lambda: common_batches(48, 4), **settings)["metrics"]
    line = last_line(caplog)
    assert re.match(f"Compression: {said}", line), line
    took = (
        r"On links of 10 Gbit/s compressing would take \d+% of a step, messages .* (\d+|under 1)%\."
    )
    assert re.search(took, line)
    if workers == 2:
        ratio = metrics["compression/total_ratio"]
        assert f"{ratio:.{0 if ratio >= 9.95 else 1}f} times less" in line
    if kind is TensorBoardLogger:
        assert line.endswith("Charts: tensorboard --logdir logs")


@pytest.mark.parametrize(
    ("wire", "dense", "said"),
    [
        (2e6, 13e6, "6.5 times less"),
        (3e6, 2e6, "1.5 times more"),
        (2e6, 2e6, "as much as"),
        (2e6, 2.08e6, "3.8% less"),
        (2.1e6, 2e6, "5.0% more"),
    ],
)
def test_the_line_says_more_less_or_as_much(wire: float, dense: float, said: str) -> None:
    total = Totals(steps=1, wire_bytes=wire, dense_bytes=dense)
    assert said in summary("Cast()", total, {})


def test_shares_are_of_a_measured_step() -> None:
    spent = {"compress_seconds": 0.02, "decode_seconds": 0.01, "communicate_seconds": 0.001}
    line = summary("Cast()", Totals(steps=1, wire_bytes=1, dense_bytes=2), spent)
    assert line.endswith(" 2.0 times less (as much as in 16 bits).")  # no step is known
    line = summary("Cast()", Totals(steps=1), spent | {"step_seconds": 0.3})
    assert line.endswith("Compressing took 10% of a step, messages and waiting under 1%.")


def test_shares_are_of_one_whole() -> None:
    """Means over other steps than the phases' do not make a step shorter than its phases."""
    spent = {"compress_seconds": 0.2, "decode_seconds": 0.1, "communicate_seconds": 0.7}
    line = summary("Cast()", Totals(steps=1), spent | {"step_seconds": 0.9})
    assert line.endswith("Compressing took 30% of a step, messages and waiting 70%.")


@pytest.mark.parametrize(
    ("compute", "compress", "communicate", "half", "said"),
    [
        (0.02, 0.01, 0.0025, "4.3 times as fast as", "8.0 times as fast as"),
        (0.1, 0.2, 0.05, "1.6 times as long as", "as fast as"),
        (0.1, 0.48, 0.1, "3.1 times as long as", "2.0 times as long as"),
    ],
)
def test_a_simulated_step_is_compared_with_16_bits_and_plain_ddp(
    compute: float, compress: float, communicate: float, half: str, said: str
) -> None:
    """A gradient of 15 MB takes 0.24 s on 1 Gbit/s, to a server and back."""
    total = Totals(steps=2, dense_bytes=2 * 1.5 * 15e6, wire_bytes=1)
    averages = {
        "compute_seconds": compute,
        "compress_seconds": compress,
        "decode_seconds": 0.0,
        "communication_seconds_estimated": communicate,
    }
    line = summary("TopK(0.01)", total, averages, NetworkModel(1.0), workers=4)
    assert line.endswith(f" A step would be {half} one with 16 bits, and {said} plain DDP's.")


class SlowStart(Plain):
    """Needs 1,000 seconds for each pass of its first two steps, by the hand of the clock."""

    ahead = 0.0

    def loss(self, batch: Any, batch_idx: int) -> Any:
        if self.trainer.global_step < 2:
            type(self).ahead += 1000.0
        return super().loss(batch, batch_idx)


@pytest.mark.parametrize("every", [None, 2])
def test_the_start_up_of_a_fit_is_no_step(
    every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first two steps, or the first round of local steps."""
    clock = time.perf_counter
    monkeypatch.setattr(time, "perf_counter", lambda: clock() + SlowStart.ahead)
    strategy: Any = SimulatedDDPStrategy(TopK(0.1), workers=2)
    if every is not None:
        strategy = SimulatedLocalStepsStrategy(TopK(0.1), workers=2, every=every)
    with unwarned():
        data = partial(common_batches, 96, 4)
        left = fit(strategy, SlowStart, data, callbacks=[CompressionMonitor()])
    assert 0 < left["seconds"]["compression_epoch/compute_seconds"] < 50


def test_seconds_of_local_steps_are_of_all_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """As bytes are: an exchange every 4 steps costs each of them a quarter of it."""
    ticks = itertools.count()
    monkeypatch.setattr(time, "perf_counter", lambda: float(next(ticks)))
    strategy = SimulatedLocalStepsStrategy(TopK(0.1), workers=2, every=4)
    monitor = CompressionMonitor()
    with unwarned():
        fit(strategy, Plain, lambda: common_batches(96, 4), callbacks=[monitor])
    total = monitor.state_dict()["total"]
    assert total["steps"] == 12
    assert total["timed_steps"] == 8  # two of three rounds


def test_levels_in_figures() -> None:
    assert level_figures({}) == {}
    assert level_figures({"a": None}) == {"uncompressed_share": 1}
    figures = level_figures({"a": 0.1, "b": None, "c": 0.3, "d": 0.2})
    assert figures == {
        "uncompressed_share": 0.25,
        "level": 0.2,
        "level_min": 0.1,
        "level_max": 0.3,
    }


def test_an_epoch_and_a_step_are_counted_by_themselves() -> None:
    """Figures of the last epoch are of its level alone; a micro-batch is not a step."""
    monitor = CompressionMonitor()
    strategy = SimulatedDDPStrategy(
        PerParameter(TopK(0.5)), workers=2, controller=Schedule((0.5, 0.1))
    )
    settings: dict[str, Any] = {"max_epochs": 2, "callbacks": [monitor]}
    with unwarned():
        result = fit(strategy, Plain, lambda: common_batches(48, 4), **settings)
    assert result["steps"] == 12
    assert result["metrics"]["compression_epoch/density"] == pytest.approx(0.1, abs=0.01)
    total = monitor.state_dict()["total"]
    assert total["steps"] == 12
    assert total["sent"] / total["elements"] == pytest.approx(0.3, abs=0.01)


def test_totals_are_of_one_trainer() -> None:
    """A callback may be used again, as in an Optuna objective."""
    monitor, found = CompressionMonitor(), []
    for _ in range(2):
        strategy = SimulatedDDPStrategy(TopK(0.1), workers=2)
        with unwarned():
            result = fit(strategy, Plain, lambda: common_batches(48, 4), callbacks=[monitor])
        found.append(result["metrics"]["compression/total_wire_bytes"])
    assert found[0] == found[1] > 0


class Saves(pl.Callback):
    """Saves at the end of one training batch."""

    def __init__(self, path: Path, step: int) -> None:
        self.path, self.step = path, step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.path.exists():
            trainer.save_checkpoint(self.path)


@pytest.mark.slow
@pytest.mark.parametrize("every", [None, 2])
@pytest.mark.parametrize("state", ["full", "off"])
@pytest.mark.parametrize("step", [4, 6])
@pytest.mark.parametrize("first", [True, False])
def test_a_checkpoint_counts_every_step_once(
    every: int | None, state: Any, step: int, first: bool, tmp_path: Path
) -> None:
    """Also one that is saved before the monitor has seen its step, and at an epoch's last."""
    path = tmp_path / "step.ckpt"

    def run(resume: str | None = None) -> dict[tuple[str, str], float]:
        # Bytes that vary tell epochs apart; they are the same where errors and data are.
        varies = state == "full" and step == 6
        compressor = PerParameter(HardThreshold(0.01)) if varies else TopK(0.1)
        strategy: Any = SimulatedDDPStrategy(compressor, workers=2, state=state)
        if every is not None:
            strategy = SimulatedLocalStepsStrategy(compressor, workers=2, every=every, state=state)
        logger = CSVLogger(tmp_path, name="", version="resumed" if resume else "whole")
        settings: dict[str, Any] = {"max_epochs": 2, "logger": logger, "log_every_n_steps": 1}
        both = [Saves(path, step), CompressionMonitor()]
        callbacks = both if first else both[::-1]
        data = partial(common_batches, 48, 4)
        with unwarned():
            fit(strategy, Plain, data, resume=resume, callbacks=callbacks, **settings)
        return logged(Path(logger.log_dir) / "metrics.csv")

    whole = run()
    resumed = run(str(path))
    assert resumed == {name: whole[name] for name in resumed}


def logged(file: Path) -> dict[tuple[str, str], float]:
    """Return the bytes of the last epoch and of the run, and those of each step that was logged."""
    with file.open(newline="") as lines:
        rows = list(csv.DictReader(lines))
    return {
        (name, row["step"]): float(row[name])
        for row in rows
        for name in row
        if name.endswith("wire_bytes") and row[name]
    }


def test_a_trainer_that_logs_no_steps_still_logs_epochs(tmp_path: Path) -> None:
    """``log_every_n_steps=0`` is Lightning's never."""
    logger = CSVLogger(tmp_path, name="", version="run")
    settings: dict[str, Any] = {"logger": logger, "log_every_n_steps": 0}
    with unwarned():
        fit(
            SimulatedDDPStrategy(TopK(0.1), workers=2),
            Plain,
            lambda: common_batches(48, 4),
            callbacks=[CompressionMonitor()],
            **settings,
        )
    header = (tmp_path / "run" / "metrics.csv").read_text().partition("\n")[0]
    assert "compression_epoch/wire_bytes" in header
    assert "compression/wire_bytes" not in header


class Settled(Plain):
    def __init__(self, rate: float = 0.02, width: int = 40) -> None:
        super().__init__(rate)
        self.save_hyperparameters()


class Judged(Plain):
    """Logs losses under names of its own."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("own_loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("held_out_loss", self.loss(batch, batch_idx))


class JudgedBy(Judged):
    """Validates by metrics that are not called a loss, and writes its own hyperparameters."""

    def on_train_start(self) -> None:
        board: Any = self.logger
        board.log_hyperparams({"mine": 1.0}, {"score": 0.0})

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("score", self.loss(batch, batch_idx))
        self.log("speed", 1.0)


def logged_run(
    folder: Path,
    made: Any = Judged,
    workers: int = 2,
    prefix: str = "",
    callbacks: Sequence[Any] = (),
    **options: Any,
) -> EventAccumulator:
    """Train two epochs of simulated workers and return what TensorBoard gets."""
    compressor = PerParameter(TopK(0.1)) if "controller" in options else TopK(0.1)
    logger = TensorBoardLogger(folder, name="", version="run", prefix=prefix)
    settings: dict[str, Any] = {
        "logger": logger,
        "callbacks": [CompressionMonitor(), *callbacks],
        "max_epochs": 2,
        "log_every_n_steps": 2,
    }
    strategy = SimulatedDDPStrategy(compressor, workers=workers, **options)
    with unwarned():
        fit(strategy, made, lambda: common_batches(48, 4), common_batches(8, 4), **settings)
    return EventAccumulator(str(folder / "run"), {"tensors": 0, "scalars": 0}).Reload()


def texts(events: EventAccumulator, name: str = "summary") -> list[str]:
    tag = f"compression/{name}/text_summary"
    return [each.tensor_proto.string_val[0].decode() for each in events.Tensors(tag)]


def charts(folder: Path) -> dict[str, dict[str, list[str]]]:
    """Return patterns by title and page, read as the page Custom Scalars reads them."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    asked: Any = {"plugin_name": "custom_scalars", "experiment_id": "", "downsample": 1}
    points = provider.read_tensors(RequestContext(), **asked)["run"][CONFIG_SUMMARY_TAG]
    layout = Layout.FromString(points[0].numpy.item())
    return {
        page.title: {each.title: list(each.multiline.tag) for each in page.chart}
        for page in layout.category
    }


@pytest.mark.parametrize("controller", [None, Schedule((0.5, 0.1))])
def test_each_run_has_a_summary(controller: Any, tmp_path: Path) -> None:
    options = {} if controller is None else {"controller": controller}
    events = logged_run(tmp_path, **options)
    first, *_, last = texts(events)
    losses = {name: events.Scalars(name)[-1].value for name in ("own_loss_epoch", "held_out_loss")}
    rows = dict(line.strip("| ").split(" | ") for line in last.splitlines()[4:])
    assert rows["training"] == f"`own_loss_epoch` {losses['own_loss_epoch']:.4g}"
    assert rows["validation"] == f"`held_out_loss` {losses['held_out_loss']:.4g}"
    assert rows["run"] == "finished after 12 steps"
    assert rows["memory"] == "`ErrorFeedback()`"
    assert rows["scheme"] == "`AllGather()`"
    assert rows["controller"].startswith("`Schedule(" if controller else "`None`")
    said = (
        r"Compression: .*TopK\(0\.\d\).* sent .* instead of .* per worker in .* steps?, .* times "
    )
    said += r"less \(.* than in 16 bits\)\. "
    said += r"On links of 10 Gbit/s compressing would take \d+% of a step, messages and waiting "
    assert re.match(said, last)
    assert "in training after 2 steps" in first
    assert "no metric with `loss` in its name has been logged" in first  # of validation


def test_a_run_that_crashes_has_a_summary(tmp_path: Path) -> None:
    class Fails(pl.Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            if trainer.global_step == 11:
                raise Crashed

    events = logged_run(tmp_path, callbacks=[Fails()])
    assert "stopped by Crashed after 11 steps" in texts(events)[-1]
    assert "compression ratio: uncompressed over sent" in charts(tmp_path)["gradient compression"]


@pytest.mark.parametrize("prefix", ["", "mine"])
@pytest.mark.parametrize(
    ("workers", "options", "expected"),
    [
        (2, {}, ["ratio: uncompressed", "bytes", "comput", "compress", "wait", "decod", "error n"]),
        (1, {}, ["ratio: gradient", "comput", "compress", "wait", "decod", "error n"]),
        (
            2,
            {"controller": Schedule((0.5, 0.1))},
            ["ratio: unc", "bytes", "comput", "compress", "wait", "decod", "controller", "error n"],
        ),
    ],
    ids=["two", "one", "controller"],
)
def test_charts_have_data_and_an_order(
    workers: int, options: Any, expected: list[str], prefix: str, tmp_path: Path
) -> None:
    events = logged_run(tmp_path, workers=workers, prefix=prefix, **options)
    (page,) = charts(tmp_path).values()
    titles = list(page)
    assert titles[0] == "did training suffer? own_loss_epoch, held_out_loss"
    assert len(titles) == 1 + len(expected)
    for title, part in zip(titles[1:], expected, strict=True):
        assert part in title
    for patterns in page.values():
        for pattern in patterns:
            assert any(re.match(pattern, tag) for tag in events.Tags()["scalars"]), pattern


@pytest.mark.parametrize("moment", ["on_fit_start", "on_train_start", "on_train_end"])
def test_a_users_own_charts_stay(moment: str, tmp_path: Path) -> None:
    def lay_out(trainer: Any, module: Any) -> None:
        layout = {"my page": {"mine": ["Multiline", ["score"]]}}
        trainer.logger.experiment.add_custom_scalars(layout)

    user = pl.Callback()
    setattr(user, moment, lay_out)
    logged_run(tmp_path, callbacks=[user])
    pages = charts(tmp_path)
    assert list(pages) == ["my page", "gradient compression"]
    assert pages["my page"] == {"mine": ["score"]}
    assert len(pages["gradient compression"]) == 8


@pytest.mark.parametrize("monitored", [True, False])
def test_what_a_callback_monitors_is_shown_like_a_loss(monitored: bool, tmp_path: Path) -> None:
    stopping = EarlyStopping("score", check_on_train_epoch_end=False)
    events = logged_run(tmp_path, JudgedBy, callbacks=[stopping] if monitored else [])
    shown = "`score` " if monitored else "no metric with `loss` in its name has been logged"
    assert f"| validation | {shown}" in texts(events)[-1]
    title, *_ = charts(tmp_path)["gradient compression"]
    assert title == "did training suffer? own_loss_epoch" + (", score" if monitored else "")


def test_hyperparameters_that_the_user_writes_are_shown(tmp_path: Path) -> None:
    logged_run(tmp_path, JudgedBy)
    [shown] = shown_by_tensorboard(tmp_path)
    assert hparams_in(shown) == {"mine": 1.0}
    assert [each.name.tag for each in shown.metric_values] == ["score"]


@pytest.mark.parametrize("made", [Settled, Plain])
def test_tensorboard_shows_the_models_hparams_too(made: type[Plain], tmp_path: Path) -> None:
    """As its HPARAMS page reads them: of several records of a run, the first."""
    logged_run(tmp_path, made, controller=Schedule((0.5, 0.1)))
    [group] = shown_by_tensorboard(tmp_path)
    shown = hparams_in(group)
    assert shown.pop("gc/network").startswith("NetworkModel(")
    own = {"rate": 0.02, "width": 40.0} if made is Settled else {}
    assert shown == own | {
        "gc/compressor": "PerParameter(TopK(0.1))",
        "gc/memory": "ErrorFeedback()",
        "gc/scheme": "AllGather()",
        "gc/controller": "Schedule(levels=(0.5, 0.1))",
        "gc/seed": 0.0,
        "gc/workers": 2.0,
    }


@pytest.mark.parametrize("monitored", [True, False])
def test_runs_can_be_sorted_by_the_validation_loss(monitored: bool, tmp_path: Path) -> None:
    callbacks = [EarlyStopping("held_out_loss")] if monitored else []
    events = logged_run(tmp_path, callbacks=callbacks)
    [group] = shown_by_tensorboard(tmp_path)
    values = {each.name.tag: each.value for each in group.metric_values}
    assert values["~compression/validation_loss"] == events.Scalars("held_out_loss")[-1].value
    assert values["~compression/total_ratio"] > 1
    tags = sorted(events.Tags()["scalars"])  # as TensorBoard sorts charts
    mine = [tag for tag in tags if not tag.startswith("~")]
    assert "held_out_loss" in mine
    assert tags[: len(mine)] == mine
    metadata = events.SummaryMetadata("_hparams_/experiment").plugin_data.content
    experiment = parse_experiment_plugin_data(metadata)
    names = [each.display_name for each in experiment.metric_infos]
    loss = "held_out_loss" if monitored else "validation loss"
    assert names[:3] == [loss, "compression ratio", "seconds per step"]
    assert "compressor" in [each.display_name for each in experiment.hparam_infos]


def test_a_fast_dev_run_writes_to_dummies(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"logger": TensorBoardLogger(tmp_path), "fast_dev_run": True}
    strategy = SimulatedDDPStrategy(TopK(0.1), workers=2)
    with unwarned():
        callbacks = [CompressionMonitor()]
        fit(strategy, Judged, lambda: common_batches(48, 4), callbacks=callbacks, **settings)
    assert not list(tmp_path.iterdir())


def test_nested_hyperparameters_are_flat() -> None:
    nested = {"a": {"b": 1}, "c": [{"d": 2}], "e": Namespace(f=None), "g": TopK(0.1).traits}
    flat = _flat(nested)
    assert flat.items() >= {"a/b": 1, "c/0/d": 2, "e/f": "None"}.items()
    assert any(name.startswith("g/") for name in flat)


def hparams_in(group: Any) -> dict[str, Any]:
    values = group.hparams.items()
    return {name: getattr(value, value.WhichOneof("kind")) for name, value in values}


def shown_by_tensorboard(folder: Path) -> list[Any]:
    """Return the runs with hyperparameters and metrics, by the code behind the page HPARAMS."""
    multiplexer = EventMultiplexer().AddRunsFromDirectory(str(folder)).Reload()
    provider = MultiplexerDataProvider(multiplexer, str(folder))
    context = backend_context.Context(TBContext(data_provider=provider))
    request = api_pb2.ListSessionGroupsRequest(
        start_index=0, slice_size=9, allowed_statuses=range(4), include_metrics=True
    )
    asked = RequestContext(), context, "", request
    return list(list_session_groups.Handler(*asked).run().session_groups)
