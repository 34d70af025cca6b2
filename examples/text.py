"""Text as a language model wants it: numbered words, in columns, a few steps at a time."""

from __future__ import annotations

import gzip
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytorch_lightning as pl
import torch
from torch import Tensor

UNKNOWN, END_OF_LINE = "<unk>", "<eos>"
PIECES = ("train", "valid", "test")


@dataclass(frozen=True)
class Corpus:
    """A text in three pieces, as numbers of words.

    Attributes:
        words: the vocabulary; the number of a word is its place.
        train: ``(words,) int64``; so are ``valid`` and ``test``.
    """

    words: tuple[str, ...]
    train: Tensor
    valid: Tensor
    test: Tensor


def load(directory: Path | None, rare: int = 1) -> Corpus:
    """Return the text in ``directory``, or Python's own documentation if that is None.

    Words that the training text has at most ``rare`` times become ``<unk>``.

    Raises:
        ValueError: a piece is missing, ambiguous or empty; the message says which and why.
    """
    pieces = python_topics() if directory is None else read_pieces(directory)
    counts = Counter(pieces["train"])
    frequent = sorted(word for word, count in counts.items() if count > rare)
    words = (UNKNOWN, *(word for word in frequent if word != UNKNOWN))
    number = {word: i for i, word in enumerate(words)}
    train, valid, test = (
        torch.tensor([number.get(word, 0) for word in pieces[piece]]) for piece in PIECES
    )
    return Corpus(words, train, valid, test)


def python_topics() -> dict[str, list[str]]:
    """Return the words of ``pydoc_data.topics``, the texts behind ``help('while')``.

    Of each topic the last tenth is for testing and the tenth before it for validation. Topics
    quote one another at length, so a paragraph counts only where it occurs first: nothing that is
    tested has been trained on.
    """
    from pydoc_data.topics import topics

    seen: set[str] = set()
    pieces: dict[str, list[str]] = {piece: [] for piece in PIECES}
    for _, topic in sorted(topics.items()):
        paragraphs = [p for p in dict.fromkeys(topic.strip().split("\n\n")) if p not in seen]
        seen.update(paragraphs)
        words = split_words("\n\n".join(paragraphs))
        tenth = len(words) // 10
        end_of_train, end_of_valid = len(words) - 2 * tenth, len(words) - tenth
        pieces["train"] += words[:end_of_train]
        pieces["valid"] += words[end_of_train:end_of_valid]
        pieces["test"] += words[end_of_valid:]
    return pieces


def split_words(text: str) -> list[str]:
    """Return lower-case words, line ends and marks such as ``...``; rulers are cut to ``====``."""
    text = re.sub(r"([^\w\s])\1{4,}", r"\1\1\1\1", text.lower())
    tokens = (match[0] for match in re.finditer(r"\w+|([^\w\s])\1*|\n", text))
    return [END_OF_LINE if token == "\n" else token for token in tokens]


def read_pieces(directory: Path) -> dict[str, list[str]]:
    """Return the words of ``*train.txt*``, ``*valid.txt*`` and ``*test.txt*``, split by spaces."""
    if not directory.is_dir():
        raise ValueError(
            f"{directory} is not a directory. --data wants one that holds train.txt, valid.txt "
            f"and test.txt; leave it out to train on Python's own documentation."
        )
    return {piece: read_words(find_piece(directory, piece)) for piece in PIECES}


def find_piece(directory: Path, piece: str) -> Path:
    """Return the file of a piece: ``valid.txt``, ``ptb.valid.txt.gz``, ``wiki.valid.tokens``."""
    pattern = re.compile(rf".*{piece}\.(txt|tokens)(\.gz)?")
    found = sorted(p.name for p in directory.iterdir() if pattern.fullmatch(p.name))
    # PTB's archive has a version in characters beside the one in words.
    found = [name for name in found if ".char." not in name]
    if len(found) != 1:
        what = f"{len(found)} ({', '.join(found)})" if found else "none"
        raise ValueError(
            f"{directory} must hold exactly one file called *{piece}.txt or *{piece}.tokens, with "
            f"or without .gz, but holds {what}."
        )
    return directory / found[0]


def read_words(path: Path) -> list[str]:
    """Return the words of a plain or gzipped file, each line closed by ``<eos>``."""
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as lines:
        words = [word for line in lines for word in (*line.split(), END_OF_LINE)]
    if not words:
        raise ValueError(f"{path} is empty; a language model needs words.")
    return words


def columns(text: Tensor, count: int) -> Tensor:
    """Cut a text in ``count`` equal columns, ``(count, length)``; a remainder falls away."""
    length = len(text) // count
    if length < 2:
        raise ValueError(
            f"A text of {len(text)} words is too short for {count} columns of at least 2. Take "
            f"fewer columns or workers, or a longer text."
        )
    return text[: length * count].view(count, length)


@dataclass(frozen=True)
class Batches:
    """Reads all columns from start to end, ``steps`` words at a time.

    Consecutive batches continue each other, so that a recurrent state can be carried on. Yields
    ``(inputs, targets)``, each ``(columns, steps)``: the target is the next word.
    """

    columns: Tensor
    steps: int

    def __len__(self) -> int:
        return -(-(self.columns.shape[1] - 1) // self.steps)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        last = self.columns.shape[1] - 1
        for start in range(0, last, self.steps):
            stop = min(start + self.steps, last)
            yield self.columns[:, start:stop], self.columns[:, start + 1 : stop + 1]


class Text(pl.LightningDataModule):
    """Gives every worker its own columns of a text.

    Args:
        corpus: the text.
        workers: how many share the training and validation text.
        batch: columns per worker.
        bptt: words per batch and column.
    """

    def __init__(self, corpus: Corpus, workers: int, batch: int, bptt: int) -> None:
        super().__init__()
        self.bptt = bptt
        # split: one tensor per worker, each (batch, length)
        self.train = columns(corpus.train, workers * batch).split(batch)
        self.valid = columns(corpus.valid, workers * batch).split(batch)
        self.test = columns(corpus.test, 1)

    def train_dataloader(self) -> Batches:
        """Return this worker's part of the training text."""
        return Batches(self.train[self._worker()], self.bptt)

    def val_dataloader(self) -> Batches:
        """Return this worker's part of the validation text."""
        return Batches(self.valid[self._worker()], self.bptt)

    def test_dataloader(self) -> Batches:
        """Return the whole test text as one column: no word is left out or read twice."""
        return Batches(self.test, self.bptt)

    def _worker(self) -> int:
        assert self.trainer is not None
        return self.trainer.global_rank
