"""Run a function in W real processes: quick to start, killed in time, errors brought home."""

import contextlib
import multiprocessing
import os
import random
import resource
import socket
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
TIMEOUT = 90.0


def run_in_processes(
    function: Callable[..., Any],
    workers: int,
    *args: Any,
    timeout: float = TIMEOUT,
    wait_for: int | None = None,
) -> Any:
    """Call ``function(worker, *args)`` in ``workers`` processes; return the results in order.

    With ``wait_for=n`` only the first n must finish; the others are killed then.

    The processes find the variables that torchrun would set. They come from a fork server that
    has imported torch and Lightning but run nothing, so that they start quickly and share no
    threads. If one fails or the time is up, all are killed, and the error is raised here.
    """
    context = preloaded()
    held = hold_port()
    port = held.getsockname()[1]
    pipes, processes = [], []
    for worker in range(workers):
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_run, args=(theirs, function, worker, workers, port, args))
        process.start()
        theirs.close()
        pipes.append(ours)
        processes.append(process)
    deadline = time.monotonic() + timeout
    results = []
    try:
        for worker, pipe in enumerate(pipes[:wait_for]):
            results.append(_result(pipe, worker, deadline, timeout))
        for process in processes[:wait_for]:
            process.join(max(0.1, deadline - time.monotonic()))
    finally:
        for process in processes:
            process.kill()
            process.join()
        held.close()
    return results


class Standing:
    """Processes that run one function after the other, for files with many short runs.

    Each function finds the variables, random numbers and filters that a new process has.
    Modules stay changed, so a function that changes one needs ``run_in_processes``.
    """

    def __init__(self) -> None:
        self._staff: list[tuple[Any, Any]] = []  # pipe, process

    def run(
        self, function: Callable[..., Any], workers: int, *args: Any, timeout: float = TIMEOUT
    ) -> list[Any]:
        """Do as ``run_in_processes``; after an error all processes are new."""
        while len(self._staff) < workers:
            ours, theirs = preloaded().Pipe()
            process = preloaded().Process(target=_stand, args=(theirs,))
            process.start()
            theirs.close()
            self._staff.append((ours, process))
        deadline = time.monotonic() + timeout
        try:
            with contextlib.closing(hold_port()) as held:
                port = held.getsockname()[1]
                pipes = [pipe for pipe, _ in self._staff[:workers]]
                for worker, pipe in enumerate(pipes):
                    pipe.send((os.getcwd(), function, worker, workers, port, args))
                return [_result(pipe, n, deadline, timeout) for n, pipe in enumerate(pipes)]
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all."""
        for pipe, process in self._staff:
            pipe.close()
            process.kill()
            process.join()
        self._staff = []


standing = Standing()
"""The processes of the running file of tests; ``conftest.py`` ends them after its last test."""


def _result(pipe: Any, worker: int, deadline: float, timeout: float) -> Any:
    if not pipe.poll(max(0.0, deadline - time.monotonic())):
        raise TimeoutError(f"worker {worker} has not finished after {timeout} s")
    succeeded, value = pipe.recv()
    if not succeeded:
        raise RuntimeError(f"worker {worker} failed:\n{value}")
    return value


def said(act: Any, *args: Any, **options: Any) -> str:
    """Return the class and the text of what a call raises, or nothing."""
    try:
        act(*args, **options)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def preloaded() -> multiprocessing.context.ForkServerContext:
    """Return what makes processes that have imported torch and Lightning, and run nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preload"])
    with contextlib.chdir(ROOT):  # from elsewhere it would not find what to import, and not say so
        forkserver.ensure_running()
    return context


class HeldPort(socket.socket):
    """A port where torch can listen and nobody else, until this is closed.

    It lies below those that a system gives out by itself. NCCL has hundreds of them, at other
    addresses than this one; where it listens torch cannot. Of a pair of ports the first keeps away
    who looks here too.
    """

    def __init__(self, lock: socket.socket, port: int) -> None:
        super().__init__()
        self._lock = lock
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as torch does
        self.bind(("", port))

    def close(self) -> None:
        """Give both back."""
        super().close()
        self._lock.close()


def hold_port() -> HeldPort:
    """Return a port that is free at every address."""
    for first in random.SystemRandom().sample(range(10_000, 32_000, 2), 200):
        lock = socket.socket()
        try:
            lock.bind(("127.0.0.1", first))
            return HeldPort(lock, first + 1)
        except OSError:  # somebody's
            lock.close()
    raise RuntimeError("No port between 10,000 and 32,000 is free, or none of 200 tries.")


def without_others() -> None:
    """Forget, in a process of ``run_in_processes``, that it is a worker: nobody has started it."""
    for name in _PLACE:
        del os.environ[name]


_PLACE = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE", "NODE_RANK")


def _run(pipe: Any, *call: Any) -> None:
    pipe.send(_outcome(*call))


def _stand(pipe: Any) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    variables = dict(os.environ)
    drawn = random.getstate(), np.random.get_state(), torch.get_rng_state()
    with contextlib.suppress(EOFError, OSError):
        while True:
            folder, *call = pipe.recv()
            os.chdir(folder)
            with warnings.catch_warnings():
                outcome = _outcome(*call)
            if dist.is_initialized():
                dist.destroy_process_group()
            os.environ.clear()
            os.environ.update(variables)
            random.setstate(drawn[0])
            np.random.set_state(drawn[1])
            torch.set_rng_state(drawn[2])
            pipe.send(outcome)


def _outcome(function: Any, worker: int, workers: int, port: int, args: Any) -> tuple[bool, Any]:
    from tests.support.accelerator import local_rank

    of_node, node = local_rank(worker)
    os.environ.update(
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        RANK=str(worker),
        LOCAL_RANK=str(of_node),
        WORLD_SIZE=str(workers),
        NODE_RANK=str(node),
        OMP_NUM_THREADS="1",
    )
    import torch

    # The parent's filters do not reach here, and Lightning warns of much that is not ours.
    warnings.filterwarnings("error", message=".*torch.distributed.*")
    torch.set_num_threads(1)
    try:
        return True, function(worker, *args)
    except BaseException:
        return False, traceback.format_exc()


@contextlib.contextmanager
def many_files() -> Iterator[None]:
    """Let this process open thousands of files, as far as it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(8192, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
