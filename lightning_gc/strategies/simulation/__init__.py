"""Simulate W workers on one device under Lightning."""
