"""Attach gradient compression to a module: one handle for every way in."""
