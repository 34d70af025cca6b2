"""The tuning example's configurations are valid, and workers only split its batches."""

import importlib
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import optuna
import pytest
import torch

from lightning_gc import QSGD, AllGather, NoMemory, RandomK, TopK
from lightning_gc.compressors import Codec
from lightning_gc.engine.compatibility import combine
from lightning_gc.methods import yaml_config
from lightning_gc.tuning import Method
from lightning_gc.tuning.early_stopping import EarlyStopping
from lightning_gc.tuning.experiment import load_experiment
from lightning_gc.tuning.trial import fit
from tests.support.fitting import unwarned
from tests.support.texts import write

ROOT = Path(__file__).parents[2]
EXAMPLES, CONFIGS = ROOT / "examples", ROOT / "configs"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("tune_language_model")


def test_the_files_describe_the_thesis_and_the_demo(example: ModuleType) -> None:
    thesis, methods = load_experiment(CONFIGS / "thesis.yaml")
    assert (thesis.trials, thesis.sampler, thesis.patience) == (60, "random", 10)
    assert [m.name for m in methods if m.tuned] == []  # ratios are given, not searched
    assert len(methods) == 1 + 4 * 3 + 1
    momenta = [m.name for m in methods if m.tuned_memory]
    assert momenta == ["dgc_50x", "dgc_500x", "dgc_5000x"]
    demo, methods = load_experiment(CONFIGS / "demo.yaml")
    assert [m.name for m in methods] == ["dense", "topk", "randomk", "qsgd", "hard_threshold"]
    assert demo.workers == 2


def test_ratios_are_those_of_the_thesis(example: ModuleType) -> None:
    """In its own count, of 64 bits for a value and its index; QSGD's of s levels and a sign."""
    _, methods = load_experiment(CONFIGS / "thesis.yaml")
    counted = {}
    for method in methods[1:]:
        assert not isinstance(method.memory, str)
        assert not isinstance(method.scheme, str)
        compressor, memory, scheme = combine(
            method.make_compressor({}), method.memory, method.scheme
        )
        assert compressor.compresses((400,)), "biases too"
        inner = compressor.method
        if isinstance(inner, QSGD):
            assert (inner.norm, memory, scheme) == ("l2", NoMemory(), AllGather())
            assert inner.block_size >= 10_000 * 500  # a norm per tensor
            counted[method.name] = f"{inner.bits}_bits"
        else:
            assert inner.level is not None
            counted[method.name] = f"{32 / (64 * inner.level):g}x"
            assert (memory == NoMemory()) == method.name.endswith("no_feedback")
    assert all(ratio in name.split("_", 1)[1] for name, ratio in counted.items()), counted
    assert {ratio for ratio in counted.values() if "x" in ratio} == {"50x", "500x", "5000x"}
    assert {ratio for ratio in counted.values() if "b" in ratio} == {"7_bits", "5_bits", "3_bits"}


def test_the_table_of_ratios_is_right() -> None:
    """Of the medium model, every tensor compressed: what the payloads take, as declared."""
    layers = [(1200, 300), (1200, 300), (1200,), (1200,)] * 2
    sizes = [math.prod(shape) for shape in ((10_000, 300), *layers)]
    table = re.findall(
        r"^# +(\S+) +(\S+) +\S+ +([\d,.]+)$", (CONFIGS / "thesis.yaml").read_text(), re.M
    )
    made: dict[str, Callable[[float], Codec]] = {
        "topk": TopK,
        "randomk": RandomK,
        "qsgd": lambda bits: QSGD(int(bits), 1 << 24, "l2"),
    }
    assert len(table) == 9
    for name, level, ratio in table:
        codec = made[name](float(level))
        payload = sum(field.nbytes for n in sizes for field in codec.wire(n))
        assert float(ratio.replace(",", "")) == pytest.approx(4 * sum(sizes) / payload, rel=2e-3)


def test_windows_are_whole_and_dealt_in_turn(example: ModuleType) -> None:
    text = torch.arange(4 * 23).view(4, 23)
    whole, dealt = example.Windows(text, 7), example.Windows(text, 7, workers=2)
    assert (len(whole), len(dealt)) == (3, 6)  # 22 words have a next one
    batches = list(dealt)
    for (inputs, targets), first, second in zip(whole, batches[::2], batches[1::2], strict=True):
        assert inputs.shape == (7, 4)
        assert torch.equal(targets, inputs + 1)
        assert torch.equal(torch.cat([first[0], second[0]], dim=1), inputs)
    with pytest.raises(ValueError, match=r"92 words in 4 columns has no window of 23"):
        example.Windows(text, 23)


def test_the_number_of_workers_changes_nothing_without_compression(
    example: ModuleType, tmp_path: Path
) -> None:
    """One, two and four workers are one and the same algorithm; the thesis's are only redrawn."""
    data = write(tmp_path / "data", [f"{piece}.txt" for piece in ("train", "valid", "test")])
    curves = []
    for workers in (1, 2, 4):
        sections = yaml_config.read(CONFIGS / "thesis.yaml")
        sections["model"]["init_args"]["hidden"] = 8
        sections["data"]["init_args"] |= {"folder": str(data), "batch": 8, "bptt": 5}
        sections["trainer"] |= {"accelerator": "cpu", "max_epochs": 2}
        experiment, _ = load_experiment(sections, workers=workers)
        stopping = EarlyStopping(experiment, Method("dense"))
        trial = optuna.trial.FixedTrial({"model.learning_rate": 5.0, "model.dropout": 0.0})
        with unwarned():
            tested = fit(experiment, Method("dense"), trial, stopping.update, 0, final=True)
        curves.append([*stopping.curve, tested])
    assert len(curves[0]) == 3
    assert curves[1] == pytest.approx(curves[0], rel=1e-4)
    assert curves[2] == pytest.approx(curves[0], rel=1e-4)


def test_the_script_tunes_and_reports(
    example: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    data = write(tmp_path / "data", ["train.txt", "valid.txt", "test.txt"], lines=300)
    text = (CONFIGS / "demo.yaml").read_text()
    for old, new in (("max_epochs: 8", "max_epochs: 1"), ("[0, 1, 2]", "[0]")):
        assert old in text
        text = text.replace(old, new)
    (tmp_path / "tiny.yaml").write_text(text)
    monkeypatch.chdir(tmp_path)
    words: list[Any] = ["tiny.yaml", "--data", data, "--hidden", 8, "--trials", 1]
    monkeypatch.setattr(sys, "argv", ["tune", *map(str, words)])
    with unwarned():
        example.main()
    assert (tmp_path / "runs" / "tune" / "tiny_data_h8_w2" / "report.html").is_file()
    assert "hard_threshold" in capsys.readouterr().out


def test_a_folder_without_a_text_is_refused(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["tune", str(CONFIGS / "demo.yaml"), "--data", "nowhere"])
    with pytest.raises(SystemExit) as end:
        example.main()
    assert end.value.code == 2
    assert "nowhere is not a directory" in capsys.readouterr().err
