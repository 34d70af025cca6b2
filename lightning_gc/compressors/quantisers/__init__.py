"""Quantisers: send every element in fewer bits."""
