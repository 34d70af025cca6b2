"""Fulfil the requests of flows: over a process group, or between simulated workers."""

from lightning_gc.core.registry import export as _export
from lightning_gc.transports.accounting import Recording as Recording
from lightning_gc.transports.base import Checksummed as Checksummed
from lightning_gc.transports.base import Transport as Transport
from lightning_gc.transports.distributed import Distributed as Distributed
from lightning_gc.transports.island import Island as Island
from lightning_gc.transports.island import Seat as Seat
from lightning_gc.transports.peer_error import MessageError as MessageError
from lightning_gc.transports.peer_error import PeerError as PeerError
from lightning_gc.transports.simulated import Simulated as Simulated

_export(globals())
