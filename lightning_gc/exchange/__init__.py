"""Synchronise gradients or weights between workers, and verify replicas."""

from lightning_gc.exchange.compression import Compression as Compression
from lightning_gc.exchange.compression import Configuration as Configuration
from lightning_gc.exchange.compression import WayIn as WayIn
from lightning_gc.exchange.synchronizer import JOINING as JOINING
from lightning_gc.exchange.synchronizer import Synchronizer as Synchronizer
from lightning_gc.exchange.workers import Workers as Workers
