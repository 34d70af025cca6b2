"""Observe training, ask the controller for levels, and apply its decision on every worker."""
