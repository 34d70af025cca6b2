"""Can the advice be trusted? Its link probe, predictions and verdicts on links of a known speed.

``probe``: rate and latency that the probe finds, beside those of the shaped links. ``predict``: on
every link an advice with its turns; from each, predictions for the other links, beside what was
measured there; and the regret of each verdict, the suggested row's seconds over the best measured
one's. ``repeat``: how often the same verdict comes out. Workers are processes in network
namespaces. Needs Linux, root and iproute2.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import statistics
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from dated_page import say
from models import MODELS, Network, build
from namespaces import Link, check_privileges, launch, network
from pytorch_lightning import LightningDataModule

from lightning_gc.advice import advise
from lightning_gc.advice.description import link_of
from lightning_gc.advice.link_probe import probe
from lightning_gc.advice.prediction import predict
from lightning_gc.bench.baselines import PLAIN
from lightning_gc.methods.text_table import markdown
from lightning_gc.transports import Distributed
from lightning_gc.transports.link import KINDS, NOMINAL, at_rate, fit_with_knee

LIMIT = timedelta(seconds=120)
ENOUGH = 32


class Benched(Network):
    """One of ``models.MODELS``."""

    def __init__(self, name: str) -> None:
        made, _ = build(name, 1, 0)
        super().__init__(made.net, made.rate, made.clip, made.optimizer)


class Batches(LightningDataModule):
    """Batches of it, each worker's own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.which = name

    def train_dataloader(self) -> Any:
        """Return more batches than a turn takes."""
        return build(self.which, ENOUGH, 1 + int(os.environ.get("RANK", "0")))[1]


def sections(name: str) -> dict[str, Any]:
    """Return what a file would say."""
    return {
        "model": {"class_path": "advice.Benched", "init_args": {"name": name}},
        "data": {"class_path": "advice.Batches", "init_args": {"name": name}},
        "trainer": {"accelerator": "cpu", "max_epochs": 1, "use_distributed_sampler": False},
    }


def work(options: argparse.Namespace) -> Any:
    """Be one worker."""
    torch.set_num_threads(1)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    if options.what == "probe":
        return probed()
    began = time.monotonic()
    advice = advise(sections(options.model[0]), budget_seconds=options.budget_seconds)
    took = time.monotonic() - began
    compressed = frozenset(advice.situation.names)
    known = dict.fromkeys(advice.methods, compressed)
    others = {}
    for mbit in options.mbit:
        there = replace(
            advice.situation,
            links=at_rate(advice.situation.links, link_of(f"{mbit:g}mbit")),
        )
        others[str(mbit)] = {row.name: row.seconds for row in predict(there, known)}
    return {
        "measured": advice.measured,
        "predicted": {row.name: row.seconds for row in advice.rows},
        "bytes": {row.name: row.nbytes for row in advice.rows},
        "others": others,
        "choice": advice.verdict and advice.verdict.choice,
        "verdict": str(advice.verdict),
        "table": markdown(*advice.table()),
        "facts": {
            **vars(advice.situation.module),
            "contention": advice.situation.contention,
            "overhead": advice.situation.overhead,
        },
        "seconds": took,
    }


def probed() -> Any:
    """Return the fitted links in one worker."""
    dist.init_process_group("gloo", timeout=LIMIT)
    began = time.monotonic()
    found = probe(Distributed(), torch.device("cpu"))
    fitted = {kind: fit_with_knee(found[kind]) for kind in KINDS}
    rows = {
        kind: [
            fitted[kind].gbps,
            fitted[kind].latency_us,
            max(  # the largest relative error of the fit
                abs(fitted[kind].seconds(each.messages, each.nbytes) / each.seconds - 1)
                for each in found[kind]
            ),
        ]
        for kind in KINDS
    }
    took = time.monotonic() - began
    dist.barrier()
    dist.destroy_process_group()
    return {"rows": rows, "seconds": took}


def probes(options: argparse.Namespace) -> str:
    """Return the table of probes."""
    lines = []
    for workers in options.workers:
        for mbit in options.mbit:
            for delay in options.delay_ms:
                link = Link(mbit, delay)
                with network(workers, link) as spaces:
                    (answer, *_) = launch(__file__, ["probe", "--worker"], spaces, timeout=300)
                cells = [str(workers), str(link), f"{answer['seconds']:.1f}"]
                for gbps, latency, off in answer["rows"].values():
                    share = 1000 * gbps / mbit / NOMINAL - 1
                    late = latency / 1000 - delay
                    cells.append(f"{share:+.1%}, {late:+.3f} ms, {off:.0%}")
                lines.append(cells)
                say(" | ".join(cells))
    columns = ("W", "link", "s", *KINDS)
    return (
        "Rate beside 96 % of the nominal one, latency beside the link's delay, and the largest "
        f"relative error of the fit.\n\n{markdown(columns, lines)}"
    )


def predictions(options: argparse.Namespace) -> str:
    """Return the tables of predictions beside measurements, and of verdicts."""
    answers: dict[tuple[int, str, float], Any] = {}
    for workers in options.workers:
        for model in options.model:
            for mbit in options.mbit:
                answers[workers, model, mbit] = advised(options, workers, model, mbit)
                say(f"{workers}, {model}, {mbit:g}: {answers[workers, model, mbit]['verdict']}")
    lines, own, held = [], [], []
    for (workers, model, mbit), answer in answers.items():
        measured = {n: row["seconds"] for n, row in answer["measured"].items()}
        here = [
            answer["predicted"][n] / s - 1 for n, s in measured.items() if n in answer["predicted"]
        ]
        there = []
        for other in options.mbit:
            source = answers[workers, model, other]["others"][str(mbit)]
            if other != mbit:
                there += [source[n] / s - 1 for n, s in measured.items() if n in source]
        sent = [
            answer["bytes"][n] / row["bytes"] - 1
            for n, row in answer["measured"].items()
            if answer["bytes"].get(n) and row["bytes"]
        ]
        best = min(measured.values())
        chosen = measured[answer["choice"] or PLAIN]
        own += here
        held += there
        lines.append(
            [
                *(str(workers), model, f"{mbit:g}", answer["choice"] or "nothing"),
                *(f"{chosen / best - 1:.1%}", worst(here), worst(there), worst(sent)),
                f"{answer['seconds']:.0f}",
            ]
        )
    details = "\n".join(
        f"## {workers} workers, {model}, {mbit:g} Mbit/s\n\n{answer['table']}\n"
        f"{answer['verdict']}\n\n"
        f"{', '.join(f'{name} {value:.4f}' for name, value in answer['facts'].items())}\n"
        for (workers, model, mbit), answer in answers.items()
    )
    columns = ("W", "model", "Mbit/s", "suggested", "regret", "error here", "error held out",
               "bytes off", "s")  # fmt: skip
    table = markdown(columns, lines, left=columns[1:4:2])
    return (
        f"{table}\nErrors are relative, median and worst. Here {worst(own)}, from other links "
        f"{worst(held)}.\n\n{details}"
    )


def repeated(options: argparse.Namespace) -> str:
    """Return how often each verdict came out."""
    lines = []
    for model in options.model:
        for mbit in options.mbit:
            found = [
                advised(options, options.workers[0], model, mbit)["verdict"].split(":")[0]
                for _ in range(options.times)
            ]
            counts = collections.Counter(found).most_common()
            lines.append([model, f"{mbit:g}", "; ".join(f"{n} x {word}" for word, n in counts)])
            say(" | ".join(lines[-1]))
    return markdown(("model", "Mbit/s", "verdicts"), lines)


def advised(options: argparse.Namespace, workers: int, model: str, mbit: float) -> Any:
    """Return worker 0's advice on a link."""
    arguments = [options.what, "--worker", "--model", model]
    arguments += ["--mbit", *map(str, options.mbit)]
    arguments += [f"--budget-seconds={options.budget_seconds}"]
    # What a shaper of 10 Gbit/s lets pass is more than this machine sends.
    with network(workers, Link(mbit)) as spaces:
        return launch(__file__, arguments, spaces, timeout=900)[0]


def worst(errors: list[float]) -> str:
    """Return the median and the largest absolute error."""
    if not errors:
        return ""
    sizes = [abs(error) for error in errors]
    return f"{statistics.median(sizes):.1%}, {max(sizes):.1%}"


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("what", choices=("probe", "predict", "repeat"))
    add("--workers", type=int, nargs="+", default=[2])
    default = "(default: 50 200 1000 to probe, else 100 1000 10000)"
    add("--mbit", type=float, nargs="+", help=default)
    add("--delay-ms", type=float, nargs="+", default=[0.0, 20.0], help="of the probe's links")
    add("--model", nargs="+", choices=MODELS, default=["lstm8", "resnet18", "mlp"])
    add("--budget-seconds", type=float, default=120.0)
    add("--times", type=int, default=10, help="of repeat")
    add("--out", type=Path, default=dated_page.RESULTS)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.mbit is None:
        options.mbit = [50.0, 200.0, 1000.0] if options.what == "probe" else [100.0, 1e3, 1e4]
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("The benchmark of the advice")
    kinds = {"probe": probes, "predict": predictions, "repeat": repeated}
    text = kinds[options.what](options)
    head = f"{dated_page.title(f'Advice: {options.what}')}\n\n"
    head += f"`python benchmarks/advice.py {' '.join(sys.argv[1:])}`, {os.cpu_count()} CPUs.\n\n"
    stem = dated_page.write(options.out, f"advice_{options.what}", head + text)
    say(f"\n{text}\n{stem}.md")


if __name__ == "__main__":
    main()
