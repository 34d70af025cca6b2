"""Adaptors to Lightning: one mixin with all the logic, one thin class per flavour."""
