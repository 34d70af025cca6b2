"""Advise whether compression would speed up a model on these machines, and which method."""

import argparse
import contextlib
import copy
import dataclasses
import json
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from lightning_gc.advice import prediction, report
from lightning_gc.advice.description import LEFT_OUT, candidates, link_of
from lightning_gc.advice.session import SHARE, SHARE_ALONE, Session
from lightning_gc.bench import preparation
from lightning_gc.bench.baselines import PLAIN, select_methods
from lightning_gc.controllers.auto import MANY
from lightning_gc.core.refusal import refuse
from lightning_gc.methods.lightning_flavour import quiet_libraries
from lightning_gc.methods.method import Method
from lightning_gc.methods.text_table import markdown, plain
from lightning_gc.methods.yaml_config import methods_in, read

STOPPED = 130


@dataclass(frozen=True)
class Advice:
    """The result of ``advise``.

    Attributes:
        rows: predicted, shortest step first.
        measured: name -> ``seconds``, ``low``, ``high``, ``bytes``; empty if nothing was measured.
        verdict: None if nothing was measured.
        untuned: the same among methods that need no tuning; None also if none was measured.
        situation: the measured inputs of the prediction.
        methods: candidates by name.
        missing: method -> why it was not predicted.
        sections: sections of the user's file.
        trainer: settings of the Trainer in the written file.
        ddp: further DDP settings in the written file.
    """

    rows: tuple[prediction.Prediction, ...]
    measured: Mapping[str, Mapping[str, Any]]
    verdict: report.Verdict | None
    untuned: report.Verdict | None
    situation: prediction.Situation
    methods: Mapping[str, Method]
    missing: Mapping[str, str]
    sections: Mapping[str, Any] = field(repr=False)
    trainer: Mapping[str, Any] = field(repr=False)
    ddp: Mapping[str, Any] = field(repr=False)

    def suggestion(self) -> prediction.Prediction | None:
        """Return the suggested row, or None for "do nothing" and for no verdict."""
        choice = None if self.verdict is None else self.verdict.choice
        return next((row for row in self.rows if row.name == choice), None)

    def yaml(self, path: str | Path) -> None:
        """Write the user's file with the suggested strategy; ``lightning-gc fit`` runs it.

        Raises:
            ValueError: nothing is suggested.
        """
        row = self.suggestion()
        if row is None:
            refuse(
                f"The advice has no suggestion to write: {self.verdict or 'nothing was measured'}"
            )
        assert row.method is not None
        section = report.strategy_section(row, self.methods[row.method], self.ddp)
        written, path = copy.deepcopy(dict(self.sections)), Path(path)
        trainer = {**(written.get("trainer") or {}), **self.trainer, "strategy": section}
        path.parent.mkdir(parents=True, exist_ok=True)
        text = yaml.safe_dump(written | {"trainer": trainer}, sort_keys=False)
        path.write_text(text, encoding="utf-8")

    def plot(self, path: str | Path) -> None:
        """Draw a step with plain DDP, torch's 16-bit hook and the best row, as predicted."""
        best = self.suggestion() or next(iter(prediction.shortlist(self.rows, 1)), None)
        steps = {row.name: row.drawn for row in report.plain_rows(self.rows) if row.drawn}
        if best is not None and best.drawn is not None and best.method in self.methods:
            steps[best.name] = best.drawn
        report.plot(Path(path), steps, self.situation.module.step)

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Return columns and cells: measured rows, then the best other row of every method."""
        return report.table(self.rows, self.measured)


def advise(
    config: str | Path | Mapping[str, Any],
    methods: Sequence[str] = (),
    *,
    budget_seconds: float = 120.0,
    workers: int | None = None,
    link: str | None = None,
    predict_only: bool = False,
    timeout: float = 120.0,
    find_unused_parameters: bool = False,
    say: Any = None,
) -> Advice:
    """Return whether compression would speed up a model on these machines, and which method.

    Called by every worker, started by torchrun. The verdict rests on measured seconds; prediction
    chooses what to measure and answers what-ifs.

    Args:
        config: path of a YAML file with LightningCLI's model, data and trainer, or its sections.
        methods: candidates, as for ``lightning-gc bench``; by default 16 bits, 4 bits, low
            rank and, among at most 8 workers, top-k by several schemes.
        budget_seconds: seconds for everything. Three tenths time the methods' computation; seven
            tenths if no method is measured. If that is too little, candidates are left out.
        workers: predict for this number of workers; no method is measured.
        link: predict for links of this nominal rate, such as ``"1gbit"``, or of these rates up and
            down, ``"20mbit/200mbit"``; no method is measured.
        predict_only: measure no method, and give no verdict.
        timeout: of every collective, in seconds.
        find_unused_parameters: as for DDP.
        say: called with lines of progress.

    Communication pattern:
        A probe of each kind of request, some steps of plain DDP, and turns of the best candidates.

    Raises:
        ValueError: an invalid file, method or rate; a model that optimizes manually.
        BenchError: a worker has failed.
    """
    nominal = None if link is None else link_of(link)
    if workers is not None and workers < 2:
        refuse(f"advise(workers={workers!r}): at least 2 exchange gradients")
    if budget_seconds < 10:
        refuse(f"advise(budget_seconds={budget_seconds:g}): give 10 or more")
    began = time.monotonic()
    worker = preparation.WorkerRank.from_environment("advise")
    quiet_libraries()
    tell = (say or (lambda text: None)) if worker.rank == 0 else (lambda text: None)
    sections = config if isinstance(config, Mapping) else read(config, needed=("model",))
    chosen = select_methods(
        [prediction.SIXTEEN, *(methods or candidates(workers or worker.world_size))],
        methods_in(sections),
    )
    if not methods and (workers or worker.world_size) > MANY:
        tell(LEFT_OUT)
    asked = {"methods": list(chosen), "budget": budget_seconds}
    asked |= {"workers": workers, "link": nominal}
    same = {name: repr(value) for name, value in asked.items()} | {"predict": str(predict_only)}
    with contextlib.ExitStack() as within:
        within.enter_context(stopping_at_once(worker.rank))
        setup, device = preparation.prepare(
            sections,
            worker,
            6,
            timeout,
            find_unused_parameters=find_unused_parameters,
            say=tell,
        )
        within.enter_context(preparation.process_group(setup, device, same))
        within.enter_context(preparation.explained())
        preparation.SigtermCallback(worker.rank, "the link and the module")
        turns = not (predict_only or workers or link)
        share = SHARE if turns else SHARE_ALONE
        deadline = began + budget_seconds
        session = Session(setup, chosen, device, tell, deadline, share * budget_seconds)
        found = session.find_link()
        tell(f"link: {report.link_line(found)}")
        situation = session.situation(found, workers, nominal)
        rows = prediction.predict(situation, session.knobs(situation.costs))
        measured: dict[str, dict[str, Any]] = {}
        if turns:
            measured = session.measure(rows)
    verdict = untuned = None
    if measured:
        ranked = [row for row in prediction.shortlist(rows, len(rows)) if row.name in measured]
        sixteen = next(
            (row.name for row in ranked if row.method == prediction.SIXTEEN), prediction.SIXTEEN
        )
        verdict = report.judge(measured, PLAIN, sixteen, situation.module.step, hook=session.hook)
        kept = [row.name for row in ranked if report.keeps_settings(chosen, row)]
        if kept:
            ours = {name: measured[name] for name in (PLAIN, session.hook, *kept)}
            untuned = report.judge(ours, PLAIN, sixteen, situation.module.step, hook=session.hook)
    nodes = worker.world_size // worker.local_world_size
    return Advice(
        tuple(rows),
        measured,
        verdict,
        untuned,
        situation,
        chosen,
        session.missing,
        sections,
        {"devices": worker.local_world_size, "num_nodes": nodes, "accelerator": device.type},
        setup.ddp,
    )


@contextlib.contextmanager
def stopping_at_once(rank: int) -> Iterator[None]:
    """Exit immediately on Ctrl-C, without waiting for other workers; worker 0 prints a message."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: Any) -> None:
        if rank == 0:
            sys.stderr.write("lightning-gc: Stopped. Nothing was written.\n")
            sys.stderr.flush()
        os._exit(STOPPED)

    before = signal.signal(signal.SIGINT, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def run(options: argparse.Namespace) -> None:
    """Run the command on one worker."""
    advice = advise(
        options.config,
        options.methods or (),
        budget_seconds=options.budget_seconds,
        workers=options.workers,
        link=options.link,
        predict_only=options.predict_only,
        timeout=options.timeout,
        find_unused_parameters=options.find_unused_parameters,
        say=preparation.print_line,
    )
    if int(os.environ["RANK"]) == 0:
        show(advice, options.config, options.out)


def show(advice: Advice, config: Path, out: Path) -> None:
    """Print the table and the verdict, and write the files."""
    (columns, cells), width = advice.table(), shutil.get_terminal_size(fallback=(120, 24)).columns
    verdict = verdict_line(advice)
    preparation.print_line(f"{verdict}\n\n{plain(columns, cells, width)}")
    lines = [report.LOCAL_NOTE, limits(advice.situation)]
    lines += [f"Not predicted: {name}: {why}." for name, why in advice.missing.items()]
    preparation.print_line("\n".join(lines))
    # Not with_suffix, which would cut "lm-1.5".
    page, figures, drawing, suggested = (
        out / f"{config.stem}.advised.{kind}" for kind in ("md", "json", "svg", "yaml")
    )
    facts = {
        "measured": advice.measured,
        "predicted": [{n: v for n, v in vars(row).items() if n != "drawn"} for row in advice.rows],
        "verdict": None if advice.verdict is None else dataclasses.asdict(advice.verdict),
        "module": dataclasses.asdict(advice.situation.module),
        "contention": advice.situation.contention,
        "overhead": advice.situation.overhead,
        "workers": advice.situation.workers,
        "link": report.link_line(advice.situation.links),
    }
    out.mkdir(parents=True, exist_ok=True)
    figures.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    parts = [f"# {config.stem}", verdict, markdown(columns, cells), *lines]
    text = "\n\n".join(parts) + "\n"
    page.write_text(text, encoding="utf-8")
    advice.plot(drawing)
    written = [page, figures, drawing]
    if advice.suggestion() is not None:
        advice.yaml(suggested)
        written.append(suggested)
    preparation.print_line("\n".join(map(str, written)))
    if advice.suggestion() is not None:
        preparation.print_line(f"Next: lightning-gc fit {suggested}")
    preparation.print_line(verdict)


def verdict_line(advice: Advice) -> str:
    """Return the verdict as the first and the last line of the command's output.

    Name next steps only after a suggestion.
    """
    if advice.verdict is None:
        best = next(row for row in advice.rows if row.every == 1)
        return (
            f"No verdict, because nothing was measured. The shortest predicted step is "
            f"{best.name}'s, {best.seconds:.4f} s."
        )
    row = advice.suggestion()
    if row is None:
        return f"Verdict: {advice.verdict}"
    assert row.method is not None
    again = report.tuning(advice.methods[row.method])
    other = ""
    if advice.untuned is not None and not report.keeps_settings(advice.methods, row):
        other = f" Without tuning: {advice.untuned}"
    return f"Verdict: {advice.verdict} Accuracy is not judged. {again}{other}"


def limits(situation: prediction.Situation) -> str:
    """Describe what limits a step."""
    dense, module = situation.step(None), situation.module
    return (
        f"A step of plain DDP takes {dense.seconds:.4f} s (predicted). Forward, backward and "
        f"optimizer take {module.step:.4f} s, the wait for the link {dense.waited:.4f} s, DDP "
        f"itself {situation.overhead:.4f} s. No method can be faster than {module.step:.4f} s."
    )
