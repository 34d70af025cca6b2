"""The same steps between real processes over Gloo, to hold the model against."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lightning_gc.advice.traces import Shapes, engines, gradient
from lightning_gc.compressors import Compressor
from lightning_gc.schemes import Scheme
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.distributed import Distributed

LIMIT = timedelta(seconds=120)
SMALL = "8 bytes"


def work(
    configurations: Mapping[str, tuple[Compressor, Scheme]], shapes: Shapes, repeat: int
) -> dict[str, dict[str, float]]:
    """Be one worker; return the seconds and bytes of a step of each configuration.

    The steps are those of ``traces.trace``: the same gradients, the same errors.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    worker, workers = dist.get_rank(), dist.get_world_size()
    tiny = torch.ones(2)
    found = {SMALL: {"seconds": _median(lambda: dist.all_reduce(tiny), 50), "sent": 8.0}}
    flat = gradient(shapes, worker)
    for name, (compressor, scheme) in configurations.items():
        (engine,) = engines(compressor, scheme, workers, [worker])
        recording = Recording(Distributed())
        sent: list[float] = []
        seconds: list[float] = []
        for _ in range(1 + repeat):
            own = flat.clone()
            dist.barrier()
            started = time.perf_counter()
            with torch.no_grad():
                recording.run(engine.flow(own, shapes), own.device)
            seconds.append(time.perf_counter() - started)
            engine.advance()
            sent.append(recording.take().wire_bytes)
        found[name] = {"seconds": statistics.median(seconds[1:]), "sent": sent[-1]}
    dist.destroy_process_group()
    return found


def _median(function: Callable[[], Any], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        dist.barrier()
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def on_loopback(script: str, arguments: list[str], workers: int, timeout: float) -> list[Any]:
    """Run a script in so many processes; return what each wrote into the folder given as --out.

    Raises:
        RuntimeError: it failed; the end of its output says why.
        subprocess.TimeoutExpired: it took too long; torchrun and its workers are gone then.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={workers}", script, *arguments, f"--out={folder}"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        if done.returncode:
            raise RuntimeError(f"{workers} workers failed: {done.stderr[-2000:]}")
        return [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(workers)]
