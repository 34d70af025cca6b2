"""Policies that choose the level of compression, epoch by epoch. Standard library only."""

if __name__ == "controllers":
    raise ImportError(
        "Import this folder as lightning_gc.controllers. Under the name 'controllers' every class "
        "would exist twice."
    )
