"""Fulfil the requests of flows: over a process group, or between simulated workers.

Names are imported when they are first used: the command line judges addresses without torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning_gc.transports.accounting import Recording as Recording
    from lightning_gc.transports.base import Checksummed as Checksummed
    from lightning_gc.transports.base import Transport as Transport
    from lightning_gc.transports.distributed import Distributed as Distributed
    from lightning_gc.transports.island import Island as Island
    from lightning_gc.transports.island import Seat as Seat
    from lightning_gc.transports.peer_error import MessageError as MessageError
    from lightning_gc.transports.peer_error import PeerError as PeerError
    from lightning_gc.transports.simulated import Simulated as Simulated

_FACE = {
    "Checksummed": "base",
    "Distributed": "distributed",
    "Island": "island",
    "MessageError": "peer_error",
    "PeerError": "peer_error",
    "Recording": "accounting",
    "Seat": "island",
    "Simulated": "simulated",
    "Transport": "base",
}
__all__ = sorted(_FACE)


def __getattr__(name: str) -> Any:
    if name in _FACE:
        return getattr(importlib.import_module(f"{__name__}.{_FACE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
