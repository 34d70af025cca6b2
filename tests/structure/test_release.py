"""What is released says one version, and CI tries the versions that it promises."""

import importlib.util
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_gc
from tests.matrix.combination import CONSTRAINTS, Project, combinations, projects
from tests.matrix.projects.comparison import broken

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
BOUNDS = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["lightning"]]


def oldest(package: str) -> str:
    (bound,) = (re.search(r">=([\d.]+)", b) for b in BOUNDS if re.match(rf"{package}>=", b))
    assert bound is not None
    return bound[1]


def test_one_version() -> None:
    version = lightning_gc.__version__
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    newest = re.search(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest
    assert newest[1] == version
    assert f"Version {version}." in (ROOT / "README.md").read_text()


@pytest.fixture
def addresses() -> Any:
    path = ROOT / "docs" / "repository_url.py"
    spec = importlib.util.spec_from_file_location("repository_url", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_address_of_the_repository_is_where_it_belongs(addresses: Any) -> None:
    stale = [str(path.relative_to(ROOT)) for path in addresses.changed(ROOT)]
    assert stale == [], "Run `make url`."


def test_one_address_reaches_all_files(addresses: Any, tmp_path: Path) -> None:
    for name in (*addresses.PLACES, "pyproject.toml"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    project = tmp_path / "pyproject.toml"
    given = re.sub(
        r"# (\[project.urls\]|(?:Repository|Documentation) = .*)", r"\1", project.read_text()
    )
    for owner in ("first", "second"):  # a second address replaces the first
        project.write_text(given.replace("host/owner", f"host/{owner}"))
        assert len(addresses.changed(tmp_path)) == len(addresses.PLACES)
        for path, text in addresses.changed(tmp_path).items():
            path.write_text(text)
        assert addresses.changed(tmp_path) == {}
        for name in addresses.PLACES:
            assert (tmp_path / name).read_text().count(f"https://host/{owner}/lightning_gc") == 1
    assert "git+https://host/second/lightning_gc'" in (tmp_path / "README.md").read_text()
    assert "repository-code" in yaml.safe_load((tmp_path / "CITATION.cff").read_text())


def test_changelog_has_one_section_per_version() -> None:
    """Towncrier puts a second one above a section that was begun by hand."""
    headings = re.findall(r"^## \[([\d.]+)\]", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert len(headings) == len(set(headings)) > 1


def test_changes_are_files_that_towncrier_collects() -> None:
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]
    folder, types = ROOT / settings["directory"], "|".join(settings["fragment"])
    assert all(f"`{kind}`" in (folder / "README.md").read_text() for kind in types.split("|"))
    for change in folder.iterdir():
        if change.name != "README.md":
            assert re.fullmatch(rf"[a-z0-9-]+\.({types})\.md", change.name)
            assert 1 <= len(re.findall(r"\.(?:\s|$)", change.read_text())) <= 3, change.name


@pytest.mark.parametrize("package", ["pytorch-lightning", "lightning"])
def test_oldest_versions_are_tried_together(package: str) -> None:
    python = PROJECT["requires-python"].removeprefix(">=")
    (first, *_) = (each for each in combinations() if each.package == package)
    assert first.python == python
    for version, bound in ((first.torch, "torch"), (first.lightning, package)):
        assert version.startswith(f"{oldest(bound)}.")
    for name in ("torchmetrics", "tensorboard", "numpy", "safetensors") if first.others else ():
        assert any(other.startswith(f"{name}=={oldest(name)}.") for other in first.others)


def test_each_promised_python_is_tried_and_the_newest_with_the_newest() -> None:
    said = {c.rpartition(" ")[2] for c in PROJECT["classifiers"] if ":: 3." in c}
    tried = {each.python for each in combinations()}
    assert said <= tried
    newest = {each.package for each in combinations() if each.python == max(tried)}
    assert newest == {"pytorch-lightning", "lightning"}


def test_each_project_has_a_script_and_each_script_a_project() -> None:
    """Their environments get torch before anything else could choose its build."""
    folder = ROOT / "tests" / "matrix" / "projects"
    scripts = {path.name for path in folder.glob("*.py")} - {"comparison.py"}
    assert {each.script for each in projects()} == scripts
    assert not any(word.startswith("torch") for each in projects() for word in each.requirements)
    weekly = yaml.safe_load((ROOT / ".github" / "workflows" / "projects.yml").read_text())
    (schedule,) = weekly[True]["schedule"]  # YAML 1.1 reads the key "on" so
    assert schedule["cron"].rpartition(" ")[2] in "0123456"


def test_a_project_is_free_of_the_constraints_that_it_names() -> None:
    pinned = set(CONSTRAINTS.read_text().splitlines())
    for each in (*projects(), Project("", "", [], ["numpy"])):
        missing = pinned - set(each.constraints.splitlines())
        assert {line.partition("==")[0] for line in missing} == set(each.unpinned)
        assert "torch" not in each.unpinned


def digests(**changed: str) -> list[dict[str, str]]:
    """Return what two workers write that keep all promises, but for some of the second."""
    sound = {"plain": "a", "identity": "a", "qsgd": "b", "topk": "c", "powersgd": "d"}
    return [sound, sound | changed]


@pytest.mark.parametrize(
    ("trained", "resumed", "said"),
    [
        (digests(), digests(), []),
        (digests(topk="e"), digests(), ["topk: the two workers"]),
        (digests(), digests(topk="e"), ["topk: the two workers"]),
        (digests(), [digests(qsgd="e")[1]] * 2, ["qsgd: the resumed run"]),
        ([digests(qsgd="a")[1]] * 2, [digests(qsgd="a")[1]] * 2, ["qsgd: the weights are those"]),
        ([digests(identity="e")[1]] * 2, [digests(identity="e")[1]] * 2, ["identity: the weights"]),
    ],
)
def test_a_project_s_broken_promises_are_named(trained: Any, resumed: Any, said: Any) -> None:
    found = broken(trained, resumed)
    assert len(found) == len(said)
    assert all(map(str.startswith, found, said)), found


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda p: p.name)
def test_workflows_make_what_there_is(workflow: Path) -> None:
    loaded: dict[Any, Any] = yaml.safe_load(workflow.read_text())
    assert loaded["permissions"] == {"contents": "read"}
    steps = [step for job in loaded["jobs"].values() for step in job["steps"]]
    assert all("timeout-minutes" in job for job in loaded["jobs"].values())
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z-]+)", " ".join(step.get("run", "") for step in steps)):
        assert re.search(rf"^{target}:", makefile, re.M), target
