"""Triton kernels, one module for each family; imported when a tensor on a GPU needs them."""
