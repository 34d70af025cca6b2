"""What workers exchange beside trained weights: buffers, and parameters that are not trained."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lightning_gc.local_steps.common_weights import CommonBuffers
from lightning_gc.local_steps.local_rounds import CommonState, OwnState, finished
from lightning_gc.transports import Simulated
from lightning_gc.transports.accounting import COMMUNICATE
from tests.units.local_steps.test_local_rounds import rounds_of

INF, NAN = math.inf, math.nan


def exchanged(workers: list[CommonBuffers], requests: int = 1) -> int:
    """Exchange once, as rounds do; return the elements that a worker has sent at first.

    So many requests are made, if anything is sent.
    """
    arriving: list[dict[str, Tensor]] = [{} for _ in workers]
    flows, sent = zip(*map(CommonBuffers.exchange, workers, arriving), strict=True)
    elements = int(sent[0].numel())
    laps: list[str] = []
    Simulated(len(workers)).run(flows, lambda phase, worker: laps.append(phase))
    assert laps.count(COMMUNICATE) == (requests if elements else 1)
    for each, arrived in zip(workers, arriving, strict=True):
        each.step(arrived)
    return elements


def workers_with(
    buffers: dict[str, Tensor], frozen: dict[str, Tensor] | None = None, number: int = 3
) -> tuple[list[dict[str, Tensor]], list[CommonBuffers]]:
    """Return what workers have by name, and their common buffers."""
    named = [{n: t.clone() for n, t in (buffers | (frozen or {})).items()} for _ in range(number)]
    made = []
    for each in named:
        kept = partial(_those, each, list(frozen or ()), False)
        made.append(CommonBuffers(kept, partial(_those, each, list(frozen or ()), True)))
    return named, made


def _those(named: dict[str, Tensor], frozen: list[str], are: bool) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in named.items() if (name in frozen) == are}


def test_running_statistics_become_the_mean_and_constants_keep_every_bit() -> None:
    mask = torch.full((3, 3), -torch.inf).triu(1)
    third, missing = torch.full((5,), 0.1), torch.tensor([1.0, NAN])
    constants = {"mask": mask, "third": third, "missing": missing}
    buffers = {"mean": torch.tensor([1.0, 2.0]), **constants, "count": torch.tensor(4)}
    named, workers = workers_with(buffers)
    for worker, each in enumerate(named):
        each["mean"] += worker
        each["count"] += worker
    exchanged(workers)
    for worker, each in enumerate(named):
        assert each["mean"].tolist() == [2.0, 3.0]
        for name, constant in constants.items():
            assert torch.equal(each[name].view(torch.int32), constant.view(torch.int32))
        assert int(each["count"]) == 4 + worker, "integers are left alone"


def test_counters_in_float64_keep_counting() -> None:
    """Beyond float32, whose neighbours are 64 apart there; smaller types beside them, too."""
    buffers = {"seen": torch.tensor([1e9], dtype=torch.float64), "mean": torch.zeros(2)}
    named, workers = workers_with(buffers)
    for _ in range(5):
        for each in named:
            each["seen"] += 3
            each["mean"] += 1
        exchanged(workers)
    for each in named:
        assert float(each["seen"]) == 1e9 + 15
        assert each["mean"].tolist() == [5.0, 5.0]


def test_what_is_written_while_the_common_ones_are_shown_stays() -> None:
    """As by a validation that keeps its best result in a buffer."""
    module = nn.Linear(3, 2)
    module.register_buffer("best", torch.zeros(1))
    module.register_buffer("mean", torch.zeros(1))
    rounds = rounds_of(module, 5)
    buffers = dict(module.named_buffers())
    buffers["mean"] += 1  # in training
    rounds.weights.show()
    assert float(buffers["mean"]) == 0
    buffers["best"] += 3
    rounds.weights.hide()
    assert (float(buffers["mean"]), float(buffers["best"])) == (1, 3)


@pytest.mark.parametrize(
    ("before", "values", "after"),
    [
        (INF, (4.0, 1.0, 1.0), 2.0),
        (INF, (INF, 1.0, 5.0), 3.0),
        (INF, (1.0, INF, 5.0), 3.0),
        (2.0, (INF, INF, INF), INF),
        (2.0, (1.0, NAN, 5.0), 3.0),
        (NAN, (NAN, 7.0, 5.0), 6.0),
        (-INF, (4.0, NAN, INF), 4.0),
        (2.0, (NAN, INF, -INF), NAN),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_a_mean_that_is_not_finite_becomes_that_of_finite_values(
    before: float, values: tuple[float, ...], after: float, dtype: torch.dtype
) -> None:
    """Or worker 0's value if none is; what is finite beside it, the mean."""
    named, workers = workers_with({"best": torch.tensor([before, 0.0], dtype=dtype)})
    for each, value in zip(named, values, strict=True):
        each["best"] = torch.tensor([value, 6.0], dtype=dtype)
    exchanged(workers, requests=2)
    for each in named:
        torch.testing.assert_close(
            each["best"], torch.tensor([after, 6.0], dtype=dtype), equal_nan=True
        )
    for worker, each in enumerate(named):
        each["best"] = torch.tensor([worker, 0.0], dtype=dtype)
    exchanged(workers, requests=1 if math.isfinite(after) else 2)
    if math.isfinite(after):
        assert all(abs(float(each["best"][0]) - 1) < 0.01 for each in named)


def test_a_teacher_is_averaged_from_when_it_changes_and_a_backbone_never_sent() -> None:
    backbone, teacher = torch.randn(1000), torch.tensor([[1.0, 2.0]], dtype=torch.bfloat16)
    frozen = {"backbone": backbone, "teacher": teacher, "index": torch.arange(3)}
    named, workers = workers_with({"mean": torch.zeros(5)}, frozen)
    assert [exchanged(workers) for _ in range(2)] == [5 + 2, 5 + 2], "a number for each parameter"
    for step in range(2):
        for worker, each in enumerate(named):
            each["teacher"].data.add_(worker)  # as many do it, unseen by autograd
        elements = exchanged(workers, requests=2 if step == 0 else 1)
        assert elements == (5 + 2 if step == 0 else 5 + 2 + 1)
        for each in named:
            assert each["teacher"].tolist() == [[2.0 + step, 3.0 + step]]
            assert torch.equal(each["backbone"], backbone)
    assert [each.taken for each in workers] == [["teacher"]] * 3


def test_what_has_changed_on_one_worker_only_is_averaged_too() -> None:
    named, workers = workers_with({}, {"a": torch.ones(2), "b": torch.ones(2)})
    named[1]["b"] = torch.tensor([4.0, NAN])
    exchanged(workers, requests=3)
    assert all(torch.equal(each["b"], torch.tensor([2.0, 1.0])) for each in named)
    assert all(torch.equal(each["a"], torch.ones(2)) for each in named)


def test_parameters_that_are_gone_or_have_no_plain_memory_are_left_alone() -> None:
    """The last are frozen weights of four bits in a class of their own."""

    class Packed(Tensor):
        pass

    frozen = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(9).as_subclass(Packed)}
    named, workers = workers_with({}, frozen)
    del named[0]["a"]
    named[2]["a"] = torch.ones(5)
    for worker, each in enumerate(named):
        each["b"] = torch.full((2,), float(worker))
    assert exchanged(workers, requests=2) == 2
    assert all(each["b"].tolist() == [1.0, 1.0] for each in named)
    assert exchanged(workers) == 1 + 2
    assert not any(each.moved for each in workers)


def test_nothing_is_sent_where_there_is_nothing() -> None:
    _, workers = workers_with({"count": torch.tensor(3)})
    assert exchanged(workers) == 0


def test_buffers_that_are_new_gone_or_resized_are_left_alone() -> None:
    """On some workers or on all; the others are averaged."""
    named, workers = workers_with(
        {"table": torch.ones(4), "gone": torch.ones(2), "m": torch.ones(1)}
    )
    for worker, each in enumerate(named):
        each["m"] += worker
        each["new"] = torch.full((2,), float(worker))
        del each["gone"]
    named[1]["table"] = torch.zeros(7)
    for _ in range(2):
        exchanged(workers)
    assert [each["m"].tolist() for each in named] == [[2.0]] * 3
    assert [each["table"].tolist() for each in named] == [[1.0] * 4, [0.0] * 7, [1.0] * 4]
    assert [each["new"].tolist() for each in named] == [[0.0] * 2, [1.0] * 2, [2.0] * 2]
    shapes = [[t.shape for t in each.alike(torch.device("cpu"))] for each in workers]
    assert shapes[0] == shapes[1] == shapes[2]
    named[1]["table"] = torch.full((4,), 4.0)
    exchanged(workers)
    assert [each["table"].tolist() for each in named] == [[2.0] * 4] * 3, "it is back"


def own_rounds(buffers: Any, seed: int = 0) -> Any:
    """Return a module with a queue, extremes and a counter, and its rounds of two steps."""
    torch.manual_seed(seed)
    module = nn.Linear(3, 2)
    module.register_buffer("queue", torch.nn.functional.normalize(torch.randn(4, 3)))
    module.register_buffer("least", torch.tensor(INF))
    module.register_buffer("seen", torch.tensor(0))
    module.register_buffer("cache", torch.zeros(2), persistent=False)
    return module, rounds_of(module, 2, buffers=buffers)


@pytest.mark.parametrize("buffers", ["own", ["q*", "least", "seen"]], ids=str)
def test_buffers_that_stay_own_are_not_exchanged_and_resume_by_worker(buffers: Any) -> None:
    """Validation sees the worker's own, of any type. Another number of workers takes no mean."""
    module, rounds = own_rounds(buffers)
    common = rounds.weights.buffers
    assert not {"queue", "least", "seen"} & set(common.common)
    assert ("cache" in common.common) == (buffers != "own")
    module.queue.neg_()
    module.least.fill_(2.0)
    module.seen.add_(5)
    with rounds.weights.presented():
        assert float(module.least) == 2.0
        module.seen.add_(1)  # in a validation
    assert int(module.seen) == 6
    assert not common.moved
    rounds.weights.go_back()
    assert float(module.least) == 2.0, "a lost round leaves it"
    saved = OwnState(rounds, list, lambda: None).own_state()
    OwnState.structure.check(saved, "state")
    assert saved["kept"].keys() == {"queue", "least", "seen"}, "what a state_dict has"
    other, resumed = own_rounds(buffers, seed=1)
    OwnState(resumed, list, lambda: None).load_own_states([saved])
    for name in saved["kept"]:
        assert torch.equal(getattr(other, name), getattr(module, name)), name
    second = saved | {"kept": {name: each + 1 for name, each in saved["kept"].items()}}
    OwnState(resumed, list, lambda: None).load_own_states([saved, second])
    assert torch.equal(other.queue, module.queue), "worker 0 has worker 0's"
    assert other.seen.dtype == torch.int64


def test_a_worker_that_joins_gets_own_buffers_from_a_member() -> None:
    module, rounds = own_rounds("own")
    module.queue.neg_()
    other, joins = own_rounds("own", seed=1)
    buffers = rounds.weights.buffers
    joins.begin_from({}, buffers.common, buffers.constants)
    assert torch.equal(other.queue, module.queue)
    assert other.queue.data_ptr() != module.queue.data_ptr()


@pytest.mark.parametrize(
    ("buffers", "said"),
    [
        ("queue", r"names in a tuple, such as \('queue',\)"),
        (("quewe",), r"'quewe' fits no buffer of the module; did you mean one of 'queue'"),
        ((), "use 'mean' or 'own', or names"),
        (3, "use 'mean' or 'own', or names"),
    ],
)
def test_buffers_that_do_not_exist_are_refused(buffers: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        own_rounds(buffers)


class Student(nn.Module):
    """Has a teacher, which is not trained."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.Linear(2, 1)
        self.teacher = nn.Linear(2, 1).requires_grad_(False)
        with torch.no_grad():
            for param in self.parameters():
                param.fill_(0.1)


@pytest.mark.parametrize("steps", [1, 2, 3])
def test_a_teacher_goes_on_after_a_resume_bit_for_bit(steps: int) -> None:
    """Saved before it is exchanged for the first time, with an exchange, and after one."""

    def trained(rounds: Any, module: Student, first: int, last: int) -> list[Tensor]:
        seen = []
        for step in range(first, last):
            module.teacher.weight.data.fill_(1.2345 * 10.0 ** (3 - 2 * step))
            finished(rounds.stepped(ends=False))
            seen.append(module.teacher.weight.detach().clone())
        return seen

    module, other = Student(), Student()
    rounds = rounds_of(module, 2)
    trained(rounds, module, 0, steps)
    common = CommonState([rounds]).common_state()
    own = OwnState(rounds, list, lambda: None).own_state()
    rounds.weights.show()
    other.load_state_dict(module.state_dict())
    rounds.weights.hide()
    resumed = rounds_of(other, 2)
    CommonState([resumed]).load_common_state(common)
    OwnState(resumed, list, lambda: None).load_own_states([own])
    pairs = zip(trained(rounds, module, steps, 6), trained(resumed, other, steps, 6), strict=True)
    assert all(torch.equal(ours, theirs) for ours, theirs in pairs)
    assert rounds.weights.buffers.taken == resumed.weights.buffers.taken == ["teacher.weight"]
    for name, kept in rounds.weights.buffers.common.items():
        assert torch.equal(kept, resumed.weights.buffers.common[name])
