"""Core: buckets, flows, settings, registries, wire formats and coding, for all other packages."""
