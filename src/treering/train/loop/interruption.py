"""How a signal ends a run without a loss: whoever handles signals asks for the end, and the run grants it."""

from collections.abc import Callable

from treering.errors import Interrupted
from treering.ranks.group import RankGroup
from treering.train.progress import OnProgress, Phase


class Interruption:
    """A request to end a run, granted at the next place where the running step can be dropped.

    One process drops its step between micro-batches, or between two steps of its engine. Ranks finish theirs, and agree
    at its end: what one of them leaves out the others would wait for.

    Example: after `request(signal.SIGTERM)` during the third step of a run that has saved its first, `check` raises
    `Interrupted(signal.SIGTERM)`, and `run_steps` saves the second.
    """

    def __init__(self, group: RankGroup) -> None:
        """`group`: the ranks that train together."""
        self.has_unsaved: Callable[[], bool] = lambda: False
        """Whether an end now would lose a whole step; set by the run."""
        self._group = group
        self._number: int | None = None

    @property
    def is_requested(self) -> bool:
        """Whether a request waits for the run."""
        return self._number is not None

    def request(self, signal_number: int) -> bool:
        """Asks for the end, from any thread; returns whether to wait for it.

        Where every whole step is saved, an end at once loses nothing; of several ranks none knows about the others.
        """
        if self._number is None and (self._group.size > 1 or self.has_unsaved()):
            self._number = signal_number
        return self.is_requested

    def check(self) -> None:
        """Raises the request, if there is one.

        Raises:
            Interrupted: the end was asked for.
        """
        if self._number is not None:
            raise Interrupted(self._number)

    def as_error(self) -> Interrupted:
        """The request, which there is."""
        assert self._number is not None, "the end was asked for"
        return Interrupted(self._number)

    def check_together(self) -> None:
        """`check`, in all ranks alike; between steps."""
        if self._group.size > 1:
            self._number = next((number for number in self._group.gather(self._number) if number is not None), None)
        self.check()

    def checked(self, on_progress: OnProgress) -> OnProgress:
        """An `on_progress` that calls another one and, of one process, lets the step end there."""
        if self._group.size > 1:
            return on_progress

        def check_and_tell(phase: Phase, num_done: int, num_planned: int) -> None:
            self.check()
            on_progress(phase, num_done, num_planned)

        return check_and_tell
