"""Monitor: log bytes, ratios, errors, levels and seconds of compression under Lightning."""

from lightning_gc.lightning.monitor.callback import Monitor as Monitor
