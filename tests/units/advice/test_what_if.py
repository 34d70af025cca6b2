"""A what-if without a project predicts what advise predicts with one, and refuses mistakes."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lightning_gc import cli
from lightning_gc.advice.costs import segment_trace
from lightning_gc.advice.description import LATENCY_US, MODELS, parameters, shapes_of, square
from lightning_gc.advice.prediction import METHODS, WHOLE, Situation, predict
from lightning_gc.advice.traces import Shapes, Trace
from lightning_gc.advice.what_if import WhatIf, shipped, shipped_trace, verdict
from lightning_gc.exchange.timeline import Module
from lightning_gc.methods.method import Method, parse_method
from lightning_gc.transports.link import Link, alike, at_rate
from lightning_gc.transports.network_model import rate
from tests.support.processes import ROOT

SHAPES: Shapes = {
    "embedding": (2_000, 96),
    **{f"{i}.{name}": shape for i in range(2) for name, shape in (("w", (384, 96)), ("b", (384,)))},
    "filter": (128, 64, 3, 3),
    "small": (8, 8),
}
GPT = ("--params", "124M", "--step-ms", "45", "--link", "1gbit", "--workers", "4")


def link(gbps: float, down_gbps: float | None = None) -> Link:
    return Link(gbps, LATENCY_US, down_gbps=down_gbps)


def methods() -> dict[str, Method | None]:
    return {WHOLE: None, **{name: parse_method(name) for name in METHODS}}


def measured(case: WhatIf) -> Situation:
    """Return the situation that a session finds: messages of flows that really run.

    Its seconds of computation, which depend on the machine, are those of the shipped costs.
    """
    draw = torch.Generator().manual_seed(0)
    gradients = {name: torch.randn(shape, generator=draw) for name, shape in SHAPES.items()}
    given = case.situation()
    costs: dict[str, list[Trace]] = {}
    for name, method in methods().items():
        costs[name] = []
        for piece, known in zip(given.pieces, given.costs[name], strict=True):
            names = [given.names[i] for i in piece]
            own = torch.cat([gradients[n].reshape(-1) for n in names])
            real = segment_trace(method, {n: SHAPES[n] for n in names}, own, case.workers)
            assert [a.kind for a in real.asked] == [a.kind for a in known.asked]
            costs[name].append(replace(real, seconds=known.seconds))
    links = at_rate(alike(case.link), case.link)
    module = Module(case.step / 3, case.step * 2 / 3, 0.0)
    return replace(given, module=module, links=links, costs=costs)


@pytest.mark.parametrize("workers", [2, 4, 8])
def test_it_predicts_what_advise_predicts_from_the_same_numbers(workers: int) -> None:
    case = WhatIf(SHAPES, 0.05, workers, link(0.1))
    theirs = {row.name: row for row in predict(measured(case), {})}
    ours = {row.name: row for row in case.rows()}
    assert theirs.keys() == ours.keys()
    for name, row in ours.items():
        assert row.nbytes == pytest.approx(theirs[name].nbytes, rel=0.05), name
        assert row.seconds == pytest.approx(theirs[name].seconds, rel=0.03), name


@pytest.mark.parametrize("name", METHODS)
def test_messages_of_a_large_matrix_are_those_of_the_flow(name: str) -> None:
    """At sizes between the measured ones, and of another shape."""
    shapes: Shapes = {"matrix": (300, 1_000)}
    own = torch.randn(300_000, generator=torch.Generator().manual_seed(0))
    real = segment_trace(parse_method(name), shapes, own, 3)
    ours = shipped_trace(name, parse_method(name), shapes, 3)
    assert ours.nbytes == pytest.approx(real.nbytes, rel=0.02)


def test_parameters_of_the_models() -> None:
    found = {name: WhatIf(make(), 1.0, 2, link(1.0)).parameters for name, make in MODELS.items()}
    assert found["gpt2"] == 124_439_808
    assert found["resnet50"] == 25_557_032
    assert found["llama-1b"] == pytest.approx(1.1e9, rel=0.01)
    for number in (10, 50_000, 10**6, 124 * 10**6):
        assert WhatIf(square(number), 1.0, 2, link(1.0)).parameters == pytest.approx(
            number, rel=0.11
        )


def test_costs_of_the_gpu_are_those_of_the_page() -> None:
    page = (ROOT / "benchmarks/results/gpu_step_20261126.md").read_text()
    known = dict(line.split("|")[1:4:2] for line in page.splitlines() if line.startswith("| "))
    by_row = {row.strip(): ms.strip() for row, ms in known.items()}
    rows = {"cast": "Cast()", "qsgd": "QSGD(4)", "topk": "TopK(0.01)", "plain DDP": "plain DDP"}
    rows |= {"powersgd:rank=2": "PowerSGD(2)", WHOLE: "Identity()"}
    for name, row in rows.items():
        assert shipped()["gpu"]["step_ms"][name] == float(by_row[row])


def test_the_faster_the_link_the_less_there_is_to_gain() -> None:
    case = WhatIf(shapes_of("gpt2"), 0.045, 4, link(0.1))
    speeds = [verdict(replace(case, link=link(g)).rows(), case.step)[2] for g in (0.1, 1.0, 10.0)]
    assert speeds == sorted(speeds, reverse=True)
    text, method, _ = verdict(replace(case, link=link(1e4)).rows(), case.step)
    assert text.startswith("Do nothing: ")
    assert method is None
    found = [
        verdict(replace(case, link=link(g)).rows(), case.step) for g in (10.0, 14.0, 20.0, 30.0)
    ]
    for text, method, speed in found:
        assert text.startswith("Too close to call. ") == (method is not None and speed < 1.5)
    assert any(text.startswith("Too close") for text, *_ in found)


@pytest.mark.parametrize("rates", [(0.02, 0.2), (0.2, 0.02)])
def test_the_slower_direction_decides_where_all_send_alike(rates: tuple[float, float]) -> None:
    """What a worker receives another one has sent: so the scheme is the same either way."""
    case = WhatIf(shapes_of("gpt2"), 0.045, 4, link(*rates))
    slow = {row.name: row for row in replace(case, link=link(0.02)).rows()}
    for row in case.rows():
        assert row.seconds == pytest.approx(slow[row.name].seconds, rel=1e-6)
    chosen = verdict(case.rows(), case.step)[1]
    assert chosen == verdict(tuple(slow.values()), case.step)[1]


def test_a_gpu_compresses_faster_and_without_overlap_nothing_is_hidden() -> None:
    case = WhatIf(shapes_of("gpt2"), 0.045, 4, link(1.0))
    plain, gpu, late = (
        {row.name: row.seconds for row in each.rows()}
        for each in (case, replace(case, gpu=True), replace(case, overlap=False))
    )
    assert gpu["topk"] < plain["topk"]
    assert set(gpu) < set(plain)
    assert late["plain DDP"] > plain["plain DDP"]


def test_the_command_says_first_and_last_that_it_predicts(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["advise", *GPT]) == cli.OK
    said = capsys.readouterr().out
    first, *_, last = said.splitlines()
    assert first == last
    assert first.startswith("Prediction, nothing was measured. Such a step is a GPU's: give --gpu.")
    assert " It is 3.1 s with torch bf16 hook, 86% shorter." in first
    assert cli.main(["advise", *GPT, "--gpu"]) == cli.OK
    assert "nothing was measured. Use " in capsys.readouterr().out.splitlines()[0]
    home = [*GPT[:4], "--link", "20mbit/200mbit", "--workers", "4"]
    assert cli.main(["advise", *home]) == cli.OK
    of_home = capsys.readouterr().out
    assert "4 workers, 20 Mbit/s up, 200 Mbit/s down, 50 µs a message." in of_home
    assert "200 Mbit/s up, 2 Gbit/s down: " in of_home
    for part in (shipped()["machine"], "500 µs a message: ", "8 workers: ", "no overlap with"):
        assert part in said


def test_the_headline_names_what_counts_as_equal(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", *GPT]) == cli.OK
    said = capsys.readouterr().out
    first = said.splitlines()[0]
    assert "Use powersgd:rank=2: 0.43 s a step against 6.2 s with plain DDP" in first
    assert first.endswith("Equal within the prediction's error: topk:value_dtype=bfloat16.")
    assert cli.main(["advise", *GPT, "--methods", "qsgd", "cast"]) == cli.OK
    only = capsys.readouterr().out.partition("Without a prediction")[0]
    assert "Use qsgd" in only
    assert "topk" not in only
    assert "powersgd" not in only


def test_it_needs_no_lightning() -> None:
    """Its import takes longer than the rest of the command."""
    program = (
        "import sys; from lightning_gc import cli; code = cli.main(sys.argv[1:]);"
        "print([name for name in ('pytorch_lightning', 'optuna') if name in sys.modules], code)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, "advise", *GPT],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        check=True,
    )
    assert done.stdout.splitlines()[-1] == "[] 0"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--params", "124MB"], "'124MB' is not a number of parameters (did you mean 124M?)"),
        (["--params", "1.1G"], "(did you mean 1.1B?). Write it as 124M or 1.1B."),
        (["--params", "many"], "'many' is not a number of parameters. Write"),
        (["--params", "0M"], "'0M' is not"),
        (["--link", "1gb"], "--link '1gb' is not a rate (did you mean 1gbit?). Write it as 1gbit"),
        (["--link", "1Gbps"], "(did you mean 1gbit?)"),
        (["--link", "1.25GB/s"], "(did you mean 10gbit?)"),
        (["--link", "100 mbps"], "(did you mean 100mbit?)"),
        (["--link", "20mbit/fast"], "--link '20mbit/fast' is not a rate"),
        (["--link", "20mbit/200"], "--link '200' is not a rate"),
        (["--link", "fast"], "--link 'fast' is not a rate. Write it as 1gbit"),
        (["--workers", "1"], "--workers 1: at least 2 exchange gradients"),
        (["--step-ms", "0"], "--step-ms 0: must be above 0"),
        (["--latency-us", "-1"], "--latency-us -1: must be above 0"),
        (["--model", "gpt2"], "Give --params or --model, not both."),
        (["--methods", "qsdg"], "qsdg: it has no shipped costs (did you mean 'qsgd'?). Choose"),
        (["--methods", "signsgd"], "or measure it with a file such as train.yaml"),
        (["--methods", METHODS[3], "--gpu"], f"{METHODS[3]}: it has no costs on a GPU"),
        (["--out", "x"], "--out is for a measurement, which needs a file such as train.yaml"),
        (["--budget-seconds", "60"], "--budget-seconds is for a measurement"),
        (["--timeout", "60"], "--timeout is for a measurement"),
        (["--predict-only"], "--predict-only is for a measurement"),
        (["--find-unused-parameters"], "--find-unused-parameters is for a measurement"),
    ],
)
def test_mistyped_words_are_refused_with_the_fix(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["advise", *GPT, *words]) == cli.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "The description lacks --params or --model, --step-ms, --link, --workers."),
        (["--model", "gpt3", *GPT[2:]], "'gpt3' is not known (did you mean 'gpt2'?). Use gpt2,"),
        (["--model", "gpt2"], "The description lacks --step-ms, --link, --workers. Write"),
        (
            ["train.yaml", "--gpu"],
            "--gpu describes a training without a file. Leave out one of the two",
        ),
    ],
)
def test_what_is_missing_is_named(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert cli.main(["advise", *words]) == cli.USAGE
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(("workers", "named"), [(8, False), (9, False), (16, True)])
def test_among_many_workers_sparsifiers_are_predicted_only_if_named(
    workers: int, named: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"advise --params 10M --step-ms 300 --link 1gbit --workers {workers}".split()
    assert cli.main([*words, *(["--methods", "topk", "qsgd"] if named else [])]) == cli.OK
    said = capsys.readouterr().out
    table = said.partition("Rows with")[0]
    assert ("\ntopk" in table) == (workers <= 8 or named)
    assert ("Sparsifiers are left out among more than 8 workers, " in said) == (
        workers > 8 and not named
    )
    assert (f"  {2 * workers} workers, without sparsifiers: " in said) == (workers == 8)


def test_numbers() -> None:
    assert [parameters(t) for t in ("124M", "1.1b", "7 K", "124439808", "1_000")] == [
        124_000_000,
        1_100_000_000,
        7_000,
        124_439_808,
        1_000,
    ]
    assert [rate(t, "") for t in ("1gbit", "2.5Gbit", "100mbit", "50 Mbit")] == [
        1.0,
        2.5,
        0.1,
        0.05,
    ]


def test_costs_are_shipped_for_every_method_that_advise_tries() -> None:
    assert set(shipped()["methods"]) == {WHOLE, *METHODS}
    for by_workers in shipped()["methods"].values():
        assert set(by_workers) == {"2", "3", "4", "6"}
        for traces in by_workers.values():
            assert len(traces) == len(shipped()["sizes"])
            # From 2^18 elements on, a larger matrix takes longer.
            assert sum(traces[-1]["seconds"]) > sum(traces[-3]["seconds"]) > 0
