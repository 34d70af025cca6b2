"""Compute the SHA-256 of saved state over names and values, not over a file's encoding.

The state itself can therefore hold its checksum, in any file format and with any CheckpointIO.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_gc.core.pytree import Tree

NAME = "sha256"


class _Hash(Protocol):
    def update(self, data: Any, /) -> None: ...


def checksum(value: Any) -> str:
    """Return the SHA-256 of nested dicts and lists of tensors, numbers, texts and None.

    The order of a dict's names does not matter. Shapes, dtypes and every bit of a tensor do.

    Raises:
        ValueError: a value of another type, which a checkpoint could hold only as pickled code.

    Example:
        >>> checksum({"a": 1, "b": [2.0]}) == checksum({"b": [2.0], "a": 1})
        True
        >>> checksum({"a": 1}) == checksum({"a": 1.0})
        False
    """
    digest = hashlib.sha256()
    _add(digest, value)
    return digest.hexdigest()


def with_checksum(state: Tree) -> Tree:
    """Return a copy of ``state`` with its checksum under ``"sha256"``."""
    return state | {NAME: checksum(state)}


def check_checksum(state: Mapping[str, Any]) -> None:
    """Raise ValueError if a state made by ``with_checksum`` has changed."""
    content = {name: value for name, value in state.items() if name != NAME}
    if state.get(NAME) != checksum(content):
        raise ValueError("its content does not have the checksum that it was saved with")


def _add(digest: _Hash, value: Any) -> None:
    """Hash a value after its kind and length, so that different values give different bytes."""
    if isinstance(value, dict):
        digest.update(f"dict {len(value)};".encode())
        for name in sorted(value, key=repr):
            _add(digest, name)
            _add(digest, value[name])
    elif isinstance(value, list | tuple):
        digest.update(f"list {len(value)};".encode())
        for each in value:
            _add(digest, each)
    elif isinstance(value, Tensor):
        digest.update(f"tensor {value.dtype} {tuple(value.shape)};".encode())
        digest.update(value.detach().cpu().reshape(-1).view(torch.uint8).numpy())
    elif value is None or isinstance(value, bool | int | float | str):
        text = _in_words(value).encode()
        digest.update(f"{len(text)};".encode() + text)
    else:
        raise ValueError(
            f"State can hold tensors, numbers, texts, lists and dicts only, but it has {value!r} "
            f"of {type(value).__name__}; keep it as one of these."
        )


def _in_words(value: bool | int | float | str | None) -> str:
    # A file returns subclasses, such as NumPy's numbers, as the plain type.
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return f"{kind.__name__} {kind(value)!r}"
    return "None"
