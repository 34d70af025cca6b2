"""``python -m lightning_gc``: the same as ``lightning-gc``."""

import sys

from lightning_gc.cli import main

if __name__ == "__main__":
    sys.exit(main())
