"""The comparison: all methods by turns, several times over, and what all workers have seen."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from lightning_gc.bench.baselines import NONE, PEERS
from lightning_gc.bench.method_run import Ground, Taken, turn
from lightning_gc.transports.distributed import Distributed, gather_text
from lightning_gc.tuning.method import Method

Say = Callable[[str], None]
Found = dict[str, list[Taken]]


def compare(
    ground: Ground, methods: Mapping[str, Method], rounds: int, device: torch.device, say: Say
) -> dict[str, dict[str, Any]]:
    """Measure and return a row per method, the same on all workers.

    Needs a process group. Within a run ratios can be trusted, for what else the machines do hits
    all methods alike: that is what the turns are for.

    Args:
        ground: what all have in common.
        methods: ours; the peers and the limit are always there.
        rounds: turns of each method.
        device: one that the group's backend can send from.
        say: hears of each turn.

    Raises:
        BenchError: a method has not got through.
    """
    found: Found = {name: [] for name in (*PEERS, *methods)}
    for number in range(1, rounds + 1):
        for name, turns in found.items():
            taken = turn(ground, name, methods.get(name))
            turns.append(taken)
            middle = statistics.median(taken.seconds)
            say(f"round {number} of {rounds}  {name}: {middle:.4f} s per step")
    ours = json.dumps({name: [vars(each) for each in turns] for name, turns in found.items()})
    texts = gather_text(ours, Distributed(), device)
    answers = [
        {name: [Taken(**each) for each in turns] for name, turns in json.loads(text).items()}
        for text in texts
    ]
    return dict(_rows(answers, methods))


def _rows(
    answers: Sequence[Found], methods: Mapping[str, Method]
) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in answers[0]:
        taken = [each for answer in answers for each in answer[name]]
        seconds = sorted(second for each in taken for second in each.seconds)
        low, middle, high = statistics.quantiles(seconds, n=4, method="inclusive")
        row: dict[str, Any] = {
            "seconds": middle,
            "low": low,
            "high": high,
            "bytes": statistics.mean(each.nbytes for each in taken),
            "source": "counted" if name in methods else "" if name == NONE else "computed",
        }
        losses = [each.loss for each in taken if each.loss is not None]
        if losses:
            row["loss"] = statistics.fmean(losses)
        yield name, row
