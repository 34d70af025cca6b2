"""Catalogue of compressors, memories, schemes and wire formats, read from the classes."""
