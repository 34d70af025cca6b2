"""Error state in Lightning checkpoints: save, restore, side files."""
