"""Compare the bytes that CompressionMonitor reports with the network interface's own counter.

Each worker is a process in a network namespace of its own, joined to the others by a veth pair
(two workers) or a bridge (more). Over Gloo, two things are measured there against ``tx_bytes``:
what the monitor reports for a window of steps of a Lightning fit, for each method, and what the
transport counts for each kind of request, with long and with short messages.

Start-up is not in the window. TCP/IP headers, acknowledgements, Gloo's own small messages, segments
sent again and one barrier are, so the interface shows a little more. A veth hands on up to 64 KiB
under one header (GSO); frames of 1,500 bytes would add 4.7 % to everything, compressed or not.
Needs Linux, root and iproute2. Exits with 0 if every fit is within 5 % and every long request
within 2 %, with 1 if not, with 2 if it could not measure.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dated_page
import torch
import torch.distributed as dist
from namespaces import check_privileges, launch, network, sent_bytes
from pytorch_lightning import LightningModule, Trainer
from pytorch_lightning.callbacks import LambdaCallback
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gc import QSGD, Cast, HardThreshold, Identity, TopK
from lightning_gc.core.flow import Exchange, Gather, Mean, Request
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy, CompressionMonitor
from lightning_gc.transports import Distributed

TOLERANCE, OF_LONG = 0.05, 0.02  # of a fit, and of a long request
WARMUP, WIDTH, LAYERS, BATCH = 5, 1024, 4, 32  # steps before the window; the model
TIMEOUT = 300.0  # seconds for one task; a silent peer is given up after a third of it
LIMIT = datetime.timedelta(seconds=TIMEOUT / 3)
METHODS = {repr(c): c for c in (Identity(), Cast(), QSGD(bits=4), TopK(0.01), HardThreshold(5e-4))}
REQUESTS, LONG, SHORT = "requests", 4096, 16  # KiB of a message
Readings = dict[str, list["Reading"]]  # one of each worker, by what was measured


class Reading(NamedTuple):
    """What one worker has sent: as counted, by its interface, and as segments sent again."""

    counted: float
    interface: float
    again: float

    @classmethod
    def now(cls, counted: float) -> Reading:
        """Wait until all workers are here and their bytes have left; then read."""
        dist.barrier()
        time.sleep(0.2)  # the kernel sends what it holds
        lines = Path("/proc/self/net/snmp").read_text().splitlines()
        names, values = (line.split() for line in lines if line.startswith("Tcp:"))
        return cls(counted, float(sent_bytes()), float(values[names.index("RetransSegs")]))

    def since(self, start: Reading, rounds: int) -> Reading:
        """Return what was sent since ``start``, per round."""
        return Reading(*((b - a) / rounds for a, b in zip(start, self, strict=True)))

    def excess(self) -> float:
        """Return how much more the interface shows than was counted, as a share."""
        return self.interface / self.counted - 1


class Perceptron(LightningModule):
    """Matrices, few biases, and no buffers: DDP itself sends nothing after its start."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        """Fit noise to noise."""
        loss: Tensor = (self.layers(batch[0]) - batch[0].roll(1, 0)).square().mean()
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Small steps, so that gradients stay as they are."""
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def fit(method: str, steps: int) -> dict[str, Reading]:
    """Train with a method and return what a step costs."""
    strategy = CompressedDDPStrategy(METHODS[method], timeout=LIMIT)
    monitor = CompressionMonitor()
    moments = []

    def read(trainer: Trainer, *_: Any) -> None:
        if trainer.global_step in (WARMUP, WARMUP + steps):
            assert strategy.recording is not None
            total = monitor.state_dict()["total"]
            moments.append((Reading.now(total["wire_bytes"]), total, strategy.recording.sent_bytes))

    trainer = Trainer(
        accelerator="cpu",
        devices=1,
        num_nodes=int(os.environ["WORLD_SIZE"]),
        strategy=strategy,
        callbacks=[monitor, LambdaCallback(on_train_batch_end=read)],  # in this order
        max_steps=WARMUP + steps,
        barebones=True,
    )
    torch.manual_seed(int(os.environ["RANK"]))  # DDP starts from worker 0's parameters
    noise = torch.randn(BATCH * (WARMUP + steps), WIDTH)
    trainer.fit(Perceptron(), DataLoader(TensorDataset(noise), BATCH))
    (start, before, sent_before), (end, after, sent_after) = moments
    assert end.counted - start.counted == sent_after - sent_before, "the monitor missed a step"
    sent, elements = (after[name] - before[name] for name in ("sent", "elements"))
    name = f"{method}, {sent / elements:.2%} sent" if sent < elements else method
    return {name: end.since(start, steps)}


def requests(kib: int, workers: int, worker: int) -> dict[str, Request]:
    """Return one request of each kind, with messages of (ragged: at most) so many KiB."""
    n = kib * 256
    whole = torch.ones(n)
    ragged = [torch.ones(n - n // 32 * (worker + i)) for i in range(workers)]
    tenfold = torch.ones(n if worker == workers - 1 else n // 10)
    return {
        f"Mean, {kib} KiB": Mean((whole,)),
        f"Gather, {kib} KiB": Gather((whole,)),
        f"Gather, ragged, {kib} KiB": Gather((ragged[0],), (n,)),
        f"Gather, 1 of {kib} KiB, others 1/10": Gather((tenfold,), (n,)),
        f"Exchange, {kib} KiB": Exchange(((whole,),) * workers),
        f"Exchange, ragged, {kib} KiB": Exchange(tuple((part,) for part in ragged), (n,)),
    }


def fulfil_all() -> dict[str, Reading]:
    """Fulfil requests of all kinds and sizes and return what each costs."""
    dist.init_process_group("gloo", timeout=LIMIT)
    transport = Distributed()
    readings = {}
    for kib, rounds in ((LONG, 10), (SHORT, 100)):
        for name, request in requests(kib, transport.workers, transport.worker).items():
            start = Reading.now(transport.sent_bytes)
            for _ in range(rounds):
                transport.fulfil(request)
            readings[name] = Reading.now(transport.sent_bytes).since(start, rounds)
    dist.destroy_process_group()
    return readings


def measure(task: str, steps: int, spaces: Sequence[str]) -> Readings:
    """Carry out a task in every namespace and return the readings."""
    answers = launch(__file__, [f"--task={task}", f"--steps={steps}"], spaces, TIMEOUT)
    values = zip(*(answer.values() for answer in answers), strict=True)
    return {name: [Reading(*v) for v in row] for name, row in zip(answers[0], values, strict=True)}


def table(title: str, lines: Readings) -> str:
    """Return a Markdown table: means over workers, and the difference of the worst worker."""
    text = f"### {title}\n\n| | counted bytes | interface bytes | difference | extra bytes "
    text += "| sent again |\n|---|---:|---:|---:|---:|---:|\n"
    for name, readings in lines.items():
        mean = Reading(*(sum(column) / len(readings) for column in zip(*readings, strict=True)))
        worst = max((reading.excess() for reading in readings), key=abs)
        text += f"| {name} | {mean.counted:,.0f} | {mean.interface:,.0f} | {worst:+.2%} "
        text += f"| {mean.interface - mean.counted:,.0f} | {mean.again:.2f} |\n"
    return text


def page(workers: Sequence[int], steps: int, tables: str) -> str:
    """Return the dated file's text."""
    versions = dated_page.versions("lightning-gc", "torch", "pytorch-lightning")
    return f"""{dated_page.title("True bytes")}

`python benchmarks/true_bytes.py --workers {" ".join(map(str, workers))} --steps {steps}` with
Python {sys.version.split()[0]}, {versions}, {os.cpu_count()} CPUs.

{LAYERS} layers of {WIDTH} x {WIDTH} in float32, over Gloo; {steps} steps after {WARMUP}.
Bytes per worker, and per step or request: means over workers. The difference is the worst
worker's. Long requests are held to 2 %; short ones show what a message costs besides its bytes.
"Sent again" counts TCP segments. A veth does not cut frames at 1,500 bytes, so headers are few.

{tables}"""


def parse() -> argparse.Namespace:
    """Return the command line; ``--task`` is for workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--steps", type=int, default=20, help="steps in the window")
    parser.add_argument("--workers", type=int, nargs="+", default=[2], help="one number or several")
    parser.add_argument(
        "--out", type=Path, default=dated_page.RESULTS, help="folder of the dated file"
    )
    parser.add_argument("--task", choices=[*METHODS, REQUESTS], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 1 or not all(2 <= workers <= 16 for workers in options.workers):
        parser.error("--steps must be at least 1, and every number of --workers in 2..16.")
    return options


def main() -> int:
    """Measure, print, write; return the exit code."""
    options = parse()
    if options.task is not None:
        found = fulfil_all() if options.task == REQUESTS else fit(options.task, options.steps)
        options.out.write_text(json.dumps(found))
        return 0
    check_privileges("true_bytes")
    tables, within = [], True
    for workers in options.workers:
        with network(workers) as spaces:
            fits = {k: v for m in METHODS for k, v in measure(m, options.steps, spaces).items()}
            kinds = measure(REQUESTS, options.steps, spaces)
        tables.append(table(f"{workers} workers, a step of a fit", fits))
        tables.append(table(f"{workers} workers, a request", kinds))
        sys.stdout.write("\n".join((*tables[-2:], "")))
        long = list(kinds.values())[: len(kinds) // 2]
        for rows, most in ((fits.values(), TOLERANCE), (long, OF_LONG)):
            within &= all(abs(reading.excess()) <= most for row in rows for reading in row)
    text = page(options.workers, options.steps, "\n".join(tables))
    dated_page.write(options.out, "true_bytes", text)
    return int(not within)


if __name__ == "__main__":
    sys.exit(main())
