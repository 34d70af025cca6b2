"""Checkpoints: error state in Lightning checkpoints, saved in side files and restored."""
