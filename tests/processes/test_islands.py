"""Islands: workers of several processes, alone, elastic, and as simulated."""

import json
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pytorch_lightning.callbacks import Callback

from lightning_gc import TopK
from lightning_gc.core.digest import ReplicaError
from lightning_gc.lightning.for_pytorch_lightning import (
    LocalStepsStrategy,
    SimulatedLocalStepsStrategy,
)
from lightning_gc.transports.island import ALONE, Island, IslandError, Seat
from lightning_gc.transports.peer_error import PeerError
from tests.processes.test_elastic import Site, assert_replayed
from tests.soak.elastic import Run
from tests.support.elastic import Job, Stream, batches, left_in
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.processes import run_in_processes

pytestmark = pytest.mark.processes


class Skewed(Stream):
    """Stream, with a rank whose replica is moved within a round."""

    skewed = -1

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.global_rank == self.skewed and batch_idx == 5:
            with torch.no_grad():
                next(self.parameters()).add_(1e-3)


def fit_real(rank: int, job: Job, islands: int, skewed: int = -1, **settings: Any) -> Any:
    """Train as one process of islands that do not change."""
    torch.set_num_threads(1)
    model = Skewed(job)
    model.skewed = skewed
    parts: dict[str, Any] = job.parts() | settings
    strategy = LocalStepsStrategy(**parts, process_group_backend="gloo")
    devices = islands * job.island
    sent = Sent()
    trainer = quiet_trainer(strategy, max_steps=job.steps, devices=devices, callbacks=[sent])
    with unwarned():
        trainer.fit(model, batches(devices))
    more = {"sent": sent.found, "saves": strategy.checkpoint_parts.saves}
    return left_in(trainer) | more | {"parameters": [p.tolist() for p in model.parameters()]}


class Sent(Callback):
    """Notes the bytes that this process has sent to other islands, and inside its island."""

    def on_train_end(self, trainer: Any, module: Any) -> None:
        account = trainer.strategy.recording.take()
        self.found = (account.wire_bytes, account.node_bytes)


def simulated(job: Job, islands: int) -> Any:
    """Return what as many simulated islands have left."""
    strategy = SimulatedLocalStepsStrategy(**job.parts(), workers=islands)
    trainer = quiet_trainer(strategy, max_steps=job.steps)
    with unwarned():
        trainer.fit(Stream(job), batches(islands * job.island))
    made = left_in(trainer)
    made["parameters"] = [p.tolist() for p in trainer.lightning_module.parameters()]
    made["errors"] = [
        {n: e.double().flatten().tolist() for n, e in engine.errors().items()}
        for engine in strategy.engines
    ]
    return made


def same_as_simulated(job: Job, islands: int) -> list[Any]:
    made: list[Any] = run_in_processes(fit_real, islands * job.island, job, islands)
    expected = simulated(job, islands)
    assert {each["weights"] for each in made} == {expected["weights"]}
    assert all(each["buffers"] == expected["buffers"] for each in made)
    for rank, each in enumerate(made):
        assert each["errors"] == expected["errors"][rank // job.island]
    return made


def test_two_islands_of_two_are_as_two_simulated_workers(tmp_path: Path) -> None:
    job = Job(0, str(tmp_path), steps=10, island=2)
    made = same_as_simulated(job, 2)
    assert [each["saves"] for each in made] == [True, False, True, False]
    dense = 4 * sum(p.numel() for p in Stream(job).parameters())
    for rank, each in enumerate(made):
        between, inside = each["sent"]
        assert (between > 0) == (rank % 2 == 0)
        told = inside - job.steps * dense  # an all-reduce of two sends as much as it reduces
        assert between < told < 3 * dense if rank % 2 == 0 else told == 0


def _hears(rank: int) -> list[str]:
    """Say what a process of an island hears."""
    dist.init_process_group("gloo", rank=rank, world_size=2)
    island = Island.among([[0, 1]])
    heard = [island.say(lambda: f"rank {rank}")]
    for error in (PeerError("a"), OSError("b"), KeyError("c")):

        def fails(error: Exception = error) -> str:
            raise error

        try:
            island.say(fails)
        except Exception as found:
            heard.append(type(found).__name__)
    island.compare([torch.ones(3)], "ones")
    try:
        island.compare([torch.full((3,), float(rank))], "ranks")
    except ReplicaError as found:
        heard.append(str(found).partition(":")[0])
    if rank:
        island.close()
        return heard
    with pytest.raises(IslandError, match=r"has lost rank 1 .* end together"):
        island.compare([torch.ones(1)], "ones")
    return heard


def test_all_ranks_hear_what_rank_0_says_or_how_it_has_failed() -> None:
    first, second = run_in_processes(_hears, 2)
    differ = "Workers hold different bits of ranks"
    assert first == ["rank 0", "PeerError", "OSError", "KeyError", differ]
    assert second == ["rank 0", "PeerError", "ValueError", "IslandError", differ]


def test_a_worker_of_one_process_hears_itself_and_has_no_other_transport() -> None:
    seat = Seat()
    assert ALONE.over(seat) is seat
    assert ALONE.say(lambda: "said") == "said"
    assert ALONE.leads
    ALONE.compare([], "nothing")


@pytest.mark.nightly
@pytest.mark.parametrize(
    "settings",
    [
        {"compressor": ("qsgd", {"bits": 4}), "outer": 0.6},
        {"compressor": ("ef_sign_sgd", {})},
        {"compressor": ("powersgd", {"rank": 2}), "batch_norm": False},
    ],
)
def test_all_kinds_of_payload_reach_all_ranks(tmp_path: Path, settings: Any) -> None:
    same_as_simulated(Job(0, str(tmp_path), steps=14, island=2, **settings), 2)


@pytest.mark.nightly
def test_four_ranks_of_an_island_sum_as_simulated_to_rounding(tmp_path: Path) -> None:
    job = Job(0, str(tmp_path), steps=8, island=4, batch_norm=False)
    made = run_in_processes(fit_real, 4, job, 1)
    assert len({each["weights"] for each in made}) == 1
    for one, other in zip(made[0]["parameters"], simulated(job, 1)["parameters"], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=1e-6)


@pytest.mark.nightly
def test_replicas_that_differ_within_an_island_are_found(tmp_path: Path) -> None:
    job = Job(0, str(tmp_path), steps=10, island=2)
    with pytest.raises(RuntimeError, match="different bits of what an island sends"):
        run_in_processes(fit_skewed, 2, job)


def fit_skewed(rank: int, job: Job) -> Any:
    return fit_real(rank, job, 1, skewed=1, verify=1)


def test_islands_that_are_not_equal_are_refused(tmp_path: Path) -> None:
    job = Job(0, str(tmp_path), steps=4, island=3)
    with pytest.raises(RuntimeError, match=r"2 processes are not islands of 3, and all islands"):
        run_in_processes(fit_uneven, 2, job)


def fit_uneven(rank: int, job: Job) -> Any:
    strategy = LocalStepsStrategy(**job.parts(), process_group_backend="gloo")
    quiet_trainer(strategy, max_steps=4, devices=2).fit(Stream(job), batches(2))


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"island": 0}, "give the number of processes"),
        ({"island": True}, "give the number of processes"),
    ],
)
def test_what_an_island_cannot_have_is_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        LocalStepsStrategy(TopK(0.1), **settings)


def test_arguments_of_the_wrapper_are_for_islands() -> None:
    strategy = LocalStepsStrategy(TopK(0.1), island=2, find_unused_parameters=True)
    assert strategy.island == 2


# ------------------------------------------------------------------------------------- elastic


def _site(folder: Path, **settings: Any) -> Site:
    terms = {"pause": 0.02, "island": 2, **settings}
    return Site(folder, **terms)


def _ended(site: Site, *names: str) -> list[Any]:
    """Wait for these islands; return what each of their processes has left."""
    found = site.ended(*names)
    return found + [json.loads((site.folder / f"{name}.1.json").read_text()) for name in names]


def test_two_elastic_islands_are_replayed(tmp_path: Path) -> None:
    site = _site(tmp_path, steps=10, pause=0.0)
    site.start("a", "b")
    left = _ended(site, "a", "b")
    assert [each.members for each in site.rounds()] == [(0, 1)] * 3
    assert_replayed(site, left)
    site.close()


@pytest.mark.nightly
def test_an_island_dies_whole_and_the_run_is_replayed(tmp_path: Path) -> None:
    site = _site(tmp_path, steps=24)
    site.start("a", "b", "c")
    site.until("c", 6)
    victim = site.processes["c"]
    os.kill(victim.pids[1], signal.SIGKILL)
    began = time.monotonic()
    victim.join(30.0)
    assert not victim.is_alive(), f"rank 0 lives after {time.monotonic() - began:.0f} s"
    left = _ended(site, "a", "b")
    assert_replayed(site, left)
    site.close()


@pytest.mark.nightly
def test_islands_that_join_leave_and_freeze_are_replayed(tmp_path: Path) -> None:
    site = _site(tmp_path, steps=160, outer=0.6, batch_norm=True)
    site.start("a", "b")
    site.until("a", 12)
    site.start("c")
    site.until("c", 24)
    for pid in site.processes["a"].pids:
        os.kill(pid, signal.SIGTERM)
    site.until("b", 60)
    os.kill(site.processes["b"].pids[1], signal.SIGSTOP)
    time.sleep(1.0)
    os.kill(site.processes["b"].pids[1], signal.SIGCONT)
    left = _ended(site, "b", "c")
    records = list(site.rounds())
    (gone,) = [each.left for each in records if each.left]
    assert [leavers for each in records for leavers in each.inherited.values()] == [gone]
    assert_replayed(site, left)
    site.close()


@pytest.mark.nightly
def test_an_elastic_job_of_another_size_is_refused(tmp_path: Path) -> None:
    site = _site(tmp_path, steps=200)
    site.start("a", "b")
    site.until("a", 8)
    whole, site.job = site.job, replace(site.job, island=1)
    site.start("c")
    site.processes["c"].join(60.0)
    assert "number of processes" in (tmp_path / "c.out").read_text()
    site.job = whole
    site.close()


@pytest.mark.nightly
def test_as_many_islands_resume_bit_for_bit_and_with_another_size(tmp_path: Path) -> None:
    job = Job(0, str(tmp_path), steps=14, island=2)
    whole = run_in_processes(fit_and_resume, 4, job, 2)
    assert whole[0]["whole"] == whole[0]["resumed"]
    assert len({each["resumed"] for each in whole}) == 1
    other = run_in_processes(fit_and_resume, 2, replace(job, island=1), 2)
    assert len({each["resumed"] for each in other}) == 1
    names = sorted(path.name for path in (tmp_path / "lightning_gc_state").iterdir())
    assert [name.partition("-worker")[2] for name in names] == ["0of2.pt", "1of2.pt"]


def fit_and_resume(rank: int, job: Job, islands: int) -> Any:
    """Train; go on from a checkpoint after 6 steps, which the first call writes."""
    torch.set_num_threads(1)
    devices, file = islands * job.island, Path(job.folder) / "six.ckpt"

    def run(steps: int, resume: str | None = None) -> Any:
        strategy = LocalStepsStrategy(**job.parts(), process_group_backend="gloo")
        trainer = quiet_trainer(strategy, max_steps=steps, devices=devices, callbacks=[Saves(file)])
        with unwarned():
            trainer.fit(Stream(job), batches(devices), ckpt_path=resume)
        return left_in(trainer)["weights"]

    found = run(job.steps)
    return {"whole": found, "resumed": run(job.steps, str(file))}


class Saves(Callback):
    """Saves after 6 steps, within a round, unless there is a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 6 and not trainer.strategy.broadcast(self.file.exists()):
            trainer.save_checkpoint(self.file)


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_short_soak_of_islands() -> None:
    """Longer: ``python -m tests.soak.elastic --islands 2 --rounds 60``."""
    seen = Run(0, rounds=20, workers=2, island=2).play(faults=3)
    assert seen.problems == []
