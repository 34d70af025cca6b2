"""What is compared of ours: methods of the file, or compressors with fields, by words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import yaml

import lightning_gc
from lightning_gc.compressors import PerParameter
from lightning_gc.tuning.method import Method

DEFAULT = ("cast", "qsgd", "topk", "topk:value_dtype=bfloat16,scheme=sparse_reduce")


def methods_of(words: Sequence[str], known: Mapping[str, Method]) -> dict[str, Method]:
    """Return the methods that are meant, and refuse those that cannot work.

    Args:
        words: each a method of the file, a compressor's name, or ``name:field=value,...``, where
            ``memory`` and ``scheme`` may stand among the fields.
        known: the methods of the file.

    Raises:
        ValueError: an unknown name or field, a value or combination that is refused.
    """
    methods = {word: known.get(word) or parse(word) for word in words}
    for method in methods.values():
        strategy_of(method)
    return methods


def parse(word: str) -> Method:
    """Return the method that ``name:field=value,...`` means."""
    name, _, rest = word.partition(":")
    fields: dict[str, Any] = {}
    for part in rest.split(",") if rest else ():
        field, equals, value = part.partition("=")
        if not equals:
            raise ValueError(f"{word!r}: write a compressor's fields as topk:density=0.01.")
        fields[field.strip()] = yaml.safe_load(value)
    parts = {kind: fields.pop(kind) for kind in ("memory", "scheme") if kind in fields}
    return Method(word, name, fixed=fields, **parts)


def strategy_of(method: Method, **settings: Any) -> Any:
    """Return a new strategy; fields that are not fixed have their defaults."""
    compressor: Any = method.kind(**method.fixed)
    return lightning_gc.CompressedDDPStrategy(
        PerParameter(compressor) if method.every_tensor else compressor,
        memory=method.memory,
        scheme=method.scheme,
        controller=method.controller,
        **settings,
    )
