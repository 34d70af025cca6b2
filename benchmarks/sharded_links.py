"""Seconds and bytes of a step of a model in shards, on four ranks and links of a chosen speed.

    python benchmarks/sharded_links.py --mbit 100 1000        # needs Linux, root and iproute2
    python benchmarks/sharded_links.py --mbit 100 1000 --fsdp
    python benchmarks/sharded_links.py --mbit 100 1000 --tensor-parallel

Each node is a network namespace, so that its ranks reach each other as fast as the machine can, and
another node's over a shaped link. A small transformer is trained by AdamW, in plain torch. Ways
take turns. All ranks share this machine's cores: ratios in a table are what counts.

Two nodes of two ranks: by DDP, by torch's HSDP with gradients reduced in float32 and in bfloat16,
and with what replicas or nodes exchange compressed by ``attach``; sharded within nodes without any
exchange between them is the limit. DDP has torch's fp16 hook too.

``--fsdp``, four nodes of one rank: by FSDP2, and with its gradients and weights compressed by
``attach``. Gloo reduce-scatters by an all-reduce, so FSDP2 itself sends a third more here than over
NCCL. ``--tensor-parallel``, two nodes whose two ranks have the feed-forward layers together and
copies of the rest: by torch, with gradients reduced in float32 and in bfloat16, and compressed by
``attach``.
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
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import QSGD, Hierarchical, Int8, PowerSGD, TopK, WeightDifferences, attach
from lightning_gc.compressors import Compressor
from lightning_gc.methods.text_table import markdown

RANKS, WARMUP = 4, 3
LIMIT = timedelta(seconds=120)
TOPK = TopK(0.01, value_dtype="bfloat16")


def in_shards(dimensions: int, dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    """Return what shards a model: on the ranks of the node, or on replicas and shards."""

    def shard(model: Any) -> Any:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        where = mesh if dimensions == 2 else mesh["shard"]
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        for part in (*model.blocks.layers, model):
            fully_shard(part, mesh=where, mp_policy=policy)
        return model

    return shard


def on_all_ranks(dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    """Return what shards a model over all ranks; it computes and communicates in ``dtype``."""

    def shard(model: Any) -> Any:
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for part in (*model.blocks.layers, model):
            fully_shard(part, mp_policy=policy)
        return model

    return shard


def cut(dtype: torch.dtype | None = None) -> Callable[[Any], Any]:
    """Return what cuts feed-forward layers over the ranks of a node; nodes are replicas."""

    def shard(model: Any) -> Any:
        names = ("replicate", "shard", "tensor")
        mesh = init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=names)
        for part in model.blocks.layers:
            plan = {"linear1": ColwiseParallel(), "linear2": RowwiseParallel()}
            parallelize_module(part, mesh["tensor"], plan)
        policy = MixedPrecisionPolicy(reduce_dtype=dtype)
        for part in (*model.blocks.layers, model):
            fully_shard(part, mesh=mesh["replicate", "shard"], mp_policy=policy)
        return model

    return shard


def hooked(model: nn.Module) -> DistributedDataParallel:
    """Return the model in DDP with torch's fp16 hook; over Gloo it has no bf16 hook."""
    ddp = DistributedDataParallel(model)
    ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
    return ddp


Way = tuple[Callable[[Any], Any], Compressor | None, dict[str, Any]]
IN_NODES = {"scheme": Hierarchical(2)}
BFLOAT16 = torch.bfloat16
HSDP: dict[str, Way] = {
    "torch's HSDP": (in_shards(2), None, {}),
    "sharded within nodes, nothing between": (in_shards(1), None, {}),
    "DDP": (DistributedDataParallel, None, {}),
    "torch's HSDP, bfloat16": (in_shards(2, BFLOAT16), None, {}),
    "DDP, fp16 hook": (hooked, None, {}),
    "DDP, TopK(0.01)": (DistributedDataParallel, TOPK, {}),
    "DDP in nodes, TopK(0.01)": (DistributedDataParallel, TOPK, IN_NODES),
    "DDP in nodes, QSGD(4)": (DistributedDataParallel, QSGD(4), IN_NODES),
    "HSDP, TopK(0.01)": (in_shards(2), TOPK, {}),
    "HSDP, QSGD(4)": (in_shards(2), QSGD(4), {}),
    "HSDP, PowerSGD(2)": (in_shards(2), PowerSGD(2), {}),
}
EIGHT = {"weights": Int8(block_size=256)}
FSDP: dict[str, Way] = {
    "FSDP2": (on_all_ranks(), None, {}),
    "FSDP2, bfloat16": (on_all_ranks(BFLOAT16), None, {}),
    "QSGD(4)": (on_all_ranks(), QSGD(4), {}),
    "QSGD(4), weights in 8 bits": (on_all_ranks(), QSGD(4), EIGHT),
    "the same, bfloat16": (on_all_ranks(BFLOAT16), QSGD(4), EIGHT),
    "QSGD(4), differences in 4 bits": (
        on_all_ranks(),
        QSGD(4),
        {"weights": WeightDifferences()},
    ),
}
TENSOR_PARALLEL: dict[str, Way] = {
    "torch": (cut(), None, {}),
    "torch, bfloat16": (cut(BFLOAT16), None, {}),
    "TopK(0.01)": (cut(), TOPK, {}),
    "QSGD(4)": (cut(), QSGD(4), {}),
    "PowerSGD(2)": (cut(), PowerSGD(2), {}),
}
KINDS = {"": HSDP, "--fsdp": FSDP, "--tensor-parallel": TENSOR_PARALLEL}


def by_mesh(model: nn.Module) -> list[list[nn.Parameter]]:
    """Return the parameters of each mesh that some are on."""
    found: dict[Any, list[nn.Parameter]] = {}
    for param in model.parameters():
        found.setdefault(getattr(param, "device_mesh", None), []).append(param)
    return list(found.values())


def turn(way: Way, steps: int, own: int) -> dict[str, list[float]]:
    """Train for so many steps after the warm-up; return seconds, and the node's bytes, of each.

    ``own``: number of this rank's data.
    """
    wrap, compressor, given = way
    torch.manual_seed(0)
    module, loader = build("gpt", WARMUP + steps, own)
    optimizer_of, rate, clip = module.optimizer, module.rate, module.clip
    model = wrap(module.net)
    optimizer = optimizer_of(model.parameters(), lr=rate)
    handle = None
    if compressor is not None:
        handle = attach(model, compressor, optimizers=optimizer, **given)
    found: dict[str, list[float]] = {"seconds": [], "between": [], "inside": [], "counted": []}
    for step, batch in enumerate(loader):
        dist.barrier()
        before, began = (sent_bytes(), sent_bytes("lo")), time.perf_counter()
        optimizer.zero_grad()
        words, following = batch
        logits = model(words)
        nn.functional.cross_entropy(logits.flatten(0, -2), following.flatten()).backward()
        assert clip is not None
        for params in by_mesh(model):  # torch takes no norm over several
            nn.utils.clip_grad_norm_(params, clip)
        optimizer.step()
        seconds = time.perf_counter() - began
        dist.barrier()
        if step >= WARMUP:
            found["seconds"].append(seconds)
            found["between"].append(sent_bytes() - before[0])
            found["inside"].append(sent_bytes("lo") - before[1])
            found["counted"].append(0 if handle is None else handle.account().wire_bytes)
        elif handle is not None:
            handle.account()
    if handle is not None:
        handle.close()
    return found


def work(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all ways by turns, in one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    own = dist.get_rank() // (2 if options.kind == "--tensor-parallel" else 1)
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(options.rounds):
        for name, way in KINDS[options.kind].items():
            for figure, values in turn(way, options.steps, own).items():
                found.setdefault(name, {}).setdefault(figure, []).extend(values)
    dist.destroy_process_group()
    return found


def table(answers: list[dict[str, Any]]) -> tuple[str, dict[str, dict[str, float]]]:
    """Return a Markdown table of medians, means over ranks, and its numbers."""
    rows = {
        way: {
            figure: statistics.mean(statistics.median(each[way][figure]) for each in answers)
            for figure in ("seconds", "between", "inside", "counted")
        }
        for way in answers[0]
    }
    first = next(iter(rows))
    plain = rows[first]["seconds"]
    lines = [
        [
            way,
            f"{row['seconds']:.3f}",
            f"{plain / row['seconds']:.2f}",
            f"{row['between']:,.0f}",
            f"{row['inside']:,.0f}",
            f"{row['counted']:,.0f}" if row["counted"] else "",
        ]
        for way, row in rows.items()
    ]
    head = ["", "s per step", f"times faster than {first}", "bytes between", "bytes inside"]
    head.append("counted by the account")
    return markdown(head, lines), rows


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--mbit", type=float, nargs="+", default=[100, 1000], help="of the link between nodes")
    add("--rounds", type=int, default=2, help="turns of each way")
    add("--steps", type=int, default=6, help="measured steps of a turn")
    add("--out", type=Path, default=dated_page.RESULTS, help="folder of the dated files")
    kind: dict[str, Any] = {"dest": "kind", "action": "store_const", "default": ""}
    add("--fsdp", const="--fsdp", help="sharded over all ranks, each a node", **kind)
    add("--tensor-parallel", const="--tensor-parallel", help="within nodes", **kind)
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        options.out.write_text(json.dumps(work(options)))
        return
    check_privileges("The benchmark of models in shards")
    text, found, nodes = "", {}, RANKS if options.kind == "--fsdp" else 2
    for mbit in options.mbit:
        link = Link(mbit)
        arguments = ["--worker", f"--rounds={options.rounds}", f"--steps={options.steps}"]
        arguments += [options.kind] if options.kind else []
        with network(nodes, link) as spaces:
            answers = launch(__file__, arguments, spaces, timeout=1500, local=RANKS // nodes)
        shown, found[str(link)] = table(answers)
        nodes_of = f"{nodes} nodes of {RANKS // nodes} ranks"
        part = f"## {MODELS['gpt']}, {nodes_of}, {link} between\n\n{shown}"
        dated_page.say(part)
        text += f"{part}\n"
    versions = dated_page.versions("lightning-gc", "torch")
    flag = f" {options.kind}".rstrip()
    head = f"""{dated_page.title("A model in shards on slow links")}

`python benchmarks/sharded_links.py{flag}` with Python {sys.version.split()[0]}, {versions},
{os.cpu_count()} CPUs. Medians of {options.rounds} x {options.steps} steps, means over ranks; bytes
of a node, by its interfaces' counters.

"""
    name = f"{(options.kind or 'sharded').strip('-').replace('-', '_')}_links"
    dated_page.write(options.out, name, head + text, found)


if __name__ == "__main__":
    main()
