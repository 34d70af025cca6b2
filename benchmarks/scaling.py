"""Where does each scheme stop paying? Measured kernels in an alpha-beta model, to 1,024 workers.

For every compressor and scheme, simulated workers take some steps on the gradients of the medium
LSTM (4.45 M elements), one thread. What they ask for and how long they compute, among 2, 4, 8 and
16, follows a pattern in W. Put through the model of a network, that tells the seconds of an
exchange for any W, and beside it those of a dense ring all-reduce. Nothing overlaps with the
backward pass here; where it does, the limit is further out.

The model is held against real processes over Gloo on loopback, 2, 4 and 8 of them: the bytes to the
byte; the seconds as far as this machine's cores go. With --shaped also on links of a given speed
(needs root and iproute2), where the network and not the cores is what counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import dated_page
import namespaces
import torch
import torch.distributed as dist
from dated_page import say
from matplotlib.figure import Figure

from lightning_gc import (
    QSGD,
    AllGather,
    AllReduce,
    Cast,
    Identity,
    RandomK,
    SparseReduce,
    TopK,
    TwoShot,
)
from lightning_gc.advice.traces import (
    Asked,
    Pattern,
    Shapes,
    Trace,
    dense,
    engines,
    gradient,
    pattern,
    trace,
)
from lightning_gc.compressors import Compressor
from lightning_gc.methods import plot_style
from lightning_gc.methods.plot_style import FAMILIES, SERIES
from lightning_gc.methods.text_table import markdown
from lightning_gc.schemes import Scheme
from lightning_gc.transports.accounting import Recording
from lightning_gc.transports.distributed import Distributed
from lightning_gc.transports.link import Link, alike

FULL: Shapes = {
    "embedding": (10_000, 300),
    **{f"lstm{i}": (1200, 300) for i in range(4)},
    **{f"bias{i}": (1200,) for i in range(4)},
}
QUICK: Shapes = {"embedding": (600, 300), "lstm": (400, 300), "bias": (1200,)}
COMPRESSORS: dict[str, Compressor] = {
    "Cast()": Cast(),
    "QSGD(4)": QSGD(4),
    "TopK(0.01), bfloat16": TopK(0.01, value_dtype="bfloat16"),
    "RandomK(0.01)": RandomK(0.01),
}
COLOURS = {
    **{"Cast()": SERIES[-1], "QSGD(4)": FAMILIES["quantiser"]},
    **{"TopK(0.01), bfloat16": FAMILIES["sparsifier"], "RandomK(0.01)": SERIES[-2]},
}
# Those of nodes have no pattern over W, and AllGatherOrTwoShot is one of these two.
SCHEMES = (AllGather(), AllReduce(), SparseReduce(), TwoShot())
DENSE = "dense"
SEEN, CHECKED, MOST = (3, 4, 8, 16), (3, 4, 8), 1024  # two workers merge messages
SHOWN = (2, 8, 64, 1024)
ROOT = Path(__file__).parents[1]
Key = tuple[str, str]
Configurations = dict[Key, tuple[Compressor, Scheme]]


def configurations() -> Configurations:
    """Return each compressor with every scheme that takes it; what can be averaged, is."""
    found: Configurations = {}
    for name, compressor in COMPRESSORS.items():
        for scheme in SCHEMES:
            try:
                scheme.check(compressor)
            except ValueError:
                continue
            if scheme.averages == compressor.traits.linear:
                found[name, type(scheme).__name__] = (compressor, scheme)
    return found


def named(found: Configurations) -> dict[str, tuple[Compressor, Scheme]]:
    """Return the same by one name each, and dense before them."""
    ours = {", ".join(key): pair for key, pair in found.items()}
    return {DENSE: (Identity(), AllReduce()), **ours}


def nbytes(shapes: Shapes) -> int:
    """Return the bytes of a dense gradient."""
    return 4 * sum(torch.Size(shape).numel() for shape in shapes.values())


def errors(traces: Sequence[Trace]) -> tuple[float, float]:
    """Return two relative errors of a pattern.

    The first is that of the bytes at the largest W, predicted from the others. The second is the
    largest of the seconds.
    """
    found, largest = pattern(traces), traces[-1]
    guessed = replace(found, sizes=pattern(traces[:-1]).sizes).at(largest.workers)
    wrong = [sum(found.at(each.workers).seconds) / sum(each.seconds) - 1 for each in traces]
    return guessed.nbytes / largest.nbytes - 1, max(wrong, key=abs)


def kernels(patterns: dict[Key, Pattern], traces: dict[Key, list[Trace]]) -> str:
    """Return the table of what has been measured."""
    least, most = SEEN[0], SEEN[-1]
    columns = [
        *("", f"bytes sent, W = {least}", f"W = {most}", "foretold", "compress, ms", "then, ms"),
        *(f"then at W = {most}, ms", "per further worker, ms", "pattern off by at most"),
    ]
    lines = []
    for key, found in patterns.items():
        few, many = traces[key][0], traces[key][-1]
        of_bytes, of_seconds = errors(traces[key])
        slope = sum(found.seconds[i][2] for i in range(1, len(found.seconds)))
        lines.append(
            [
                ", ".join(key),
                f"{few.sent:,.0f}",
                f"{many.sent:,.0f}",
                f"{of_bytes:+.1%}",
                f"{1e3 * few.seconds[0]:.1f}",
                f"{1e3 * sum(few.seconds[1:]):.1f}",
                f"{1e3 * sum(many.seconds[1:]):.1f}",
                f"{1e3 * slope:.3f}",
                f"{of_seconds:+.0%}",
            ]
        )
    return markdown(columns, lines)


def model(
    patterns: dict[Key, Pattern], link: Link, size: int
) -> tuple[str, dict[Key, list[float]]]:
    """Return a link's table, and what is to be drawn."""
    links = alike(link)

    def faster(found: Pattern, workers: int) -> float:
        return dense(size, workers).takes(links) / found.at(workers).takes(links)

    def pays(found: Pattern, workers: int) -> bool:
        return faster(found, workers) > 1

    lines = [[DENSE, *(f"{dense(size, w).takes(links):.4f} s" for w in SHOWN), ""]]
    drawn = {}
    for key, found in patterns.items():
        last = next((workers for workers in range(MOST, 1, -1) if pays(found, workers)), 0)
        until = {0: "never", MOST: f"{MOST:,} and on"}.get(last, f"{last:,}")
        lines.append([", ".join(key), *(f"{faster(found, w):.2f}" for w in SHOWN), until])
        drawn[key] = [faster(found, w) for w in points()]
    columns = ("times faster than dense", *(f"W = {w:,}" for w in SHOWN), "pays up to W =")
    return markdown(columns, lines), drawn


def draw_model(
    path: Path, links: list[Link], patterns: dict[Key, Pattern], shapes: Shapes
) -> dict[str, str]:
    """Draw the model; return each link's table."""
    found = {str(link): model(patterns, link, nbytes(shapes)) for link in links}
    draw(path, points(), {link: drawn for link, (_, drawn) in found.items()}, COLOURS)
    return {link: table for link, (table, _) in found.items()}


def kept(path: Path) -> dict[Key, Pattern]:
    """Return the patterns of stored results."""
    found = {}
    for name, traces in json.loads(path.read_text())["traces"].items():
        compressor, _, scheme = name.rpartition(", ")
        seen = [
            Trace(**{**each, "asked": tuple(Asked(**one) for one in each["asked"])})
            for each in traces
        ]
        found[compressor, scheme] = pattern(seen)
    return found


def points() -> list[int]:
    """Return the W that are drawn."""
    return sorted({round(2 ** (i / 4)) for i in range(4, 41)})


def check(
    answers: list[dict[str, dict[str, float]]],
    traces: dict[Key, list[Trace]],
    size: int,
    shaped: float,
) -> list[list[str]]:
    """Return what real workers did and what the model says of it, a line per configuration."""
    workers = len(answers)
    small, whole = (max(a[name]["seconds"] for a in answers) for name in (SMALL, DENSE))
    latency = small / (2 * (workers - 1))
    rate = 2 * (workers - 1) / workers * size * 8 / (whole - small) / 1e9
    links = alike(Link(shaped / 1000 if shaped else rate, 1e6 * latency))
    crowd = max(1.0, workers / (os.cpu_count() or 1))  # workers that share a core
    lines = [
        [str(workers), DENSE, "", f"{whole:.4f}", f"{dense(size, workers).takes(links):.4f}", ""]
    ]
    for key, seen in traces.items():
        name = ", ".join(key)
        step = next(each for each in seen if each.workers == workers)
        counted = sum(answer[name]["sent"] for answer in answers) / workers
        took = max(answer[name]["seconds"] for answer in answers)
        said = (crowd - 1) * sum(step.seconds) + step.takes(links)
        off = counted / step.sent - 1
        same = "the same" if abs(off) < 1e-6 else f"{off:+.2%}"
        lines.append([str(workers), name, same, f"{took:.4f}", f"{said:.4f}", f"{took / said:.2f}"])
    return lines


def real(options: argparse.Namespace, traces: dict[Key, list[Trace]], mbit: float) -> list[Any]:
    """Run real workers, on loopback or where ``mbit`` is given on shaped links."""
    lines = []
    for workers in options.checked:
        say(f"{workers} processes over Gloo, {namespaces.Link(mbit)}")
        arguments = ["--worker", f"--repeat={options.repeat}", *["--quick"] * options.quick]
        if mbit:
            with namespaces.network(workers, namespaces.Link(mbit)) as spaces:
                answers = namespaces.launch(__file__, arguments, spaces, timeout=600)
        else:
            answers = on_loopback(__file__, arguments, workers, timeout=600)
        lines += check(answers, traces, nbytes(QUICK if options.quick else FULL), mbit)
    return lines


_MEASURED = """Bytes sent: one worker's in a step, as its transport counts them. *Foretold*: what
the pattern of fewer workers says of the busiest worker's bytes at the largest W, against the truth.
*Compress* is the time before the first request, *then* all after it: decoding, and in schemes of
two rounds averaging and encoding again. All in one thread, the median of a few steps."""
_LOOPBACK = """Loopback has no link speed of its own: it is taken from the dense all-reduce of the
same run, and the latency from an all-reduce of 8 bytes. Where there are more workers than cores,
computation is counted as many times as workers share a core. So this checks the bytes, and that the
seconds add up; it cannot check how a network behaves that is shared, nor what W cores do at a time.
"""
_SHAPED = """Links of a known speed, and computation counted as on loopback. Where the link is slow
the cores count for little, and this checks the volumes against the clock. Up to 128 KiB pass at
once before a link slows down, so small payloads are faster than the model.
"""


def checked(mbit: float, lines: list[list[str]]) -> str:
    """Return the part about real workers."""
    columns = ("W", "", "bytes counted and simulated", "s measured", "s of the model", "ratio")
    where = f"links of {namespaces.Link(mbit)}" if mbit else "loopback"
    text = _SHAPED if mbit else _LOOPBACK
    return f"## Real workers over Gloo, {where}\n\n{markdown(columns, lines)}\n{text}"


def head(options: argparse.Namespace, shapes: Shapes) -> str:
    """Return how all this came about."""
    parts = dated_page.versions("lightning-gc", "torch")
    command = " ".join(["benchmarks/scaling.py", *sys.argv[1:]])
    return f"""{dated_page.title("Scaling")}

`python {command}` with Python {sys.version.split()[0]}, {parts}, {os.cpu_count()} CPUs.

A gradient of {nbytes(shapes) // 4:,} elements, an exchange without overlap, {options.latency_us:g}
microseconds a message. Dense is a ring all-reduce in float32 that computes nothing; a figure above
1 means that the exchange takes less time than that. Rings have 2·(W − 1) messages: libraries that
change to trees among hundreds of workers make dense faster than this.
"""


def data(traces: Any, patterns: dict[Key, Pattern], checks: Any) -> dict[str, Any]:
    """Return everything in figures."""
    return {
        "traces": {", ".join(key): [asdict(each) for each in seen] for key, seen in traces.items()},
        "patterns": {
            ", ".join(key): {"sizes": found.sizes, "seconds": found.seconds}
            for key, found in patterns.items()
        },
        "checks": [{"mbit": mbit, "lines": lines} for mbit, lines in checks],
    }


LIMIT = timedelta(seconds=120)
SMALL = "8 bytes"


def work(
    configurations: Mapping[str, tuple[Compressor, Scheme]], shapes: Shapes, repeat: int
) -> dict[str, dict[str, float]]:
    """Be one worker; return the seconds and bytes of a step of each configuration.

    The steps are those of ``traces.trace``: the same gradients, the same errors.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=LIMIT)
    worker, workers = dist.get_rank(), dist.get_world_size()
    tiny = torch.ones(2)
    found = {SMALL: {"seconds": _median(lambda: dist.all_reduce(tiny), 50), "sent": 8.0}}
    flat = gradient(shapes, worker)
    for name, (compressor, scheme) in configurations.items():
        (engine,) = engines(compressor, scheme, workers, [worker])
        recording = Recording(Distributed())
        sent: list[float] = []
        seconds: list[float] = []
        for _ in range(1 + repeat):
            own = flat.clone()
            dist.barrier()
            started = time.perf_counter()
            with torch.no_grad():
                recording.run(engine.flow(own, shapes), own.device)
            seconds.append(time.perf_counter() - started)
            engine.advance()
            sent.append(recording.take().wire_bytes)
        found[name] = {"seconds": statistics.median(seconds[1:]), "sent": sent[-1]}
    dist.destroy_process_group()
    return found


def _median(function: Callable[[], Any], repeat: int) -> float:
    seconds = []
    for _ in range(repeat):
        dist.barrier()
        started = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)


def on_loopback(script: str, arguments: list[str], workers: int, timeout: float) -> list[Any]:
    """Run a script in so many processes; return what each wrote into the folder given as --out.

    Raises:
        RuntimeError: it failed; the end of its output says why.
        subprocess.TimeoutExpired: it took too long; torchrun and its workers are gone then.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        command += [f"--nproc-per-node={workers}", script, *arguments, f"--out={folder}"]
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
        )
        if done.returncode:
            raise RuntimeError(f"{workers} workers failed: {done.stderr[-2000:]}")
        return [json.loads(Path(folder, f"{i}.json").read_text()) for i in range(workers)]


DASHES = ("-", "--", ":", "-.")


def draw(
    path: Path,
    workers: Sequence[int],
    links: Mapping[str, Mapping[tuple[str, str], Sequence[float]]],
    colours: Mapping[str, str],
) -> None:
    """Write a panel per link.

    Args:
        path: of the SVG.
        workers: W of the points.
        links: by link, then by (compressor, scheme): how many times faster than dense.
        colours: of the compressors.
    """
    names = [key for lines in links.values() for key in lines]
    dashes = dict(zip(dict.fromkeys(s for _, s in names), DASHES, strict=False))

    def panels(figure: Figure) -> None:
        figure.set_size_inches(plot_style.WIDTH, 1.2 + 2.6 * len(links))
        axes = figure.subplots(len(links), sharex=True, squeeze=False)[:, 0]
        for axis, (link, lines) in zip(axes, links.items(), strict=True):
            every = [value for values in lines.values() for value in values]
            low, high = max(min(every) * 0.8, 1e-3), max(max(every) * 1.3, 1.5)
            axis.axhspan(low, 1, color=plot_style.SHADE, zorder=0)
            place = {"transform": axis.transAxes, "color": plot_style.MUTED}
            axis.text(0.02, 0.05, "slower than dense", **place)
            for (compressor, scheme), values in lines.items():
                axis.plot(workers, values, dashes[scheme], color=colours[compressor], lw=1.6)
            plot_style.plain_log(axis.yaxis)
            axis.set(xscale="log", ylim=(low, high), title=link, ylabel="times faster")
            axis.set_xticks([2, 8, 32, 128, 512], ["2", "8", "32", "128", "512"])
            axis.minorticks_off()
        axes[-1].set_xlabel("workers")
        for name in dict.fromkeys(compressor for compressor, _ in names):
            axes[0].plot([], [], color=colours[name], lw=3, label=name)
        for name, style in dashes.items():
            axes[0].plot([], [], style, color=plot_style.INK, label=name)
        plot_style.legend(figure)

    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(plot_style.svg(panels, "scaling"))


def parse() -> argparse.Namespace:
    """Return the command line; ``--worker`` is for workers."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    add = parser.add_argument
    add("--quick", action="store_true", help="a small gradient: checks the script, not the model")
    add("--gbps", type=float, nargs="+", default=[0.1, 1, 10], help="links, in 10⁹ bits per second")
    add("--latency-us", type=float, default=50.0, help="of one message")
    add("--repeat", type=int, default=3, help="measured steps")
    add("--checked", type=int, nargs="*", default=CHECKED, help="numbers of real workers")
    add(
        "--shaped", type=float, default=0.0, metavar="MBIT", help="check on links of this speed too"
    )
    add("--out", type=Path, help="folder of the dated files (default: benchmarks/results)")
    add("--plot", type=Path, help="image (default: docs/images/scaling.svg)")
    add("--redraw", type=Path, metavar="JSON", help="draw the image of these results, run nothing")
    add("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.repeat < 1 or not set(options.checked) <= set(SEEN) - {1}:
        parser.error(f"--repeat must be at least 1, and --checked among {SEEN}.")
    # What a quick run measures is worth nothing, so it goes where nothing is kept.
    quick = ROOT / "runs" / "scaling"
    if options.out is None:
        options.out = quick if options.quick else dated_page.RESULTS
    if options.plot is None:
        folder = quick if options.quick else ROOT / "docs" / "images"
        options.plot = folder / "scaling.svg"
    return options


def main() -> None:
    """Measure, model, check, write."""
    options = parse()
    shapes = QUICK if options.quick else FULL
    ours = configurations()
    if options.worker:
        path = options.out
        path = path / f"{os.environ['RANK']}.json" if path.is_dir() else path
        path.write_text(json.dumps(work(named(ours), shapes, options.repeat)))
        return
    links = [Link(gbps, options.latency_us) for gbps in options.gbps]
    if options.redraw:
        draw_model(options.plot, links, kept(options.redraw), shapes)
        return
    if options.shaped:
        namespaces.check_privileges("The check on shaped links")
    torch.set_num_threads(1)
    began = time.monotonic()
    traces = {}
    for key, pair in ours.items():
        traces[key] = [trace(*pair, shapes, workers, options.repeat) for workers in SEEN]
        say(f"{', '.join(key)}: {1e3 * sum(traces[key][0].seconds):.1f} ms among {SEEN[0]} workers")
    patterns = {key: pattern(seen) for key, seen in traces.items()}
    modelled = draw_model(options.plot, links, patterns, shapes)
    checks = [(mbit, real(options, traces, mbit)) for mbit in dict.fromkeys((0.0, options.shaped))]
    parts = [f"## The model: {link}\n\n{table}" for link, table in modelled.items()]
    parts.append(f"## What was measured\n\n{kernels(patterns, traces)}\n{_MEASURED}\n")
    parts += [checked(mbit, lines) for mbit, lines in checks if lines]
    text = f"{head(options, shapes)}\n" + "\n".join(parts)
    stem = dated_page.write(options.out, "scaling", text, data(traces, patterns, checks))
    say(f"{text}\n{stem}.md, {stem}.json, {options.plot}: {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
