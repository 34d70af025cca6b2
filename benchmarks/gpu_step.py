"""What compression costs a GPU: seconds and memory of a whole step of GPT-2, beside torch's hooks.

One worker trains GPT-2 (124 M parameters) over NCCL, in bfloat16 by autocast, with AdamW. With one
worker nothing travels, but everything is compressed, sent to itself and decoded: what a step takes
longer than without synchronisation is what a network must save. More workers add the decoding of
what they send where a method gathers payloads. Methods take turns; the medians of steps are shown.
Each runs with buckets of the size that DDP or the strategy chooses, and of 25 and 100 MiB.

The host's time of a step ends when all its work is queued. It includes waiting for the GPU if the
GPU is more than about a thousand operations behind. In a method's first turn some more steps run
under torch's profiler, which tells what the GPU is busy with.

Each turn prints one line, and is kept in a file. A second call measures only turns that the file
has not for this machine, these packages and these sources. So it may be ended at any time.
"""

from __future__ import annotations

import argparse
import gc as garbage
import json
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import dated_page
import torch
from pytorch_lightning import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

import lightning_gc as gc
from lightning_gc.bench.baselines import BASELINES, NONE, PLAIN, baseline_strategy
from lightning_gc.bench.method_run import WARMUP_STEPS, StepTimer
from lightning_gc.compressors import Compressor
from lightning_gc.lightning.for_pytorch_lightning import CompressedDDPStrategy
from lightning_gc.methods.text_table import markdown

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.gpu.machine import machine, sources

METHODS: dict[str, Compressor] = {
    "Identity()": gc.Identity(),
    "Cast()": gc.Cast(),
    "TopK(0.01)": gc.TopK(0.01),
    "TopK(0.01, selection='sampled')": gc.TopK(0.01, selection="sampled"),
    "RandomK(0.01)": gc.RandomK(0.01),
    "QSGD(4)": gc.QSGD(4),
    "EFSignSGD()": gc.EFSignSGD(),
    "Quantised(ChunkedTopK(), BinMeans(2))": gc.Quantised(gc.ChunkedTopK(), gc.BinMeans(2)),
    "PowerSGD(2)": gc.PowerSGD(2),
}
WORDS, LENGTH = 50_257, 1_024


class GPT2(LightningModule):
    """Twelve pre-norm blocks of width 768, learnt positions, the embedding tied; no dropout."""

    def __init__(self, width: int = 768, layers: int = 12, heads: int = 12) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, width)
        self.positions = nn.Embedding(LENGTH, width)
        block = nn.TransformerEncoderLayer(
            width, heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True
        )
        norm = nn.LayerNorm(width)
        self.blocks = nn.TransformerEncoder(block, layers, norm, enable_nested_tensor=False)
        for weight in (self.embedding.weight, self.positions.weight):
            nn.init.normal_(weight, std=0.02)
        mask = nn.Transformer.generate_square_subsequent_mask(LENGTH)
        self.register_buffer("mask", mask, persistent=False)

    def training_step(self, words: Tensor, index: int) -> Tensor:
        """Return the mean cross-entropy of each next word."""
        hidden = self.embedding(words[:, :-1]) + self.positions.weight
        hidden = self.blocks(hidden, self.mask, is_causal=True)
        logits = hidden @ self.embedding.weight.t()
        return nn.functional.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=3e-4, fused=True)


@dataclass(frozen=True)
class Case:
    """A method with buckets of one size.

    Attributes:
        method: of ``METHODS``, or a baseline.
        cap: DDP's ``bucket_cap_mb``; None: the strategy's choice.
    """

    method: str
    cap: int | None = None

    @property
    def name(self) -> str:
        """The method, and a size that is given."""
        return self.method if self.cap is None else f"{self.method}, buckets of {self.cap} MiB"

    def strategy(self) -> Any:
        """Return a new one."""
        sized: dict[str, Any] = {} if self.cap is None else {"bucket_cap_mb": self.cap}
        if self.method in METHODS:
            return CompressedDDPStrategy(
                METHODS[self.method], process_group_backend="nccl", **sized
            )
        return baseline_strategy(self.method, "nccl", **sized)


class Clock(StepTimer):
    """Also records how long the host takes to queue each step's work, and the most RAM.

    Args:
        steps: that count; the RAM of later ones does not.
    """

    def __init__(self, steps: int) -> None:
        super().__init__(lambda _: 0)
        self.counted, self.gib = steps, 0.0
        self.host: list[float] = []

    def on_train_batch_end(self, trainer: Any, _: Any, outputs: Any, *rest: Any) -> None:
        """Stop the host's clock, and then the step's."""
        self.host.append(time.perf_counter() - self.started)
        super().on_train_batch_end(trainer, _, outputs, *rest)
        if trainer.global_step <= self.counted:
            self.gib = torch.cuda.max_memory_allocated() / 2**30


TRACED = 3
"""Steps under the profiler."""


class Busy(Callback):
    """Traces some steps.

    Args:
        after: number of steps before them.
        steps: that are traced.

    Attributes:
        launches: operations of the GPU in a step: kernels, copies and fills.
        milliseconds: of a step in which the GPU works, operations side by side counted once.
        each: by the name of an operation, its milliseconds in a step.
    """

    def __init__(self, after: int, steps: int = TRACED) -> None:
        self.after, self.steps = after, steps
        self.launches = self.milliseconds = 0.0
        self.each: dict[str, float] = {}
        self.profiler = profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        """Start after the first steps."""
        if trainer.global_step == self.after:
            torch.cuda.synchronize()
            self.profiler.start()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        """Stop after the last of the traced steps, and add up."""
        if trainer.global_step != self.after + self.steps:
            return
        torch.cuda.synchronize()
        self.profiler.stop()
        events = [
            event
            for event in self.profiler.events()
            if event.device_type.name == "CUDA" and not event.is_user_annotation
        ]
        spans = sorted((e.time_range.start, e.time_range.end) for e in events)
        busy, until = 0.0, 0.0
        for start, end in spans:
            busy, until = busy + max(0.0, end - max(start, until)), max(until, end)
        self.launches, self.milliseconds = len(events) / self.steps, busy / self.steps / 1e3
        sums: dict[str, list[float]] = {}
        for event in events:
            sums.setdefault(event.name, []).append(event.time_range.elapsed_us())
        self.each = {name: sum(found) / self.steps / 1e3 for name, found in sums.items()}


@dataclass(frozen=True)
class Turn:
    """What one turn of a case has found.

    Attributes:
        case: as a name.
        number: of the turn, from 1.
        where: the machine, the packages, the sources and the settings of the run.
        seconds: of each measured step.
        host: seconds of the host for each.
        gib: allocated at most.
        buckets: how many are recorded in the end, of how many; empty for baselines.
        launches, milliseconds, each: as ``Busy`` has them, in the first turn.
    """

    case: str
    number: int
    where: str
    seconds: list[float]
    host: list[float]
    gib: float
    buckets: str = ""
    launches: float = 0.0
    milliseconds: float = 0.0
    each: dict[str, float] = field(default_factory=dict)

    def in_words(self) -> str:
        """Return the turn's line."""
        step, host = median([self.seconds]), median([self.host])
        line = f"{self.case}: {step:.1f} ms a step, {host:.1f} of the host"
        if self.launches:
            line += f"; the GPU works {self.milliseconds:.1f} in {self.launches:.0f} operations"
        return line + (f"; {self.buckets} buckets recorded" if self.buckets else "")

    def beside(self, base: Turn, most: int = 6) -> str:
        """Name the operations that take longer than in ``base``, with their milliseconds."""
        more = {name: each - base.each.get(name, 0.0) for name, each in self.each.items()}
        longest = sorted(more.items(), key=lambda item: -item[1])[:most]
        return ", ".join(f"{_short(name)} {ms:.2f}" for name, ms in longest if ms >= 0.05)


def kept(file: Path, where: str) -> dict[tuple[str, int], Turn]:
    """Return the turns in a file, by case and number; without a last line that was cut off."""
    found = {}
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            turn = Turn(**json.loads(line))
        except json.JSONDecodeError:
            continue
        if turn.where == where:
            found[turn.case, turn.number] = turn
    return found


def _short(name: str) -> str:
    """Return a kernel's name without its types and arguments."""
    for word in ("at::native::", "(anonymous namespace)::", "void "):
        name = name.replace(word, "")
    return name.split("<", 1)[0].split("(", 1)[0][:60]


def measure(case: Case, number: int, where: str, batch: int, steps: int) -> Turn:
    """Train from the same weights."""
    garbage.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    torch.cuda.reset_peak_memory_stats()
    last = WARMUP_STEPS + steps
    clock, busy, strategy = Clock(last), Busy(last), case.strategy()
    length = last + (TRACED if number == 1 else 0)
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        strategy=strategy,
        precision="bf16-mixed",
        max_steps=length,
        callbacks=[clock, *([busy] if number == 1 else [])],
        use_distributed_sampler=False,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    texts = torch.randint(WORDS, (batch * length, LENGTH + 1))
    with torch.device("cuda"):  # the host would take seconds to draw the weights
        model = GPT2()
    trainer.fit(model, DataLoader(texts, batch))  # type: ignore[arg-type]
    recorded = [
        layout.recorded is not None
        for engine in getattr(strategy, "engines", ())
        for layout in engine._recordings._known.values()
    ]
    return Turn(
        case.name,
        number,
        where,
        clock.seconds[WARMUP_STEPS:last],
        clock.host[WARMUP_STEPS:last],
        clock.gib,
        f"{sum(recorded)} of {len(recorded)}" if recorded else "",
        busy.launches,
        busy.milliseconds,
        busy.each,
    )


def median(turns: Sequence[Sequence[float]]) -> float:
    """Return the median of the seconds of all turns, in milliseconds."""
    return 1e3 * statistics.median(second for turn in turns for second in turn)


def page(cases: Sequence[Case], turns: Mapping[tuple[str, int], Turn], batch: int) -> str:
    """Return the page of all turns that were measured."""
    by_case = {
        case.name: [turn for turn in turns.values() if turn.case == case.name] for case in cases
    }
    by_case = {name: found for name, found in by_case.items() if found}
    steps = {name: median([turn.seconds for turn in found]) for name, found in by_case.items()}
    hosts = {name: median([turn.host for turn in found]) for name, found in by_case.items()}
    gib = {name: max(turn.gib for turn in found) for name, found in by_case.items()}
    traced = {name: turns[name, 1] for name in by_case if (name, 1) in turns}
    rows, longest = list[list[str]](), list[list[str]]()
    for name, step in steps.items():
        more = f"{step - steps[NONE]:+.1f}" if NONE in steps else ""
        apart = f"{gib[name] - gib[PLAIN]:+.2f}" if PLAIN in gib else ""
        work = ["", "", ""]
        if name in traced:
            one = traced[name]
            work = [f"{one.launches:.0f}", f"{one.milliseconds:.1f}", one.buckets]
            if NONE in traced:
                longest.append([name, one.beside(traced[NONE])])
        rows.append(
            [name, f"{step:.1f}", more, f"{hosts[name]:.1f}", *work, f"{gib[name]:.2f}", apart]
        )
    head = ["method", "ms a step", f"beside {NONE}", "ms of the host", "operations", "ms busy"]
    head += ["recorded buckets", "GiB", f"beside {PLAIN}"]
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    known = dated_page.versions("torch", "triton", "pytorch-lightning")
    counts = sorted({len(turn.seconds) for turn in turns.values()})
    most = max(map(len, by_case.values()))
    return f"""{dated_page.title("What compression costs a GPU")}

`python benchmarks/gpu_step.py --batch {batch}` on one {torch.cuda.get_device_name()} with {known},
NCCL {nccl}: GPT-2, {batch} texts of 1,024 words a step, bfloat16 by autocast, AdamW; medians of
up to {most} turns of {", ".join(map(str, counts))} steps. One worker: everything is compressed and
decoded, nothing travels. Where no size of buckets is given, DDP or the strategy has chosen it. The
host's time ends when a step's work is queued. torch's profiler counted operations of the GPU in a
step, and the milliseconds in which at least one runs, in steps after the measured ones.

{markdown(head, rows, left=("method",))}
Operations that take longer than in {NONE!r}, in milliseconds of a step:

{markdown(("method", "operations"), longest, left=("method", "operations"))}"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    names = [NONE, PLAIN, *METHODS, *(name for name in BASELINES if name not in (NONE, PLAIN))]
    add("--methods", nargs="+", choices=names, default=names, metavar="METHOD")
    sizes = "MiB, besides the chosen size (default: 25 100)"
    add("--buckets", nargs="*", type=int, default=[25, 100], metavar="SIZE", help=sizes)
    add("--batch", type=int, default=8, help="texts of 1,024 words (default: %(default)s)")
    add("--steps", type=int, default=20, help="in each turn (default: %(default)s)")
    add("--rounds", type=int, default=3, help="turns of each method (default: %(default)s)")
    rows = Path("runs/gpu_step.jsonl")
    add("--rows", type=Path, default=rows, help="file of turns (default: %(default)s)")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("this needs a GPU; on the CPU there is engine_step.py.")
    torch.set_float32_matmul_precision("high")
    settings = f"{options.batch} texts, {options.steps} steps, sources {sources()}"
    where = "; ".join([*machine(), settings])
    cases = [
        Case(name, cap)
        for name in options.methods
        for cap in ((None,) if name == NONE else (*options.buckets, None))
    ]
    options.rows.parent.mkdir(parents=True, exist_ok=True)
    turns = kept(options.rows, where)
    for number in range(1, options.rounds + 1):
        for case in cases:
            if (case.name, number) in turns:
                continue
            turn = measure(case, number, where, options.batch, options.steps)
            turns[case.name, number] = turn
            with options.rows.open("a") as file:
                file.write(f"\n{json.dumps(asdict(turn))}\n")  # the last line may be cut off
            dated_page.say(turn.in_words())
    written = dated_page.write(options.out, "gpu_step", page(cases, turns, options.batch))
    dated_page.say(f"{len(turns)} turns of {len(cases)} cases are in {written}.md")


if __name__ == "__main__":
    main()
