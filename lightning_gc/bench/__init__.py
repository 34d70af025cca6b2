"""``lightning-gc bench``: seconds per training step, beside plain DDP and torch's hooks."""
