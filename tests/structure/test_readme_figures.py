"""README, home page and Evidence show the newest measurements."""

import importlib
import json
import logging
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.fitting import unwarned

ROOT = Path(__file__).parents[2]
README = " ".join((ROOT / "README.md").read_text().split())
PAGE = " ".join((ROOT / "docs" / "will-it-help.md").read_text().replace("**", "").split())
EVIDENCE = (ROOT / "docs" / "evidence.md").read_text()


def newest(name: str) -> Path:
    """Return the newest results of an experiment, which the page of evidence names."""
    found = max((ROOT / "benchmarks" / "results" / "papers").glob(f"{name}_2*.md"))
    assert found.name in EVIDENCE
    return found


SHOWN = {
    "plain DDP": "plain DDP",
    "torch's fp16 hook": "torch fp16 hook",
    "QSGD(4)": "QSGD(4)",
    "TopK(0.01)": "TopK(0.01), β₁ = 0",
}
"""Rows of README's table by their names in the results."""
ARMS = {
    '16 bits, `Cast("bfloat16")': "16 bits",
    "TopK(0.01)": "Top-k 1%",
    "TopK(0.001)": "Top-k 0.1%",
    "Accordion": "Accordion",
    "TotalError": "hard threshold",
    "TotalErrorBudget": "budget",
    "QSGD(4)": "QSGD, 4 bits",
    "PowerSGD(2)": "PowerSGD, rank 2",
    "DynamicBitWidth": "dynamic bits",
}
BRANCHES = {
    "16 bits": "16 bits",
    "QSGD(4)": "QSGD, 4 bits",
    "PowerSGD(2)": "PowerSGD, rank 2",
    "TopK(0.01)": "Top-k 1 %",
    "Quantised(ChunkedTopK(), BinMeans(2))": "chunks and bins",
}
"""Rows of the page of evidence by their names in the results."""


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    return importlib.import_module("network_plot")


def test_pictures_are_drawn_from_them(plot: Any) -> None:
    drawn = plot.in_words(plot.seconds(plot.newest()))
    for name in ("network", "network_narrow"):
        image = (ROOT / "docs" / "images" / f"{name}.svg").read_text()
        assert drawn in image, "stale: run python benchmarks/network_plot.py"


def times(found: dict[str, float], method: str) -> tuple[float, float]:
    """Return how many times as fast a method is as torch's fp16 hook, and as plain DDP."""
    return found["torch fp16 hook"] / found[method], found["plain DDP"] / found[method]


def test_sentence_holds_for_the_picture(plot: Any) -> None:
    rows = plot.seconds(plot.newest())
    ours = plot.OURS
    pairs = [times(rows[link], m) for link in plot.LINKS[:2] for m in ours]
    half, slow = zip(*pairs, strict=True)
    said = f"were {min(half):.1f} to {max(half):.0f} times as fast as with torch's fp16 hook, and "
    assert f"{said}{min(slow):.1f} to {max(slow):.0f} times as fast as with plain DDP." in PAGE
    most = max(times(rows["10 Gbit/s"], method)[0] for method in ours)
    said = f"At 10 Gbit/s none of them was more than {most:.2f} times as fast as the hook."
    assert said in PAGE


def test_sentence_holds_for_what_is_not_in_the_picture(plot: Any) -> None:
    theirs = ("no synchronisation", "plain DDP", "torch", "GRACE")
    pairs = [
        times({each: row["seconds"] for each, row in part["rows"].items()}, name)
        for part in json.loads(plot.newest().read_text())
        if (part["workers"], part["model"]) != (2, "lstm8")
        and part["link"] in ("100 Mbit/s", "1 Gbit/s")
        for name in part["rows"]
        if not name.startswith(theirs)
    ]
    half, factors = zip(*pairs, strict=True)
    said = f"were {min(half):.1f} to {max(half):.0f} times as fast as the hook, and "
    assert f"{said}{min(factors):.1f} to {max(factors):.0f} times as fast as plain DDP." in PAGE


def rows_of(text: str) -> dict[str, list[str]]:
    """Return first cell -> other cells of a page's tables, without markup."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    cells = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines]
    return {first.split("`,")[0]: others for first, *others in cells}


def of_section(title: str) -> dict[str, list[str]]:
    """Return the rows of the tables in a section of the page of evidence."""
    (found,) = [part for part in EVIDENCE.split("\n## ") if part.startswith(f"{title}\n")]
    return rows_of(found)


def test_accuracies_are_the_measured_ones() -> None:
    theirs, shown = rows_of(newest("cifar").read_text()), of_section("Accuracy")
    for ours, arm in ARMS.items():
        _, rate, *others = theirs[arm]
        others = [cell.replace("-", "−") for cell in others]
        assert shown[ours] == [rate.removesuffix(" (edge)"), *others], ours
    assert len(shown) == len(ARMS) + 2  # and the head


def test_gaps_are_the_measured_ones() -> None:
    text = newest("gap").read_text()
    gaps, slopes, _ = map(rows_of, text[text.index("| gap, nats") :].split("\n\n", 2))
    shown = of_section("Larger models, longer training")
    for ours, method in BRANCHES.items():
        found = [f"{float(cell.split()[0]):.3f}" for cell in gaps[method]]
        found = [cell.replace("-0.000", "0.000") for cell in found]
        sizes = [", ".join(found[at : at + 3]) for at in (0, 3, 6)]
        assert shown[ours] == [c.replace("-", "−") for c in (*sizes, *slopes[method])], ours
    assert len(shown) == len(BRANCHES) + 2  # and the head


def test_seconds_to_a_loss_are_the_measured_ones() -> None:
    links = [rows_of(part) for part in newest("time_to_loss").read_text().split("\n## ")[1:]]
    shown = rows_of((ROOT / "README.md").read_text())
    whole = of_section("Seconds to a loss")
    for ours, theirs in SHOWN.items():
        assert shown[ours] == [link[theirs][4].split(" ± ")[0] for link in links], ours
    for ours, theirs in {**SHOWN, "torch's fp16 hook, β₁ = 0": "torch fp16 hook, β₁ = 0"}.items():
        found = [link[theirs] for link in links]
        cells = [cells[at] for cells in found for at in (4, 6)]
        cells = ["1" if cell.startswith("1.00 (1.00") else cell for cell in cells]
        assert whole[ours] == [found[0][3], *cells], ours


def test_seconds_of_a_replay_are_the_measured_ones() -> None:
    newest = max((ROOT / "benchmarks" / "results").glob("replay_2*.json"))
    names = {"gpt2": "GPT-2", "resnet50": "ResNet-50"}
    shown = of_section("GPUs, replayed")
    seen = 0
    for part in json.loads(newest.read_text()):
        row = shown.get(f"{names[part['model']]}, {part['workers']} workers, {part['link']}")
        if row is not None:
            seen += 1
            seconds = [found["seconds"] for found in part["rows"].values()]
            decimals = [len(cell.split(".")[1]) for cell in row]
            assert row == [f"{s:.{n}f}" for s, n in zip(seconds, decimals, strict=True)], part
    assert seen == 6


def test_share_of_the_bytes_is_the_measured_one(plot: Any) -> None:
    part = next(
        part
        for part in json.loads(plot.newest().read_text())
        if (part["workers"], part["model"], part["link"]) == (2, "lstm8", "1 Gbit/s")
    )
    assert "`QSGD(bits=4)` | 1/8 (1/4)" in README
    rows = part["rows"]
    assert abs(rows["plain DDP"]["bytes"] / rows["QSGD(4)"]["bytes"] - 8) < 0.6


@pytest.mark.slow
def test_the_program_prints_what_the_table_says(
    caplog: pytest.LogCaptureFixture, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many times less as README says, within the table's range, and shares of one whole."""
    (code,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(), re.S | re.M)
    monkeypatch.chdir(tmp_path)
    with caplog.at_level(logging.INFO, "pytorch_lightning"), unwarned():
        names: dict[str, Any] = {"__name__": "readme"}
        exec(code, names)
    (line,) = [r.getMessage() for r in caplog.records if "Compression: " in r.getMessage()]
    ratio = float(names["trainer"].callback_metrics["compression/total_ratio"])
    said = re.search(r"`TopK\(0\.01\)` \| 1/(\d+) to 1/(\d+) \(", README)
    assert said is not None
    assert int(said[1]) <= ratio <= int(said[2])
    assert f"each worker sent {ratio:.0f} times less than with plain DDP" in README
    half = f"({ratio / 2:.0f} times less than in 16 bits)"
    assert f", {ratio:.0f} times less {half}. On links of 1 Gbit/s compressing would take " in line
    numel = sum(param.numel() for param in names["model"].parameters())
    assert f"The model has {numel / 1e6:.1f} million parameters." in README
    assert sum(int(share) for share in re.findall(r"(\d+)%", line)) < 100
    assert re.search(r" A step would be .* plain DDP's\.", line)
