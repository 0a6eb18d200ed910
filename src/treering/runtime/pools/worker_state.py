"""The controller's state of one rollout worker: its step, its rollouts, and what it has of the history."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from treering.engine.rollout import RolloutKey
from treering.history.store.prompt_index import PromptIndex
from treering.history.store.snapshot import SnapshotSource
from treering.runtime.ipc.messages import BeginStep, PromptHistories, RefreshHistory, SampleRequests, Work
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.step.open_step import OpenStep
from treering.types import PromptId

OpenSteps = Mapping[int, OpenStep]
"""Steps that are being sampled, by number, in order."""


MAX_OTHER_ENTRIES = 1 << 18
"""Entries of other prompts that a worker keeps: as many as a `Drafter` searches by default, 2 MiB."""


class SentHistory:
    """The indexes that one worker holds: those of its step's prompts, and of earlier ones to draft other prompts from.

    Indexes never change, and published states share those of prompts that do not: another object is another history.

    Example: a second `changes(["q"])` is empty, as the worker has the index of "q", unless a newer one is published.
    """

    def __init__(self, source: SnapshotSource, *, keeps_others: bool = True) -> None:
        """A new process, which has nothing.

        Args:
            source: the published history.
            keeps_others: whether the worker drafts from other prompts; else it keeps none of earlier steps.
        """
        self._source = source
        self._max_other_entries = MAX_OTHER_ENTRIES if keeps_others else 0
        self._indexes: dict[PromptId, PromptIndex] = {}
        self._needed: dict[PromptId, None] = {}
        self._outdated: list[PromptId] = []

    def begin(self) -> None:
        """Starts a step: the prompts of earlier ones are others from here on, and are brought up to date once."""
        # Also those that had no history then: it is the reason why rollouts of new prompts draft from others.
        self._outdated = list(dict.fromkeys([*self._indexes, *self._needed]))
        self._needed = {}

    def changes(self, prompt_ids: Iterable[PromptId]) -> dict[PromptId, PromptIndex | None]:
        """What to send so that the worker has the published indexes of prompts; it counts as sent.

        None drops a prompt: one whose history is gone, or one of an earlier step, the first sent first, while the texts
        of those exceed the limit.
        """
        named, snapshot = list(prompt_ids), self._source.snapshot
        self._needed |= dict.fromkeys(named)
        outdated, self._outdated = self._outdated, []
        before = self._indexes.copy()
        for prompt_id in [*outdated, *named]:
            index = snapshot.get(prompt_id)
            if index is self._indexes.get(prompt_id):
                continue
            self._indexes.pop(prompt_id, None)
            if index is not None:
                # Last in the order, as the one sent last.
                self._indexes[prompt_id] = index
        self._drop()
        after = self._indexes
        return {each: after.get(each) for each in before | after if after.get(each) is not before.get(each)}

    def _drop(self) -> None:
        """Forgets prompts of earlier steps that are too many."""
        sizes = {each: index.text.size for each, index in self._indexes.items() if each not in self._needed}
        num_entries = sum(sizes.values())
        for prompt_id, size in sizes.items():
            if num_entries <= self._max_other_entries:
                return
            num_entries -= size
            del self._indexes[prompt_id]


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    """A rollout worker as the controller knows it.

    Example: `WorkerState(child=child)` is a process that has just started; it has no step, rollouts or history.
    """

    child: ChildProcess
    step: int = 0
    """Its current step; 0 for a new worker."""
    running: dict[RolloutKey, Work] = field(default_factory=dict)
    move_target: int | None = None
    """Worker that takes over the rollouts that this one must give up, until this one has answered."""
    has_report: bool = False
    """Whether it has reported progress since moves were last considered."""
    num_ended: int = 0
    """Rollouts finished since it was last sent requests."""
    pace: int = 0
    """The most rollouts that recently finished between two dispatches."""
    sent: SentHistory | None = None
    """What its process was sent of the history; None: it reads a folder, or none."""

    def num_spare(self, max_batch: int) -> int:
        """Requests to queue in its engine: twice those that finish between two dispatches, and at least a few."""
        return min(max(2 * self.pace, max_batch // 4, 1), max_batch)

    def next_step(self, number: int, open_steps: OpenSteps) -> OpenStep | None:
        """Its current step while it has rollouts there, else the next step with work for it, the `number`-th worker."""
        if self.running:
            return open_steps.get(self.step)
        return next(
            (
                open_step
                for step, open_step in sorted(open_steps.items())
                if step >= self.step and open_step.has_work(number)
            ),
            None,
        )

    def begin(self, open_step: OpenStep, policy_version: int) -> None:
        """Starts a step on it, before its first requests there."""
        self.step = open_step.step
        if self.sent is not None:
            self.sent.begin()
        self.child.offer(open_step.version)
        self.child.send(
            BeginStep(
                step=open_step.step,
                version=open_step.version,
                policy_version=policy_version,
                reports=open_step.moving != "off",
            )
        )

    def submit(self, requests: Sequence[Work]) -> None:
        """Sends it requests, and first the history of their prompts that it lacks."""
        self.running.update((request.key, request) for request in requests)
        self._send_history(requests)
        self.child.send(SampleRequests(requests=requests))

    def refresh(self) -> None:
        """Sends what was published of the prompts that it runs, or lets it read its folder."""
        if self.sent is None:
            self.child.send(RefreshHistory())
        self._send_history(self.running.values())

    def _send_history(self, requests: Iterable[Work]) -> None:
        if self.sent is None:
            return
        indexes = self.sent.changes(request.prompt_id for request in requests)
        if indexes:
            self.child.send(PromptHistories(indexes=indexes))
