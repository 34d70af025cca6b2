"""Read YAML files: model, data and Trainer as for LightningCLI, and methods from ``tune``."""

from __future__ import annotations

import copy
import functools
import importlib
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_gc.compressors.wrappers.size_switch import MIN_NUMEL
from lightning_gc.controllers import Controller
from lightning_gc.core import Space
from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import did_you_mean
from lightning_gc.local_steps import RoundPlan
from lightning_gc.memories import Memory
from lightning_gc.methods.lightning_flavour import pl
from lightning_gc.methods.method import Method, endpoints, parse_all, suggest
from lightning_gc.methods.sections import read_known, read_sections
from lightning_gc.schemes import Scheme

if TYPE_CHECKING:
    import optuna
    from jsonargparse import ArgumentParser, Namespace


@dataclass
class MethodSettings:
    """Hold one entry of the file's ``tune.methods``; see ``Method``."""

    compressor: str | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    space: dict[str, Any] = field(default_factory=dict)
    memory: Memory | None = None
    scheme: Scheme | None = None
    controller: Controller | None = None
    min_numel: int = MIN_NUMEL
    budget: float | None = None
    memory_space: dict[str, Any] = field(default_factory=dict)
    rounds: RoundPlan | None = None
    rounds_space: dict[str, Any] = field(default_factory=dict)

    def method(self, name: str) -> Method:
        """Return the method."""
        named = ("space", "memory_space", "rounds_space")
        spaces = {name: parse_all(getattr(self, name)) for name in named}
        return Method(name, **(vars(self) | spaces))


@dataclass(frozen=True)
class YAMLBuild:
    """Build model, data and Trainer arguments from the file's sections and a trial's values.

    Attributes:
        sections: ``model``, ``data`` and ``trainer`` of the file.
        space: tuned values, by path without ``init_args``, such as ``model.learning_rate``.
    """

    sections: Mapping[str, Any]
    space: Space

    def suggest(self, trial: optuna.trial.BaseTrial) -> dict[str, Any]:
        """Return the values of a trial."""
        return suggest(trial, self.space)

    def __call__(self, trial: optuna.trial.BaseTrial) -> tuple[Any, Any, dict[str, Any]]:
        """Return model, datamodule and Trainer arguments."""
        return self.make(self.suggest(trial))

    def make(self, values: Mapping[str, Any]) -> tuple[Any, Any, dict[str, Any]]:
        """Return model, datamodule and Trainer arguments with these values at their paths."""
        sections = self._with_values(values)
        made = _parser().instantiate(parse(_parser(), sections))
        trainer, given = made.trainer.as_dict(), sections.get("trainer") or {}
        return made.model, made.get("data"), {name: trainer[name] for name in given}

    def check(self) -> None:
        """Raise ValueError, before the first trial, if a tuned path is not in the file."""
        parse(_parser(), self._with_values(endpoints(self.space)))

    def _with_values(self, values: Mapping[str, Any]) -> dict[str, Any]:
        sections = copy.deepcopy(dict(self.sections))
        for path, value in values.items():
            _set(sections, path, value)
        return sections


def methods_in(sections: Mapping[str, Any]) -> dict[str, Method]:
    """Return the file's methods by name, or an empty dict without a section ``tune``."""
    given = mapping("tune", sections.get("tune"), "metric: loss").get("methods")
    if isinstance(given, list) and all(isinstance(name, str) for name in given):
        given = dict.fromkeys(given)  # all settings at their defaults
    named = mapping("tune.methods", given, "topk: {}", ", or a list of names, [topk, qsgd]")
    parser = arguments()
    parser.add_argument("--tune.methods", type=dict[str, MethodSettings])
    settings = {name: value or {} for name, value in named.items()}
    parsed = parser.instantiate(parse(parser, {"tune": {"methods": settings}})).tune.methods
    return {name: each.method(name) for name, each in (parsed or {}).items()}


def read(path: str | Path, needed: Sequence[str] = ("model", "tune")) -> dict[str, Any]:
    """Return the sections of a file; raise ValueError if one is missing or unknown."""
    sections = read_known(path, needed)
    _refuse_misspelt(sections)
    return sections


def read_any(path: str | Path) -> dict[str, Any]:
    """Return the sections of a file without a check of their names, as LightningCLI has others."""
    sections = read_sections(path)
    _refuse_misspelt(sections)
    return sections


def _refuse_misspelt(value: Any) -> None:
    """Raise ValueError if a part of a file names a class that this package does not have."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _refuse_misspelt(each)
    elif isinstance(value, str) and value.startswith("lightning_gc."):
        name = value.removeprefix("lightning_gc.")
        package = _package()
        if name.isidentifier() and not hasattr(package, name):
            meant = did_you_mean(name, package.__all__)
            refuse(f"{value} does not exist{meant}. lightning-gc list prints all names")


def _package() -> Any:
    # The package imports all others for type checkers, so an import at the top would be a cycle.
    return importlib.import_module(__name__.partition(".")[0])


def mapping(key: str, given: Any, example: str, more: str = "") -> dict[str, Any]:
    """Return a part of the file as a dict, empty if the part is missing."""
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        refuse(key, f"{given!r} has no keys. Write some, such as {example}{more}")
    return dict(given)


def arguments() -> ArgumentParser:
    """Return an empty parser that raises an exception instead of ending the program.

    Raises:
        ImportError: jsonargparse is not installed.
    """
    try:
        from jsonargparse import ArgumentParser
    except ImportError as error:
        raise ImportError(
            "Reading a YAML file needs jsonargparse, which is not installed. Install the extra: "
            "pip install 'lightning-gc[tune]'."
        ) from error
    return ArgumentParser(exit_on_error=False)


@functools.cache
def _parser() -> ArgumentParser:
    parser = arguments()
    parser.add_subclass_arguments(pl.LightningModule, "model", required=True)
    parser.add_subclass_arguments(pl.LightningDataModule, "data")
    # As in LightningCLI: nested classes are instantiated, the Trainer itself is not.
    parser.add_class_arguments(pl.Trainer, "trainer", instantiate=False)
    return parser


def parse(parser: ArgumentParser, sections: Mapping[str, Any]) -> Namespace:
    """Return the parsed sections; raise ValueError that says why they are invalid."""
    known = {name: value for name, value in sections.items() if value is not None}
    try:
        parsed: Namespace = parser.parse_object(known)
        return parsed
    except Exception as error:  # jsonargparse's own errors, and any error of an import
        _refuse_missing(known)
        raise ValueError(f"The configuration is refused. {error}") from error


def _refuse_missing(value: Any) -> None:
    """Raise ValueError if a ``class_path`` cannot be imported; jsonargparse's message is long."""
    for each in value if isinstance(value, list) else ():
        _refuse_missing(each)
    if not isinstance(value, Mapping):
        return
    path = value.get("class_path")
    if isinstance(path, str) and "." in path:
        module, _, name = path.rpartition(".")
        try:
            getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError) as error:
            raise ValueError(
                f"class_path {path} cannot be imported: {error}. Python searches the current "
                f"folder and PYTHONPATH."
            ) from error
    for each in value.values():
        _refuse_missing(each)


def _set(sections: dict[str, Any], path: str, value: Any) -> None:
    """Set a value at its dotted path, through ``init_args`` of classes."""
    first, *middle, last = path.split(".")
    if "init_args" in (*middle, last):
        shorter = path.replace(".init_args", "")
        refuse("tune.space", f"write {shorter}, not {path}")
    node = sections.get(first)
    if first not in ("model", "data", "trainer") or not isinstance(node, dict):
        refuse(
            f"{path} cannot be tuned. Begin with model., data. or trainer., and a section that "
            "the file has. A compressor's fields belong to its method"
        )
    for name in middle:
        node = _init_args(node).setdefault(name, {})
        if not isinstance(node, dict):
            refuse(path, f"{name} has a single value, so it has no {last}")
    _init_args(node)[last] = value


def _init_args(node: dict[str, Any]) -> dict[str, Any]:
    inner: dict[str, Any] = node.setdefault("init_args", {}) if "class_path" in node else node
    return inner


def fit(words: Sequence[str]) -> None:
    """Run LightningCLI with these arguments; the file's section ``tune`` is ignored."""
    cli: Any = importlib.import_module(f"{pl.__name__}.cli")

    class FitCLI(cli.LightningCLI):  # type: ignore[misc]
        def add_arguments_to_parser(self, parser: Any) -> None:
            parser.add_argument("--tune", type=Any, help="what lightning-gc tune reads")

    # It warns because these are not the arguments of the process.
    warnings.filterwarnings("ignore", message="LightningCLI's args parameter")
    FitCLI(args=list(words), save_config_kwargs={"overwrite": True})


def editor_schema(modules: Sequence[str] = ()) -> dict[str, Any]:
    """Return a JSON schema of ``trainer.strategy``, without constraints on the rest of a file.

    Args:
        modules: modules with the user's classes, which are imported.
    """
    for module in modules:
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{module}.".startswith(f"{error.name}."):
                raise  # the module imports another one, which is missing
            raise ValueError(f"The module {module} does not exist: {error}.") from error
    from jsonargparse import ArgumentParser

    parser = ArgumentParser()
    names = (
        *("CompressedDDPStrategy", "CompressedFSDPStrategy", "CompressedHSDPStrategy"),
        *("LocalStepsStrategy", "SimulatedDDPStrategy", "SimulatedLocalStepsStrategy"),
    )
    strategies = [getattr(_package(), name) for name in names]
    for strategy in strategies:
        parser.add_subclass_arguments(strategy, strategy.__name__)
    try:
        found = json.loads(parser.get_completion_script("jsonschema"))
    except (AttributeError, ValueError) as error:
        raise ImportError(
            "lightning-gc schema needs jsonargparse 4.53 or later, which writes JSON schemas: "
            "pip install --upgrade 'jsonargparse[signatures]'."
        ) from error
    named = [found["properties"][strategy.__name__] for strategy in strategies]
    either = {"anyOf": [{"type": "string"}, *named]}
    trainer = {"type": "object", "properties": {"strategy": either}}
    return {"type": "object", "properties": {"trainer": trainer}, "$defs": found["$defs"]}
