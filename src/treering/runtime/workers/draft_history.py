"""The history that a rollout worker drafts from: files of the controller's host, or what the controller sends."""

from collections.abc import Mapping
from pathlib import Path

from treering.history.store.prompt_index import PromptIndex
from treering.history.store.reader import HistoryReader
from treering.history.store.snapshot import Snapshot
from treering.rl.drafting import DraftOptions, make_drafter
from treering.types import PromptId


class ReceivedHistory:
    """The indexes that the controller has sent, a `SnapshotSource`; it decides which stay (`SentHistory`).

    Example: after `take({"q": index})` and `take({"q": None})` the snapshot is empty; the one in between is unchanged.
    """

    def __init__(self) -> None:
        """Nothing has been sent."""
        self._snapshot = Snapshot()

    @property
    def snapshot(self) -> Mapping[PromptId, PromptIndex]:
        """The indexes by prompt; a snapshot never changes."""
        return self._snapshot

    def take(self, indexes: Mapping[PromptId, PromptIndex | None]) -> None:
        """Adds or replaces the indexes of some prompts; None drops one that was taken before."""
        self._snapshot = self._snapshot.changed(indexes)


class DraftHistory:
    """A worker's copy or map of the controller's history, and its drafter.

    Example: `DraftHistory(None, options).take({"q": index})` lets its `drafter` draft rows of "q".
    """

    def __init__(self, folder: Path | None, options: DraftOptions) -> None:
        """Reads the history in a folder; None: takes what is sent."""
        self._source = ReceivedHistory() if folder is None else HistoryReader(folder)
        self.drafter = make_drafter(self._source, options)

    def begin(self) -> None:
        """Starts a step: loads the published history, and resets the drafter's per-step measurements."""
        self.refresh()
        self.drafter.load_state(self.drafter.state())

    def refresh(self) -> None:
        """Loads the published history from its folder, if there is one."""
        if isinstance(self._source, HistoryReader):
            self._source.refresh()

    def take(self, indexes: Mapping[PromptId, PromptIndex | None]) -> None:
        """See `ReceivedHistory.take`."""
        assert isinstance(self._source, ReceivedHistory), "a worker that reads a folder is sent no history"
        self._source.take(indexes)
