"""What kernels are made of: float32 arithmetic in LLVM's own operations, so that loops vectorise.

Python's and NumPy's counterparts would be function calls, or compute in float64. Nothing here, and
no kernel, lets the compiler reorder or contract arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

jit = numba.njit(nogil=True, cache=True)
"""Compiles a kernel; other threads run meanwhile."""


def _operation(name: str, arguments: int) -> Callable[..., Any]:
    """Return LLVM's ``name`` of so many float32."""
    number = ir.FloatType()
    kind = ir.FunctionType(number, [number] * arguments)

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.call(builder.module.declare_intrinsic(name, [number], kind), values)

    if arguments == 1:
        return intrinsic(lambda typing, x: (types.float32(x), generate))
    return intrinsic(lambda typing, x, y: (types.float32(x, y), generate))


magnitude = _operation("llvm.fabs", 1)
floor = _operation("llvm.floor", 1)
copysign = _operation("llvm.copysign", 2)


@intrinsic
def multiply_add(typing: Any, x: Any, y: Any, z: Any) -> Any:
    """Return ``x·y + z``, rounded once, as torch adds with a factor."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        return builder.fma(*values)

    return types.float32(x, y, z), generate
