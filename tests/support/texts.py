"""Small texts in files, for the language model."""

import gzip
import random
from collections.abc import Sequence
from pathlib import Path


def write(folder: Path, names: Sequence[str], lines: int = 30) -> Path:
    draw = random.Random(0)
    folder.mkdir(exist_ok=True)
    for name in names:
        opener = gzip.open if name.endswith(".gz") else open
        with opener(folder / name, "wt") as file:
            file.writelines(" ".join(draw.choices("abcdefgh", k=10)) + "\n" for _ in range(lines))
    return folder
