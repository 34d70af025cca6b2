"""Ranks that run different units of FSDP2 end in the same step, with the names of the units."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from lightning_gc import QSGD, Identity, Int8, WeightDifferences, attach
from lightning_gc.transports.peer_error import PeerError
from tests.support.accelerator import needs_two
from tests.support.processes import run_in_processes

pytestmark = [pytest.mark.processes, needs_two]


class Expert(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, width), nn.Linear(width, 16)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down(self.up(x).relu())
        return out


class Experts(nn.Module):
    def __init__(self, widths: Sequence[int]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(Expert(width) for width in widths)
        self.first, self.head = nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = self.first(x)
        for index in chosen:
            x = x + self.experts[index](x)
        out: Tensor = self.head(x)
        return out


@dataclass(frozen=True)
class Case:
    """Which experts each rank uses, in one step after another.

    Attributes:
        gradients, weights, verify: of ``attach``.
        steps: for each step the experts of rank 0 and of rank 1.
        widths: of the experts; others have other sizes.
        said: names of the units in the error; none if there is to be no error.
    """

    gradients: Any
    weights: Any
    verify: Any
    steps: Sequence[tuple[Sequence[int], Sequence[int]]]
    said: tuple[str, ...]
    widths: tuple[int, int] = (32, 32)


ONE, BOTH = ("experts.0", "experts.1"), ([0, 1], [0, 1])
CASES = {
    "weights": Case(QSGD(8), Int8(256), 0, [([0], [1])], ONE),
    "exact weights": Case(QSGD(8), Identity(), 0, [([0], [1])], ONE),
    "after all were used": Case(Identity(), Int8(256), 0, [BOTH, BOTH, ([0], [1])], ONE),
    "differences": Case(QSGD(8), WeightDifferences(), 0, [BOTH, ([0], [1])], ONE),
    "in another order": Case(QSGD(8), Int8(256), 0, [BOTH, ([0, 1], [1, 0])], ONE),
    "of another size": Case(QSGD(8), Int8(256), "payload", [([0], [1])], ONE, (32, 48)),
    "on one alone": Case(QSGD(8), Int8(256), "payload", [BOTH, ([0, 1], [0])], ONE[::-1]),
    "gradients": Case(QSGD(8), None, "payload", [BOTH, ([0], [1])], ONE),
    "dense gradients": Case(Identity(), None, "payload", [BOTH, ([0], [1])], ONE),
    "the same": Case(QSGD(8), Int8(256), "payload", [BOTH, ([1], [1]), BOTH], ()),
    "the same, unverified": Case(QSGD(8), Int8(256), 0, [BOTH, ([1], [1]), BOTH], ()),
}


def trained(case: Case, rank: int) -> tuple[int, str, list[float]]:
    """Return the steps that ended, what was raised, and the rank's shards if nothing was."""
    net: Any = Experts(case.widths)
    for layer in (*net.experts, net):  # the others are in the unit of the whole model
        fully_shard(layer)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    weights = {} if case.weights is None else {"weights": case.weights}
    attach(net, case.gradients, optimizers=optimizer, verify=case.verify, **weights)
    draw = torch.Generator().manual_seed(rank)
    done = 0
    try:
        for chosen in case.steps:
            optimizer.zero_grad()
            net(torch.randn(8, 16, generator=draw), chosen[rank]).square().mean().backward()
            optimizer.step()
            done += 1
    except PeerError as error:
        return done, str(error), []
    local = [param.to_local().flatten() for param in net.parameters()]
    return done, "", torch.cat(local).tolist()


def all_trained(rank: int) -> dict[str, tuple[int, str, list[float]]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    found = {}
    for name, case in CASES.items():
        found[name] = trained(case, rank)
        dist.barrier()
    return found


def test_both_ranks_name_both_units() -> None:
    both = run_in_processes(all_trained, 2)
    for name, case in CASES.items():
        for rank, found in enumerate(both):
            done, said, _ = found[name]
            if not case.said:
                assert (done, said) == (len(case.steps), ""), name
                continue
            mine, others = case.said if rank == 0 else case.said[::-1]
            wanted = f"This rank exchanges {mine}, and worker {1 - rank} exchanges {others}."
            assert wanted in said, (name, rank, said)
            assert done == len(case.steps) - 1, (name, rank)
    for found in both:
        assert found["the same"] == found["the same, unverified"]
