"""Log bytes, ratios, errors, levels and seconds of compression with Lightning's loggers."""

from lightning_gc.monitor.callback import Monitor as Monitor

__all__ = ["Monitor"]
