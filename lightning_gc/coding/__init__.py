"""Payload coding: bit packing, Elias-Fano coded positions, wire formats, validation."""
