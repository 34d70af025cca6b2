"""Triton kernels, one file each; the only files that import triton, and imported lazily.

They use only features of Triton 3.2 (torch 2.6). To equal the torch reference bit for bit, all are
launched with ``EXACT``, divide with ``div_rn`` (``/`` is approximate), and take no minimum or
maximum of NaN, on which devices differ. No kernel uses atomics.

Triton compiles a variant of a kernel for each kind of argument: numbers that are 1 or multiples of
16, tensors that begin at multiples of 16 bytes. Parameters lie anywhere in buckets and payloads
anywhere in messages, so that would be dozens, compiled in the midst of training. With ``kernel``
there is one variant for each set of constants and element types, and a few more where a kernel is
faster for what is ``aligned``.
"""

import inspect
from collections.abc import Callable
from typing import Any

import triton

EXACT: dict[str, Any] = {"enable_fp_fusion": False}
"""Launch options: a product and a sum round twice, as two torch operations do."""


def kernel(*aligned: str) -> Callable[[Callable[..., None]], Any]:
    """Return a decorator that declares a kernel.

    Args:
        aligned: arguments of which it matters whether they are aligned: the tensor of which whole
            vectors are loaded, and its number of elements.
    """

    def declare(function: Callable[..., None]) -> Any:
        arguments = inspect.signature(function).parameters.values()
        numbers = {argument.name for argument in arguments if argument.annotation is argument.empty}
        others = sorted(numbers - set(aligned))
        return triton.jit(do_not_specialize=others, do_not_specialize_on_alignment=others)(function)

    return declare
