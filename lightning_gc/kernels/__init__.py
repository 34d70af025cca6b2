"""Fuse passes over a gradient, or over all parameters of a bucket.

Each function has a reference in torch. A Triton kernel (``gpu``) is used if ``dispatch.fused``
returns True. A numba kernel (``host``) is used if there is one and ``dispatch.compiled`` returns
True. Families of codes have a ``shards.ShardTable`` in each, which ``dispatch.table_for`` chooses.
Triton's kernels equal the reference bit for bit in Triton's interpreter.
"""
