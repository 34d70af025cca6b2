"""lightning-gc list and the committed tables show what the classes declare."""

import importlib
import inspect
import math
import re
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from lightning_gc import (
    COMPRESSORS,
    MEMORIES,
    QSGD,
    SCHEMES,
    Cast,
    EFSignSGD,
    ErrorFeedback,
    HardThreshold,
    Identity,
    PowerSGD,
    SizeSwitch,
    TopK,
    cli,
)
from lightning_gc.compressors import (
    AbsoluteError,
    Codec,
    Compressor,
    Contraction,
    Knob,
    Multiple,
    Unbounded,
    Variance,
)
from lightning_gc.compressors.base import Traits
from lightning_gc.core.wire import Field, Wire
from lightning_gc.methods import catalogue
from lightning_gc.methods.catalogue import (
    FAMILIES,
    bound,
    cited,
    compressor_entry,
    wire_bits,
    wire_entry,
    written,
)

ROOT = Path(__file__).parents[2]
TABLES = sorted((ROOT / "docs" / "tables").glob("*.md"))


@dataclass(frozen=True)
class Mine(Codec):
    """Send all, or |nothing|.

    Reference:
        Me, "On Mine", 2020.
    """

    width: int = 3

    traits = Traits(
        "sparsifier",
        linear=True,
        conserves=False,
        default_memory="none",
        knob=Knob("width", low=1, high=9, more="compression", integer=True),
    )

    def encode(self, buffer: torch.Tensor, bucket: Any) -> tuple[torch.Tensor, ...]:
        taken = buffer[: buffer.numel() // 8].clone()
        buffer[: buffer.numel() // 8] = 0
        return (taken,)

    def decode(self, payload: Any, out: torch.Tensor, scale: float, bucket: Any) -> None:
        out[: len(payload[0])].add_(payload[0], alpha=scale)

    def bound(self, numel: int) -> Contraction:
        return Contraction(0.0)

    def wire(self, numel: int) -> Wire:
        return (Field("first", torch.float32, numel // 8, note="in order"),)


def test_every_class_has_a_row() -> None:
    rows = [(row.cells["kind"].partition(",")[0], row.name) for row in FAMILIES["compressors"]()]
    assert rows == sorted((cls().traits.kind, name) for name, cls in COMPRESSORS.items())
    assert [row.name for row in FAMILIES["memories"]()] == sorted(MEMORIES)
    assert [row.name for row in FAMILIES["schemes"]()] == sorted(SCHEMES)
    assert {"accordion", "total_error"} <= {row.name for row in FAMILIES["controllers"]()}


def test_a_plug_in_gets_entries() -> None:
    assert dict(wire_entry("mine", Mine).cells) == {
        "tensors for 1,000,000 elements": "first: 125,000 float32 (in order)",
        "bytes": "500,000",
    }
    assert dict(compressor_entry("mine", Mine).cells) == {
        "kind": "sparsifier,\nlinear, no mean",
        "bits": "4",
        "error bound": "contraction\nδ = 0",
        "knob": "width: 1 to 9,\nhigher sends less",
        "tuned": "width: 1 to 9, log",
        "memory": "NoMemory()",
        "scheme": "AllReduce()",
        "reference": "Me, 2020",
    }


@pytest.mark.parametrize(
    ("compressor", "bits"),
    [
        (Identity(), 32),
        (Cast(), 16),
        (QSGD(4, block_size=512), 4 + 32 / 512),
        (EFSignSGD(), 1 + 32 / 512**2),
        (TopK(0.01), 0.01 * 40.6),
        (HardThreshold(1.0), 0),
        (PowerSGD(2), 32 * 2 * 2 / 512),
    ],
    ids=repr,
)
def test_bits_are_those_of_the_payload(compressor: Compressor, bits: float) -> None:
    assert wire_bits(compressor) == pytest.approx(bits, rel=0.002, abs=1e-3)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (lambda d: Contraction(0.25), "contraction δ = 0.25"),
        (lambda d: Contraction(1 - 2**-16), "contraction δ = 1 − 1.53e-05"),
        (lambda d: Variance(d / 8), "variance ω = 12.5"),
        (lambda d: Multiple(3.0), "‖error‖² ≤ 3·‖x‖²"),
        (lambda d: AbsoluteError(0.5 * math.sqrt(d)), "‖error‖ ≤ 0.5·√d"),
        (lambda d: AbsoluteError(0.5), "‖error‖ ≤ 0.5"),
        (lambda d: Unbounded(), "none"),
    ],
)
def test_bounds_in_words(found: Any, said: str) -> None:
    compressor: Any = SimpleNamespace(bound=found, traits=SimpleNamespace(exact=False))
    assert bound(compressor, 100).replace("\n", " ") == said
    compressor.traits.exact = True
    assert bound(compressor, 100) == "no error"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            'Aji and Heafield, "X",\n    EMNLP 2017. Lin et al., "Y", 2018.',
            "Aji and Heafield, 2017",
        ),
        ('A. F. Aji & K. Heafield. "X." 2017', "A. F. Aji and K. Heafield, 2017"),
        ('Lin, Han, and Dally, "Since 1999", ICLR 2018.', "Lin et al., 2018"),
        ('In wide use: Yu et al., "X", arXiv:1901.04359, 2019.', "Yu et al., 2019"),
        ('Yu, Wu and Li, "X", to appear; Li, "Z", 2019.', "Yu et al."),
        ("The MPI standard, section 6.", "The MPI standard"),
    ],
)
def test_references(text: str, said: str) -> None:
    docstring = f"Send.\n\nReference:\n    {text}\n\nRaises:\n    Me, 'X', 1066.\n"
    assert cited(docstring) == said
    assert cited("Send.\n\nRaises:\n    ValueError: never.") == ""


def test_every_reference_is_understood() -> None:
    """Authors and a year, of each docstring that has a reference."""
    for cls in COMPRESSORS.values():
        text = inspect.getdoc(cls) or ""
        if "\nReference" in text:
            assert re.fullmatch(r"[A-ZŁ][^:;()]{1,50}, (19|20)\d\d", cited(text)), cls


def test_configurations_are_written_without_defaults() -> None:
    assert written(ErrorFeedback()) == "ErrorFeedback()"
    assert written(ErrorFeedback(decay=0.9)) == "ErrorFeedback(decay=0.9)"
    assert written(SizeSwitch(Identity(), min_dims=1)) == "SizeSwitch(inner=Identity(), min_dims=1)"
    assert written(TopK(0.5, selection="sampled")) == "TopK(density=0.5, selection='sampled')"


@pytest.mark.parametrize("path", TABLES, ids=lambda path: path.stem)
def test_the_tables_of_the_documentation_are_current(path: Path) -> None:
    command = f"python -m lightning_gc list {path.stem} --markdown > docs/tables/{path.name}"
    stale = f"docs/tables/{path.name} is stale. Run `make docs-tables`, or: {command}"
    assert path.read_text() == catalogue.markdown(path.stem), stale
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    assert any(f'"docs/tables/{path.name}"' in page for page in pages)


def test_the_readme_begins_with_the_same_methods() -> None:
    table = catalogue.markdown("start")
    assert table in (ROOT / "README.md").read_text(), "Put docs/tables/start.md into README.md."
    for row in catalogue.START:
        written = row.code.strip("`")
        if row.name in COMPRESSORS:
            assert written.startswith(f"{COMPRESSORS[row.name].__name__}(")
        else:
            others = 'strategy="compressed_ddp_auto"', "LocalStepsStrategy(QSGD(bits=4), every=8)"
            assert written in others


def test_there_are_tables() -> None:
    makefile = (ROOT / "Makefile").read_text()
    names = [path.stem for path in TABLES]
    assert f"TABLES := {' '.join(names)}\n" in makefile
    assert "compressors" in names


def test_bars_do_not_break_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(FAMILIES, "own", lambda: [compressor_entry("mine", Mine)])
    *_, line = catalogue.markdown("own").splitlines()
    assert line.startswith(
        "| [`Mine`][tests.tuning.test_catalogue.Mine]<br>`mine` | Send all, or &#124;nothing&#124;."
    )


@pytest.mark.parametrize(("width", "options"), [("100", []), ("120", []), ("400", ["--wide"])])
def test_a_terminal_shows_all_of_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], width: str, options: Any
) -> None:
    monkeypatch.setenv("COLUMNS", width)
    assert cli.main(["list", "compressors", *options]) == cli.OK
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= int(width)
    words = set(said.split())
    for name, cls in COMPRESSORS.items():
        assert {name, cls.__name__} <= words if options else name in words
    assert ("tuned" in said) == bool(options)


def test_families_are_chosen(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["list", "memories", "--markdown"]) == cli.OK
    assert capsys.readouterr().out == catalogue.markdown("memories")
    assert cli.main(["list", "recollections"]) == cli.USAGE
    assert "'recollections' is not a family. Choose from start, compr" in capsys.readouterr().err


@pytest.fixture
def benchmark(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    for folder in ("examples", "benchmarks"):
        monkeypatch.syspath_prepend(str(ROOT / folder))
    return importlib.import_module("catalogue")


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([7.0, 6.0, 5.0], False),
        ([7.0, 5.0, 7.0], True),
        ([7.0, 6.0, 7.5], True),
        ([7.0, 6.0, math.inf], True),
        ([7.0, 6.0, math.nan], True),
        ([math.nan], True),
        ([7.0, *[5.0] * 38, 8.5], False),  # the last two of forty: a mean of 6.75
        ([], True),
    ],
)
def test_no_run_diverges_silently(benchmark: ModuleType, losses: Any, diverged: bool) -> None:
    callback = benchmark.Losses()
    callback.kept = losses
    assert callback.diverged() is diverged


def test_directions_have_rates_of_their_own(benchmark: ModuleType) -> None:
    assert benchmark.is_direction(Mine())
    assert not benchmark.is_direction(TopK(0.01))
    assert max(benchmark.DIRECTION_RATES) < min(benchmark.RATES) / 100
    assert benchmark.compressor("hard_threshold") == HardThreshold(0.008)  # as in the demo


def test_the_page_says_what_diverged(benchmark: ModuleType, tmp_path: Path) -> None:
    run: dict[str, Any] = {"compressor": "X()", "seconds": 2, "epochs": 1, "steps": 0, "hidden": 8}
    run |= {"workers": 2, "seed": 0, "kind": "dense", "memory": "NoMemory()"}
    run |= {"diverged": False, "bytes": 4e6, "ratio": 1.0}
    bad, failed = (
        run | {"diverged": True, "perplexity": math.inf},
        run | {"failed": "ValueError: 7"},
    )
    rows = [
        run | {"name": "identity", "rate": 20.0, "perplexity": 90.0},
        run | {"name": "identity", "rate": 8.0, "perplexity": 80.0, "bytes": 5e6},
        bad | {"name": "half", "rate": 20.0},
        run | {"name": "half", "rate": 8.0, "perplexity": 81.0},
        bad | {"name": "lost", "rate": 20.0},
        failed | {"name": "lost", "rate": 8.0},
    ]
    lines = benchmark.page(rows, "a machine", "plot.svg").splitlines()
    start = "| `X()` | 20 / 8 |"
    memory = "| 1.0 | `NoMemory()` |"
    assert [line for line in lines if line.startswith("| `X()`")] == [
        f"{start} 90.00 / 80.00 | 80.00 | 5,000,000 {memory} no |",
        f"{start} diverged / 81.00 | 81.00 | 4,000,000 {memory} yes: diverged |",
        f"{start} diverged / failed | none | 4,000,000 {memory} yes: diverged, failed |",
    ]
    assert "- lost at 8: ValueError: 7" in lines
    benchmark.draw(rows, tmp_path / "plot.svg")
    drawn = (tmp_path / "plot.svg").read_text()
    assert ">half<" in drawn
    assert ">lost<" not in drawn


def test_the_page_says_of_each_class_when_to_use_it() -> None:
    """One row per compressor, memory and scheme, with a case for it and a case against it."""
    page = (ROOT / "docs" / "methods.md").read_text()
    advice = page.partition("\n## By family\n")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| ([^|]+) \| ([^|]+) \|$", advice, re.M)
    classes = [*COMPRESSORS.values(), *MEMORIES.values(), *SCHEMES.values()]
    assert sorted(name for name, *_ in rows) == sorted(cls.__name__ for cls in classes)
