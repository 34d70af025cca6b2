"""Passes over a gradient that are worth fusing, one plain function per file.

Each function has two bodies with the same results: torch's operations, beside it, which are the
reference; and a Triton kernel in ``triton_kernels``, which runs where ``dispatch.fused`` says so.
"""
