"""Triton kernels, one file each; the only files that import triton, and imported lazily.

They use only features of Triton 3.2 (torch 2.6). To equal the torch reference bit for bit, all are
launched with ``EXACT``, divide with ``div_rn`` (``/`` is approximate), and take no minimum or
maximum of NaN, on which devices differ. No kernel uses atomics.
"""

from typing import Any

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product and a sum round twice, as two torch operations do."""
