"""Compressors around compressors: granularity, size limits, quantised values."""
