"""Readers find each benchmark by name, and a stored result is cited or the newest."""

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
BENCHMARKS = ROOT / "benchmarks"
PAPERS = BENCHMARKS / "papers"
SCRIPTS = {path.stem: path for path in (*BENCHMARKS.glob("*.py"), *PAPERS.glob("*.py"))}
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    ROOT / "Makefile",
    PAPERS / "README.md",
    *(ROOT / "docs").rglob("*.md"),
    *(ROOT / ".ci").iterdir(),
    *(ROOT / "lightning_gc").rglob("*.py"),
]
TEXT = "\n".join(path.read_text() for path in PAGES)


def test_scripts_have_names_of_their_own() -> None:
    assert len(SCRIPTS) == len([*BENCHMARKS.glob("*.py"), *PAPERS.glob("*.py")])


def test_each_script_is_named_or_serves_one_that_is() -> None:
    readme = (PAPERS / "README.md").read_text()
    found = [
        stem
        for stem, path in SCRIPTS.items()
        if str(path.relative_to(ROOT)) in TEXT or (path.parent == PAPERS and path.name in readme)
    ]
    reached: set[str] = set()
    while found:
        stem = found.pop()
        if stem not in reached:
            reached.add(stem)
            found += served(SCRIPTS[stem])
    assert SCRIPTS.keys() - reached == set()


def served(path: Path) -> set[str]:
    """Return the scripts that a script imports or starts."""
    source = path.read_text()
    names = set(re.findall(r'"(\w+)\.py"', source))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names & SCRIPTS.keys()


def test_scripts_that_are_named_exist() -> None:
    named = set(re.findall(r"\bbenchmarks/(?:papers/)?[a-z]\w+\.py\b", TEXT))
    assert len(named) > 30
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_the_readme_lists_the_folder() -> None:
    listed = re.findall(r"`(\w+\.py)`", (PAPERS / "README.md").read_text())
    assert {path.name for path in PAPERS.glob("*.py")} == set(listed)


def test_results_that_are_cited_exist() -> None:
    cited = set(re.findall(r"\bbenchmarks/results/(?:papers/)?[a-z]\w+\.\w+", TEXT))
    assert len(cited) > 30
    assert [name for name in cited if not (ROOT / name).is_file()] == []


def test_each_result_is_cited_or_the_newest_of_its_kind() -> None:
    """Files of one name and date are one result."""
    dates = defaultdict(set)
    for path in (BENCHMARKS / "results").rglob("*_????????.*"):
        kind, date = path.stem.rsplit("_", 1)
        dates[kind].add(date)
    assert len(dates) > 30
    old = [f"{k}_{date}" for k, found in dates.items() for date in found - {max(found)}]
    assert [stem for stem in old if stem not in TEXT] == []
