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
    "bitmap": "*u8", "counts": "*i32", "values": "*fp32", "parts": "*i64",
    "positions": "*i64", "out": "*fp32", "buffer": "*fp32", "norms": "*fp32", "noise": "*fp32",
    "packed": "*u8", "scale": "fp32", "seed": "i64", "pieces": "*i32", "found": "*i32",
    "peaks": "*fp32", "target": "*fp32", "source": "*fp32", "flag": "*fp32", "grad": "*fp32",
    "decay": "fp32", "gain": "fp32", "share": "fp32", "table": "*i32", "taken": "*fp32",
    "flags": "*fp32", "first": "*i64", "starts": "*i64", "sent_flag": "*fp32", "padding": "*u8",
    "halves": "*i16", "tiles": "*i32", "keys": "*i64", "codes": "*u8", "times": "fp32",
    "sums": "*fp32", "negatives": "*i32", "signs": "*u8", "means": "*fp32", "thresholds": "*fp32",
    "histogram": "*i32", "reached": "*i32", "finer": "*i32", "numbers": "*i32", "after": "*i32",
    "limits": "*i32", "larger": "*i32", "equal": "*i32", "total": "*i32", "coded": "*u8",
    "seal_place": "*i32", "wrong": "*i32", "columns": "*fp32", "bases": "*fp32", "least": "fp32",
    "arrivals": "*i32", "p": "*fp32", "q": "*fp32", "kept": "*fp32", "products": "*fp32",
    "book": "*fp32", "top": "fp32", "lows": "*fp32",
    **{f"factor{i}": "fp32" for i in range(1, 5)},
}  # fmt: skip
FAMILIES = {
    "segments": {"mean": "*fp32"},
    "levels": {"mean": "*fp32", "most": "*i32"},
    "low_rank": {"before": "*fp32", "most": "fp32"},
    "sparse": {"before": "*i32", "positions": "*i32", "tiles": "i32"},
    "chunks": {"positions": "*i32"},
    "blocks": {"numbers": "*fp32", "positions": "*i32"},
}
"""Types of arguments that mean something else in other families."""
BLOCKS = [(0, 2, 0, True), (0, 4, 0, False), (1, 8, 0, False), (2, 8, 7, False), (2, 4, 3, True)]
KERNELS = [
    ("accumulate", "scatter_add", {"BLOCK": 512}),
    ("segments", "largest", {"BLOCK": 1024}),
    ("segments", "move_pieces", {"ADD": False, "TAKE": True, "BLOCK": 1024}),
    ("segments", "move_pieces", {"ADD": True, "TAKE": False, "BLOCK": 1024}),
    ("segments", "zero_if", {"PEAKS": 256, "BLOCK": 1024}),
    ("segments", "take_pieces", {"ADD": True, "BLOCK": 1024}),
    ("segments", "put_pieces", {"BLOCK": 1024}),
    ("segments", "book_pieces", {"ADD": True, "BLOCK": 1024}),
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
    ("sparse", "sample_thresholds", {"ADD": True, "GUARDED": True, "BINS": 2048, "ROW": 1024}),
    *(
        ("sparse", name, {"ROW": 1024, **constants, "GUARDED": True, "SAMPLED": sampled})
        for sampled in (True, False)
        for name, constants in (
            ("first_digit", {"ADD": True, "FIRST": 512, "ROW": 4096}),
            ("next_digit", {"THIRD": False, "BINS": 2048, "FIRST": 512}),
            ("next_digit", {"THIRD": True, "BINS": 2048, "FIRST": 512}),
            ("count_pieces", {"BINS": 2048}),
        )
    ),
    ("sparse", "count_reaching", {"ADD": True, "GUARDED": True, "ROW": 1024}),
    *(
        (
            "sparse",
            "move_chosen",
            {**kept, "BFLOAT": bfloat, "SEALED": bfloat, "FOLD": 256, "ROW": 1024},
        )
        for bfloat in (True, False)
        for kept in ({"KEEP": True, "GUARDED": True}, {"KEEP": bfloat, "GUARDED": not bfloat})
    ),
    ("sparse", "code_positions", {"GROUPS": 128}),
    ("sparse", "count_bits", {"TILE": 4096, "ROW": 1024}),
    ("sparse", "find_places", {"TILE": 4096, "FOLD": 256, "ROW": 1024}),
    *(
        (
            "chunks",
            "take_chunks",
            {"ADD": add, "KEEP": add, "GUARDED": add, "ROWS": 1 if add else 32, "WIDTH": width}
            | {"ROW": 1024},
        )
        for add, width in ((True, 4096), (False, 64))
    ),
    *(
        (
            "blocks",
            "round_blocks",
            {
                "ADD": not chosen,
                "KEEP": True,
                "GUARDED": True,
                "CHOSEN": chosen,
                "KIND": kind,
                "MEAN": False,
            }
            | {"BITS": bits, "STEPS": steps, "LEVELS": 9, "SIGMAS": 6, "TILE": 2048},
        )
        for kind, bits, steps, chosen in BLOCKS
    ),
    *(
        (
            "blocks",
            "average_blocks",
            {
                "MEAN": kind == 0,
                "KIND": kind,
                "BITS": bits,
                "STEPS": steps,
                "LEVELS": 9,
                "TILE": 2048,
            },
        )
        for kind, bits, steps, _ in BLOCKS
    ),
    *(("sparse", "add_all", {"BFLOAT": bfloat, "ROW": 1024}) for bfloat in (True, False)),
    ("random_k", "take_drawn", {"ADD": True, "SCALED": False, "ROW": 1024}),
    ("random_k", "take_drawn", {"ADD": True, "SCALED": True, "ROW": 1024}),
    ("random_k", "put_drawn", {"BLOCK": 1024}),
    *(
        ("signs", name, {**constants, "SPLIT": split, "VOTE": vote, "MEAN": vote})
        for split, vote in ((False, False), (True, False), (False, True))
        for name, constants in (
            ("sum_pieces", {"ADD": True, "PIECE": 1 << 15, "LANES": 2048, "LEVELS": 11}),
            (
                "take_signs",
                {
                    **{"ADD": not vote, "KEEP": True, "GROUPS": 128},
                    **{"PIECE": 1 << 15, "SUMS": 256, "LEVELS": 8},
                },
            ),
            ("average_signs", {"GROUPS": 128, "PIECE": 1 << 15}),
        )
    ),
    *(
        ("levels", "raise_peaks", {"ADD": add, "LARGE": add, "MEAN": not add, "TILE": 2048})
        for add in (False, True)
    ),
    *(
        (
            "levels",
            "round_tiles",
            {
                "ADD": add,
                "KEEP": add,
                "MEAN": not add,
                "NEAREST": add,
                "BITS": bits,
                "BLOCK": block,
                "TILE": 2048,
            },
        )
        for bits, block, add in ((4, 512, False), (9, 0, True))
    ),
    *(
        ("levels", "average_tiles", {"FRESH": fresh, "MEAN": not fresh, "BITS": bits, "TILE": 2048})
        for bits, fresh in ((4, True), (9, False))
    ),
]


FUSED = {
    *("take_pieces", "round_pieces", "average_pieces"),
    *("raise_peaks", "round_tiles", "average_tiles", "book_pieces"),
    *("sum_pieces", "take_signs", "average_signs"),
    *("sample_thresholds", "first_digit", "count_reaching"),
    *("take_drawn", "project_rows", "take_chunks", "round_blocks", "average_blocks"),
}
"""Kernels that add a product as torch's ``add`` with a factor does, rounded once."""
NUMBERS = {"numel", "chosen", "block_size", "count"}
TARGETS = [
    *(("cuda", 70, 32), ("cuda", 80, 32), ("cuda", 90, 32), ("cuda", 100, 32)),
    ("hip", "gfx942", 64),
]
_FIRST = {name: index for index, (_, name, _) in reversed(list(enumerate(KERNELS)))}
each_kernel = pytest.mark.parametrize(
    ("operation", "name", "constants"),
    [
        pytest.param(*case, marks=[] if _FIRST[case[1]] == index else pytest.mark.nightly)
        for index, case in enumerate(KERNELS)
    ],
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def modules() -> list[Any]:
    package = importlib.import_module("lightning_gc.kernels.gpu")
    names = [each.name for each in pkgutil.iter_modules(package.__path__)]
    return [importlib.import_module(f"lightning_gc.kernels.gpu.{name}") for name in names]


def found(name: str) -> Any:
    return next(getattr(module, name) for module in modules() if hasattr(module, name))


def compiled(
    operation: str, name: str, constants: dict[str, Any], target: tuple[Any, ...]
) -> dict[str, Any]:
    """Return the kernel's code by stage; fails where the compiler does."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = found(name)
    types = POINTERS | FAMILIES.get(operation, {})
    types |= {"values": "*i16"} if constants.get("BFLOAT") else {}
    names = kernel.arg_names
    signature = {n: "constexpr" if n in constants else types.get(n, "i32") for n in names}
    source = ASTSource(kernel, signature, constants)
    options = {"enable_fp_fusion": False}
    stages: dict[str, Any] = triton.compile(source, target=GPUTarget(*target), options=options).asm
    return stages


@pytest.mark.slow
@each_kernel
def test_compiles(operation: str, name: str, constants: dict[str, Any]) -> None:
    code = compiled(operation, name, constants, ("cuda", 80, 32))["ptx"]
    fused = re.findall(r"\bfma\.rn\.f32", code)
    adds = name in FUSED and constants.get("ADD", True)
    assert bool(fused) == adds, "a product is rounded before it is added"
    assert "div.full" not in code
    assert "approx" not in code
    atomics = set(re.findall(r"\batom\.\S+|\bred\.\S+", code))
    assert not any(re.search(r"\.b?f(16|32|64)", each) for each in atomics), "order counts in sums"
    flushed = set(re.findall(r"\S*\.ftz\S*", code))
    allowed = {"cvt.rmi.ftz.f32.f32", "div.rn.ftz.f32"}  # a floor; a quotient that is floored
    assert flushed <= allowed, "subnormal numbers count"


NEWEST = TARGETS[-2:]
DRAWN = {"ADD": False, "KEEP": False, "MEAN": True, "NEAREST": False, "BITS": 4, "BLOCK": 512}
DRAWN |= {"TILE": 2048}
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
    assert compiled(operation, name, constants | given, target)


@pytest.mark.parametrize("name", sorted({case[1] for case in KERNELS}))
def test_there_are_few_variants(name: str) -> None:
    """At most for one tensor and its number of elements Triton asks whether they are aligned."""
    kinds = [each for each in found(name).params if not each.is_constexpr]
    asked = {each.name for each in kinds if not each.do_not_specialize_on_alignment}
    assert asked == {each.name for each in kinds if not each.do_not_specialize}
    assert asked in (set(), {"buffer", "numel"})


def test_these_are_all_kernels() -> None:
    text = "".join(Path(module.__file__).read_text() for module in modules())
    declared = set(re.findall(r"^@kernel\(.*\)\ndef (\w+)", text, re.MULTILINE))
    assert declared == {name for _, name, _ in KERNELS}
