"""Count synchronisation rounds, and tell whether one is under way."""

from __future__ import annotations


class Rounds:
    """Counts rounds: in a round, all buckets of a step are synchronised once.

    Attributes:
        step: rounds finished.
    """

    def __init__(self) -> None:
        self.step = 0
        self._opened = -1
        self._begun = self._ended = self._advanced = 0  # flows: made, finished, of finished rounds

    def begin_flow(self) -> None:
        """Count a flow that was made."""
        self._begun += 1

    def end_flow(self) -> None:
        """Count a flow that has ended."""
        self._ended += 1

    def advance(self) -> None:
        """Count a round: flows of all its buckets have been made."""
        self.step, self._advanced = self.step + 1, self._begun

    def opens(self, step: int) -> bool:
        """Return whether the first flow of the round of ``step`` is running just now."""
        first, self._opened = step != self._opened, step
        return first

    @property
    def torn(self) -> bool:
        """Whether a round is under way, so that errors are neither those before nor after it."""
        return not self._begun == self._ended == self._advanced

    def restart(self, step: int) -> None:
        """Go on from ``step``; the next round is a new one, whatever its number."""
        self.step, self._opened = step, -1
        self._ended = self._advanced = self._begun
