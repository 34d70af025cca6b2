"""See what compressed gradients are worth: seconds per step, bytes and loss, before and after.

    python examples/first_speedup.py                            # a transformer at 200 Mbit/s
    python examples/first_speedup.py --model images --mbit 1000 --after compressed_ddp_topk

Two processes train three times over a link that this program makes and slows down: with plain DDP,
with torch's 16-bit hook, and with the strategy of your choice. That needs Linux, root and iproute2.
Elsewhere one process simulates both workers and predicts the seconds. The last lines are a table;
the losses over time go to first_speedup.png, if matplotlib is installed.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import itertools
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from pytorch_lightning.strategies import StrategyRegistry
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_gc import Cast, CompressionMonitor, NetworkModel, SimulatedDDPStrategy
from lightning_gc.bench.baselines import FP16, baseline_strategy

WORKERS, WORDS, LENGTH = 2, 8_000, 32
INTERFACE, ADDRESS, PORT = "gc0", "10.77.2.", "29500"  # inside the namespaces only
HOOK = "ddp_fp16_hook"
SPENT = ("compute_seconds", "compress_seconds", "decode_seconds", "communication_seconds_estimated")


class Text(nn.Module):
    """A small transformer that predicts the next word; 5.2 million parameters."""

    def __init__(self, width: int = 256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(LENGTH))
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits, ``(batch, LENGTH, WORDS)``."""
        hidden = self.blocks(self.embedding(words), self.mask, is_causal=True)
        logits: Tensor = hidden @ self.embedding.weight.t()
        return logits

    @staticmethod
    def data(rows: int, draw: torch.Generator) -> TensorDataset:
        """Return text in which one of three words may follow each, and few words are frequent."""
        follow = (
            WORDS * torch.rand(WORDS, 3, generator=torch.Generator().manual_seed(0)) ** 4
        ).long()
        words = [(WORDS * torch.rand(rows, generator=draw) ** 4).long()]
        for _ in range(LENGTH):
            choice = torch.randint(3, (rows,), generator=draw)
            words.append(follow[words[-1], choice])
        text = torch.stack(words, dim=1)
        return TensorDataset(text[:, :-1], text[:, 1:])


class Images(nn.Sequential):
    """Four convolutions and two linear layers; 5.7 million parameters."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after in ((3, 64), (64, 128), (128, 256), (256, 512)):
            layers += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
        super().__init__(
            *layers, nn.Flatten(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
        )

    @staticmethod
    def data(rows: int, draw: torch.Generator) -> TensorDataset:
        """Return noise of 32 by 32 pixels, each with the class of a fixed projection."""
        images = torch.randn(rows, 3, 32, 32, generator=draw)
        project = torch.randn(3 * 32 * 32, 10, generator=torch.Generator().manual_seed(0))
        return TensorDataset(images, (images.flatten(1) @ project).argmax(1))


KINDS: dict[str, Any] = {"text": Text, "images": Images}


class Model(LightningModule):
    """Trains by AdamW; put your own LightningModule in its place."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.net = KINDS[kind]()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        """Return the mean cross-entropy."""
        outputs = self.net(batch[0])
        return nn.functional.cross_entropy(outputs.flatten(0, -2), batch[1].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4)


class Watch(Callback):
    """Notes when each step ended, its loss, and what the interface had sent; speaks every 10 s."""

    def __init__(self) -> None:
        self.said = 0.0
        self.seconds: list[float] = []
        self.losses: list[float] = []
        self.sent: list[int] = []

    def on_train_start(self, trainer: Trainer, module: LightningModule) -> None:
        """Start the clock."""
        self.began = time.perf_counter()

    def on_train_batch_end(
        self, trainer: Trainer, module: LightningModule, outputs: Any, *rest: Any
    ) -> None:
        """Add a step, if the batch has ended one."""
        if trainer.global_step > len(self.losses):
            self.seconds.append(time.perf_counter() - self.began)
            self.losses.append(float(outputs["loss"]))
            counter = Path(f"/sys/class/net/{INTERFACE}/statistics/tx_bytes")
            self.sent.append(int(counter.read_text()) if counter.exists() else 0)
            done, passed = len(self.losses), self.seconds[-1]
            if trainer.is_global_zero and passed > self.said + 10:
                self.said = passed
                left = (trainer.estimated_stepping_batches - done) * passed / done
                say(f"  {done} steps in {passed:.0f} s, about {left:.0f} s left")


def train(strategy: Any, options: argparse.Namespace, batches: int, **where: Any) -> Trainer:
    """Train for two epochs: what measures its link has decided before the second one."""
    seed_everything(0, verbose=False)
    model, draw = Model(options.model), torch.Generator().manual_seed(1 + where.pop("worker", 0))
    rows = KINDS[options.model].data(8 * batches // 2, draw)
    trainer = Trainer(
        accelerator="cpu",
        strategy=strategy,
        max_epochs=2,
        logger=False,
        use_distributed_sampler=False,  # each worker has drawn its own rows
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **where,
    )
    trainer.fit(model, DataLoader(rows, 8))
    return trainer


def summary(name: str, watch: Watch, step: float, nbytes: float) -> dict[str, Any]:
    """Return what the table and the picture show of a run."""
    losses = watch.losses
    return {
        "strategy": name,
        "step": step,
        "bytes": nbytes,
        "loss": statistics.fmean(losses[-5:]),
        "seconds": watch.seconds,
        "losses": losses,
    }


def work(options: argparse.Namespace) -> None:
    """Be one of two workers; worker 0 writes what it saw."""
    torch.set_num_threads(1)
    watch, number = Watch(), int(os.environ["NODE_RANK"])
    train(
        baseline_strategy(FP16, "gloo") if options.work == HOOK else options.work,
        options,
        options.steps,
        worker=number,
        callbacks=[watch],
        devices=1,
        num_nodes=WORKERS,
    )
    half = len(watch.seconds) // 2
    steps = [end - start for start, end in itertools.pairwise(watch.seconds[half:])]
    sent = (watch.sent[-1] - watch.sent[half]) / len(steps)
    if number == 0:
        found = summary(options.work, watch, statistics.median(steps), sent)
        options.out.write_text(json.dumps(found))


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train with a strategy in two processes, each in its own network namespace."""
    with tempfile.TemporaryDirectory() as folder, link(options.mbit) as spaces:
        out, workers = Path(folder, "run.json"), []
        command = [sys.executable, __file__, f"--model={options.model}", f"--steps={options.steps}"]
        command += [f"--work={name}", f"--out={out}"]
        for number, space in enumerate(spaces):
            told = {"MASTER_ADDR": ADDRESS + "1", "MASTER_PORT": PORT, "NODE_RANK": str(number)}
            told |= {"GLOO_SOCKET_IFNAME": INTERFACE, "OMP_NUM_THREADS": "1"}
            words = ["ip", "netns", "exec", space, *command]
            workers.append(subprocess.Popen(words, env=os.environ | told))
        try:
            while not (failed := any(each.poll() for each in workers)):
                if all(each.poll() == 0 for each in workers):
                    break
                time.sleep(0.1)
        finally:
            for each in workers:
                each.kill()
        if failed:
            raise SystemExit(f"Training with {name} failed; its last lines are above.")
        found: dict[str, Any] = json.loads(out.read_text())
    return found


@contextlib.contextmanager
def link(mbit: float) -> Iterator[list[str]]:
    """Make two network namespaces, joined by a link of so many 10⁶ bits per second."""
    spaces = [f"speedup{os.getpid()}-{number}" for number in range(WORKERS)]

    def tell(words: str) -> None:
        subprocess.run(words.split(), check=True, capture_output=True, timeout=30)

    try:
        for space in spaces:
            tell(f"ip netns add {space}")
        one, two = spaces
        tell(f"ip -n {one} link add {INTERFACE} type veth peer name {INTERFACE} netns {two}")
        burst = max(128 * 1024, int(mbit * 750))  # bytes: 6 ms at this speed
        for number, space in enumerate(spaces):
            tell(f"ip -n {space} addr add {ADDRESS}{number + 1}/24 dev {INTERFACE}")
            for name in ("lo", INTERFACE):
                tell(f"ip -n {space} link set {name} up")
            limit = f"tbf rate {mbit}mbit burst {burst} latency 200ms"
            tell(f"tc -n {space} qdisc add dev {INTERFACE} root {limit}")
        yield spaces
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=30)


def may_make_links(mbit: float) -> bool:
    """Return whether this user may make a link, on this machine: root in a container may not."""
    try:
        with link(mbit):
            return True
    except (OSError, subprocess.SubprocessError):
        return False


def predict(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Train with two simulated workers; return predicted seconds of a step in the second epoch."""
    watch, method = Watch(), name.removeprefix("compressed_").removeprefix("ddp").strip("_")
    compressor = Cast("float16") if name == HOOK else method or "identity"
    network = NetworkModel(options.mbit / 1000)
    strategy = SimulatedDDPStrategy(compressor, workers=WORKERS, network=network)
    callbacks = [watch, CompressionMonitor()]
    trainer = train(strategy, options, WORKERS * options.steps, callbacks=callbacks)
    epoch = {n: float(v) for n, v in trainer.callback_metrics.items()}
    step = sum(epoch.get(f"compression_epoch/{part}", 0.0) for part in SPENT)
    watch.seconds = [step * number for number in range(1, len(watch.losses) + 1)]
    return summary(name, watch, step, epoch["compression_epoch/wire_bytes"])


def draw(runs: list[dict[str, Any]], path: Path) -> None:
    """Draw the losses over time: an SVG has colours for light and for dark pages."""
    from matplotlib.figure import Figure

    from lightning_gc.methods import plot_style

    def panel(figure: Figure) -> None:
        axes = figure.subplots()
        colours = (plot_style.MUTED, plot_style.PEER, plot_style.SERIES[0])
        for run, colour in zip(runs, colours, strict=True):
            axes.plot(run["seconds"], run["losses"], color=colour, lw=2, label=run["strategy"])
        axes.set(xlabel="seconds", ylabel="training loss")
        axes.legend(frameon=False)

    if path.suffix == ".svg":
        path.write_bytes(plot_style.svg(panel, path.stem))
    else:
        figure = Figure(figsize=(7, 4), layout="constrained")
        panel(figure)
        figure.savefig(path, dpi=150)


def parse() -> argparse.Namespace:
    """Return the command line; ``--work`` and ``--out`` are for the workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add = parser.add_argument
    add("--model", choices=KINDS, default="text", help="what is trained (default: %(default)s)")
    add("--mbit", type=float, default=200, help="the link, in 10⁶ bits/s (default: %(default)s)")
    add("--steps", type=int, default=100, help="steps of each run (default: %(default)s)")
    after = "strategy to compare with plain DDP (default: %(default)s)"
    add("--after", default="compressed_ddp_auto", help=after)
    add("--picture", type=Path, default=Path("first_speedup.png"), help="(default: %(default)s)")
    add("--simulate", action="store_true", help="simulate both workers, here too")
    add("--work", help=argparse.SUPPRESS)
    add("--out", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.steps < 4:  # the first half of a run is not measured
        parser.error(f"--steps {options.steps}: give 4 or more, such as 100.")
    if not 0 < options.mbit < float("inf"):
        parser.error(f"--mbit {options.mbit:g}: give a number above 0, such as 200.")
    if options.after not in StrategyRegistry:
        known = list(StrategyRegistry)
        near = difflib.get_close_matches(options.after, known, n=1) or ["compressed_ddp_topk"]
        parser.error(f"--after {options.after} is not a strategy; give a name such as {near[0]}.")
    return options


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> None:
    """Compare and print."""
    options = parse()
    for package in ("pytorch_lightning", "lightning_fabric"):
        logging.getLogger(package).setLevel(logging.WARNING)
    for unread in (".*is deprecated", ".*not have many workers", ".*no logger to write to"):
        warnings.filterwarnings("ignore", message=unread)
    if options.work:
        work(options)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that processes and link are removed
    real = not options.simulate and may_make_links(options.mbit)
    if not real and not options.simulate:
        say("No link can be made here: that needs Linux, root and iproute2. Seconds are predicted.")
    how = "Two processes train" if real else "One process simulates two workers that train"
    say(f"{how} {options.steps} steps three times, over a link of {options.mbit:g} Mbit/s.")
    runs = []
    for name in ("ddp", HOOK, options.after):
        say(f"Training with strategy={name!r} ...")
        runs.append((measure if real else predict)(name, options))
    say(f"\n{'strategy':24} {'s/step':>8} {'MB/step':>8} {'loss':>8}")
    for run in runs:
        say(f"{run['strategy']:24} {run['step']:8.3f} {run['bytes'] / 1e6:8.2f} {run['loss']:8.3f}")
    *others, after = runs
    say("")
    for each in others:
        times, less = each["step"] / after["step"], each["bytes"] / after["bytes"]
        how = f"{times:.2f} times as fast, with {less:.1f} times fewer bytes"
        say(f"Compared with {each['strategy']} a step is {how}.")
    try:
        draw(runs, options.picture)
    except ImportError:
        say("No picture without matplotlib.")
    else:
        say(f"Losses over time: {options.picture}")


if __name__ == "__main__":
    main()
