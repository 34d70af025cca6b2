"""Seconds and bytes of a step of a model in shards, two nodes of two ranks, on links of a speed.

    python benchmarks/sharded_links.py --mbit 100 1000        # needs Linux, root and iproute2

Each node is a network namespace, so that its ranks reach each other as fast as the machine can, and
the other node's over a shaped link. A small transformer is trained by AdamW, in plain torch: by
DDP, by torch's HSDP with gradients reduced in float32 and in bfloat16, and with what replicas or
nodes exchange compressed by ``attach``; sharded within nodes without any exchange between them is
the limit. Ways take turns. All ranks share this machine's cores: ratios in a table are what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import dated_page
import torch
import torch.distributed as dist
from models import MODELS, build
from namespaces import Link, check_privileges, launch, network, sent_bytes
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import QSGD, Hierarchical, PowerSGD, TopK, attach
from lightning_gc.compressors import Compressor
from lightning_gc.core.text_table import markdown
from lightning_gc.schemes import Scheme

NODES, LOCAL, WARMUP = 2, 2, 3
LIMIT = timedelta(seconds=120)
TOPK = TopK(0.01, value_dtype="bfloat16")


def in_shards(dimensions: int, dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    """Return what shards a model: on the ranks of the node, or on replicas and shards."""

    def shard(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (NODES, LOCAL), mesh_dim_names=("replicate", "shard"))
        where = mesh if dimensions == 2 else mesh["shard"]
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        for part in (*model.blocks.layers, model):
            fully_shard(part, mesh=where, mp_policy=policy)
        return model

    return shard


IN_NODES = Hierarchical(LOCAL)
WAYS: dict[str, tuple[Callable[[Any], Any], Compressor | None, Scheme | None]] = {
    "sharded within nodes, nothing between": (in_shards(1), None, None),
    "DDP": (DistributedDataParallel, None, None),
    "torch's HSDP": (in_shards(2), None, None),
    "torch's HSDP, bfloat16": (in_shards(2, torch.bfloat16), None, None),
    "DDP, TopK(0.01)": (DistributedDataParallel, TOPK, None),
    "DDP in nodes, TopK(0.01)": (DistributedDataParallel, TOPK, IN_NODES),
    "DDP in nodes, QSGD(4)": (DistributedDataParallel, QSGD(4), IN_NODES),
    "HSDP, TopK(0.01)": (in_shards(2), TOPK, None),
    "HSDP, QSGD(4)": (in_shards(2), QSGD(4), None),
    "HSDP, PowerSGD(2)": (in_shards(2), PowerSGD(2), None),
}


def turn(way: str, steps: int) -> dict[str, list[float]]:
    """Train for so many steps after the warm-up; return seconds, and the node's bytes, of each."""
    wrap, compressor, scheme = WAYS[way]
    torch.manual_seed(0)
    module, loader = build("gpt", WARMUP + steps, dist.get_rank())
    optimizer_of, rate, clip = module.optimizer, module.rate, module.clip
    model = wrap(module.net)
    optimizer = optimizer_of(model.parameters(), lr=rate)
    handle = None
    if compressor is not None:
        options: Any = {"scheme": scheme, "optimizers": optimizer, "timeout": LIMIT}
        handle = attach(model, compressor, **options)
    found: dict[str, list[float]] = {"seconds": [], "between": [], "inside": []}
    for step, batch in enumerate(loader):
        dist.barrier()
        before, began = (sent_bytes(), sent_bytes("lo")), time.perf_counter()
        optimizer.zero_grad()
        words, following = batch
        logits = model(words)
        nn.functional.cross_entropy(logits.flatten(0, -2), following.flatten()).backward()
        assert clip is not None
        nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        seconds = time.perf_counter() - began
        dist.barrier()
        if step >= WARMUP:
            found["seconds"].append(seconds)
            found["between"].append(sent_bytes() - before[0])
            found["inside"].append(sent_bytes("lo") - before[1])
    if handle is not None:
        handle.close()
    return found


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways by turns, in one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for way in WAYS:
            for figure, values in turn(way, options.steps).items():
                found.setdefault(way, {}).setdefault(figure, []).extend(values)
    dist.destroy_process_group()
    return found


def table(answers: list[dict[str, Any]]) -> tuple[str, dict[str, dict[str, float]]]:
    """Return a Markdown table of medians, means over ranks, and its numbers."""
    rows = {
        way: {
            figure: statistics.mean(statistics.median(each[way][figure]) for each in answers)
            for figure in ("seconds", "between", "inside")
        }
        for way in WAYS
    }
    hsdp = rows["torch's HSDP"]["seconds"]
    lines = [
        [
            way,
            f"{row['seconds']:.3f}",
            f"{hsdp / row['seconds']:.2f}",
            f"{row['between']:,.0f}",
            f"{row['inside']:,.0f}",
        ]
        for way, row in rows.items()
    ]
    head = ["", "s per step", "times faster than torch's HSDP", "bytes between", "bytes inside"]
    return markdown(head, lines), rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--mbit", type=float, nargs="+", default=[100, 1000], help="of the link between nodes")
    add("--rounds", type=int, default=2, help="turns of each way")
    add("--steps", type=int, default=6, help="measured steps of a turn")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder of the dated files")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("The benchmark of models in shards")
    text, found = "", {}
    for mbit in options.mbit:
        link = Link(mbit)
        arguments = ["--worker", f"--rounds={options.rounds}", f"--steps={options.steps}"]
        with network(NODES, link) as spaces:
            answers = launch(__file__, arguments, spaces, timeout=1500, local=LOCAL)
        shown, found[str(link)] = table(answers)
        part = f"## {MODELS['gpt']}, {NODES} nodes of {LOCAL} ranks, {link} between\n\n{shown}"
        dated_page.say(part)
        text += f"{part}\n"
    versions = dated_page.versions("lightning-gc", "torch")
    head = f"""{dated_page.title("A model in shards on slow links")}

`python benchmarks/sharded_links.py` with Python {sys.version.split()[0]}, {versions},
{os.cpu_count()} CPUs. Medians of {options.rounds} x {options.steps} steps, means over ranks; bytes
of a node, by its interfaces' counters.

"""
    dated_page.write(options.out, "sharded_links", head + text, found)


if __name__ == "__main__":
    main()
