"""The controller's state of one rollout worker: its step, its rollouts, and what it has of the history."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from treering.engine.rollout import RolloutKey
from treering.runtime.ipc.messages import BeginStep, PromptHistories, RefreshHistory, SampleRequests, Work
from treering.runtime.ipc.process import ChildProcess
from treering.runtime.pools.sent_history import SentHistory
from treering.runtime.step.open_step import OpenStep

OpenSteps = Mapping[int, OpenStep]
"""Steps that are being sampled, by number, in order."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerState:
    """A rollout worker as the controller knows it.

    Example: `WorkerState(child=child)` is a process that has just started; it has no step, rollouts or history.
    """

    child: ChildProcess
    step: int = 0
    """Its current step; 0 for a new worker."""
    has_begun: bool = False
    """Whether it was sent that step."""
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
        self.step, self.has_begun = open_step.step, True
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
