"""Fuse passes over a gradient: accumulate, select, quantise, dequantise.

Each function has a reference in torch, a Triton kernel (``triton_kernels``), used if
``dispatch.fused`` returns True, and maybe a numba kernel (``numba_kernels``), used if
``dispatch.compiled`` does. Triton's kernels equal the reference bit for bit in its interpreter and
on an NVIDIA H100.
"""
