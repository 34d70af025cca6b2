"""Sparsifiers: send a share of the elements, and their positions."""
