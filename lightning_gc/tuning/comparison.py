"""Tune each method in its own study, one after the other, then do the final runs."""

import contextlib
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import optuna
import rich.console
import rich.progress
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from lightning_gc.core import notices
from lightning_gc.core.refusal import refuse
from lightning_gc.methods.method import DENSE, Method
from lightning_gc.tuning import failure_detector, final_runs
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.failure_detector import FailureDetector
from lightning_gc.tuning.journal import database_errors, open_storage
from lightning_gc.tuning.studies import best_trial, open_study
from lightning_gc.tuning.trial import run_trial

_PAUSE = 0.5  # seconds between two looks at trials of other processes


@dataclass(frozen=True)
class Workload:
    """Runs of a comparison, and an estimate of the time that is left.

    Attributes:
        methods: number of studies.
        trials: all trials of all studies.
        finals: all final runs.
        done: trials and final runs that have ended, in this and earlier calls.
        seconds: left for one process, at the mean of the ended runs; None before the first one.
    """

    methods: int
    trials: int
    finals: int
    done: int
    seconds: float | None

    @property
    def runs(self) -> int:
        """Trials and final runs together."""
        return self.trials + self.finals

    def __str__(self) -> str:
        """Return the plan, as the command prints it before the first trial."""
        finals = f", then {self.finals} final runs" if self.finals else ", no final runs"
        plan = f"Plan: {self.methods} methods x {self.trials // self.methods} trials{finals}."
        if self.done == self.runs:
            return f"{plan} All have ended before."
        earlier = f" {self.done} of {self.runs} runs have ended before." if self.done else ""
        left = "unknown until the first trial has ended"
        return (
            f"{plan}{earlier}\n"
            f"Time for one process: {left if self.seconds is None else duration(self.seconds)}.\n"
            f"Ctrl-C is safe: finished trials are kept. Repeat the command to continue."
        )


@dataclass(frozen=True)
class Event:
    """Progress of a comparison.

    Attributes:
        method: name of the study's method; empty for the plan.
        kind: ``"plan"``: the comparison begins. ``"trial"`` or ``"final"``: a run has ended.
            ``"lost"``: processes died during their trials, or another process took this one for
            dead.
        done: trials that count so far; final runs so far.
        text: the result, or the plan.
        workload: of the whole comparison, after this event.
    """

    method: str
    kind: Literal["plan", "trial", "final", "lost"]
    done: int
    text: str
    workload: Workload | None = None


def workload(
    experiment: Experiment,
    methods: Iterable[Method],
    studies: Mapping[str, optuna.Study],
    finals: bool = True,
) -> Workload:
    """Count the runs of a comparison, and estimate the seconds that are left for one process.

    A missing trial takes the mean of its study's ended trials. A missing final run takes the mean
    of its method's final runs, else of the study's complete trials. Without any of these, the mean
    over all studies is taken.
    """
    methods = list(methods)
    total = done = 0
    missing: list[tuple[int, list[float]]] = []  # runs, and seconds of runs like them
    for method in methods:
        study = studies[method.name]
        ended = [t for t in study.get_trials(deepcopy=False) if failure_detector.counts(t)]
        ended = [t for t in ended if t.state != TrialState.RUNNING]
        took = [t.duration.total_seconds() for t in ended if t.duration is not None]
        left = max(experiment.trials - len(ended), 0)
        done += experiment.trials - left
        missing.append((left, took))
        if finals:
            records = final_runs.final_records(study, studies[DENSE])
            planned = final_runs.finals_total(experiment, method, study, studies[DENSE])
            spent = [float(r["seconds"]) for r in records if "seconds" in r]
            whole = [t for t in ended if t.state == TrialState.COMPLETE and t.duration is not None]
            like = spent or [t.duration.total_seconds() for t in whole if t.duration is not None]
            run = min(len(records), planned)
            total += planned
            done += run
            missing.append((planned - run, like))
    known = [second for _, like in missing for second in like]
    seconds = None
    if known:
        mean = statistics.fmean(known)
        seconds = sum(n * (statistics.fmean(like) if like else mean) for n, like in missing)
    return Workload(len(methods), experiment.trials * len(methods), total, done, seconds)


def duration(seconds: float) -> str:
    """Return a duration in words.

    Example:
        >>> duration(20.0), duration(100.0), duration(9000.0)
        ('less than a minute', 'about 2 min', 'about 2.5 h')
    """
    if seconds < 45:
        return "less than a minute"
    return f"about {seconds / 60:.0f} min" if seconds < 5400 else f"about {seconds / 3600:.1f} h"


@database_errors()
def tune(
    experiment: Experiment,
    methods: Iterable[Method | str],
    storage: str | Path | BaseStorage,
    finals: bool = True,
    show: Callable[[Event], None] = lambda event: None,
) -> dict[str, optuna.Study]:
    """Tune every method in its own study, with equal numbers of trials, and run the winners.

    Call it again with the same arguments to resume; call it on several machines with one storage to
    share the work. Finished trials are never repeated.

    Args:
        experiment: the task and the rules.
        methods: names or ``Method``s. The dense baseline is added if left out, and comes first.
        storage: the path of a journal, a database URL, or an Optuna storage.
        finals: run the winners over ``experiment.seeds`` and compute the test metric.
        show: called with each event.

    Returns:
        ``{name of the method: its study}``.

    Raises:
        ValueError: methods that cannot be compared, or a study under other rules.
        StorageError: the storage cannot be used.
        TrialError: a trial has failed before any has completed.
        KeyboardInterrupt: Ctrl-C; the current run is lost, finished runs are kept.
    """
    wanted = _unique(methods)
    storage = open_storage(storage)
    # All of them before the first trial, which may take a day.
    dense = open_study(experiment, wanted[0], storage)
    studies = {DENSE: dense}
    for method in wanted[1:]:
        studies[method.name] = open_study(experiment, method, storage, dense)
    detector = FailureDetector()
    idle, due = time.monotonic(), notices.FIRST  # since when; after how many seconds to say so
    with interrupt_check() as check:

        def run(events: Iterator[Event]) -> None:
            nonlocal idle, due
            check()
            for event in events:
                now = workload(experiment, wanted, studies, finals)
                show(replace(event, workload=now))
                check()
                idle, due = time.monotonic(), notices.FIRST

        def pause(what: str) -> None:
            nonlocal due
            time.sleep(_PAUSE)
            if (passed := time.monotonic() - idle) > due:
                notices.say("Waiting for other processes to end %s (%.0f s so far).", what, passed)
                due = passed + notices.AGAIN

        planned = workload(experiment, wanted, studies, finals)
        show(Event("", "plan", 0, str(planned), planned))
        for method in wanted:
            run(_run_study(experiment, method, studies[method.name], detector))
        for method in wanted:
            study = studies[method.name]
            # If other processes die during the last trials, this one repeats them.
            while failure_detector.running(study):
                pause(f"trials of {study.study_name}")
                run(_run_study(experiment, method, study, detector))
            while finals:
                run(_run_finals(experiment, method, study, studies[DENSE], detector))
                if not final_runs.finals_running(experiment, method, study, studies[DENSE]):
                    break
                pause(f"final runs of {study.study_name}")
    return studies


def _unique(methods: Iterable[Method | str]) -> list[Method]:
    wanted = [Method(m) if isinstance(m, str) else m for m in methods]
    names = [method.name for method in wanted]
    for name in names:
        if names.count(name) > 1:
            refuse(
                f"Two methods are called {name!r}, so their trials would be mixed. Give one "
                f"another name, such as Method({name + '_2'!r}, {name!r}, ...)"
            )
    if DENSE not in names:
        wanted.insert(0, Method(DENSE))
    return sorted(wanted, key=lambda method: method.name != DENSE)


def _run_study(
    experiment: Experiment, method: Method, study: optuna.Study, detector: FailureDetector
) -> Iterator[Event]:
    while True:
        lost = failure_detector.fail_lost_trials(study, detector)
        if lost:
            numbers = ", ".join(map(str, lost))
            yield Event(method.name, "lost", len(lost), f"trials of dead processes: {numbers}")
        trial = failure_detector.begin_trial(study, experiment.trials)
        if trial is None:
            return
        if not run_trial(experiment, method, study, trial):
            text = (
                f"trial {trial.number}: another process took this one for dead, so it is repeated"
            )
            yield Event(method.name, "lost", 1, text)
            continue
        trials = study.get_trials(deepcopy=False)
        done = sum(failure_detector.counts(t) and t.state != TrialState.RUNNING for t in trials)
        yield Event(method.name, "trial", done, _describe(study, trial.number))


def _run_finals(
    experiment: Experiment,
    method: Method,
    study: optuna.Study,
    dense: optuna.Study,
    detector: FailureDetector,
) -> Iterator[Event]:
    records = final_runs.run_finals(experiment, method, study, dense, detector)
    for done, record in enumerate(records, start=1):
        value = record["test"] if record["test"] is not None else record["validation"]
        result = "diverged" if value is None else f"{value:.5g}"
        text = f"{_WHICH[record['source']]}, seed {record['seed']}: {result}"
        yield Event(method.name, "final", done, text)


_WHICH = {
    final_runs.TUNED: "final run",
    final_runs.TRANSFERRED: "final run with dense's hyper-parameters",
    final_runs.RETURNED: "dense with its hyper-parameters",
}


def _describe(study: optuna.Study, number: int) -> str:
    trial = study.get_trials(deepcopy=False)[number]
    best = best_trial(study)
    values = ", ".join(f"{value:.5g}" for value in trial.values or ())
    error = trial.user_attrs.get("error", "")
    text = f"trial {number} {trial.state.name.lower()} {values or error}"
    return text if best is None else f"{text} (best {best.values[0]:.5g})"


@contextlib.contextmanager
def interrupt_check() -> Iterator[Callable[[], None]]:
    """Record Ctrl-C; yield a function that raises KeyboardInterrupt if there was one.

    Call it between two runs. Python prints and forgets exceptions in destructors and in callbacks
    from C, where short trials spend much of their time.
    """
    pressed = threading.Event()

    def check() -> None:
        if pressed.is_set():
            raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    before = signal.getsignal(signal.SIGINT) if in_main else None
    if not callable(before):  # not the main thread, ignored, or not Python's to handle
        yield check
        return

    def record(number: int, frame: Any) -> None:
        pressed.set()
        before(number, frame)

    signal.signal(signal.SIGINT, record)
    try:
        yield check
    finally:
        signal.signal(signal.SIGINT, before)


class Progress(rich.progress.Progress):
    """Shows events of ``tune``: one line per run, and in a terminal a bar for the whole."""

    def __init__(self) -> None:
        console = rich.console.Console()
        super().__init__(
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._bar: rich.progress.TaskID | None = None

    def show(self, event: Event) -> None:
        """Show one event."""
        now = event.workload
        if event.kind == "plan" or now is None:
            self.say(event.text)
            return
        left = "time left unknown" if now.seconds is None else f"{duration(now.seconds)} left"
        if self._bar is None:
            self._bar = self.add_task("", total=now.runs)
        described = f"{now.done} of {now.runs} runs, {left}"
        self.update(self._bar, completed=now.done, total=now.runs, description=described)
        number = f"[{now.done:{len(str(now.runs))}}/{now.runs}]"
        self.say(f"{number} {event.method:14}  {event.text}; {left}")

    def say(self, text: str) -> None:
        """Write one line above the bar."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
