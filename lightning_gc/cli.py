"""Run ``lightning-gc``: tune, report, fit, schema, bench, advise, check, list, rendezvous."""

import argparse
import json
import os
import re
import shutil
import signal
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_gc import __version__
from lightning_gc.core.registry import did_you_mean

OK, FAILED, USAGE, INTERRUPTED, TERMINATED = 0, 1, 2, 130, 143
_TUNING = ("optuna", "jsonargparse", "rich", "matplotlib")
_UNKEPT = "Stopped. No measurement is kept."
LISTED = (
    "start",
    "compressors",
    "memories",
    "schemes",
    "controllers",
    "waits",
    "wire",
    "combinations",
)
"""What ``list`` shows: "start", ``catalogue.FAMILIES``, and what does not go together."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Args:
        argv: the words after the program's name; by default this process's ``sys.argv[1:]``.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    parser, commands = _parser()
    if not words:
        parser.print_help(sys.stderr)
        return USAGE
    if words[0] == "help":
        words = [*words[1:2], "--help"]
    if not words[0].startswith("-") and words[0] not in commands:
        meant = did_you_mean(words[0], commands)
        parser.error(f"{words[0]!r} is not a command{meant}. See lightning-gc --help.")
    options, rest = parser.parse_known_args(words)
    if rest and options.run is not _fit:
        known = re.findall(r"--[a-z-]+", options.parser.format_help())
        meant = did_you_mean(rest[0].partition("=")[0], known) if rest[0].startswith("--") else ""
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}{meant}")
    options.rest = rest
    # Models and plug-ins are in the user's folder, as for `python -m`.
    sys.path.insert(0, os.getcwd())
    try:
        code = int(options.run(options))
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print(options.stopped.format(**vars(options)), file=sys.stderr)  # noqa: T201
        return INTERRUPTED
    except (ValueError, ImportError, RuntimeError) as error:
        ours = type(error).__module__.startswith("lightning_gc")
        if not ours and type(error) not in (ValueError, ImportError):
            raise  # an error of another library: show its traceback
        print(f"lightning-gc: {error}", file=sys.stderr)  # noqa: T201
        return USAGE if isinstance(error, ValueError) else FAILED
    except BrokenPipeError:  # nobody reads on, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for Python's own flush
        return FAILED
    except OSError as error:
        print(f"lightning-gc: {error}", file=sys.stderr)  # noqa: T201
        return FAILED


def _needs(*packages: str) -> None:
    """Raise ValueError if a package of the extra is missing."""
    missing = [name for name in packages if find_spec(name) is None]
    if missing:
        raise ValueError(
            f"This command needs {', '.join(missing)}, not installed here. Install the extra: "
            f"pip install 'lightning-gc[tune]'."
        )


def _folder(name: str) -> Path:
    """Return a folder, which may be missing; argparse's error if it cannot be made."""
    path = Path(name)
    there = next(each for each in (path, *path.absolute().parents) if each.exists())
    if not there.is_dir():
        raise argparse.ArgumentTypeError(f"{there} is a file; give the name of a folder")
    return path


def _port(text: str) -> int:
    """Return a port; argparse's error if it is none."""
    if not (text.isascii() and text.isdecimal()) or int(text) >= 1 << 16:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 65535")
    return int(text)


def _parser() -> tuple[argparse.ArgumentParser, Mapping[str, argparse.ArgumentParser]]:
    """Return the parser, and the parser of each command."""
    epilog = "Exit codes: 0 done, 1 failed, 2 invalid request, 130 Ctrl-C, 143 ended by SIGTERM."
    parser = argparse.ArgumentParser(
        prog="lightning-gc",
        description="Tune, compare, measure and list methods of gradient compression.",
        epilog=epilog,
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(
        run: Callable[[argparse.Namespace], int], short: str, long: str, stopped: str = "Stopped."
    ) -> Any:
        name = run.__name__.removeprefix("_")
        made = commands.add_parser(name, help=short, description=long, epilog=epilog)
        made.set_defaults(run=run, parser=made, stopped=stopped)
        return made

    storage = "path of a journal file, or a database URL such as postgresql://user@host/name"
    add = command(
        _tune,
        "tune each method in its own study, then run the winners",
        "Tune each method in its own study with the same number of trials, then run the winners "
        "over several seeds. Repeat the command to resume. Start it several times with one "
        "storage to share the work.",
        "Stopped. Finished trials are kept. Repeat the command to resume.",
    ).add_argument
    add("config", type=Path, help="YAML with LightningCLI's model, data and trainer, and tune")
    methods = "methods of the file, or compressors by name"
    dense = " (default: all methods of the file). The dense baseline is always added"
    add("--compressor", nargs="+", metavar="NAME", help=methods + dense)
    add("--trials", type=int, metavar="N", help="trials per method (default: the file's, or 60)")
    add("--workers", type=int, metavar="W", help="simulated workers (default: as in the file)")
    add("--storage", help=storage + " (default: runs/tune/<name>.journal)")
    add("--no-finals", action="store_true", help="skip the final runs of the best trials")
    curves = "write the curves of all final runs there, for TensorBoard"
    add("--tensorboard", type=_folder, metavar="DIR", help=curves)

    add = command(
        _report,
        "write tables, plots and one HTML page about an experiment",
        "Write report.md, report.html, plots/ and tables/ about an experiment.",
    ).add_argument
    add("--storage", required=True, help=storage)
    add("--out", type=_folder, default=Path("runs", "report"), help="folder (default: %(default)s)")
    add("--name", help="name of the experiment, if the storage holds several")

    add = command(
        _fit,
        "train once, as LightningCLI does",
        "Train once with the file's model, data and trainer. Everything else is handed to "
        "LightningCLI, such as --trainer.strategy or --model.learning_rate.",
    ).add_argument
    add("config", type=Path, help="YAML as for LightningCLI. A section tune is ignored")

    add = command(
        _schema,
        "a JSON schema of trainer.strategy, for completion in editors",
        "Print a JSON schema of trainer.strategy in a YAML file, for completion in editors.",
    ).add_argument
    add(
        "modules",
        nargs="*",
        metavar="MODULE",
        help="module with your own classes",
    )

    add = command(
        _list,
        "compressors, memories, schemes, controllers, waits, wire formats, and combinations",
        "List the registered classes, one line each, beginning with what to try first. "
        "Bounds and bits per element are for the default instance and a 512 x 512 matrix. "
        "combinations: the settings that do not go together, and what to give instead.",
    ).add_argument
    families = f"{', '.join(LISTED)} (default: the first five)"
    add("families", nargs="*", metavar="FAMILY", help=families)
    add("--wide", action="store_true", help="tables of all declarations, also the ranges to tune")
    add("--markdown", action="store_true", help="tables in Markdown, as in the documentation")
    _add_bench_and_advise(command, methods)
    _add_check(command)
    add = command(
        _rendezvous,
        "where the workers of elastic local steps meet",
        "Serve the rendezvous of LocalStepsStrategy(elastic=Elastic('host:port')), and decide who "
        "takes part in which round. It may be stopped and started again while workers train.",
        "Stopped. Rounds until now are in {roll}. Repeat the command to continue with them.",
    ).add_argument
    port = "that it listens on, or 0 for any (default: %(default)s)"
    add("--port", type=_port, default=29400, help=port)
    secret = "file with the text that all workers give as Elastic(secret=...)"
    add("--secret-file", type=Path, metavar="FILE", help=secret)
    roll = (
        "file to which each round's members are written. A run of the file continues there. "
        "Another run gets the file, and the former rounds a free name such as roll-1.jsonl "
        "(default: %(default)s)"
    )
    add("--roll", type=Path, default=Path("roll.jsonl"), metavar="FILE", help=roll)
    return parser, commands.choices


def _add_bench_and_advise(command: Callable[..., argparse.ArgumentParser], methods: str) -> None:
    measured = "YAML as for lightning-gc fit. Of its section tune, only the methods are read"
    bench = command(
        _bench,
        "seconds per step on your machines and model, compared with plain DDP and torch's hooks",
        "Compare seconds, bytes and loss per step: without synchronisation, with plain DDP, with "
        "torch's 16-bit and PowerSGD hooks, and with compression. Methods take turns. Start it on "
        "all workers, by torchrun. With --replay it needs no file and no GPU: computation is "
        "slept, and messages are sent.",
        _UNKEPT,
    )
    add = bench.add_argument
    add("config", type=Path, nargs="?", help=f"{measured}. Leave it out to replay")
    fields = " with fields, memory and scheme: topk:density=0.001,scheme=two_shot (default: %s)"
    four = "cast, qsgd, topk, powersgd:rank=2"
    add("--compressor", nargs="+", metavar="NAME", help=methods + fields % four)
    add("--rounds", type=int, default=3, help="measurements of each method (default: %(default)s)")
    add("--steps", type=int, default=20, help="measured steps per round (default: %(default)s)")
    add("--timeout", type=float, default=120, help="seconds of a collective (default: %(default)s)")
    add("--find-unused-parameters", action="store_true", help="set it for all methods, as for DDP")
    add("--out", type=_folder, default=Path("runs", "bench"), help="folder (default: %(default)s)")
    group = bench.add_argument_group("without a file")
    group.add_argument("--replay", action="store_true", help="replay a described training")
    _add_description(group.add_argument)

    advise = command(
        _advise,
        "whether compression would speed up a model, with or without a project",
        "Say whether compression would make training faster, and with which method. With a file, "
        "measure the link, the model and the best methods. Start it on all workers, by torchrun. "
        "Without a file, predict from a description, in seconds and on one machine: "
        "lightning-gc advise --params 124M --step-ms 45 --gpu --link 1gbit --workers 4.",
        _UNKEPT,
    )
    add = advise.add_argument
    add("config", type=Path, nargs="?", help=f"{measured}. Leave it out to predict only")
    six = (
        "cast, qsgd, topk, topk:value_dtype=bfloat16, and that with scheme=two_shot, "
        "powersgd:rank=2"
    )
    add("--workers", type=int, metavar="W", help="predict for W workers, without measuring methods")
    rates = "predict for 1gbit, 20mbit/200mbit (up/down), ..., without measuring methods"
    add("--link", metavar="RATE", help=rates)
    add("--methods", nargs="+", metavar="NAME", help=methods + fields % six)
    group = advise.add_argument_group("with a file")
    add = group.add_argument
    add(
        "--budget-seconds",
        type=float,
        help="seconds in total (default: 120)",
    )
    add("--predict-only", action="store_true", help="predict for these machines, without a verdict")
    add("--timeout", type=float, help="seconds of a collective (default: 120)")
    add("--find-unused-parameters", action="store_true", help="set it for all methods, as for DDP")
    add("--out", type=_folder, help=f"folder (default: {Path('runs', 'advice')})")
    group = advise.add_argument_group("without a file")
    add = group.add_argument
    _add_description(add)
    add("--latency-us", type=float, metavar="US", help="of a message, in µs (default: 50)")


def _add_description(add: Callable[..., argparse.Action]) -> None:
    add("--params", metavar="N", help="number of parameters, such as 124M or 1.1B")
    add("--model", metavar="NAME", help="gpt2, resnet50 or llama-1b, in place of --params")
    add("--step-ms", type=float, metavar="MS", help="time of a step on one worker, in ms")
    add("--gpu", action="store_true", help="compression takes as long as on a GPU (default: a CPU)")
    add("--codec-ms", type=float, metavar="MS", help="compression takes so long in a step")


def _add_check(command: Callable[..., argparse.ArgumentParser]) -> None:
    add = command(
        _check,
        "whether two or more machines can train together, before they do",
        "Check names, interfaces, ports, versions, kernels and the link between machines, and say "
        "how to fix what is found. Start it on each machine, with these options or by torchrun. "
        "Without options it checks this machine only. With --folder it checks whether workers can "
        "meet there, without ports between them.",
    ).add_argument
    add("--nnodes", type=int, metavar="N", help="number of machines")
    add("--node-rank", type=int, metavar="K", help="number of this machine, from 0 on")
    add("--master-addr", metavar="HOST", help="address of machine 0; HOST:PORT names its port too")
    add("--master-port", type=int, metavar="PORT", help="a free port of it (default: 29500)")
    wait = "seconds for the other machines to start (default: %(default)s)"
    add("--wait", type=float, default=60, help=wait)
    folder = "path or URL of fsspec where elastic workers would meet, such as s3://bucket/run"
    add("--folder", metavar="URL", help=folder)


def _tune(options: argparse.Namespace) -> int:
    from lightning_gc.methods.sections import read_known

    read_known(options.config, ("model", "tune"))  # before torch is imported, as in all commands
    _needs(*_TUNING)
    from lightning_gc.methods.lightning_flavour import quiet_libraries
    from lightning_gc.tuning import Method, tune
    from lightning_gc.tuning.comparison import Progress
    from lightning_gc.tuning.curves import write_curves
    from lightning_gc.tuning.experiment import load_experiment
    from lightning_gc.tuning.journal import without_password
    from lightning_gc.tuning.report import results_text
    from lightning_gc.tuning.studies import best_trial

    quiet_libraries()
    experiment, known = load_experiment(
        options.config, trials=options.trials, workers=options.workers
    )
    methods = {method.name: method for method in known}
    names = options.compressor or methods
    if not names:
        raise ValueError(
            f"{options.config} names no methods. Add them to its section tune, or use --compressor."
        )
    wanted = [methods.get(name) or Method(name) for name in names]
    storage = options.storage or str(Path("runs", "tune", f"{experiment.name}.journal"))
    with Progress() as progress:
        studies = tune(experiment, wanted, storage, not options.no_finals, progress.show)
    where = f"--storage {without_password(storage)} --name {experiment.name}"
    sys.stdout.write(f"\n{results_text(studies, _width())}\n")
    if options.tensorboard is not None:
        written = write_curves(experiment.name, studies, options.tensorboard)
        look = f"tensorboard --logdir {options.tensorboard}"
        sys.stdout.write(f"Curves: {look if written else 'none, as there are no final runs'}\n")
    sys.stdout.write(f"Next: lightning-gc report {where}\n")
    return OK if all(best_trial(study) for study in studies.values()) else FAILED


def _report(options: argparse.Namespace) -> int:
    if "://" not in options.storage and not Path(options.storage).is_file():
        # A journal that is missing would be made.
        raise ValueError(
            f"The journal {options.storage} does not exist. lightning-gc tune makes one."
        )
    _needs(*_TUNING)
    from lightning_gc.methods.lightning_flavour import quiet_libraries
    from lightning_gc.tuning.report import find_studies, results_text, write

    quiet_libraries()
    name, studies = find_studies(options.storage, options.name)
    files = write(options.out, name, studies)
    sys.stdout.write(
        f"{results_text(studies, _width())}\n"
        f"Report: {options.out / 'report.html'} and {len(files) - 1} other files\n"
    )
    return OK


def _width() -> int:
    return shutil.get_terminal_size((120, 24)).columns


def _fit(options: argparse.Namespace) -> int:
    from lightning_gc.methods.sections import read_sections

    read_sections(options.config)
    _needs("jsonargparse")
    from lightning_gc.methods.yaml_config import fit, read_any

    read_any(options.config)
    try:
        fit(["fit", "--config", str(options.config), *options.rest])
    except SystemExit as end:
        if isinstance(end.__context__, KeyboardInterrupt):  # Lightning exits with code 1
            return INTERRUPTED
        raise
    except Exception:
        traceback.print_exc()  # the error may be in the user's code: show the full traceback
        return FAILED
    return OK


def _schema(options: argparse.Namespace) -> int:
    _needs("jsonargparse")
    from lightning_gc.methods.yaml_config import editor_schema

    sys.stdout.write(f"{json.dumps(editor_schema(options.modules), indent=1)}\n")
    return OK


def _told(options: argparse.Namespace) -> dict[str, object]:
    """Return the options that describe a training, by name."""
    told = {"--params": options.params, "--model": options.model, "--step-ms": options.step_ms}
    return told | {"--gpu": options.gpu or None, "--codec-ms": options.codec_ms}


_TOLD = "describes a training without a file. Leave out one of the two"


def _bench(options: argparse.Namespace) -> int:
    if options.replay:
        _refuse_given({str(options.config): options.config}, "is not read in a --replay")
        from lightning_gc.advice.replay import run

        run(options)
        return OK
    if options.config is None:
        raise ValueError("bench needs a file such as train.yaml, or --replay and a description.")
    _refuse_given(_told(options), _TOLD)
    from lightning_gc.methods.sections import read_known

    read_known(options.config, ("model",))
    _needs("jsonargparse")
    from lightning_gc.bench.benchmark import bench

    bench(options)
    return OK


def _advise(options: argparse.Namespace) -> int:
    measured = {"--budget-seconds": options.budget_seconds, "--timeout": options.timeout}
    measured |= {"--out": options.out, "--predict-only": options.predict_only or None}
    measured |= {"--find-unused-parameters": options.find_unused_parameters or None}
    if options.config is None:
        _refuse_given(measured, "is for a measurement, which needs a file such as train.yaml")
        from lightning_gc.advice.description import described

        case = described(options)
        from lightning_gc.advice import what_if

        what_if.run(case, options.model)
        return OK
    _refuse_given(_told(options) | {"--latency-us": options.latency_us}, _TOLD)
    from lightning_gc.methods.sections import read_known

    read_known(options.config, ("model",))
    _needs("jsonargparse", "matplotlib")
    from lightning_gc.advice.advising import run

    for name, default in (("budget_seconds", 120.0), ("timeout", 120.0)):
        if getattr(options, name) is None:
            setattr(options, name, default)
    options.out = options.out or Path("runs", "advice")
    run(options)
    return OK


def _refuse_given(given: Mapping[str, object], why: str) -> None:
    """Raise ValueError if an option is given that the request does not use."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} {why}.")


def _check(options: argparse.Namespace) -> int:
    if options.folder is not None:
        from lightning_gc.advice.check import check_folder

        return OK if check_folder(options.folder) else FAILED
    from lightning_gc.advice.meeting import party_of

    party = party_of(options)
    from lightning_gc.advice.check import check

    return OK if check(party) else FAILED


def _rendezvous(options: argparse.Namespace) -> int:
    secret = None
    if options.secret_file is not None:
        try:
            secret = options.secret_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"{options.secret_file} cannot be read ({error}). Make it by: openssl rand "
                f"-base64 32 > {options.secret_file}"
            ) from error
        if not secret:
            raise ValueError(f"{options.secret_file} is empty. Write a long random text into it.")

    from lightning_gc.elastic.rendezvous import serve

    def began(port: int) -> None:
        sys.stdout.write(
            f"Rendezvous on port {port}, {'with' if secret else 'without'} a secret. Rounds are "
            f"written to {options.roll}. Ctrl-C stops it.\n"
        )
        if not secret:
            sys.stdout.write(
                "Everyone who reaches the port may take part. Make a secret by: openssl rand "
                "-base64 32 > secret.txt. Then give --secret-file secret.txt.\n"
            )
        sys.stdout.flush()

    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(TERMINATED))
    try:
        serve(options.port, secret, options.roll, began=began)
    except SystemExit:
        sys.stderr.write(f"{options.stopped.format(**vars(options))}\n")
        return TERMINATED
    finally:
        signal.signal(signal.SIGTERM, before)
    return OK


def _list(options: argparse.Namespace) -> int:
    for family in options.families:
        if family not in LISTED:
            meant = did_you_mean(family, LISTED)
            raise ValueError(f"{family!r} is not a family{meant}. Choose from {', '.join(LISTED)}.")
    from lightning_gc.methods.catalogue import FAMILIES, markdown, plain

    width = max(_width(), 220 if options.wide else 0)
    short = [f for f in FAMILIES if options.wide or options.markdown or f not in ("waits", "wire")]
    all_columns = options.wide or options.markdown
    families = options.families or (short if all_columns else ["start", *short])
    texts = (markdown(f) if options.markdown else plain(f, width, options.wide) for f in families)
    sys.stdout.write("\n".join(texts))
    if not (options.wide or options.markdown or options.families):
        sys.stdout.write(
            "\nNext: lightning-gc list --wide, for bounds, bits, knobs and defaults.\n"
        )
    return OK
