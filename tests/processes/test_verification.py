"""Damaged bytes are noticed as ``verify=`` promises, on all workers, and cost no bit otherwise."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, Literal
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from lightning_gc import QSGD, GTopK, Int8, PowerSGD, SimulatedDDPStrategy, StepAhead, TopK, attach
from lightning_gc.compressors import Compressor
from lightning_gc.core.digest import ReplicaError
from lightning_gc.core.flow import Exchange, Request
from lightning_gc.core.message import as_bytes
from lightning_gc.transports import Distributed
from lightning_gc.transports.peer_error import MessageError, PeerError
from tests.support.fitting import ddp, digest, fit
from tests.support.fsdp import fsdp
from tests.support.hsdp import fit_sharded, hsdp
from tests.support.models import Books, own_batches
from tests.support.processes import standing

pytestmark = pytest.mark.processes
TIMEOUT, SHORT = timedelta(seconds=60), timedelta(seconds=6)
STEPS, HIT = 4, 2
METHODS: tuple[Compressor, ...] = (TopK(0.05), QSGD(4), PowerSGD(1))
"""One for each way to communicate; the messages of the tree of ``GTopK`` besides."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(40, 600)
        self.middle = nn.Linear(600, 600)  # with the head it fills a bucket
        self.head = nn.Linear(600, 20)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.middle(self.body(x).tanh()).tanh())
        return out


def damaging(at: Callable[[], object], tree: bool = False) -> Any:
    """Flip a high bit of what worker 0 has sent here, in one message whenever ``at()`` is new.

    In one that all get alike; in a ``tree``, in one of which every worker gets another. Not in one
    of digests, which may be sent when the next step is being counted.
    """
    fulfil, done = Distributed.fulfil, []

    def damaged(self: Distributed, request: Request) -> Any:
        reply, now = fulfil(self, request), at()
        chosen = isinstance(request, Exchange) == tree
        first = reply[0] if isinstance(reply[0], Tensor) else reply[0][0]
        if now and now not in done and first.numel() and chosen and first.dtype != torch.int64:
            done.append(now)
            as_bytes(first.view(-1))[3] ^= 32
        return reply

    return mock.patch.object(Distributed, "fulfil", damaged)


def trained(worker: int, compressor: Compressor, verify: Any, hit: bool) -> tuple[str, str, int]:
    """Train a few steps, worker 1 with a damaged link in one; return error, digest and bytes."""
    torch.manual_seed(0)
    net = Net()
    wrapped = DistributedDataParallel(net, bucket_cap_mb=1)
    alone = hit and verify == "payload"  # one worker stops, and the others wait for it
    timeout = SHORT if alone else TIMEOUT
    handle = attach(wrapped, compressor, timeout=timeout, verify=verify)
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    draw = torch.Generator().manual_seed(worker)
    step, error = 0, ""
    try:
        tree = isinstance(compressor, GTopK)
        with damaging(lambda: hit and worker == 1 and step == HIT and step, tree):
            for step in range(STEPS):  # noqa: B007 - read by damaging
                optimizer.zero_grad()
                wrapped(torch.randn(8, 40, generator=draw)).square().mean().backward()
                handle.check()
                optimizer.step()
    except (PeerError, ReplicaError) as caught:
        error = f"{type(caught).__name__} in step {step}: {caught}"
    nbytes = handle.account().wire_bytes
    if not error:
        handle.close()
    dist.barrier()
    return error, digest(net), nbytes


def in_turn(
    worker: int, cases: Sequence[tuple[Compressor, Any, bool]]
) -> list[tuple[str, str, int]]:
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))
    return [trained(worker, *case) for case in cases]


def trained_alone(worker: int) -> tuple[str, str, int]:
    return in_turn(worker, [(TopK(0.05), 0, True)])[0]


def test_means_that_differ_stop_all_workers() -> None:
    cases = [(compressor, 1, True) for compressor in METHODS] + [(GTopK(0.05), 0, True)]
    found = standing.run(in_turn, 3, cases)
    for (compressor, *_), ends in zip(cases, zip(*found, strict=True), strict=True):
        for error, _, _ in ends:
            assert f"ReplicaError in step {HIT}: " in error, (compressor, error)
            assert "worker 1 differs from the other 2" in error, (compressor, error)
            assert "head.weight" in error


def test_what_differed_between_two_comparisons_shows_in_the_weights() -> None:
    for ((error, _, _),) in standing.run(in_turn, 3, [(TopK(0.05), 3, True)]):
        assert f"ReplicaError in step {HIT + 1}: " in error, error
        assert f"the weights before step {HIT + 1}: worker 1 differs from the other 2" in error


def test_without_verification_nobody_notices() -> None:
    ends = standing.run(trained_alone, 3)
    assert [error for error, _, _ in ends] == ["", "", ""]
    assert ends[0][1] == ends[2][1] != ends[1][1]


@pytest.mark.parametrize(
    "compressor",
    [pytest.param(c, marks=() if c == QSGD(4) else pytest.mark.nightly) for c in METHODS],
    ids=repr,
)
def test_damaged_messages_are_named_with_their_sender(compressor: Compressor) -> None:
    errors = [end[0][0] for end in standing.run(in_turn, 3, [(compressor, "payload", True)])]
    assert errors[1].startswith(f"MessageError in step {HIT}: The message of worker 0")
    assert all(error.startswith("PeerError") for error in (errors[0], errors[2]))


@pytest.mark.nightly
def test_verified_or_not_the_weights_are_the_same() -> None:
    """Bit for bit; a sum of two does not depend on their order."""
    cases = [(compressor, v, False) for compressor in METHODS for v in (0, 1, 2, "payload")]
    found = standing.run(in_turn, 2, cases)
    for start in range(0, len(cases), 4):
        mine = [ends for worker in found for ends in worker[start : start + 4]]
        assert {error for error, _, _ in mine} == {""}
        assert len({weights for _, weights, _ in mine}) == 1, cases[start]
        plain, every, second, _ = (nbytes for _, _, nbytes in found[0][start : start + 4])
        # One bucket in the first step, then two: as many bytes, so that a resume counts the same.
        assert (every - plain, second - plain) == (STEPS * 8, STEPS // 2 * 8)


def in_shards(worker: int, verify: Any) -> str:
    """Train two replicas of a model in shards by ``attach``; return the error of a damaged link."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    net: Any = Net()
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
    for part in (net.body, net.middle, net.head, net):
        fully_shard(part, mesh=mesh)
    handle = attach(
        net, TopK(0.05), timeout=SHORT if verify == "payload" else TIMEOUT, verify=verify
    )
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    draw = torch.Generator().manual_seed(worker)
    step, error = 0, "nothing"
    try:
        with damaging(lambda: worker == 1 and step == HIT and step):
            for step in range(STEPS):  # noqa: B007 - read by damaging
                optimizer.zero_grad()
                net(torch.randn(8, 40, generator=draw)).square().mean().backward()
                handle.check()
                optimizer.step()
    except (PeerError, ReplicaError) as caught:
        error = f"{type(caught).__name__} in step {step}: {caught}"
    dist.barrier()
    return error


@pytest.mark.parametrize(
    ("verify", "step", "what"), [(1, HIT, "the mean gradient"), (3, HIT + 1, "the weights before")]
)
def test_replicas_of_shards_that_differ_stop(verify: int, step: int, what: str) -> None:
    for error in standing.run(in_shards, 2, verify):
        assert f"ReplicaError in step {step}: " in error, error
        assert what in error, error
        assert "no majority agrees: 0 | 1" in error, error


def test_damaged_messages_between_shards_are_named() -> None:
    errors = standing.run(in_shards, 2, "payload")
    assert errors[1].startswith(f"MessageError in step {HIT}: The message of worker 0"), errors
    assert errors[0].startswith("PeerError"), errors


def fitted_in_shards(rank: int, leg: Literal["replicas", "scatters", "gathers"]) -> str:
    """Train with Lightning, a message damaged at rank 1 once; return the error."""
    strategy: Any = hsdp(TopK(0.1), verify=1, timeout=TIMEOUT)
    if leg != "replicas":
        gathers: dict[str, Any] = {"weights": Int8(256)} if leg == "gathers" else {}
        strategy = fsdp(QSGD(8), verify="payload", timeout=SHORT, **gathers)
    try:
        at = lambda: rank == 1 and bool(strategy.engine) and strategy.engine.step >= 2  # noqa: E731
        with damaging(at, tree=leg == "scatters"):
            fit_sharded(rank, strategy, steps=5, ranks=2)
    except (PeerError, ReplicaError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def test_lightnings_replicas_of_shards_are_compared() -> None:
    for error in standing.run(fitted_in_shards, 2, "replicas"):
        assert error.startswith("ReplicaError: Workers hold different bits of the mean"), error
        assert "no majority agrees: 0 | 1" in error


@pytest.mark.parametrize("leg", ["scatters", pytest.param("gathers", marks=pytest.mark.nightly)])
def test_damaged_messages_of_fsdp_are_named(leg: str) -> None:
    errors = standing.run(fitted_in_shards, 2, leg)
    assert errors[1].startswith("MessageError: The message of worker 0"), errors
    assert errors[0].startswith("PeerError"), errors


def fitted(worker: int, verify: Any) -> tuple[str, str]:
    """Train with Lightning, a message damaged at worker 1 once; return error and weights.

    From when three rounds are counted: the message of a round may be seen before or after that.
    """
    strategy: Any = ddp(TopK(0.1), verify=verify, timeout=TIMEOUT)
    module = Books()
    with damaging(lambda: worker == 1 and bool(strategy.engine) and strategy.engine.step >= 3):
        try:
            data = own_batches(worker, 8)
            fit(strategy, lambda: module, data, devices=2, use_distributed_sampler=False)
        except ReplicaError as error:
            return str(error), digest(module)
    return "", digest(module)


def test_lightning_stops_before_the_optimizers_step() -> None:
    errors, weights = zip(*standing.run(fitted, 2, 1), strict=True)
    assert all("no majority agrees: 0 | 1" in error for error in errors)
    assert len(set(weights)) == 1


def ahead(worker: int) -> tuple[str, str]:
    """Train with weights that each worker moves by its own error, which are not compared."""
    module = Books()
    strategy: Any = ddp(TopK(0.1), memory=StepAhead(), verify=2, timeout=TIMEOUT)
    data = own_batches(worker, 8)
    fit(strategy, lambda: module, data, devices=2, use_distributed_sampler=False)
    return "", digest(module)


def test_weights_that_are_moved_ahead_are_compared_where_they_were() -> None:
    _, weights = zip(*standing.run(ahead, 2), strict=True)
    assert len(set(weights)) == 1


@pytest.mark.parametrize("verify", [-1, 1.5, True, "payloads", None])
def test_what_cannot_be_asked_for(verify: Any) -> None:
    with pytest.raises(ValueError, match=r"verify=.*: give n to compare .* every n-th step"):
        ddp(TopK(0.1), verify=verify)


def test_simulated_workers_have_nothing_to_compare() -> None:
    SimulatedDDPStrategy(TopK(0.1), workers=2, verify=0)
    with pytest.raises(ValueError, match="share one mean, so there is nothing to compare"):
        SimulatedDDPStrategy(TopK(0.1), workers=2, verify=1)


def test_a_damaged_message_is_a_bad_value_as_well() -> None:
    assert issubclass(MessageError, ValueError)
    assert issubclass(MessageError, PeerError)
