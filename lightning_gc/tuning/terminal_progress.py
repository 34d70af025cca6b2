"""Progress of a comparison in a terminal: a line per run, and a bar per study."""

from __future__ import annotations

import rich.progress

from lightning_gc.tuning.comparison import Event
from lightning_gc.tuning.experiment import Experiment


class Progress(rich.progress.Progress):
    """Shows events of a comparison; without a terminal, lines only.

    Args:
        experiment: tells the number of trials per study.
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
