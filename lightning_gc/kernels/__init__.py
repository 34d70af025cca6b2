"""Fuse passes over a gradient: accumulate, select, quantise, dequantise.

Each has two implementations with the same results: the reference in torch, in the same file, and a
Triton kernel in ``triton_kernels``, used where ``dispatch.fused`` returns True. Kernels equal the
reference bit for bit in Triton's interpreter and on an NVIDIA H100.
"""
