"""``lightning-gc advise``: print what was found, and write it to files."""

from __future__ import annotations

import argparse
import dataclasses
import os
import shutil
from pathlib import Path

from lightning_gc.advice.advising import Advice, advise
from lightning_gc.advice.alpha_beta import LinkByKind
from lightning_gc.advice.prediction import Situation
from lightning_gc.advice.report import COLUMNS, link_line, write_json
from lightning_gc.bench.preparation import print_line
from lightning_gc.text_table import markdown, plain


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
        say=print_line,
    )
    if int(os.environ["RANK"]) == 0:
        show(advice, options.config, options.out)


def show(advice: Advice, config: Path, out: Path) -> None:
    """Print the table and the verdict, and write the files."""
    table, width = advice.table(), shutil.get_terminal_size(fallback=(120, 24)).columns
    print_line(plain(COLUMNS, table, width))
    lines = [limits(advice.situation)]
    lines += [f"Not predicted: {name}: {why}." for name, why in advice.missing.items()]
    if advice.verdict is None:
        best = next(row for row in advice.rows if row.every == 1)
        lines.append(
            f"Predicted, not measured, so no verdict: the shortest step is {best.name}'s, "
            f"{best.seconds:.4f} s."
        )
    else:
        lines.append(f"{advice.verdict} Accuracy is not judged: tune the learning rate anew.")
    print_line("\n".join(lines))
    # Names of their own, and not with_suffix, which would cut "lm-1.5".
    report, figures, drawing, suggested = (
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
        "link": link_line(advice.situation.link),
    }
    write_json(figures, facts)
    page = f"# {config.stem}\n\n{markdown(COLUMNS, table)}\n" + "\n\n".join(lines) + "\n"
    report.write_text(page, encoding="utf-8")
    advice.plot(drawing)
    written = [report, figures, drawing]
    if advice.suggestion() is not None:
        advice.yaml(suggested)
        written.append(suggested)
    print_line("\n".join(map(str, written)))
    if advice.suggestion() is not None:
        print_line(f"Next: lightning-gc fit {suggested}")


def limits(situation: Situation) -> str:
    """Return what limits a step, in a sentence."""
    dense = situation.step(situation.plain(None))
    module, link = situation.module, situation.link
    assert isinstance(link, LinkByKind)
    return (
        f"Of a step of plain DDP, predicted at {dense.seconds:.4f} s, forward, backward and "
        f"optimizer take {module.step:.4f} s, waiting for the link {dense.waited:.4f} s, and DDP "
        f"itself {situation.overhead:.4f} s; no method can be faster than {module.step:.4f} s."
    )
