"""The Triton kernels, one file each. Nothing else imports triton, and nothing imports these early.

They keep to what Triton 3.2 (torch 2.6) knows. Results are those of the torch reference bit for
bit, so all of them are launched with ``EXACT``, divide with ``div_rn`` (``/`` is approximate), and
never ask a minimum or maximum about NaN, which devices answer differently. No kernel uses atomics.
"""

from typing import Any

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product and a sum round twice, as two operations of torch do."""
