"""Synchronise gradients or weights between workers, and verify replicas."""

from lightning_gc.exchange.synchronizer import JOINING as JOINING
from lightning_gc.exchange.synchronizer import Synchronizer as Synchronizer
from lightning_gc.exchange.workers import Configuration as Configuration
from lightning_gc.exchange.workers import Workers as Workers
from lightning_gc.exchange.workers import configure as configure
