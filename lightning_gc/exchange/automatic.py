"""Automatic: the menus from which ``Auto`` chooses, by what the user permits in one word."""

from __future__ import annotations

from dataclasses import replace

from lightning_gc.compressors import (
    COMPRESSORS,
    QSGD,
    BinMeans,
    Cast,
    ChunkedTopK,
    Compressor,
    PowerSGD,
    Quantised,
    TopK,
)
from lightning_gc.compressors.wrappers.menu import Menu
from lightning_gc.controllers import Auto, Controller
from lightning_gc.core.combinations import judge
from lightning_gc.core.registry import closest
from lightning_gc.exchange.validation import make_controller
from lightning_gc.memories import ErrorFeedback, Memory, NoMemory

AUTO: dict[str, str | None] = {
    "auto": None,
    "auto_rounding": "rounding",
    "auto_feedback": "feedback",
}
"""Word as the compressor -> what the controller ``Auto`` permits; None: what its own field says."""
IN_FSDP = "FSDP"
WITH_LOCAL_STEPS = "local steps"
"""Places of ``refuse_auto``."""
_ROUNDING: dict[str, Compressor] = {
    "Cast()": Cast(),
    "QSGD(8)": QSGD(8),
    "QSGD(6)": QSGD(6),
    "QSGD(4)": QSGD(4),
}
_TWICE = "TopK(0.01), TwoShot"
_FEEDBACK: dict[str, Compressor] = {
    **_ROUNDING,
    "PowerSGD(2)": PowerSGD(2),
    _TWICE: TopK(0.01),
    "TopK(0.01)": TopK(0.01),
    "ChunkedTopK and BinMeans": Quantised(ChunkedTopK(), BinMeans(2)),
}
_MENUS: dict[str, tuple[Menu, Memory]] = {
    "rounding": (Menu(_ROUNDING), NoMemory()),
    "feedback": (Menu(_FEEDBACK, schemes={_TWICE: "two_shot"}), ErrorFeedback()),
}
"""Word -> menu and default memory. Without errors uncompressed steps are plain DDP's."""


def menu_of(word: str) -> tuple[Menu, Memory]:
    """Return the menu and the default memory of "rounding" or "feedback"."""
    if word not in _MENUS:
        raise ValueError(f"Auto(allow={word!r}): give 'rounding', 'feedback', or a Menu.")
    return _MENUS[word]


def permitted(
    owner: str,
    compressor: Compressor | str,
    memory: Memory | str | None,
    controller: Controller | str | None,
) -> tuple[Compressor | str, Memory | str | None, Controller | str | None]:
    """Return compressor, memory and controller, with those that ``"auto"`` stands for.

    Args:
        owner: the class or function with these arguments, for error messages.
        compressor: as given; ``"auto"`` becomes a menu, and so do the other words of ``AUTO``.
        memory: as given; None becomes the menu's, where it is one of ours.
        controller: as given; None becomes ``Auto()`` for ``"auto"``.

    Raises:
        ValueError: ``"auto"`` with another controller than ``Auto``; an ``Auto`` that permits
            something else than the compressor that is given; a controller as the compressor.
    """
    given: object = compressor
    if isinstance(given, Controller):
        first = "'auto'" if isinstance(given, Auto) else "..."
        raise ValueError(
            f"{owner}({given}): that is a controller; write {owner}({first}, controller={given})."
        )
    if controller is not None:
        controller = make_controller(controller, owner)
    if not isinstance(compressor, str) or compressor not in AUTO:
        close = closest(compressor, [*COMPRESSORS, *AUTO]) if isinstance(compressor, str) else None
        if close in AUTO:
            raise ValueError(f"{compressor!r} is not a compressor (did you mean {close!r}?).")
        if isinstance(controller, Auto) and isinstance(compressor, Menu):
            controller = _permitting(compressor, owner, compressor, controller)
        return compressor, memory, controller
    controller = controller or Auto()
    if not isinstance(controller, Auto):
        given = {"compressor": compressor, "controller": controller}
        judge("Auto", owner, **given, where="another controller")
    assert isinstance(controller, Auto)
    controller = _permitting(AUTO[compressor] or controller.allow, owner, compressor, controller)
    if isinstance(controller.allow, Menu):
        return controller.allow, memory, controller
    menu, usual = menu_of(controller.allow)
    return menu, usual if memory is None else memory, controller


def _permitting(allow: Menu | str, owner: str, compressor: object, controller: Auto) -> Auto:
    """Return the controller with this ``allow``; refuse one that was given another."""
    given = {"compressor": compressor, "controller": controller, "allow": allow}
    judge("Auto", owner, **given, where="allow")
    return replace(controller, allow=allow)


def refuse_auto(owner: str, compressor: object, controller: object, where: str) -> None:
    """Raise ValueError for ``"auto"``, or ``Auto``, where nothing can be chosen.

    Args:
        owner: the class or function with these arguments.
        compressor: as given, a word of ``AUTO`` or another.
        controller: as given.
        where: ``IN_FSDP`` or ``WITH_LOCAL_STEPS``.
    """
    word = isinstance(compressor, str) and compressor in AUTO
    if word or isinstance(controller, Auto) or controller == "auto":
        judge("Auto", owner, where=where)
