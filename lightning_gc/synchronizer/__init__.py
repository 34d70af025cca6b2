"""Synchronizer: a worker's compressed gradient exchange over torch.distributed; no Lightning."""

from lightning_gc.synchronizer.configuration import Configuration as Configuration
from lightning_gc.synchronizer.configuration import configure as configure
from lightning_gc.synchronizer.synchronizer import JOINING as JOINING
from lightning_gc.synchronizer.synchronizer import Synchronizer as Synchronizer
from lightning_gc.synchronizer.workers import Workers as Workers
