"""Buckets, flows, settings, registries, wire formats and coding: what every room imports."""
