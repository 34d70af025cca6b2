"""The soak: random runs, random faults, restarts; ``python -m tests.soak --help``."""
