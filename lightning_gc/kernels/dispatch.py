"""Choose between a compiled kernel and its torch reference, and let kernels be compiled.

A family of kernels is compiled when a method first asks for it, once per machine: compilers keep
their results on disk. Numba needs up to ten seconds of CPU time for a family. An exchange does not
wait for them: a process of low priority compiles, and until it is done torch's operations are used,
which have the same bits. Kernels of ``ROUNDED`` families have other last bits than torch's
operations. All workers would have to change in one step, and a run's bits would depend on what its
machine has compiled before. So a training waits for these.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import hashlib
import importlib
import logging
import os
import pkgutil
import subprocess
import sys
import tempfile
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from lightning_gc.core.notices import say, waiting
from lightning_gc.core.registry import did_you_mean

_log = logging.getLogger(__name__)
MAX_NUMEL = 1 << 30  # Triton's kernels count in int32, and numba's in int64
ROUNDED = frozenset({"low_rank"})
"""Families whose kernels equal torch's operations up to rounding."""
_SOURCES = Path(__file__).with_name("host")
_watched: set[str] | None = None
_told: set[str] = set()  # causes of warnings
_SLOW = 2.0  # seconds after which a compilation is said
_POLL = 0.2  # seconds between two looks at another process
_ROOM = 16 << 20  # bytes, three times what all families take


SWITCH = "LIGHTNING_GC_KERNELS"
"""Name of the environment variable that takes kernels away."""
WITHOUT = f"{SWITCH}=torch leaves compiled kernels out."


@dataclass(frozen=True)
class Allowed:
    """What a value of the switch leaves.

    Attributes:
        value: of the environment variable.
        compiled: kernels of Triton and numba. Torch's operations take their place.
        prepared: Triton's kernels are started by one call of the driver. Triton takes its place.
        recorded: exchanges on a GPU are started again. Their Python takes its place.
    """

    value: str = "auto"
    compiled: bool = True
    prepared: bool = True
    recorded: bool = True


_ALLOWED = (
    Allowed(),
    Allowed("prepared", recorded=False),
    Allowed("written", recorded=False, prepared=False),
    Allowed("torch", recorded=False, prepared=False, compiled=False),
)
"""For each value of the switch; each one takes away what those before it do, and one thing more."""


@functools.cache
def allowed() -> Allowed:
    """Return what the switch leaves. It is read once in a process, when it is first needed.

    Raises:
        ValueError: it has another value than those of ``_ALLOWED``.
    """
    given, known = os.environ.get(SWITCH) or "auto", {each.value: each for each in _ALLOWED}
    if given not in known:
        raise ValueError(
            f"{SWITCH}={given} is not a way to run kernels{did_you_mean(given, known)}. Set it to "
            f"one of {', '.join(known)}, or unset it."
        )
    return known[given]


def _may_use(compiler: str) -> bool:
    """Return whether kernels of numba or Triton are allowed, and it can be imported."""
    return allowed().compiled and find_spec(compiler) is not None


class _LostError(Exception):
    """A kernel is asked for that is in no file."""


class _RefusedError(RuntimeError):
    """A family did not pass its test after it had been compiled."""


class HostFamilies:
    """Numba's families in this process.

    Laws:
        1. While an exchange runs, ``works`` does not change its answers: what begins with torch's
           operations ends with them.
        2. A family is used only after its self-test has passed in this process.
        3. One process of a machine compiles a family; the others read the result.
        4. An exchange compiles nothing, whatever the files contain. Damaged files are deleted and
           compiled again, as missing ones are.

    Example:
        >>> families = HostFamilies()
        >>> with families.steady():
        ...     first, second = (families.works("segments") for _ in range(2))
        >>> first == second
        True
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._works: dict[str, bool] = {}
        self._made: dict[str, bool] = {}  # by the thread, and not taken over yet
        self._left: list[str] = []  # to the thread
        self._running = 0  # exchanges
        self._resting = weakref.WeakSet[object]()  # owners of exchanges that call ``take_over``
        self._counting = False
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def works(self, family: str) -> bool:
        """Return whether a family's kernels are used.

        The first call compiles them, unless an exchange runs, which does not wait.

        Args:
            family: a module of ``kernels.host``.
        """
        known = self._works.get(family)
        if _watched is not None:
            _watched.add(family)
        if known is None and not self._counting:
            known = self._works[family] = self._first_answer(family)
        return bool(known)

    def _first_answer(self, family: str) -> bool:
        if not _may_use("numba"):
            return False
        error = _load(family)
        if error is None or isinstance(error, _RefusedError):
            return _tell({family: error})[family]
        leave = self._running and family not in ROUNDED
        if leave:
            self._leave(family)
            return False
        return _compile(family)

    @contextlib.contextmanager
    def steady(self) -> Iterator[None]:
        """Keep all answers during an exchange; first take over what has been compiled."""
        with self._lock:
            if self._made and not self._resting:
                self._use_made()
            self._running += 1
        try:
            yield
        finally:
            with self._lock:
                self._running -= 1

    def rest(self, owner: object, *, ends: bool = False) -> None:
        """Let ``steady`` take nothing over while ``owner`` lives, or from now on again."""
        with self._lock:
            (self._resting.discard if ends else self._resting.add)(owner)

    def take_over(self) -> None:
        """Use what has been compiled, unless an exchange runs."""
        with self._lock:
            self._use_made()

    def _use_made(self) -> None:
        if self._made and not self._running:
            self._works |= self._made
            self._made = {}

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Compile and load nothing: an exchange is made to count its bytes only."""
        self._counting = True
        try:
            yield
        finally:
            self._counting = False

    def wait(self) -> None:
        """Return when no family is being compiled: a measurement begins."""
        thread = self._thread
        if thread is not None:
            with waiting("Waiting for compiled kernels", _SLOW):
                thread.join()

    @property
    def compiling(self) -> bool:
        """Whether families are being compiled, so that exchanges do not have them yet."""
        return self._thread is not None

    def close(self) -> None:
        """Stop the thread. The other process ends by itself, and the next run has its result."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join()

    def forked(self) -> None:
        """Forget, in a new process, what a thread of the old one was about to do."""
        self._lock, self._thread = threading.Lock(), None
        for family in {*self._left, *self._made}:
            del self._works[family]
        self._left, self._made, self._running = [], {}, 0
        self._resting = weakref.WeakSet()

    def _leave(self, family: str) -> None:
        with self._lock:
            self._left.append(family)
            if self._thread is None:
                self._thread = threading.Thread(target=self._make, name="kernels", daemon=True)
                self._thread.start()
                atexit.register(self.close)

    def _make(self) -> None:
        """Let another process compile what is left, then load and test it here."""
        while True:
            with self._lock:
                families = list(self._left)
                if not families or self._ending.is_set():
                    self._thread = None
                    return
            with _locked() as mine:
                while not mine():
                    if self._ending.is_set():
                        return
                try:
                    errors = _prepare(families, self._follow)
                except OSError as error:  # no process could be started, or no folder read
                    errors = dict.fromkeys(families, error)
            if self._ending.is_set():
                return
            works = _tell(errors)
            with self._lock:
                self._made |= works
                self._left = [family for family in self._left if family not in works]

    def _follow(self, families: list[str], damaged: bool) -> None:
        """Compile in another process of low priority, and say when it begins and ends."""
        names = ", ".join(families)
        say(
            "Compiling numba's kernels of %s, once per machine. Training begins with torch's "
            "operations, which have the same bits.",
            names,
        )
        began = time.monotonic()
        child = _child(families)
        while child.poll() is None:
            if self._ending.wait(_POLL):
                return
        if not all(map(_is_compiled, families)):
            return
        say("The kernels of %s are ready, after %.0f s.", names, time.monotonic() - began)


host = HostFamilies()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=host.forked)


def compile_families(families: list[str]) -> None:
    """Compile and test numba's families; the entrance of the other process."""
    if hasattr(os, "nice"):
        os.nice(10)
    for family in families:
        _make(family)


def _child(families: list[str]) -> subprocess.Popen[bytes]:
    call = f"from {__name__} import compile_families; compile_families({families!r})"
    paths = os.pathsep.join(path or os.getcwd() for path in sys.path)
    threads = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", call],
        env={**os.environ, "PYTHONPATH": paths, **threads},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


def _compile(family: str) -> bool:
    """Compile a family in this process, or wait for another one that does; return if it works."""

    def here(families: list[str], damaged: bool) -> None:
        if damaged:  # this process may have loaded some of it
            _child(families).wait()
        else:
            _make(family)

    line = f"Compiling numba's kernels of {family}, once per machine"
    with waiting(line, _SLOW), _locked() as mine:
        while not mine():
            pass
        return _tell(_prepare([family], here))[family]


def _prepare(
    families: list[str], compile_them: Callable[[list[str], bool], None]
) -> dict[str, Exception | None]:
    """Load families, and compile the missing ones, as the machine's only compiler.

    Args:
        families: modules of ``kernels.host``.
        compile_them: compiles families; it is told whether their files were damaged.

    Returns:
        Why a family does not run, or None.
    """
    errors = {family: _load(family) for family in families}
    lost = [f for f, e in errors.items() if e is not None and not isinstance(e, _RefusedError)]
    if not lost:
        return errors
    damaged = [family for family in lost if _is_compiled(family)]
    if damaged:
        say(
            "numba's kernels of %s in %s are damaged (%s). They are deleted and compiled again. "
            "If this comes again, %s",
            *(", ".join(damaged), _folder(), _cause(errors[min(damaged)]), WITHOUT),
        )
        for file in _folder().iterdir():
            if file.suffix in {".nbi", ".nbc", ".compiled"}:
                with contextlib.suppress(OSError):  # of another user; the next test says so
                    file.unlink()
    unkept = _unkept()
    if unkept is not None:
        return errors | dict.fromkeys(lost, unkept)
    compile_them(lost, bool(damaged))
    return errors | {family: _load(family) for family in lost}


def _load(family: str) -> Exception | None:
    """Test a family that is compiled; return why it does not run."""
    if not _is_compiled(family):
        return _LostError("its files are missing")
    try:
        refused = _mark(family).read_text()
        if refused:
            return _RefusedError(refused)
        with _uncompiled_refused():
            _test(family)
    except Exception as error:  # any exception of a damaged file
        return error
    return None


def _make(family: str) -> None:
    """Compile and test a family, and note in a file that it works, or why not."""
    refused = ""
    try:
        _test(family)
    except (OSError, MemoryError):  # may pass with the next run
        return
    except Exception as error:  # any exception of a compiler, which would come again
        refused = f"{type(error).__name__}: {error}"
    with contextlib.suppress(OSError):  # of another user; the next run compiles again
        _mark(family).write_text(refused)


def _test(family: str) -> None:
    from lightning_gc.kernels.host import self_test

    self_test(family)


@contextlib.contextmanager
def _uncompiled_refused() -> Iterator[None]:
    """Raise an exception where this thread would compile a kernel of this package."""
    from numba.core import event

    thread = threading.get_ident()

    class Refusal(event.Listener):
        def on_start(self, started: Any) -> None:
            of = started.data["dispatcher"].py_func.__module__
            if threading.get_ident() == thread and of.startswith(__package__):
                raise _LostError("files are missing")

        def on_end(self, ended: Any) -> None: ...

    with event.install_listener("numba:compile", Refusal()):
        yield


def _unkept() -> Exception | None:
    """Return why the folder cannot keep compiled kernels: it is full, or cannot be written."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=_folder()) as file:
            file.write(bytes(_ROOM))
            file.flush()
    except OSError as error:
        return OSError(f"{error.strerror} in {_folder()}")
    except Exception as error:  # numba knows no folder, or cannot be imported
        return error
    return None


def _tell(errors: Mapping[str, Exception | None]) -> dict[str, bool]:
    """Return which families run, and warn about the others, once for each cause."""
    for cause, families in _by_cause(errors).items():
        if cause not in _told:
            _told.add(cause)
            _log.warning(
                "numba's kernels of %s do not run here (%s). Torch's operations are used instead, "
                "with the same results in more time. %s",
                *(", ".join(families), cause, _fix()),
            )
    return {family: error is None for family, error in errors.items()}


def _by_cause(errors: Mapping[str, Exception | None]) -> dict[str, list[str]]:
    causes: dict[str, list[str]] = {}
    for family, error in errors.items():
        if error is not None:
            causes.setdefault(_cause(error), []).append(family)
    return causes


def trouble() -> dict[str, list[str]]:
    """Return causes and numba's families that do not run here, as far as the files tell."""
    if not _may_use("numba"):
        return {}
    known = on_disk()
    errors: dict[str, Exception | None]
    errors = dict.fromkeys(known, None if all(known.values()) else _unkept())
    for family in filter(known.get, known):
        said = _mark(family).read_text()
        errors[family] = _RefusedError(said) if said else None
    return _by_cause(errors)


def _cause(error: Exception | None) -> str:
    own = isinstance(error, _LostError | _RefusedError)
    return f"{error}" if own else f"{type(error).__name__}: {error}"


def _fix() -> str:
    other = f"set NUMBA_CACHE_DIR to a folder that can be written and has {_ROOM >> 20} MB of room"
    try:
        return f"To compile them again, rm -r {_folder()}, or {other}. {WITHOUT}"
    except Exception:  # numba knows no folder, or cannot be imported
        return f"If numba can be imported, {other}. {WITHOUT}"


def _is_compiled(family: str) -> bool:
    """Return whether a family has been compiled here, with or without success."""
    try:
        return _mark(family).exists()
    except (ImportError, RuntimeError, OSError):
        return False


def on_disk() -> dict[str, bool]:
    """Return numba's families, and whether each is compiled on this machine; without numba none."""
    found = find_spec("numba") is not None
    return {family: found and _is_compiled(family) for family in _on_host()}


@functools.cache
def _on_host() -> tuple[str, ...]:
    """Return numba's families."""
    return tuple(module.name for module in pkgutil.iter_modules([str(_SOURCES)]))


def _mark(family: str) -> Path:
    return _folder() / f"{family}.{_key()}.compiled"


@functools.cache
def _folder() -> Path:
    """Return the folder in which numba keeps the kernels."""
    from lightning_gc.kernels.host.segments import times

    return Path(str(times.stats.cache_path))


@functools.cache
def _key() -> str:
    """Return a text that changes with what numba compiles, and for which processor."""
    import numba
    from llvmlite import binding

    sources = sorted(_SOURCES.glob("*.py"))
    stamps = [(s.name, s.stat().st_mtime, s.stat().st_size) for s in sources]
    features = binding.get_host_cpu_features().flatten()
    said = repr((numba.__version__, binding.get_host_cpu_name(), features, sys.version, stamps))
    return hashlib.sha256(said.encode()).hexdigest()[:16]


@contextlib.contextmanager
def _locked() -> Iterator[Callable[[], bool]]:
    """Return a function that tries to be this machine's only compiler, for a moment."""
    try:
        _folder().mkdir(parents=True, exist_ok=True)
        file = os.open(_folder() / "compiling.lock", os.O_CREAT | os.O_RDWR, 0o644)
    except (OSError, RuntimeError, ImportError):  # no folder: two processes may compile the same
        yield lambda: True
        return

    def mine() -> bool:
        try:
            import fcntl  # POSIX only

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(_POLL)
            return False
        except (OSError, ImportError):  # a network's file system without locks, or Windows
            return True
        return True

    try:
        yield mine
    finally:
        os.close(file)


@contextlib.contextmanager
def watched() -> Iterator[set[str]]:
    """Collect the families that the body asks for, in any thread."""
    global _watched
    _watched = set()
    try:
        yield _watched
    finally:
        _watched = None


def on_gpu(family: str, device: torch.device) -> bool:
    """Return whether Triton's kernels of a family are used.

    Args:
        family: a module of ``kernels.gpu``.
        device: a GPU.
    """
    if _watched is not None:
        _watched.add(family)
    return _works_on_gpu(family, device)


@functools.cache
def _works_on_gpu(family: str, device: torch.device) -> bool:
    """Compile and test a family: a C compiler may be missing, or the GPU too old."""
    if not _may_use("triton"):
        return False
    try:
        gpu = importlib.import_module("lightning_gc.kernels.gpu")
        with waiting(f"Compiling Triton's kernels of {family}, once per machine", _SLOW):
            gpu.self_test(family, device)
    except Exception as error:  # any exception of a compiler or driver
        cause = f"{device} ({_cause(error)})"
        if cause not in _told:  # other families fail in the same way
            _told.add(cause)
            warnings.warn(
                f"Triton's kernels of {family} do not run on {cause}. Torch's operations are used "
                f"instead, with the same results in more time. {_triton_fix()}",
                stacklevel=2,
            )
        return False
    return True


def _triton_fix() -> str:
    home = os.environ.get("TRITON_HOME") or Path.home()
    folder = os.environ.get("TRITON_CACHE_DIR") or Path(home, ".triton", "cache")
    return (
        f"Triton needs a C compiler (set CC to its path) and a GPU that it knows. If its files in "
        f"{folder} are damaged, delete that folder. If the folder is full or read-only, set "
        f"TRITON_CACHE_DIR to another one. {WITHOUT}"
    )


def in_words(used: Collection[str], device: torch.device) -> str:
    """Name what computes for float32 tensors of ``device``, where these families are asked for."""
    if device.type != "cuda":
        return "torch"
    works = [family for family in sorted(used) if _works_on_gpu(family, device)]
    if not works:
        return "torch"
    import triton

    return f"Triton {triton.__version__} for {', '.join(works)}"


def fused(tensor: Tensor, family: str) -> bool:
    """Return whether a family of Triton's kernels is used for ``tensor``, ``(numel,)``.

    It is used for float32 on CUDA if triton can be imported (torch's CUDA wheels for Linux have
    it) and the family passes a self-test. If it fails, torch is used and a warning is given. On CPU
    kernels run in Triton's interpreter only, for tests: set ``TRITON_INTERPRET=1`` before triton is
    imported.

    Args:
        tensor: on any device.
        family: a module of ``kernels.gpu``.
    """
    suitable = tensor.dtype == torch.float32 and tensor.is_contiguous()
    if not suitable or not 0 < tensor.numel() < MAX_NUMEL:
        return False
    if tensor.device.type == "cuda":
        return on_gpu(family, tensor.device)
    return _interpreted() and tensor.device.type == "cpu"


def compiled(tensor: Tensor, family: str) -> bool:
    """Return whether numba's kernels are used for ``tensor``, ``(numel,)``.

    They are used for float32 on the host if numba can be imported (the extra ``fast`` installs it),
    the family is compiled, and its kernels give torch's bits in a self-test. Kernels of low rank
    give them up to rounding. If one fails, torch is used and a warning is given.

    Args:
        tensor: on any device.
        family: a module of ``kernels.host``.
    """
    suitable = tensor.dtype == torch.float32 and tensor.is_contiguous()
    on_host = suitable and tensor.device.type == "cpu" and tensor.numel() > 0
    return on_host and host.works(family)


def table_for(tensor: Tensor, family: str, settings: tuple[Any, ...]) -> Any:
    """Return the table of a family's kernels for ``tensor``: of Triton, else of numba; or None.

    Args:
        tensor: on any device.
        family: a module of ``kernels.gpu`` or ``kernels.host`` with a ``shards.ShardTable``.
        settings: of the table.
    """
    if fused(tensor, family) and (found := _module(f"gpu.{family}").Table).takes(*settings):
        return found
    if family in _on_host() and compiled(tensor, family):
        found = _module(f"host.{family}").Table
        return found if found.takes(*settings) else None
    return None


def family(name: str, tensor: Tensor) -> ModuleType:
    """Return the module of a family's kernels for ``tensor``: of Triton, else of numba.

    Args:
        name: of the modules in ``kernels.gpu`` and ``kernels.host``.
        tensor: for which ``fused`` or ``compiled`` returns True.
    """
    return _module(f"{'gpu' if fused(tensor, name) else 'host'}.{name}")


def launcher() -> ModuleType:
    """Return what starts Triton's kernels."""
    return _module("gpu.prepared_launch")


def queue_of(device: torch.device) -> tuple[int, int, bool]:
    """Return the current device, where this thread queues kernels, and if a profiler watches."""
    if device.type != "cuda" or not _has_triton():
        return 0, 0, False
    found: tuple[int, int, bool] = launcher().queue_of(device.index)
    return found


@functools.cache
def _has_triton() -> bool:
    return _may_use("triton")


def may_compile(device: torch.device) -> bool:
    """Return whether kernels are compiled when they are first used for tensors of ``device``."""
    return _may_use("numba" if device.type == "cpu" else "triton")


@functools.cache  # a look for an imported module takes 10 µs, and each bucket has several
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"lightning_gc.kernels.{name}")


@functools.cache
def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1" and _may_use("triton")


def used_here(tensor: Tensor) -> None:
    """Keep the memory of ``tensor`` until the current stream has done its queued work.

    The training thread allocates restored tensors, and the background thread replaces them while
    its stream still has to read them. Without this call the allocator would give the memory to the
    training thread's next tensor at once. Nothing is done on the host.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
