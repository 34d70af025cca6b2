"""Numba kernels, one module for each family; imported when a tensor on the host needs them."""
