"""Tune each method in its own study, one after the other, then do the final runs."""

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import optuna
import rich.progress
from optuna.storages import BaseStorage
from optuna.trial import TrialState

from lightning_gc.methods.method import DENSE, Method
from lightning_gc.tuning import failure_detector
from lightning_gc.tuning.experiment import Experiment
from lightning_gc.tuning.failure_detector import FailureDetector
from lightning_gc.tuning.final_runs import finals_running, run_finals
from lightning_gc.tuning.journal import database_errors, open_storage
from lightning_gc.tuning.studies import best_trial, open_study
from lightning_gc.tuning.trial import run_trial

_PAUSE = 0.5  # seconds between two looks at trials of other processes


@dataclass(frozen=True)
class Event:
    """Progress of a comparison.

    Attributes:
        method: name of the study's method.
        kind: ``"trial"`` or ``"final"``: a run has ended. ``"lost"``: processes died during their
            trials, or another process took this one for dead.
        done: trials that count so far; final runs so far.
        text: the result.
    """

    method: str
    kind: Literal["trial", "final", "lost"]
    done: int
    text: str


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

    Warns:
        UserWarning: an earlier version made a study and did not store all its rules.

    Raises:
        ValueError: methods that cannot be compared, or a study under other rules.
        StorageError: the storage cannot be used.
        TrialError: a trial has failed before any has completed.
        KeyboardInterrupt: Ctrl-C; the current run is lost, finished runs are kept.
    """
    wanted = _unique(methods)
    storage = open_storage(storage)
    # All of them before the first trial, which may take a day.
    studies = {method.name: open_study(experiment, method, storage) for method in wanted}
    detector = FailureDetector()
    with interrupt_check() as check:

        def run(events: Iterator[Event]) -> None:
            check()
            for event in events:
                show(event)
                check()

        for method in wanted:
            run(_run_study(experiment, method, studies[method.name], detector))
        for method in wanted:
            study = studies[method.name]
            # If other processes die during the last trials, this one repeats them.
            while failure_detector.running(study):
                time.sleep(_PAUSE)
                run(_run_study(experiment, method, study, detector))
            while finals:
                run(_run_finals(experiment, method, study, studies[DENSE], detector))
                if not finals_running(experiment, method, study, studies[DENSE]):
                    break
                time.sleep(_PAUSE)
    return studies


def _unique(methods: Iterable[Method | str]) -> list[Method]:
    wanted = [Method(m) if isinstance(m, str) else m for m in methods]
    names = [method.name for method in wanted]
    for name in names:
        if names.count(name) > 1:
            raise ValueError(
                f"Two methods are called {name!r}, so their trials would be mixed. Give one "
                f"another name, such as Method({name + '_2'!r}, {name!r}, ...)."
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
            text = f"trial {trial.number}: another process took this one for dead; it is repeated"
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
    records = run_finals(experiment, method, study, dense, detector)
    for done, record in enumerate(records, start=1):
        value = record["test"] if record["test"] is not None else record["validation"]
        result = "diverged" if value is None else f"{value:.5g}"
        text = f"{record['source']}, seed {record['seed']}: {result}"
        yield Event(method.name, "final", done, text)


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
    """Shows events of ``tune``: a bar per study and a line per run; without a terminal, lines only.

    Args:
        experiment: has the number of trials per study.
    """

    def __init__(self, experiment: Experiment) -> None:
        super().__init__(transient=True)
        self._trials = experiment.trials
        self._bars: dict[str, rich.progress.TaskID] = {}

    def show(self, event: Event) -> None:
        """Show one event."""
        if event.kind == "trial":
            if event.method not in self._bars:
                self._bars[event.method] = self.add_task(event.method, total=self._trials)
            self.update(self._bars[event.method], completed=event.done)
        self.say(f"{event.method:14}  {event.text}")

    def say(self, text: str) -> None:
        """Write one line above the bars."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)
