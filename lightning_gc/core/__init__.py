"""Export buckets, flows, payload formats, search spaces and settings, which every room builds on.

Names are imported when they are first used: controllers need ``Settings`` without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_gc.core.bucket import Bucket as Bucket
    from lightning_gc.core.bucket import Tally as Tally
    from lightning_gc.core.flow import Exchange as Exchange
    from lightning_gc.core.flow import Flow as Flow
    from lightning_gc.core.flow import Gather as Gather
    from lightning_gc.core.flow import Limits as Limits
    from lightning_gc.core.flow import Mean as Mean
    from lightning_gc.core.flow import MeanShard as MeanShard
    from lightning_gc.core.flow import Payload as Payload
    from lightning_gc.core.flow import Reply as Reply
    from lightning_gc.core.flow import Request as Request
    from lightning_gc.core.flow import averaged as averaged
    from lightning_gc.core.flow import together as together
    from lightning_gc.core.saved_state import ANYTHING as ANYTHING
    from lightning_gc.core.saved_state import COUNT as COUNT
    from lightning_gc.core.saved_state import NUMBER as NUMBER
    from lightning_gc.core.saved_state import TEXT as TEXT
    from lightning_gc.core.saved_state import WHOLE as WHOLE
    from lightning_gc.core.saved_state import Each as Each
    from lightning_gc.core.saved_state import Leaf as Leaf
    from lightning_gc.core.saved_state import Listed as Listed
    from lightning_gc.core.saved_state import Number as Number
    from lightning_gc.core.saved_state import Numbers as Numbers
    from lightning_gc.core.saved_state import Optional as Optional
    from lightning_gc.core.saved_state import Pair as Pair
    from lightning_gc.core.saved_state import Record as Record
    from lightning_gc.core.saved_state import Structure as Structure
    from lightning_gc.core.search_space import Choice as Choice
    from lightning_gc.core.search_space import Range as Range
    from lightning_gc.core.search_space import Space as Space
    from lightning_gc.core.settings import Settings as Settings
    from lightning_gc.core.wire import Field as Field
    from lightning_gc.core.wire import Wire as Wire

_FACE = {
    "bucket": "Bucket Tally",
    "flow": "Exchange Flow Gather Limits Mean MeanShard Payload Reply Request averaged together",
    "search_space": "Choice Range Space",
    "settings": "Settings",
    "saved_state": "ANYTHING COUNT NUMBER TEXT WHOLE Each Leaf Listed "
    "Number Numbers Optional Pair Record Structure",
    "wire": "Field Wire",
}


def __getattr__(name: str) -> Any:
    for module, names in _FACE.items():
        if name in names.split():
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
