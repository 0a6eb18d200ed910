"""Some prompts of a task, with its rewards: the part that is trained, or the part that is held out."""

from collections.abc import Sequence

from treering.engine.rollout import Rollout
from treering.rl.tasks.score import RewardValue
from treering.rl.tasks.task import Prompt, Task


class TaskSubset(Task):
    """A task with some of the prompts of another one.

    Example: `TaskSubset(ChainedSums(64), ChainedSums(64).prompts[:8])` has eight sums.
    """

    def __init__(self, task: Task, prompts: Sequence[Prompt]) -> None:
        """`prompts`: those of the task that stay, in its order."""
        self._task, self._prompts = task, prompts

    @property
    def prompts(self) -> Sequence[Prompt]:
        """Those that stay."""
        return self._prompts

    @property
    def vocab_size(self) -> int:
        """As in the task."""
        return self._task.vocab_size

    @property
    def stop_tokens(self) -> tuple[int, ...]:
        """As in the task."""
        return self._task.stop_tokens

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """As in the task."""
        return self._task.stop_strings

    @property
    def reward_name(self) -> str:
        """As in the task."""
        return self._task.reward_name

    @property
    def rewards_groups(self) -> bool:
        """As in the task."""
        return self._task.rewards_groups

    def reward(self, prompt: Prompt, rollout: Rollout) -> RewardValue:
        """As in the task."""
        return self._task.reward(prompt, rollout)

    def reward_group(self, prompt: Prompt, rollouts: Sequence[Rollout]) -> Sequence[RewardValue | Exception]:
        """As in the task."""
        return self._task.reward_group(prompt, rollouts)
