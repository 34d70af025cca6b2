"""Triton compiles every kernel for a GPU, without one."""

import importlib
import re
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel_device import INTERPRETED

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or INTERPRETED, reason="needs triton's compiler"
)
POINTERS = {
    "threshold": "*fp32", "bitmap": "*u8", "counts": "*i32", "ends": "*i32", "values": "*fp32",
    "positions": "*i64", "out": "*fp32", "buffer": "*fp32", "norms": "*fp32", "noise": "*fp32",
    "packed": "*u8", "scale": "fp32", "seed": "i64",
}  # fmt: skip
KERNELS = [
    ("select", "mark", {"GROUPS": 256}),
    ("select", "compact", {"MOVE": True, "BLOCK": 2048}),
    ("select", "compact", {"MOVE": False, "BLOCK": 2048}),
    ("accumulate", "scatter_add", {"BLOCK": 512}),
    *(
        (
            "quantise",
            "round_and_pack",
            {"DRAW": bits < 9, "NEAREST": bits == 8, "STEPS": s, "BITS": bits, "GROUPS": 128},
        )
        for bits, s in ((3, 3.0), (8, 127.0), (12, 2047.0))
    ),
    *(
        ("dequantise", "unpack_and_add", {"STEPS": s, "BITS": bits, "GROUPS": 128})
        for bits, s in ((3, 3), (12, 2047))
    ),
]


@pytest.mark.parametrize(("module", "name", "constants"), KERNELS)
def test_compiles(
    module: str,
    name: str,
    constants: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = getattr(importlib.import_module(f"lightning_gc.kernels.triton_kernels.{module}"), name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, constants)
    options = {"enable_fp_fusion": False}
    compiled = triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options)
    code = compiled.asm["ptx"]
    fused = re.findall(r"\bfma\.rn\.f32", code)
    assert bool(fused) == (module == "dequantise"), "a product is rounded before it is added"
    assert "div.full" not in code
    assert "approx" not in code
    assert "atom" not in code
    flushed = set(re.findall(r"\S*\.ftz\S*", code))
    allowed = {"cvt.rmi.ftz.f32.f32", "div.rn.ftz.f32"}  # a floor; a quotient that is floored
    assert flushed <= allowed, "subnormal numbers count"
