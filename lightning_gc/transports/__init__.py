"""What carries requests to other workers. None of them knows a compressor."""

from lightning_gc.registry import export as _export
from lightning_gc.transports.distributed import Distributed as Distributed
from lightning_gc.transports.recording import Recording as Recording
from lightning_gc.transports.simulated import Simulated as Simulated
from lightning_gc.transports.transport import Transport as Transport
from lightning_gc.transports.transport import run as run

_export(globals())
