"""Kernels for the host, compiled by numba: each passes once over a tensor where torch passes often.

Results are those of torch's operations, bit for bit, so workers with and without numba can train
together. Each module is imported when first used, and compiled code is kept on disk.
"""
