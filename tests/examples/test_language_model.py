"""The language model example reads its whole text, trains, and reports what it measured."""

import importlib
import json
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.examples import EXAMPLES, each_way
from tests.support.texts import write

FIGURES = (
    "test_perplexity",
    "validation_perplexity",
    "wire_bytes_per_step",
    "dense_bytes_per_step",
    "ratio",
    "density",
    "seconds_per_step",
)


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("text")


@pytest.mark.processes
@each_way
def test_the_example_trains_and_reports(
    run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    data = write(tmp_path / "data", ["train.txt", "valid.txt", "test.txt"])
    out = tmp_path / "out"
    small = ("--hidden", 16, "--epochs", 1, "--batch", 2, "--learning-rate", 1)
    options = ("--data", data, "--out", out, "--methods", "dense", "topk", *small)
    done = run("language_model", options, monkeypatch, capsys)
    assert done.code == 0, done.err
    rows = json.loads((out / "summary.json").read_text())["rows"]
    assert [row["name"] for row in rows] == ["dense", "topk"]
    for row in rows:
        assert all(row[figure] > 0 for figure in FIGURES)
        assert row["replicas_identical"] is True
        assert row["name"] in done.out
        assert row["ratio"] == pytest.approx(
            row["dense_bytes_per_step"] / row["wire_bytes_per_step"]
        )
        assert list((out / "tensorboard" / row["name"]).glob("events.out.tfevents.*"))
    dense, topk = rows
    assert (dense["ratio"], dense["density"]) == (1, 1)
    assert topk["ratio"] > 2
    assert 0.05 < topk["density"] < 0.2  # with the biases, which are a tenth of so small a model
    assert (out / "perplexity_vs_bytes.png").read_bytes().startswith(b"\x89PNG")
    assert f"tensorboard --logdir {out}/tensorboard" in done.out.replace("\n", "")


@each_way
def test_a_folder_that_does_not_exist_is_refused_in_a_sentence(
    run: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    done = run("language_model", ("--data", "nowhere"), monkeypatch, capsys)
    assert done.code == 2
    assert "nowhere is not a directory" in done.err
    assert "Traceback" not in done.err


def test_files_are_found_under_the_names_they_come_with(text: ModuleType, tmp_path: Path) -> None:
    ptb = write(tmp_path / "ptb", [f"ptb.{piece}.txt.gz" for piece in text.PIECES])
    write(ptb, ["ptb.char.train.txt"], lines=1)
    wikitext = write(tmp_path / "wikitext", [f"wiki.{piece}.tokens" for piece in text.PIECES])
    for folder in (ptb, wikitext):
        corpus = text.load(folder)
        assert len(corpus.train) == len(corpus.test) == 30 * 11
        assert corpus.words[0] == text.UNKNOWN
        assert (corpus.train == corpus.words.index(text.END_OF_LINE)).sum() == 30


def test_missing_ambiguous_and_empty_files_are_named(text: ModuleType, tmp_path: Path) -> None:
    folder = write(tmp_path / "data", ["train.txt", "test.txt"])
    with pytest.raises(ValueError, match=r"\*valid\.txt .* but holds none"):
        text.load(folder)
    write(folder, ["valid.txt", "b.train.txt.gz"])
    with pytest.raises(ValueError, match=r"holds 2 \(b\.train\.txt\.gz, train\.txt\)"):
        text.load(folder)
    (folder / "train.txt").unlink()
    (folder / "test.txt").write_text("")
    with pytest.raises(ValueError, match=r"test\.txt is empty"):
        text.load(folder)


def test_rare_and_unseen_words_are_unknown(text: ModuleType, tmp_path: Path) -> None:
    for piece, line in (("train", "a a b b c\n"), ("valid", "b d\n"), ("test", "a c\n")):
        (tmp_path / f"{piece}.txt").write_text(line * 2 if piece == "train" else line)
    corpus = text.load(tmp_path, rare=2)
    assert corpus.words == ("<unk>", "a", "b")
    assert corpus.train.tolist() == [1, 1, 2, 2, 0, 0] * 2
    assert corpus.valid.tolist() == [2, 0, 0]


def test_words_marks_and_line_ends_are_split(text: ModuleType) -> None:
    words = text.split_words("The f(x) == 1...\n*****\n")
    assert words == ["the", "f", "(", "x", ")", "==", "1", "...", "<eos>", "****", "<eos>"]


def test_pythons_documentation_is_a_text_of_three_pieces(text: ModuleType) -> None:
    corpus = text.load(None)
    sizes = [len(piece) for piece in (corpus.train, corpus.valid, corpus.test)]
    assert sizes[0] > 50_000
    assert sizes[1] == sizes[2] == pytest.approx(sizes[0] / 8, rel=0.02)
    assert 1_000 < len(corpus.words) < 5_000
    assert (corpus.test == 0).float().mean() < 0.1


def test_batches_read_every_column_to_its_end(text: ModuleType) -> None:
    columns = text.columns(torch.arange(23), 2)
    assert columns.tolist() == [list(range(11)), list(range(11, 22))]
    batches = text.Batches(columns, steps=4)
    pairs = list(batches)
    assert len(pairs) == len(batches) == 3
    inputs, targets = (torch.cat(parts, dim=1) for parts in zip(*pairs, strict=True))
    assert torch.equal(inputs, columns[:, :-1])
    assert torch.equal(targets, columns[:, 1:])
    with pytest.raises(ValueError, match="too short for 12 columns"):
        text.columns(torch.arange(23), 12)


def test_every_worker_reads_its_own_columns(text: ModuleType) -> None:
    words = torch.arange(64)
    corpus = text.Corpus((), train=words, valid=words[:32], test=words[:9])
    data = text.Text(corpus, workers=2, batch=4, bptt=5)
    shares = []
    for worker in range(2):
        data.trainer = SimpleNamespace(global_rank=worker)
        shares.append(data.train_dataloader().columns)
        assert data.val_dataloader().columns.shape == (4, 4)
        assert data.test_dataloader().columns.shape == (1, 9)
    assert torch.equal(torch.cat(shares).flatten(), words)
