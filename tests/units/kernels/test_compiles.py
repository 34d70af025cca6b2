"""Triton compiles every kernel for a GPU, without one."""

import importlib
import pkgutil
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
    "packed": "*u8", "scale": "fp32", "seed": "i64", "pieces": "*i32", "found": "*i32",
    "peaks": "*fp32", "target": "*fp32", "source": "*fp32", "flag": "*fp32", "grad": "*fp32",
    "decay": "fp32", "gain": "fp32", "share": "fp32", "table": "*i32", "taken": "*fp32",
    "mean": "*fp32", "flags": "*fp32", "first": "*i64", "starts": "*i64", "sent_flag": "*fp32",
    "padding": "*u8", "halves": "*i16", "columns": "*fp32", "bases": "*fp32", "least": "fp32",
    "tiles": "*i32", "sums": "*fp32", "arrivals": "*i32", "p": "*fp32", "q": "*fp32",
    "before": "*fp32", "kept": "*fp32", "most": "fp32", "products": "*fp32",
}  # fmt: skip
KERNELS = [
    ("select", "mark", {"GROUPS": 256}),
    ("select", "compact", {"MOVE": True, "BLOCK": 2048}),
    ("select", "compact", {"MOVE": False, "BLOCK": 2048}),
    ("accumulate", "scatter_add", {"BLOCK": 512}),
    ("segments", "largest", {"BLOCK": 1024}),
    ("segments", "move_pieces", {"ADD": False, "TAKE": True, "BLOCK": 1024}),
    ("segments", "move_pieces", {"ADD": True, "TAKE": False, "BLOCK": 1024}),
    ("segments", "zero_if", {"PEAKS": 256, "BLOCK": 1024}),
    ("segments", "take_pieces", {"ADD": True, "BLOCK": 1024}),
    ("segments", "put_pieces", {"BLOCK": 1024}),
    *(
        ("casts", name, {**constants, "BFLOAT": bfloat, "ROW": 1024})
        for bfloat in (True, False)
        for name, constants in (("round_pieces", {"ADD": True}), ("average_pieces", {}))
    ),
    *(("low_rank", "orthonormalise", {"RANK": r, "BLOCK": 2048 // r}) for r in (1, 2, 16)),
    *(
        ("low_rank", name, {**constants, "ADD": True, "ROWS": 16, "COLUMNS": 64})
        for name, constants in (
            ("project_rows", {"PENDING": True, "RANK": 2}),
            ("project_rows", {"PENDING": True, "RANK": 16}),
            ("project_columns", {"RANK": 2}),
            ("project_columns", {"RANK": 16}),
            ("apply_factors", {"KEEP": True, "BLOCK": 1024}),
        )
    ),
    *(
        ("low_rank", name, {**constants, "ADD": False, "ROWS": 16, "COLUMNS": 64})
        for name, constants in (
            ("project_rows", {"PENDING": False, "RANK": 2}),
            ("apply_factors", {"KEEP": False, "BLOCK": 1024}),
        )
    ),
    ("segments", "zero_non_finite", {"BLOCK": 2048}),
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


FUSED = {"unpack_and_add", "take_pieces", "round_pieces", "average_pieces", "project_rows"}
"""Kernels that add a product as torch's ``add`` with a factor does, rounded once."""
NUMBERS = {"numel", "chosen", "block_size", "count"}
TARGETS = [
    *(("cuda", 70, 32), ("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32)),
    ("hip", "gfx942", 64),
]
each_kernel = pytest.mark.parametrize(("operation", "name", "constants"), KERNELS)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def modules() -> list[Any]:
    package = importlib.import_module("lightning_gc.kernels.gpu")
    names = [each.name for each in pkgutil.iter_modules(package.__path__)]
    return [importlib.import_module(f"lightning_gc.kernels.gpu.{name}") for name in names]


def found(name: str) -> Any:
    return next(getattr(module, name) for module in modules() if hasattr(module, name))


def compiled(name: str, constants: dict[str, Any], target: tuple[Any, ...]) -> dict[str, Any]:
    """Return the kernel's code by stage; fails where the compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = found(name)
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else POINTERS.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, constants)
    options = {"enable_fp_fusion": False}
    stages: dict[str, Any] = triton.compile(source, target=GPUTarget(*target), options=options).asm
    return stages


@pytest.mark.slow
@each_kernel
def test_compiles(operation: str, name: str, constants: dict[str, Any]) -> None:
    code = compiled(name, constants, ("cuda", 80, 32))["ptx"]
    fused = re.findall(r"\bfma\.rn\.f32", code)
    assert bool(fused) == (name in FUSED and constants.get("ADD", True)), (
        "a product is rounded before it is added"
    )
    assert "div.full" not in code
    assert "approx" not in code
    atomics = set(re.findall(r"\batom\.\S+|\bred\.\S+", code))
    assert not any(re.search(r"\.b?f(16|32|64)", each) for each in atomics), "order counts in sums"
    flushed = set(re.findall(r"\S*\.ftz\S*", code))
    allowed = {"cvt.rmi.ftz.f32.f32", "div.rn.ftz.f32"}  # a floor; a quotient that is floored
    assert flushed <= allowed, "subnormal numbers count"


NEWEST = TARGETS[-2:]
DRAWN = {"DRAW": True, "NEAREST": False, "STEPS": 3.0, "BITS": 3, "GROUPS": 128}
everywhere = [
    pytest.param(*case, target, ones, marks=[] if by_day else pytest.mark.nightly)
    for case in KERNELS
    for target in TARGETS
    for ones in (False, True)
    for by_day in [ones and target in NEWEST and case[-1] == DRAWN]
]


@pytest.mark.parametrize(("operation", "name", "constants", "target", "ones"), everywhere)
def test_compiles_for_all_gpus(
    operation: str, name: str, constants: dict[str, Any], target: tuple[Any, ...], ones: bool
) -> None:
    """Also where all whole numbers are 1, of which Triton makes constants if it is let."""
    given = dict.fromkeys(NUMBERS & set(found(name).arg_names), 1) if ones else {}
    assert compiled(name, constants | given, target)


@pytest.mark.parametrize("name", sorted({case[1] for case in KERNELS}))
def test_there_are_few_variants(name: str) -> None:
    """At most for one tensor and its number of elements Triton asks whether they are aligned."""
    kinds = [each for each in found(name).params if not each.is_constexpr]
    asked = {each.name for each in kinds if not each.do_not_specialize_on_alignment}
    assert asked == {each.name for each in kinds if not each.do_not_specialize}
    assert asked in (set(), {"buffer", "numel"}, {"out", "numel"})


def test_these_are_all_kernels() -> None:
    text = "".join(Path(module.__file__).read_text() for module in modules())
    declared = set(re.findall(r"^@kernel\(.*\)\ndef (\w+)", text, re.MULTILINE))
    assert declared == {name for _, name, _ in KERNELS}
