"""Kernels that the driver starts directly do what they do when Triton starts them."""

import gc as garbage
import importlib
import pkgutil
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from lightning_gc.compressors import Compressor, Identity  # noqa: E402
from lightning_gc.core.message import as_bytes  # noqa: E402
from lightning_gc.kernels import gpu  # noqa: E402
from lightning_gc.kernels.gpu import launch, prepared_launch  # noqa: E402
from lightning_gc.kernels.gpu.prepared_launch import Variant  # noqa: E402
from tests.support.bucket_kernels import LAYOUTS, train  # noqa: E402
from tests.support.recording import METHODS  # noqa: E402

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
needs_two_gpus = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
FAMILIES = sorted(
    each.name
    for each in pkgutil.iter_modules(gpu.__path__)
    if hasattr(importlib.import_module(f"{gpu.__name__}.{each.name}"), "ATTEMPTS")
)
BLOCK = 256
PERIOD = 4096  # of the numbers that ``count_from`` writes


@launch.kernel()
def count_from(out, first, numel, block: tl.constexpr):
    """Write ``first``, ``first + 1`` and so on, and begin at 0 again after ``PERIOD``."""
    at = tl.program_id(0) * block + tl.arange(0, block)
    tl.store(out + at, ((first + at) % 4096).to(tl.float32), mask=at < numel)


def count(out: Tensor, first: int) -> None:
    grid = (-(-out.numel() // BLOCK),)
    launch.launch(count_from, grid, out, first, out.numel(), block=BLOCK)


def counted(numel: int, first: int) -> Tensor:
    return ((torch.arange(numel) + first) % PERIOD).float()


@pytest.fixture(autouse=True)
def starts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """Count the prepared launches of each thread; begin without variants, and bear no warning."""
    found: Counter[str] = Counter()
    start = Variant.start

    def noted(self: Variant, *given: Any) -> None:
        start(self, *given)
        found[threading.current_thread().name] += 1

    monkeypatch.setattr(Variant, "start", noted)
    monkeypatch.setattr(prepared_launch, "_mine", prepared_launch.PerThread())
    monkeypatch.setattr(prepared_launch, "_trusted", True)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="The kernel .* gave another result")
        yield found
    assert prepared_launch._trusted


def results(family: str) -> list[Tensor]:
    """Return all that a family's self-test computes by kernels."""
    numbers = torch.linspace(-1, 1, 1000, dtype=torch.float32, device="cuda")
    module = importlib.import_module(f"{gpu.__name__}.{family}")
    found = []
    for attempt in module.ATTEMPTS.values():
        found += [ours.clone() for ours, _ in attempt(numbers)]
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, starts: Counter[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """By Triton, then prepared, then by what was prepared before."""
    with monkeypatch.context() as patch:
        patch.setattr(prepared_launch, "_trusted", False)
        wanted = results(family)
    assert not starts
    for _ in range(2):
        before = starts.total()
        found = results(family)
        assert starts.total() > before
        assert len(found) == len(wanted)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == theirs.dtype
            assert torch.equal(as_bytes(ours), as_bytes(theirs))


@pytest.mark.parametrize("compressor", METHODS, ids=repr)
def test_every_variant_of_an_exchange_is_prepared(
    compressor: Compressor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None is left to Triton, and each gave Triton's result in its first launch."""
    first, tried = prepared_launch._first, list[tuple[str, Any]]()

    def noted(program: Any, *given: Any) -> Variant | None:
        tried.append((program.__name__, first(program, *given)))
        return tried[-1][1]

    monkeypatch.setattr(prepared_launch, "_first", noted)
    for layout in ("some", "piece"):
        for workers in (1, 2, 3):
            train(compressor, "normal", LAYOUTS[layout], workers=workers)
    left = {name for name, variant in tried if variant is None}
    assert not left
    assert bool(tried) != isinstance(compressor, Identity)


def in_thread(work: Callable[[], None], name: str) -> threading.Thread:
    thread = threading.Thread(target=work, name=name)
    thread.start()
    return thread


def test_two_threads_start_a_kernel_with_other_arguments(starts: Counter[str]) -> None:
    """The call gives up the interpreter's lock, so each thread needs arguments of its own."""
    launches, numel = 500, 3 * BLOCK - 5
    outs = [torch.zeros(launches, numel, device="cuda") for _ in range(2)]
    count(outs[0][0], 0)  # compiles
    torch.cuda.synchronize()
    together, failures = threading.Barrier(2), list[BaseException]()

    def work(index: int) -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                count(outs[index][0], 0)  # prepares
                together.wait(60)
                for i, row in enumerate(outs[index]):
                    count(row, 7 * i + index)
                torch.cuda.current_stream().synchronize()
        except BaseException as error:
            failures.append(error)
            together.abort()

    threads = [in_thread(lambda i=i: work(i), f"worker {i}") for i in range(2)]  # type: ignore[misc]
    for thread in threads:
        thread.join(120)
    assert not failures
    assert all(starts[f"worker {i}"] >= launches for i in range(2))
    for index, out in enumerate(outs):
        wanted = [counted(numel, 7 * i + index) for i in range(launches)]
        assert torch.equal(out.cpu(), torch.stack(wanted))


def test_a_thread_that_gets_the_number_of_one_that_has_ended() -> None:
    """The driver knows of no context in a new thread, and a number is soon given again."""
    out, failures = torch.zeros(BLOCK, device="cuda"), list[BaseException]()
    numbers: Counter[int] = Counter()

    def work(first: int) -> None:
        try:
            numbers[threading.get_ident()] += 1
            count(out, first)
        except BaseException as error:
            failures.append(error)

    for first in range(50):
        in_thread(lambda first=first: work(first), "short").join(60)  # type: ignore[misc]
        assert not failures
        torch.cuda.synchronize()
        assert torch.equal(out.cpu(), counted(BLOCK, first))
    assert max(numbers.values()) > 1, "no number was given twice, so this has shown nothing"


@needs_two_gpus
def test_another_device_is_the_current_one() -> None:
    for _ in range(3):
        for device in ("cuda:0", "cuda:1"):
            out = torch.zeros(BLOCK, device=device)
            for current in (0, 1):
                with torch.cuda.device(current):
                    count(out, current + 11)
                    assert torch.cuda.current_device() == current
                assert torch.equal(out.cpu(), counted(BLOCK, current + 11))


def test_other_streams() -> None:
    """A variant is for all streams of its device, and starts on the current one."""
    numel, slow = 1 << 20, torch.cuda.Stream()
    out = torch.zeros(numel, device="cuda")
    count(out, 1)
    torch.cuda.synchronize()
    with torch.cuda.stream(slow):
        torch.cuda._sleep(50_000_000)
        count(out, 2)
        copy = out.clone()
    slow.synchronize()
    assert torch.equal(copy.cpu(), counted(numel, 2))


def test_numbers_of_other_types_find_their_variant() -> None:
    """A number of 64 bits does not fit what was prepared for one of 32."""
    out = torch.zeros(BLOCK, device="cuda")
    for first in (5, 5, 3 * PERIOD + (1 << 40), 6, (1 << 31) - 1 - BLOCK, 7):
        count(out, first)
        assert torch.equal(out.cpu(), counted(BLOCK, first))


def test_an_empty_grid_starts_nothing(starts: Counter[str]) -> None:
    """As Triton's launch does; the driver refuses a grid without programs."""
    out = torch.zeros(BLOCK, device="cuda")
    for _ in range(2):
        count(out, 3)
    launch.launch(count_from, (0,), out, 9, BLOCK, block=BLOCK)
    assert torch.equal(out.cpu(), counted(BLOCK, 3))
    assert starts


def test_a_refused_launch_says_why() -> None:
    """More programs than the driver takes in the second dimension."""
    out = torch.zeros(BLOCK, device="cuda")
    for _ in range(2):
        count(out, 3)
    with pytest.raises(RuntimeError, match="invalid argument"):
        launch.launch(count_from, (1, 1 << 16), out, 9, BLOCK, block=BLOCK)
    count(out, 4)
    assert torch.equal(out.cpu(), counted(BLOCK, 4))


def test_variants_do_not_pile_up(starts: Counter[str]) -> None:
    """Other addresses and numbers are no other variants."""
    outs = [torch.zeros(BLOCK + i, device="cuda") for i in range(40)]
    for first, out in enumerate(outs):
        count(out, first + 2)
    kept = [len(variants) for _, variants in prepared_launch._mine.variants.values()]
    before = torch.cuda.memory_allocated()
    for first, out in enumerate(outs):
        count(out, first + 2)
    garbage.collect()
    assert torch.cuda.memory_allocated() == before
    assert [len(variants) for _, variants in prepared_launch._mine.variants.values()] == kept == [1]
    assert starts.total() >= 2 * len(outs) - 1


def listen(hooks: Any, hook: Callable[..., None]) -> Callable[[], None]:
    """Let Triton call ``hook`` before each launch; return what ends it."""
    calls = hooks.launch_enter_hook
    if hasattr(calls, "add"):  # Triton 3.5 and later have several
        calls.add(hook)
        return lambda: calls.remove(hook)
    hooks.launch_enter_hook = hook

    def end() -> None:
        hooks.launch_enter_hook = calls

    return end


def test_a_profiler_of_triton_sees_all(starts: Counter[str]) -> None:
    seen: list[Any] = []
    out = torch.zeros(BLOCK, device="cuda")
    for _ in range(2):
        count(out, 1)
    prepared = starts.total()
    end = listen(prepared_launch._hooks, lambda *given: seen.append(given))
    try:
        for first in range(3):
            count(out, first)
    finally:
        end()
    assert len(seen) == 3
    assert starts.total() == prepared
    assert torch.equal(out.cpu(), counted(BLOCK, 2))
    count(out, 8)
    assert len(seen) == 3
    assert starts.total() == prepared + 1


def test_torchs_profiler_sees_prepared_launches() -> None:
    from torch.profiler import ProfilerActivity, profile

    out = torch.zeros(BLOCK, device="cuda")
    for _ in range(2):
        count(out, 1)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for first in range(3):
            count(out, first)
        torch.cuda.synchronize()
    on_device = [each.name for each in profiler.events() if each.device_type.name == "CUDA"]
    assert sum(count_from.__name__ in name for name in on_device) == 3
