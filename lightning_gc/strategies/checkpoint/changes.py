"""Changes: which saved error state still fits a changed compressor, memory, controller or model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from lightning_gc.synchronizer.pytree import Tree


class Changes(NamedTuple):
    """State to restore, and sentences about what has changed."""

    memory: Tree
    compressor: Tree
    same_controller: bool
    sentences: list[str]


def changes(
    before: Mapping[str, str],
    now: Mapping[str, str],
    own: Tree,
    shapes: Mapping[str, tuple[int, ...]],
    buffers: Sequence[str] = ("error",),
) -> Changes:
    """Compare a checkpoint with the run that resumes from it.

    Errors are in units of the gradient and belong to a parameter, so they remain valid for any
    compressor; the compressor's own state does not.

    Args:
        before: ``repr`` of compressor, memory and controller in the checkpoint, and what was
            exchanged, if not gradients.
        now: the same in this run.
        own: this worker's part of the checkpoint.
        shapes: parameter name -> shape, in this run.
        buffers: what this run's memory keeps per parameter.
    """
    saved = own["averaged"].get("memory", {})
    units = [each.get("exchanged", "gradients") for each in (before, now)]
    dropped = bool(saved) and units[0] != units[1]
    if dropped:
        saved = {}
    fitting = {
        name: kept
        for name, kept in saved.items()
        if all(tuple(tensor.shape) == shapes.get(name) for tensor in kept.values())
    }
    compressor = {
        name: kept
        for name, kept in own["compressor"].items()
        if name in shapes and (name in fitting or name not in saved)
    }
    sentences = []
    if dropped:
        sentences.append(
            f"Errors are dropped: they are of {units[0]}, and now {units[1]} are exchanged."
        )
    had = sorted({name for kept in saved.values() for name in kept})
    other_memory = before["memory"] != now["memory"]
    if before["compressor"] != now["compressor"]:
        ends = ["its own state begins anew"] if compressor else []
        if not other_memory:  # else the memory's sentence says what becomes of them
            ends.insert(0, "errors are kept" if "error" in had else "there are no errors to keep")
        end = ": " + ", ".join(ends) if ends else ""
        sentences.append(f"Compressor {before['compressor']} is now {now['compressor']}{end}.")
        compressor = {}
    if other_memory:
        sentences.append(f"Memory {before['memory']} is now {now['memory']}: {_kept(had, buffers)}")
    same = before["controller"] == now["controller"]
    if not same:
        sentences.append(
            f"Controller {before['controller']} is now {now['controller']}: it begins anew."
        )
    if saved:
        gone = [name for name in saved if name not in shapes]
        reshaped = [name for name in saved if name in shapes and name not in fitting]
        new = [name for name in shapes if name not in saved]
        for names, what in (
            (gone, "no longer there, their errors are dropped"),
            (reshaped, "of another shape, their errors begin at zero"),
            (new, "new, their errors begin at zero"),
        ):
            if names:
                sentences.append(f"Parameters {what}: {', '.join(names)}.")
        if len(fitting) < len(saved):
            sentences.append(f"Errors are kept of: {', '.join(fitting) or 'none'}.")
    return Changes(fitting, compressor, same, sentences)


def _kept(had: Sequence[str], has: Sequence[str]) -> str:
    """Say what becomes of each of a memory's buffers."""
    words = []
    for names, what in (
        ([name for name in had if name in has], "kept"),
        ([name for name in had if name not in has], "dropped"),
        ([name for name in has if name not in had], "zero at first"),
    ):
        if names:
            words.append(f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} {what}")
    said = ", ".join(words) if words else "neither keeps anything"
    if "error" in had and "error" not in has:
        said += ". To go on with what is unsent, give a memory that keeps it, such as Residual()"
    return f"{said}."
