"""More than plain: what to say of a method that sends more bytes than plain DDP."""

from __future__ import annotations

from lightning_gc.engine import Engine
from lightning_gc.monitor.totals import Totals
from lightning_gc.schemes import SparseReduce, TwoShot

_MARGIN = 1.01
"""Headers and lengths of small models are no mistake."""


def more_than_plain(epoch: Totals, engine: Engine, *, controlled: bool) -> str:
    """Return a sentence with the fix, or an empty one: it sends no more, or is exact anyway.

    Args:
        epoch: bytes of the first epoch.
        engine: of any worker.
        controlled: a controller moves the level, so that later epochs may well send less.
    """
    sent, plain = epoch.wire_bytes, epoch.dense_bytes
    if engine.compressor.traits.exact or not plain or sent <= _MARGIN * plain:
        return ""
    without = "FSDP" if engine.scatters else "DDP"
    fixes = [each for each in (_of_level(engine), _of_scheme(engine)) if each]
    fix = ", or ".join(fixes or ["use another compressor"])
    what = "With its controller's first levels this" if controlled else "This"
    return f"{what} sends {sent / plain:.2f} times what plain {without} would; {fix}."


def _of_level(engine: Engine) -> str:
    knob = engine.compressor.knob
    if knob is None:
        return ""
    if knob.field == "density":
        return "give a lower density, which is a share: 0.01 is 1 %"
    return f"{'lower' if knob.more == 'bytes' else 'raise'} the compressor's {knob.field}"


def _of_scheme(engine: Engine) -> str:
    if engine.scheme is None or engine.scatters:
        return ""
    for other in (SparseReduce(), TwoShot()):
        try:
            other.check(engine.compressor)
        except ValueError:
            continue
        if type(other) is not type(engine.scheme):
            return f"use another scheme, such as {other!r}"
    return ""
