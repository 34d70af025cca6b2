"""Dashboard: TensorBoard's pages of one run: charts, hyperparameters, summary and decisions."""

from __future__ import annotations

import dataclasses
import os
import re
import struct
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from lightning_gc.controllers import Decision
from lightning_gc.core.settings import short

PREFIX = "compression/"
EPOCH = "compression_epoch/"
OURS, OURS_EPOCH = f"~{PREFIX}", f"~{EPOCH}"
"""The same in TensorBoard, which sorts charts by name: the user's own stand before ours."""

_PAGE = "gradient compression"
_CHARTS = {
    "compression ratio: uncompressed over sent": "ratio",
    "compression ratio: gradient over its encoding": "encoding_ratio",
    "bytes so far: sent (wire), uncompressed (dense)": "total_(wire|dense)_bytes",
    "seconds of a step": "step_seconds",
    "share of a step: computing": "compute_share",
    "share of a step: compressing": "compress_share",
    "share of a step: messages and waiting": "communicate_share",
    "share of a step: decoding": "decode_share",
    "the controller's lowest and highest level": "level_(min|max)",
    "the same of gathered weights": "weight_level_(min|max)",
    "error norm: flat is healthy, steady growth is not": "error_norm",
    "local steps: drift and outer step, as norms": "(drift|outer_step)",
    "total error so far": "total_error(_update)?",
}
"""``{title: pattern of tags after OURS}``, in the page's order, after the chart of losses."""


class Dashboard:
    """Writes the pages of one run to the TensorBoard loggers of worker 0, from ``begin`` on.

    TensorBoard keeps the *first* hyperparameters of a run and the *last* layout of Custom Scalars.
    So hyperparameters are written before Lightning's, and the layout whenever a chart is new.

    A user's own pages stay. Other categories of Custom Scalars keep their place before ours. If
    Lightning will not write hyperparameters, ours wait for the first batch, so that a record that
    the user has written by then is the first.
    """

    def __init__(self) -> None:
        self._boards: list[Any] = []
        self._unsettled: list[Any] = []
        self._logged: dict[str, dict[str, Any]] = {"training": {}, "validation": {}}
        self._tags: set[str] = set()
        self._drawn: dict[str, list[str]] = {}
        self._described = 0.0  # steps that the last summary counted

    def begin(self, trainer: Any) -> None:
        """Take the Trainer's loggers at the start of ``fit``; write hyperparameters."""
        loggers = trainer.loggers if trainer.is_global_zero else ()
        self._boards = [each for each in loggers if is_tensorboard(each)]
        strategy = trainer.strategy
        alone = {"ratio", "total_wire_bytes", "total_dense_bytes"}  # one worker sends nothing
        self._dull = alone if strategy.engine.workers == 1 else {"encoding_ratio"}
        monitored = (getattr(each, "monitor", None) for each in trainer.callbacks)
        self._monitored = [name for name in monitored if isinstance(name, str)]
        self._kind = "validation" if trainer.enable_validation else "training"
        self._columns = self._metrics()
        self._configuration = configuration(trainer)
        own = hparams_of(trainer)
        self._hparams = own | self._configuration
        for board in self._boards:
            board.log_hyperparams(self._hparams, {})  # into hparams.yaml only
            if own and getattr(board, "_default_hp_metric", True):
                self._write_hparams(board, self._columns | {"hp_metric": "hp_metric"})
            else:
                self._unsettled.append(board)

    def _metrics(self) -> dict[str, str]:
        """Return the HPARAMS page's metrics: names by tag, the most useful first."""
        losses = list(filter(_is_loss, self._monitored)) or [f"{self._kind} loss"]
        return {
            f"{OURS}{self._kind}_loss": losses[0],
            **{name: name for name in self._monitored if not _is_loss(name)},
            f"{OURS}total_ratio": "compression ratio",
            f"{OURS_EPOCH}step_seconds": "seconds per step",
            f"{OURS}total_wire_bytes": "bytes sent per worker",
            f"{OURS}total_dense_bytes": "bytes uncompressed",
            f"{OURS}total_encoded_bytes": "bytes encoded",
            f"{OURS}total_encoding_ratio": "encoding ratio",
        }

    @property
    def used(self) -> bool:
        """Whether there is a TensorBoard logger to write to."""
        return bool(self._boards)

    def settle(self) -> None:
        """Write hyperparameters that have waited for the user's own."""
        while self._unsettled:
            self._write_hparams(self._unsettled.pop(), self._columns)

    def _write_hparams(self, board: Any, columns: Mapping[str, str]) -> None:
        named = {_prefix(board) + tag: name for tag, name in columns.items()}

        def shown(name: str) -> str:
            own = name.removeprefix("gc/")
            return name if own in self._hparams else own

        for record in named_hparams(_flat(self._hparams), named, shown):
            board.experiment._get_file_writer().add_summary(record)

    def wrote(self, tags: Iterable[str]) -> None:
        """Note which scalars have been written: a chart needs at least one."""
        self._tags.update(tags)

    def see(self, logged: Mapping[str, Any], *, validating: bool = False) -> None:
        """Note what the user has logged: names that are new during validation are validation's."""
        training, validation = self._logged["training"], self._logged["validation"]
        for name, value in logged.items():
            new = name not in training and validating
            (validation if name in validation or new else training)[name] = value

    def losses(self, kind: str) -> list[str]:
        """Return the tags by which a reader judges training, a monitored one first.

        They have "loss" in their name. Without such a name, they are what a ``ModelCheckpoint`` or
        ``EarlyStopping`` monitors, or else the only metric. Of ``x_step`` and ``x_epoch``, it is
        the latter.

        Args:
            kind: "training" or "validation".
        """
        logged = self._logged[kind]
        names = [n for n in logged if f"{n.removesuffix('_step')}_epoch" not in logged]
        monitored = [n for n in names if n.removesuffix("_epoch") in self._monitored]
        found = list(filter(_is_loss, names)) or monitored or (names if len(names) == 1 else [])
        return sorted(found, key=lambda name: name not in monitored)

    def score(self, kind: str, step: int) -> None:
        """Write the loss by which the HPARAMS page sorts runs, if it is of this kind."""
        for board in self._boards if kind == self._kind else ():
            for name in filter(_is_loss, self.losses(kind)[:1]):
                board.log_metrics({f"{OURS}{kind}_loss": self._logged[kind][name]}, step)

    def draw(self, *, last: bool = False) -> None:
        """Write the layout of Custom Scalars if there are new charts.

        Args:
            last: look for a layout that the user has written since.
        """
        if not self.used:
            return
        losses = [*self.losses("training"), *self.losses("validation")]
        charts = {}
        if losses:
            charts[f"did training suffer? {', '.join(losses)}"] = [re.escape(t) for t in losses]
        shown = [tag for tag in self._tags if tag.removeprefix(PREFIX) not in self._dull]
        for title, pattern in _CHARTS.items():
            if any(re.fullmatch(PREFIX + pattern, tag) for tag in shown):
                charts[title] = [OURS + pattern]
        if charts and (last or charts != self._drawn):
            self._drawn = charts
            for board in self._boards:
                _write_layout(board, charts)

    def due(self, steps: float) -> bool:
        """Return whether steps have doubled since the last summary."""
        return self.used and steps >= max(1, 2 * self._described)

    def describe(self, line: str, steps: float, state: str, step: int) -> None:
        """Write the summary of the run so far on the TEXT page.

        Args:
            line: what was sent, and what it cost.
            steps: counted by that line.
            state: of the run, in a word or two.
            step: optimizer step, the x axis.
        """
        self._described = steps
        settings = self._configuration.items()
        rows = {name.removeprefix("gc/"): f"`{value}`" for name, value in settings}
        for kind, logged in self._logged.items():
            found = [f"`{name}` {float(logged[name]):.4g}" for name in self.losses(kind)]
            rows[kind] = ", ".join(found) or "no metric with `loss` in its name has been logged"
        rows["run"] = state
        table = [f"| {name} | {value.replace('|', '&#124;')} |" for name, value in rows.items()]
        text = "\n".join([line, "", "| setting | value |", "|---|---|", *table])
        self.write("summary", text, step)

    def decide(self, decision: Decision, levels: Mapping[str, float | None], step: int) -> None:
        """Write a controller's reason and a table of levels on the TEXT page."""
        shown = dict(levels)
        if len(shown) > 1 and len(set(shown.values())) == 1:
            shown = {f"all {len(levels)}": next(iter(levels.values()))}
        rows = [
            f"| {name} | {'uncompressed' if level is None else f'{level:g}'} |"
            for name, level in shown.items()
        ]
        text = "\n".join([decision.reason, "", "| parameter | level |", "|---|---|", *rows])
        self.write("decision", text, step)

    def write(self, name: str, text: str, step: int) -> None:
        """Write Markdown on the TEXT page, and on the disk at once: the run may be killed."""
        for board in self._boards:
            board.experiment.add_text(PREFIX + name, text, step)
            board.experiment.flush()


def named_hparams(
    values: Mapping[str, Any], metrics: Mapping[str, str], shown: Callable[[str], str]
) -> tuple[Any, Any, Any]:
    """Return the records of a run for TensorBoard's page HPARAMS, with names of its columns.

    Args:
        values: hyper-parameters by name.
        metrics: tag -> name.
        shown: returns the name of a hyper-parameter on the page.
    """
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    records: tuple[Any, Any, Any] = hparams(dict(values), dict.fromkeys(metrics, 0))
    plugin = records[0].value[0].metadata.plugin_data
    content = HParamsPluginData.FromString(plugin.content)
    for info in content.experiment.hparam_infos:
        info.display_name = shown(info.name)
    for info in content.experiment.metric_infos:
        info.display_name = metrics[info.name.tag]
    plugin.content = content.SerializeToString()
    return records


def _is_loss(name: str) -> bool:
    return "loss" in name.lower()


def is_tensorboard(logger: Any) -> bool:
    """Return whether a logger has torch's ``SummaryWriter``. Dummies have any attribute."""
    kinds = type(getattr(logger, "experiment", None)).__mro__  # some loggers have none
    return any(kind.__module__.startswith("torch.utils.tensorboard") for kind in kinds)


def _prefix(board: Any) -> str:
    """Return what the logger puts before each tag."""
    own = getattr(board, "_prefix", "")
    return f"{own}{board.LOGGER_JOIN_CHAR}" if own else ""


def _write_layout(board: Any, charts: Mapping[str, list[str]]) -> None:
    """Write our category of Custom Scalars after the categories that the run already has."""
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from torch.utils.tensorboard.summary import custom_scalars

    prefix = re.escape(_prefix(board))
    ours = {
        title: ["Multiline", [f"{prefix}{pattern}$" for pattern in patterns]]
        for title, patterns in charts.items()
    }
    record = custom_scalars({_PAGE: ours})
    (content,) = record.value[0].tensor.string_val
    layout, found = Layout(), _layout_in(board)
    layout.category.extend(each for each in found.category if each.title != _PAGE)
    layout.MergeFromString(content)
    if layout != found:
        record.value[0].tensor.string_val[0] = layout.SerializeToString()
        board.experiment._get_file_writer().add_summary(record)


def _layout_in(board: Any) -> Any:
    """Return the last layout in the run's event files, or an empty layout."""
    from tensorboard.compat import tf
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.plugins.custom_scalar.layout_pb2 import Layout
    from tensorboard.plugins.custom_scalar.metadata import CONFIG_SUMMARY_TAG

    board.experiment.flush()
    layout = Layout()
    for path in sorted(tf.io.gfile.glob(os.path.join(board.experiment.log_dir, "*tfevents*"))):
        with tf.io.gfile.GFile(path, "rb") as file:
            records = _records(file.read())
        for record in records:
            if CONFIG_SUMMARY_TAG.encode() in record:
                for value in Event.FromString(record).summary.value:
                    if value.tag == CONFIG_SUMMARY_TAG:
                        layout = Layout.FromString(value.tensor.string_val[0])
    return layout


def _records(data: bytes) -> Iterator[bytes]:
    """Yield the records of an event file: length (8 bytes), checksum (4), record, checksum (4).

    TensorBoard's own reader computes checksums in Python, which takes seconds.
    """
    start = 0
    while start + 12 <= len(data):
        (length,) = struct.unpack_from("<Q", data, start)
        if start + 16 + length <= len(data):  # the last one may be cut off
            yield data[start + 12 : start + 12 + length]
        start += 16 + length


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return nested hyperparameters as Lightning's logger does: ``{"a": {"b": 1}}`` is ``a/b``."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    elif isinstance(value, Namespace):
        value = vars(value)
    elif isinstance(value, list) and value and all(isinstance(each, Mapping) for each in value):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        parts = (_flat(each, f"{name}/{key}" if name else str(key)) for key, each in value.items())
        return {key: each for part in parts for key, each in part.items()}
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    return {name: value if isinstance(value, (int, float, str)) else str(value)}


def configuration(trainer: Any) -> dict[str, Any]:
    """Return compressor, weights, memory, scheme, controller, seed, workers by ``gc/`` names."""
    strategy, engine = trainer.strategy, trainer.strategy.engine
    config = {
        "gc/compressor": short(engine.compressor),
        "gc/memory": short(engine.memory),
        "gc/scheme": short(engine.scheme),
        "gc/controller": short(strategy.controller),
        "gc/seed": engine.seed,
        "gc/workers": engine.workers,
    }
    if getattr(strategy, "weights", None) is not None:  # FSDP only
        config["gc/weights"] = short(strategy.weights)
    if strategy.network is not None:
        config["gc/network"] = short(strategy.network)
    return config


def hparams_of(trainer: Any) -> dict[str, Any]:
    """Return what Lightning is about to log: what module and datamodule have saved of themselves.

    TensorBoard shows the first record of a run only.
    """
    found: dict[str, Any] = {}
    if getattr(trainer, "enable_autolog_hparams", True):  # Lightning before 2.6 always does
        for owner in (trainer.lightning_module, trainer.datamodule):
            if owner is not None and owner._log_hyperparams:
                found |= owner.hparams_initial
    found.pop("_class_path", None)  # LightningCLI's own
    return found
