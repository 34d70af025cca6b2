"""Benchmark methods (``lightning-gc bench``): seconds per step, plain DDP and torch's hooks too."""
