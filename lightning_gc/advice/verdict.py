"""Verdict: from measured seconds, one suggestion with its reason, or to do nothing. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

LEAST_GAIN = 0.05
"""Of a method over plain DDP; methods nearer than that are as fast as each other."""
LEAST_GAIN_OVER_16_BITS = 0.10
"""Of a method over 16 bits, which need no tuning."""

Measured = Mapping[str, Mapping[str, Any]]
"""Name -> ``seconds``, the median, the quartiles ``low`` and ``high``, and ``bytes`` of a step."""


@dataclass(frozen=True)
class Verdict:
    """What to do.

    Attributes:
        choice: a measured row's name; None: do nothing, or nothing can be said.
        reason: one sentence.
        certain: the quartiles of what decides do not overlap.
    """

    choice: str | None
    reason: str
    certain: bool

    def __str__(self) -> str:
        """As the command says it."""
        if self.choice is not None:
            return f"Use {self.choice}: {self.reason}"
        return f"Do nothing: {self.reason}" if self.certain else f"No verdict: {self.reason}"


def judge(rows: Measured, dense: str, sixteen: str, limit: float) -> Verdict:
    """Return the verdict on measured rows.

    A method is suggested if its median is shorter than plain DDP's by 5 % or more and its upper
    quartile lies below DDP's lower one; 16 bits are preferred unless a method is shorter than these
    by 10 % or more, and beyond their quartiles too. Of methods that are less than 5 % apart the one
    that sends most is taken: it alters gradients least, and noise does not choose.

    Args:
        rows: those measured by turns.
        dense: name of plain DDP's row.
        sixteen: name of the row of 16 bits.
        limit: seconds of a step without exchange.
    """
    plain = rows[dense]["seconds"]
    others = {name: row for name, row in rows.items() if name != dense}
    best = fastest = min(others, key=lambda name: float(others[name]["seconds"]))
    over: list[tuple[str, float]] = [(dense, LEAST_GAIN)]  # what a suggestion must be faster than
    if sixteen in rows and _gain(rows[sixteen], rows[dense]) >= LEAST_GAIN:
        over.append((sixteen, LEAST_GAIN_OVER_16_BITS))
    worthy = [n for n in others if all(_faster(rows[n], rows[o], gain) for o, gain in over)]
    if worthy:
        fastest = min(worthy, key=lambda name: float(others[name]["seconds"]))
        near = [n for n in worthy if _gain(rows[fastest], rows[n]) < LEAST_GAIN]
        best = max(near, key=lambda name: float(rows[name]["bytes"]))
    elif len(over) > 1:
        best = sixteen
    gain = _gain(rows[best], rows[dense])
    took = f"{rows[best]['seconds']:.4f} s a step against {plain:.4f} s"
    if gain < LEAST_GAIN:
        room = (
            f"without any exchange a step takes {limit:.4f} s of plain DDP's {plain:.4f} s, so "
            f"that no method could gain more than {max(1 - limit / plain, 0):.0%}"
            if 1 - limit / plain < 2 * LEAST_GAIN
            else f"the best method, {best}, takes {took}, {_words(gain)}"
        )
        # A difference that its noise could hide is no reason to be sure of.
        hidden = rows[dense]["high"] / rows[dense]["low"] - 1 > 4 * LEAST_GAIN
        if hidden and gain > -LEAST_GAIN:
            return Verdict(None, f"{_noise(best, dense, rows)}; {room}.", False)
        return Verdict(None, f"{room}.", True)
    if not _faster(rows[best], rows[dense], LEAST_GAIN):
        return Verdict(None, f"{_noise(best, dense, rows)}, though {best} took {took}.", False)
    tie = f"; {fastest} is as fast, and sends less" if best not in (fastest, sixteen) else ""
    return Verdict(best, f"{took} with plain DDP, {_words(gain)}{tie}.", True)


def _gain(row: Mapping[str, Any], dense: Mapping[str, Any]) -> float:
    return 1 - float(row["seconds"]) / float(dense["seconds"])


def _faster(row: Mapping[str, Any], other: Mapping[str, Any], gain: float) -> bool:
    """Whether a row is shorter by so much, and its quartiles are apart from the other's."""
    return _gain(row, other) >= gain and bool(row["high"] < other["low"])


def _noise(best: str, dense: str, rows: Measured) -> str:
    one, other = rows[best], rows[dense]
    return (
        f"quartiles overlap or are wide, {one['low']:.4f} to {one['high']:.4f} s with {best} and "
        f"{other['low']:.4f} to {other['high']:.4f} s with {dense}: other load, or no difference; "
        f"measure again on an idle machine, or with a larger --budget-seconds"
    )


def _words(gain: float) -> str:
    return f"{gain:.0%} shorter" if gain >= 0 else f"{-gain:.0%} longer"
