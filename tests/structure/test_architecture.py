"""The page about the architecture names every room, in import order, and only files that exist."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "architecture.md").read_text()
LIBRARY = ROOT / "lightning_gc"


def named(text: str) -> list[str]:
    """Return the files and folders in backticks."""
    return re.findall(r"`((?:[\w.]+/)+(?:[\w.]+)?|\w+\.py)`", text)


def section(heading: str) -> str:
    return PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def rooms() -> list[set[str]]:
    """Return the rooms of each row of the first table."""
    rows = re.findall(r"^\| (`.*?) \|", section("Rooms"), re.MULTILINE)
    return [{Path(name).stem for name in named(row)} for row in rows]


def test_rooms_are_those_of_the_import_rules_in_their_order() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())
    layers = settings["tool"]["importlinter"]["contracts"][0]["layers"]
    names = [{part.strip().rpartition(".")[2] for part in layer.split("|")} for layer in layers]
    assert rooms() == [layer for layer in names if layer != {"__main__"}]


def test_every_folder_is_a_room() -> None:
    folders = {path.parent.name for path in LIBRARY.glob("*/__init__.py")}
    assert folders <= set.union(*rooms())


def test_every_named_file_exists() -> None:
    names = named(PAGE)
    assert len(names) > 60
    known = (ROOT, LIBRARY)
    missing = [n for n in names if not any((folder / n).exists() for folder in known)]
    assert not missing


def test_every_room_has_tests() -> None:
    protected = {Path(n).name for n in named(section("Which test protects which room"))}
    wanted = {Path(n).name for n in named(section("Rooms"))} - {"flavours.py"}
    assert wanted <= protected
