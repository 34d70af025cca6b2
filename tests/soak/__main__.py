"""Random training runs, random faults, restarts; and what must be true afterwards.

    python -m tests.soak --rounds 100 --out soak.jsonl

Each history draws a plan (compressor, memory, scheme, controller, 2 to 4 workers, precision,
accumulation, verification), trains it undisturbed, then trains it again with up to three faults,
each followed by a restart from the newest checkpoint. After every fault no process is left, nobody
has waited longer than the timeout and a grace, and a damaged file is refused by its name. In the
end weights, errors, levels, controller and totals equal those of the undisturbed run bit for bit;
with another number of workers the mean of the errors is kept.

A seed determines a history; only the instants of signals differ. The first failure stops the soak:
it keeps the folder with plan, logs and checkpoints, and prints the command that plays it again.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

from tests.soak.history import play


@contextlib.contextmanager
def namespaces(wanted: bool) -> Iterator[list[str]]:
    """Yield four network namespaces where that is possible, else none."""
    if not wanted or os.geteuid() != 0 or shutil.which("ip") is None:
        yield []
        return
    sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))  # where scripts are run
    from namespaces import network

    with network(4) as spaces:
        yield spaces


def table(lines: list[dict[str, object]]) -> str:
    """Return counts by kind of fault, in Markdown."""
    heads = ["fault", "rounds", "others ended", "named a worker", "another error", "killed"]
    rows = [[*heads, "median s", "longest s"]]
    kinds = collections.defaultdict(list)
    for line in lines:
        kinds[str(line["kind"])].append(line)
    for kind, found in [*sorted(kinds.items()), ("all", lines)]:
        others = collections.Counter(how for line in found for how in line["others"])  # type: ignore[attr-defined]
        seconds = [float(line["seconds"]) for line in found]  # type: ignore[arg-type]
        counts = [others[how] for how in ("ended", "named", "plain", "killed")]
        spent = [f"{statistics.median(seconds):.1f}", f"{max(seconds):.1f}"]
        rows.append([kind, str(len(found)), *map(str, counts), *spent])
    rows.insert(1, ["---", *["---:"] * (len(rows[0]) - 1)])
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=20, help="faults in all (default: 20)")
    parser.add_argument("--seed", type=int, default=0, help="of the first history")
    parser.add_argument("--out", type=Path, help="file to add a line of JSON to for each round")
    parser.add_argument("--links", action="store_true", help="links that go down; needs root")
    parser.add_argument("--table", type=Path, help="only print the table of such a file")
    options = parser.parse_args()
    if options.table:
        lines = [json.loads(line) for line in options.table.read_text().splitlines()]
        sys.stdout.write(table(lines))
        return 0
    done, seed = 0, options.seed
    with namespaces(options.links) as spaces:
        while done < options.rounds:
            folder = Path(tempfile.mkdtemp(prefix=f"soak-{seed}-"))
            started = time.monotonic()
            try:
                for outcome in play(seed, folder, spaces):
                    done += 1
                    line = {"seed": seed, **dataclasses.asdict(outcome)}
                    sys.stdout.write(f"{json.dumps(line)}\n")
                    sys.stdout.flush()
                    if options.out:
                        with options.out.open("a") as file:
                            file.write(f"{json.dumps(line)}\n")
            except Exception:
                links = " --links" if spaces else ""
                sys.stdout.write(
                    f"{traceback.format_exc()}\nSeed {seed} has failed; its files are in {folder}. "
                    f"Again: python -m tests.soak --rounds 1 --seed {seed}{links}\n"
                )
                return 1
            shutil.rmtree(folder)
            sys.stdout.write(f"history {seed}: {time.monotonic() - started:.0f} s\n")
            seed += 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
