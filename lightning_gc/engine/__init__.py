"""Flows and error state of one worker."""

from lightning_gc.engine.engine import Engine as Engine

__all__ = ["Engine"]
