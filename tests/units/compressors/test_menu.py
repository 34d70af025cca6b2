"""A menu is its chosen compressor, bit for bit; nothing is lost when the choice changes."""

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_gc import (
    QSGD,
    AllGather,
    AllReduce,
    Cast,
    CompressedDDPStrategy,
    Elastic,
    ErrorFeedback,
    HardThreshold,
    Hierarchical,
    Identity,
    LocalStepsStrategy,
    Menu,
    NoMemory,
    PerParameter,
    PowerSGD,
    SizeSwitch,
    TopK,
    TwoShot,
    VarianceCriterion,
)
from lightning_gc.compressors import Compressor
from lightning_gc.compressors.wrappers.per_parameter import by_default
from lightning_gc.controllers import (
    Accordion,
    BandwidthAware,
    Controller,
    GainSearch,
    Schedule,
)
from lightning_gc.engine.compatibility import combine
from lightning_gc.engine.engine import compressor_state
from lightning_gc.exchange import Compression
from lightning_gc.schemes import Scheme
from lightning_gc.testing import Lockstep

ALL = {
    "dense": Identity(),
    "cast": Cast(),
    "qsgd": QSGD(4),
    "topk": TopK(0.05),
    "threshold": HardThreshold(0.5),
    "powersgd": PowerSGD(2),
}
SHAPES = {"weight": (48, 40), "bias": (40,), "conv": (8, 4, 9, 9)}
STRATEGY = by_default(Menu(ALL))


def gradients(step: int, workers: int) -> list[dict[str, Tensor]]:
    drawn = torch.Generator().manual_seed(step)
    return [
        {name: torch.randn(shape, generator=drawn) for name, shape in SHAPES.items()}
        for _ in range(workers)
    ]


def chosen(name: str) -> int:
    assert isinstance(STRATEGY, Menu)
    return STRATEGY.names.index(name) + 1


def turn(lockstep: Lockstep, level: float | None, levels: Any = None) -> None:
    for engine in lockstep.engines:
        engine.levels.set(level, levels)


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("name", ALL)
def test_a_choice_has_the_bits_of_that_compressor_alone(name: str, workers: int) -> None:
    """Chosen at construction or later: means, errors, bytes, scheme."""
    alone = Lockstep(workers, by_default(ALL[name]), ErrorFeedback())
    first = Lockstep(workers, by_default(Menu(ALL, name)), ErrorFeedback())
    later = Lockstep(workers, STRATEGY, ErrorFeedback())
    turn(later, chosen(name))
    for step in range(4):
        wanted = alone.step(gradients(step, workers))
        for menu in (first, later):
            assert menu.engines[0].scheme == alone.engines[0].scheme
            found = menu.step(gradients(step, workers))
            assert found.wire_bytes == wanted.wire_bytes
            for own, theirs in zip(
                [found.mean, *found.errors], [wanted.mean, *wanted.errors], strict=True
            ):
                assert all(torch.equal(own[key], theirs[key]) for key in SHAPES)


LEVELS = st.none() | st.integers(1, len(ALL))
CHANGES = st.lists(
    st.tuples(LEVELS, st.dictionaries(st.sampled_from(sorted(SHAPES)), LEVELS)),
    min_size=20,
    max_size=20,
)


@settings(max_examples=50, deadline=None)
@given(changes=CHANGES)
def test_errors_survive_a_thousand_changes(changes: list[tuple[Any, dict[str, Any]]]) -> None:
    """Sent parts and errors sum to the gradients, also where parameters have different choices."""
    lockstep = Lockstep(2, STRATEGY, ErrorFeedback())
    total = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
    for step, (level, levels) in enumerate(changes):
        turn(lockstep, level, levels)
        own = gradients(step, 2)
        found = lockstep.step(own)
        for name, summed in total.items():
            summed += sum(each[name].double() for each in own) / 2 - found.mean[name]
    left = [engine.errors() for engine in lockstep.engines]
    for name, summed in total.items():
        errors = sum(each[name].double() for each in left if name in each)
        torch.testing.assert_close(summed, torch.zeros_like(summed) + errors / 2, atol=1e-4, rtol=0)


@pytest.mark.parametrize("poisoned", [None, 0, 1])
def test_uncompressed_steps_are_plain_where_no_error_is_left(poisoned: int | None) -> None:
    """An unused parameter keeps its error, on its worker only, and workers still agree.

    A gradient that is not finite makes the mean so on all workers, whether they have errors or not.
    """
    lockstep = Lockstep(2, STRATEGY, ErrorFeedback())
    turn(lockstep, None)
    lockstep.step(gradients(0, 2))
    assert [dict(engine.kept) for engine in lockstep.engines] == [{}, {}]
    turn(lockstep, chosen("topk"))
    lockstep.step(gradients(1, 2))
    errors = lockstep.engines[0].errors()["weight"].clone()
    assert errors.any()
    turn(lockstep, None)
    unused = gradients(2, 2)
    unused[0]["weight"].zero_()
    lockstep.step(unused)
    assert torch.equal(lockstep.engines[0].errors()["weight"], errors)
    assert dict(lockstep.engines[1].kept) == {}
    last = gradients(3, 2)
    if poisoned is not None:
        last[poisoned]["weight"].view(-1)[3] = torch.inf
    mean = lockstep.step(last).mean["weight"]
    if poisoned is None:
        expected = (last[0]["weight"] + last[1]["weight"] + errors) / 2
        torch.testing.assert_close(mean, expected)
        assert [dict(engine.kept) for engine in lockstep.engines] == [{}, {}]
    else:
        assert not mean.isfinite().all()


def test_state_belongs_to_the_choice() -> None:
    lockstep = Lockstep(2, STRATEGY)
    engine = lockstep.engines[0]
    structure = compressor_state(STRATEGY, SHAPES)

    def state_after(level: float | None, levels: Any = None) -> dict[str, Any]:
        turn(lockstep, level, levels)
        lockstep.step(gradients(engine.step, 2))
        state: dict[str, Any] = engine.state_dict()["compressor"]
        structure.check(state, "compressor")
        return state

    assert not state_after(chosen("qsgd"))
    factors = state_after(chosen("powersgd"))["weight"]
    assert factors["method of the menu"] == "powersgd"
    assert set(factors) == {"method of the menu", "q"}
    assert "q" in state_after(None)["weight"]  # sent uncompressed for now; the choice stays
    assert not state_after(chosen("topk")).get("weight")
    by_name = state_after(chosen("topk"), {"conv": chosen("powersgd")})
    assert "q" in by_name["conv"]
    assert not by_name.get("weight")
    with pytest.raises(ValueError, match=r"weight/method of the menu is 'cas', not one of"):
        structure.check({"weight": factors | {"method of the menu": "cas"}}, "compressor")
    with pytest.raises(ValueError, match="declares no state"):
        structure.check({"weight": factors | {"method of the menu": "cast"}}, "compressor")


@pytest.mark.parametrize("change_at", [2, 3, 4])
def test_goes_on_bit_for_bit_from_saved_state(change_at: int) -> None:
    """Saved before, at and after a change of the choice."""
    whole, names = Lockstep(2, STRATEGY), {0: "powersgd", change_at: "topk", change_at + 2: "qsgd"}
    again: Lockstep | None = None
    for step in range(8):
        for lockstep in (whole, again):
            if lockstep is not None and step in names:
                turn(lockstep, chosen(names[step]))
        if step == 3:
            again = Lockstep(2, STRATEGY)
            for ours, theirs in zip(again.engines, whole.engines, strict=True):
                ours.load_state_dict(copy.deepcopy(theirs.state_dict()))
                requested = theirs.levels.requested()
                assert requested is not None
                ours.levels.set(*requested)
        wanted = whole.step(gradients(step, 2))
        if again is not None:
            found = again.step(gradients(step, 2))
            assert all(torch.equal(found.mean[name], wanted.mean[name]) for name in SHAPES)


def test_order_names_and_text() -> None:
    menu = Menu({"dense": Identity(), "cast": Cast(), "qsgd": QSGD(4)})
    assert menu.names == ("qsgd", "cast", "dense")
    assert menu.level == 3
    alike = {"four": QSGD(4), "too": QSGD(4)}
    assert Menu(alike, "four") != Menu(dict(reversed(alike.items())), "four")  # other levels
    assert menu.at(1).choice == menu.at(-3).choice == "qsgd"
    assert menu == Menu({"qsgd": QSGD(4), "cast": Cast(), "dense": Identity()}, "dense")
    assert hash(menu) == hash(copy.deepcopy(menu))
    assert str(menu) == "Menu(qsgd, cast, dense)"
    assert repr(menu) == (
        "Menu(compressors={'qsgd': QSGD(4), 'cast': Cast(), 'dense': Identity()}, choice='dense')"
    )
    assert str(by_default(menu)) == str(menu)


def test_strategy_gives_each_what_it_would_have_alone() -> None:
    strategy = CompressedDDPStrategy(Menu({"dense": Identity(), "qsgd": QSGD(4)}))
    assert strategy.memory.buffers == ()
    assert strategy.scheme is None
    biased = CompressedDDPStrategy(Menu({"cast": Cast(), "topk": TopK(0.01)}), min_numel=0)
    assert biased.memory == ErrorFeedback()
    assert isinstance(biased.compressor, Menu)
    assert dict(biased.compressor.compressors) == {
        "topk": PerParameter(TopK(0.01)),
        "cast": Cast(),
    }


def test_a_scheme_that_is_given_is_everyones() -> None:
    menu = by_default(Menu({"dense": Identity(), "qsgd": QSGD(4)}))
    lockstep = Lockstep(3, menu, scheme=TwoShot())
    for level in (1, 2):
        turn(lockstep, level)
        assert lockstep.engines[0].scheme == TwoShot()


@pytest.mark.parametrize("given", ["two_shot", TwoShot()])
def test_a_choice_may_have_a_scheme_of_its_own(given: str | Scheme) -> None:
    """One compressor twice: the bits and bytes are those of that compressor with that scheme."""
    twice = {"in two rounds": TopK(0.05), "in one": TopK(0.05), "qsgd": QSGD(4)}
    menu = Menu(twice, schemes={"in two rounds": given})
    assert menu.names == (*twice,)
    assert hash(menu) == hash(copy.deepcopy(menu))
    assert repr(menu).endswith(f", choice='in two rounds', schemes={{'in two rounds': {given!r}}})")
    for name, scheme in (("in two rounds", TwoShot()), ("in one", AllGather())):
        ours = Lockstep(3, by_default(menu))
        alone = Lockstep(3, by_default(TopK(0.05)), scheme=scheme)
        turn(ours, menu.names.index(name) + 1)
        for step in range(3):
            found, wanted = (each.step(gradients(step, 3)) for each in (ours, alone))
            assert ours.engines[0].scheme == scheme
            assert found.wire_bytes == wanted.wire_bytes
            assert all(torch.equal(found.mean[key], wanted.mean[key]) for key in SHAPES)


def test_the_nodes_of_a_choices_scheme_are_the_menus() -> None:
    """So bytes within a node are counted apart, and elastic workers cannot have one."""
    each: dict[str, Compressor] = {"qsgd": QSGD(4), "topk": TopK(0.05)}
    for menu, near in ((Menu(each), 1), (Menu(each, schemes={"topk": Hierarchical(2)}), 2)):
        assert Compression(menu).configured("here").neighbours(4) == near
    with pytest.raises(ValueError, match="its nodes need a fixed number of workers"):
        LocalStepsStrategy(menu, elastic=Elastic("10.0.0.1:29400"))


@pytest.mark.parametrize(
    ("common", "other", "scheme"),
    [
        ("qsgd", "dense", AllGather()),
        ("dense", "powersgd", AllReduce()),
        ("topk", "powersgd", AllGather()),
    ],
)
def test_parameters_with_different_methods_share_a_scheme(
    common: str, other: str, scheme: Scheme
) -> None:
    lockstep = Lockstep(3, STRATEGY)
    turn(lockstep, chosen(common), {"weight": chosen(other)})
    assert lockstep.engines[0].scheme == scheme


REFUSED = {
    "fewer": (lambda: Menu({"dense": Identity()}), "at least two compressors"),
    "no mapping": (lambda: Menu([Identity(), Cast()]), "at least two compressors by name"),  # type: ignore[arg-type]
    "choice": (lambda: Menu(ALL, "topkk"), r"not on the menu \(did you mean 'topk'\?\)"),
    "whose scheme": (
        lambda: Menu(ALL, schemes={"topkk": "two_shot"}),
        r"schemes='topkk'.*not on the menu \(did you mean 'topk'\?\)",
    ),
    "whose scheme it cannot be": (
        lambda: combine(by_default(Menu(ALL, schemes={"topk": "all_reduce"}))),
        "not linear",
    ),
    "one scheme": (lambda: Menu(ALL, schemes="two_shot"), "for one scheme of all, give the strat"),  # type: ignore[arg-type]
    "no scheme": (
        lambda: combine(by_default(Menu(ALL, schemes={"topk": "two_shots"}))),
        "did you mean 'two_shot'",
    ),
    "class": (lambda: Menu({"a": Cast, "b": Cast()}), "give an instance of a compressor"),  # type: ignore[dict-item]
    "name": (lambda: Menu({1: Cast(), "b": Cast()}), "give each compressor a text"),  # type: ignore[dict-item]
    "wrapped": (lambda: combine(SizeSwitch(Menu(ALL))), "put the wrapper around compressors"),
    "scheme": (
        lambda: combine(STRATEGY, scheme=AllReduce()),
        "own communication rounds|not linear",
    ),
    "sums": (
        lambda: combine(Menu({"a": VarianceCriterion(), "b": Cast()}), NoMemory()),
        "adds up nothing",
    ),
    "min_numel": (
        lambda: CompressedDDPStrategy(Menu({"a": Identity(), "b": Cast()}), min_numel=4096),
        "compresses every tensor",
    ),
    "nan": (lambda: Menu(ALL).at(float("nan")), "level nan; give a place"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case: str) -> None:
    make, sentence = REFUSED[case]
    with pytest.raises(ValueError, match=sentence):
        make()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    "controller",
    [
        Accordion(low=3, high=1),
        BandwidthAware((3, 2, 1), step_seconds=1.0),
        GainSearch((3, 2, 1)),
        Schedule((3, None, 1)),
    ],
    ids=lambda controller: type(controller).__name__,
)
def test_controllers_take_a_menu(controller: Controller) -> None:
    menu = Menu({"dense": Identity(), "cast": Cast(), "qsgd": QSGD(4)})
    assert CompressedDDPStrategy(menu, controller=controller).controller == controller
