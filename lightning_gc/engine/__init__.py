"""Engine: one worker's error state and gradient flows; knows no network and no Lightning."""

from lightning_gc.engine.engine import Engine as Engine
