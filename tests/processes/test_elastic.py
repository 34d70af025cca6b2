"""Elastic workers in processes of their own: killed, joined, told to leave, resumed, replayed."""

import json
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_gc import QSGD, Elastic, LocalSteps, Roll
from lightning_gc.attachment.plain_torch_local_steps import StepCount
from lightning_gc.elastic.rendezvous import Rendezvous
from lightning_gc.elastic.roll import BEAT, NEAR, Called, Entrance, Round, entry_of
from lightning_gc.lightning.for_pytorch_lightning import (
    LocalStepsStrategy,
    SimulatedLocalStepsStrategy,
)
from tests.soak.elastic import Run
from tests.support.elastic import Job, Stream, batches, replay, start, step_of, train
from tests.support.fitting import quiet_trainer, unwarned
from tests.support.strangers import Tap, idle_strangers, play

pytestmark = pytest.mark.processes
LIMIT = 120.0
inf, nan = float("inf"), float("nan")


class Site:
    """A rendezvous, and the workers that meet there."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.folder, self.roll = folder, folder / "roll.jsonl"
        self.server = Rendezvous(0, "secret", self.roll)
        terms = {"secret": "secret", "roll": str(self.roll)}
        given: dict[str, Any] = {"pause": 0.02, "batch_norm": False, "elastic": terms} | settings
        self.job = Job(self.server.port, str(folder), **given)
        self.processes: dict[str, Any] = {}

    def start(self, *names: str, resume: str | None = None, plain: bool = False) -> None:
        for name in names:
            self.processes[name] = start(self.job, name, resume, plain=plain)

    def until(self, name: str, step: int) -> None:
        limit = time.monotonic() + LIMIT
        while step_of(self.job, name) < step:
            assert time.monotonic() < limit, f"{name} has not reached step {step}"
            time.sleep(0.005)

    def until_said(self, name: str, words: str) -> None:
        limit, log = time.monotonic() + LIMIT, self.folder / f"{name}.log"
        while not log.exists() or words not in log.read_text():
            assert time.monotonic() < limit, f"{name} has not said {words!r}"
            time.sleep(0.05)

    def until_one_has_left(self) -> None:
        limit = time.monotonic() + LIMIT
        while not any(each.left for each in self.rounds()):
            assert time.monotonic() < limit, "nobody has left"
            time.sleep(0.02)

    def go_on(self, name: str) -> None:
        """Let a worker go on that waits at ``Job.holds``."""
        (self.folder / f"{name}.go").touch()

    def signal(self, name: str, number: int) -> None:
        os.kill(self.processes[name].pid, number)

    def ended(self, *names: str) -> list[Any]:
        """Wait for these; return what they have left."""
        for name in names:
            self.processes[name].join(LIMIT)
            assert self.processes[name].exitcode == 0, (self.folder / f"{name}.out").read_text()
        return [json.loads((self.folder / f"{name}.json").read_text()) for name in names]

    def rounds(self) -> Roll:
        return Roll.read(self.roll)

    def close(self) -> None:
        for process in self.processes.values():
            process.kill()
            process.join()
        self.server.close()


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    made = Site(tmp_path)
    yield made
    made.close()


def assert_replayed(site: Site, left: list[Any]) -> None:
    """The replay has the workers' weights, and their errors, bit for bit."""
    made = replay(site.job, site.rounds())
    assert made["warned"] == []
    assert {made["weights"]} == {each["weights"] for each in left}
    for each in left:
        assert made["errors"][each["number"]] == each["errors"]


def test_a_killed_worker_costs_its_error_and_the_run_is_replayed(site: Site) -> None:
    """It is killed at a step where it waits. One of the others is a loop of plain torch."""
    site.job, others = replace(site.job, holds=9), replace(site.job, holds=13)
    site.start("c")
    site.job = others
    site.start("a")
    site.start("b", plain=True)
    site.until("c", 9)
    site.signal("c", signal.SIGKILL)
    site.processes["c"].join()
    for name in ("a", "b"):
        site.until(name, 13)
    time.sleep(NEAR + BEAT)  # from here on every round notes the loss
    for name in ("a", "b"):
        site.go_on(name)
    left = site.ended("a", "b")
    rounds = site.rounds()
    (victim,) = set(rounds.numbers) - {each["number"] for each in left}
    (norm,) = [each.lost[victim] for each in rounds if victim in each.lost]
    assert norm > 0
    assert_replayed(site, left)


@pytest.mark.nightly
def test_strangers_take_no_part(tmp_path: Path) -> None:
    """Two live runs of one secret. One is played what was said in the other, and is flooded.

    1,500 strangers idle at its rendezvous and at the door from which a worker joins. A job with
    another secret and one with another H call, and learn at once why they are refused. The honest
    workers alone are counted, and end as their replay.
    """
    sites = []
    for name in ("one", "other"):
        (tmp_path / name).mkdir()
        sites.append(Site(tmp_path / name))
    site, other = sites
    tap = Tap(other.server.port)
    other.start("a")
    other.job = replace(other.job, port=tap.port)
    other.start("b")
    site.job = replace(site.job, holds=9)
    site.start("a", "b")
    for name in ("a", "b"):
        site.until(name, 9)
    other.until("b", 4)
    entries = map(entry_of, list(site.server._said))
    called = next(entry for entry in entries if isinstance(entry, Called))
    doors = [int(address.rpartition(":")[2]) for address in called.addresses]
    with idle_strangers(1500, site.server.port, doors[0]):
        for port in (site.server.port, *doors):
            for said in map(bytes, tap.said):
                play(said, port)
        terms = site.job.elastic | {"secret": "another", "patience": 1000.0}
        strangers = {"stranger": start(replace(site.job, elastic=terms), "stranger")}
        site.start("c")
        site.until("c", 2)
        strangers["unlike"] = start(replace(site.job, every=8), "unlike")
        for stranger in strangers.values():
            stranger.join(LIMIT)
        for name in ("a", "b", "c"):
            site.go_on(name)
        left = site.ended("a", "b", "c")
    told = {name: (site.folder / f"{name}.out").read_text() for name in strangers}
    assert f"{site.server.port} has another secret" in told["stranger"]
    assert "every is 8 here, and 4 in the run" in told["unlike"]
    assert "Joined as worker 2 of 3 at 127.0.0.1:" in (site.folder / "c.log").read_text()
    assert site.rounds().numbers == (0, 1, 2)
    assert_replayed(site, left)
    assert_replayed(other, other.ended("a", "b"))
    tap.close()
    for each in sites:
        each.close()


@pytest.mark.nightly
def test_joins_leaves_and_a_restarted_rendezvous_are_replayed(tmp_path: Path) -> None:
    site = Site(tmp_path, steps=400, outer=0.6)
    site.start("a", "b")
    site.until("a", 12)
    site.start("c")
    site.until("c", 20)
    site.signal("a", signal.SIGTERM)
    site.until_one_has_left()
    site.until("b", 100)
    site.server.close()
    left = site.ended("b", "c")
    records = list(site.rounds())
    (gone,) = [each.left for each in records if each.left]
    assert [leavers for each in records for leavers in each.inherited.values()] == [gone]
    assert_replayed(site, left)
    site.close()


@pytest.mark.nightly
@pytest.mark.parametrize("plain", [False, True])
def test_ctrl_c_and_a_frozen_worker(tmp_path: Path, plain: bool) -> None:
    site = Site(tmp_path, steps=400, compressor=("qsgd", {"bits": 4}))
    site.start("a")
    site.start("b", "c", plain=plain)
    site.until("b", 12)
    site.signal("b", signal.SIGSTOP)
    site.until("a", 40)
    site.signal("b", signal.SIGCONT)
    site.until("b", 80)
    site.signal("c", signal.SIGINT)
    left = site.ended("a", "b")
    late = [e for each in site.rounds() for n, e in each.entered.items() if each.round]
    assert any(entrance.error == "kept" for entrance in late)
    assert_replayed(site, left)
    site.close()


@pytest.mark.nightly
@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("again", [("a", "b"), ("a", "b", "c")])
def test_a_run_resumes_with_any_number_of_workers(
    tmp_path: Path, again: tuple[str, ...], plain: bool
) -> None:
    """With as many workers as before it goes on as if it had not stopped, errors included."""
    (tmp_path / "whole").mkdir()
    whole = Site(tmp_path / "whole")
    whole.start("a", "b")
    expected = whole.ended("a", "b")
    whole.close()
    (tmp_path / "part").mkdir()
    part = Site(tmp_path / "part", steps=20)
    part.job = replace(part.job, checkpoint=20)
    part.start("a", "b", plain=plain)
    part.ended("a", "b")
    part.job = replace(part.job, steps=40, checkpoint=0)
    files = {name: next(part.folder.glob(f"{name}-*.ckpt")) for name in ("a", "b")}
    for name in again:
        part.start(name, resume=str(files.get(name, files["a"])), plain=plain)
    left = part.ended(*again)
    assert len({each["weights"] for each in left}) == 1
    if again == ("a", "b"):
        assert {each["weights"] for each in left} == {each["weights"] for each in expected}
        errors = [{each["number"]: each["errors"] for each in them} for them in (left, expected)]
        assert errors[0] == errors[1]
    else:
        assert sorted(each["number"] for each in left) == [0, 1, 2]
    part.close()


@pytest.mark.nightly
def test_a_worker_that_returns_with_an_old_checkpoint_begins_without_its_error(
    tmp_path: Path,
) -> None:
    """It has sent parts of that error since then."""
    site = Site(tmp_path, steps=20)
    site.job = replace(site.job, checkpoint=20)
    site.start("a", "b")
    site.ended("a", "b")
    site.job = replace(site.job, steps=400, checkpoint=0)
    files = {name: str(next(site.folder.glob(f"{name}-*.ckpt"))) for name in ("a", "b")}
    for name in ("a", "b", "c"):
        site.start(name, resume=files.get(name, files["a"]))
    site.until("b", 60)
    site.signal("b", signal.SIGKILL)
    site.until("a", 120)
    site.start("d", resume=files["b"])
    site.until("d", 160)
    left = site.ended("a", "c", "d")
    number = left[-1]["number"]
    late = (each.entered[number] for each in site.rounds() if number in each.entered)
    first = next(entrance for entrance in late if entrance.round > 15)
    assert first.error == "zero"
    said = (site.folder / "d.log").read_text()
    assert "The checkpoint is of round 5, and the run is in round" in said
    assert len({each["weights"] for each in left}) == 1
    site.close()


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_short_soak(seed: int) -> None:
    """Longer: ``python -m tests.soak.elastic --rounds 300``."""
    seen = Run(seed, rounds=40, workers=3).play(faults=4)
    assert seen.problems == []


def test_a_worker_without_others_says_so(tmp_path: Path) -> None:
    site = Site(tmp_path, steps=8)
    job = replace(site.job, elastic=site.job.elastic | {"patience": 5.0})
    with pytest.raises(RuntimeError, match=r"waited 5 s for other workers, with min_workers=2"):
        train(job, "a")
    site.close()


@pytest.mark.nightly
def test_a_worker_says_for_whom_it_waits_and_that_it_has_joined(site: Site) -> None:
    site.start("a")
    site.until_said("a", "Worker 0 waits for 1 more worker (1 of 2)")
    site.start("b")
    site.until_said("a", "Joined as worker 0 of 2")
    site.until_said("b", "Joined as worker 1 of 2")
    site.ended("a", "b")


def test_an_elastic_loop_refuses_what_it_cannot_obey() -> None:
    net = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    elastic = Elastic("127.0.0.1:1")
    with pytest.raises(ValueError, match=r"Elastic\(timeout=30\) says"):
        LocalSteps(net, sgd, "topk", elastic=elastic, timeout=timedelta(seconds=3))
    with pytest.raises(ValueError, match="exchanges all weights"):
        LocalSteps(net, sgd, "topk", elastic=elastic, fragments=2)


def test_a_loop_that_goes_on_elsewhere_has_the_rates_of_the_others() -> None:
    sgd = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    falling = torch.optim.lr_scheduler.ExponentialLR(sgd, 0.5)
    count = StepCount("LocalSteps", sgd, entered=True)
    with pytest.warns(UserWarning, match="is 2 steps behind"):
        count.go_on_from(2)
    count.schedulers = (falling,)
    count.go_on_from(5)
    assert (count.steps, falling.get_last_lr()) == (5, [0.125])


SECONDS = (-1, -0.5, inf, nan, 1e10, True, None, timedelta(seconds=9), (5,))
SCHEMES = ("http://h:1", "tcp://h:1", "u@h:1", "h/a:1", "h:1/a", "a b:1", "::g:1")
WRONG: list[tuple[str, tuple[Any, ...], str]] = [
    ("rendezvous", ("here", ":1", "here:", "h:0", "h:65536", "h:x", "h:²", *SCHEMES), "give host"),
    ("rendezvous", (5, None, b"h:1", True, ("h", 1)), "give host and port"),
    ("min_workers", (0, -1, True, 2.0, None, [2]), "use 1 or more"),
    ("min_workers", ("2", 2.5), "number"),
    ("timeout", (0, 0.5, *SECONDS), r"seconds must be in \[1, 1e\+09\]"),
    ("patience", (0, 0.5, *SECONDS), r"seconds must be in \[1, 1e\+09\]"),
    ("grace", SECONDS, r"seconds must be in \[0, 1e\+09\]"),
    ("number", (-1, 1.0, True, (1,)), "begin with 0"),
    ("ports", ((5, 4), (1,), 5, "56", (0, 5), (5, 65536), (5, 6.0)), "first and the last port"),
    ("address", ("h:1", "", "http://h", 5, "h/"), "host without a port"),
    ("roll", ("", 5, True, b"roll"), "name of a file"),
    ("secret", ("", "  ", "\n"), r"the secret is empty\. Give a long random text"),
    ("secret", ("hidden\n", " hidden"), "begins or ends with white space"),
    ("secret", (b"hidden", 5, ["hidden"]), "the secret is of type"),
]


@pytest.mark.parametrize(
    ("name", "wrong", "why"),
    [(name, wrong, why) for name, each, why in WRONG for wrong in each],
)
def test_settings_out_of_range_are_refused(name: str, wrong: Any, why: str) -> None:
    with pytest.raises(ValueError, match=why) as raised:
        Elastic(**{"rendezvous": "host:1", name: wrong})
    shown = "..." if name == "secret" else repr(wrong)
    assert str(raised.value).startswith(f"Elastic({name}={shown}): ")


@pytest.mark.parametrize("secret", ["", " ", b"text", "text\n"])
def test_a_rendezvous_refuses_the_secrets_that_jobs_refuse(secret: Any) -> None:
    with pytest.raises(ValueError, match=r"Rendezvous\(secret=\.\.\.\): the secret"):
        Rendezvous(0, secret)


@pytest.mark.parametrize("where", ["host:1", "10.0.0.1:65535", "[::1]:29400", "a_b.c-d:1", "::1:2"])
def test_these_addresses_are_taken(where: str) -> None:
    assert Elastic(where, address=where.rpartition(":")[0]).rendezvous == where


@pytest.mark.parametrize("wrong", ["10.0.0.1:29400", True, False, 5, Elastic, {}])
def test_what_is_no_elastic_is_refused_when_the_strategy_is_made(wrong: Any) -> None:
    net = torch.nn.Linear(4, 4)
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    for make in (
        lambda: LocalStepsStrategy("topk", elastic=wrong),
        lambda: LocalSteps(net, sgd, "topk", elastic=wrong),
    ):
        with pytest.raises(ValueError, match=r": give elastic=Elastic\('10.0.0.1:29400'\)"):
            make()


def test_a_secret_is_not_shown() -> None:
    assert "hidden" not in repr(Elastic("host:1", secret="hidden"))


def test_a_roll_replaces_the_number_of_workers() -> None:
    roll = Roll([Round(0, (0, 2)), Round(1, (0, 2))])
    assert SimulatedLocalStepsStrategy(QSGD(4), roll=roll).workers == 2
    for wrong in ({"roll": roll, "workers": 2}, {"roll": Roll()}, {"roll": Roll([Round(3, (0,))])}):
        with pytest.raises(ValueError, match="begins with round 0"):
            SimulatedLocalStepsStrategy(QSGD(4), **wrong)  # type: ignore[arg-type]


def test_a_replay_lets_workers_in_within_the_first_round() -> None:
    """They begin in the middle of it, and all end it together."""
    entered = {0: Entrance(error="kept"), 1: Entrance(position=2, donor=0)}
    roll = Roll([Round(0, (0, 1), entered=entered), Round(1, (0, 1))])
    strategy = SimulatedLocalStepsStrategy(QSGD(4), every=4, roll=roll)
    trainer = quiet_trainer(strategy, max_steps=8, max_epochs=-1)
    with unwarned():
        trainer.fit(Stream(Job(0, "")), batches(2))
    assert [engine.step for engine in strategy.engines] == [2, 2]
