"""Read a YAML file as sections; imports no torch, so that a wrong file is refused at once."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from lightning_gc.core.refusal import refuse
from lightning_gc.core.registry import did_you_mean

SECTIONS = ("model", "data", "trainer", "seed_everything", "tune")
_EXAMPLES = {
    "model": "model: {class_path: my_module.MyModel}",
    "tune": "tune: {name: first, metric: val_loss, space: {}, methods: [topk, qsgd]}",
}


def read_sections(path: str | Path) -> dict[str, Any]:
    """Return the sections of a file without a check of their names, as LightningCLI has others."""
    try:
        sections = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}.") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid YAML: {error}") from error
    if not isinstance(sections, dict):
        refuse(f"{path} has no sections. Add some, such as {_EXAMPLES['model']}")
    return sections


def read_known(path: str | Path, needed: Sequence[str]) -> dict[str, Any]:
    """Return the sections of a file; raise ValueError if one is missing or unknown."""
    sections = read_sections(path)
    for name in needed:
        if name not in sections:
            refuse(
                f"{path} has no section {name}. It has {', '.join(map(str, sections))}. Add one, "
                f"such as {_EXAMPLES[name]}"
            )
    for name in sections:
        if name not in SECTIONS:
            meant = did_you_mean(name, SECTIONS)
            refuse(f"{path} has a section {name!r}{meant}. Known are {', '.join(SECTIONS)}")
    return sections
