"""The prompts of each step, and how often each prompt was scheduled before (its draw)."""

from collections import Counter
from collections.abc import Mapping

from treering.rl.checks import check_prompts, with_stops
from treering.rl.collect import Collection
from treering.rl.environments.collect import EpisodeCollection
from treering.rl.environments.task import EnvironmentTask
from treering.rl.options import RlOptions
from treering.rl.tasks.task import Prompt, Task
from treering.train.loop.batches import StepPlan
from treering.types import PromptId


class PromptSchedule:
    """Which prompts each step of a run samples.

    Example: with 5 prompts in steps of 2, step 4 starts the second epoch, and its prompts have draw 1.
    """

    def __init__(self, task: Task, options: RlOptions) -> None:
        """Starts before the first step.

        Raises:
            InputError: no prompt, or two prompts of one id.
        """
        check_prompts(task)
        self._task = task
        self.prompts = task.prompts
        self.sampling = with_stops(options.sampling, task)
        self.plan = StepPlan(num_tasks=len(task.prompts), trees_per_step=options.prompts_per_step, seed=options.seed)
        self._options = options
        self.num_steps_done = 0
        self.draws: dict[PromptId, int] = {}

    def resume_after(self, step: int, draws: Mapping[PromptId, int]) -> None:
        """Resumes after a step, with the draws after it."""
        self.num_steps_done, self.draws = step, dict(draws)

    def note_done(self, step: int) -> None:
        """Marks the next step as done."""
        self.draws = self.draws_before(step + 1)
        self.num_steps_done = step

    def prompts_of(self, step: int) -> list[Prompt]:
        """A step's prompts."""
        return [self.prompts[number] for number in self.plan.tasks_of(step)]

    def draws_before(self, step: int) -> dict[PromptId, int]:
        """How often each prompt is scheduled before a future step."""
        draws = Counter(self.draws)
        for earlier in range(self.num_steps_done + 1, step):
            draws.update(prompt.prompt_id for prompt in self.prompts_of(earlier))
        return dict(draws)

    @property
    def runs_episodes(self) -> bool:
        """Whether the task is an environment."""
        return isinstance(self._task, EnvironmentTask)

    def collection(self, step: int) -> Collection | EpisodeCollection:
        """An empty collection for a future step."""
        prompts, draws, group_size = self.prompts_of(step), self.draws_before(step), self._options.group_size
        if isinstance(self._task, EnvironmentTask):
            return EpisodeCollection(self._task, prompts, draws, group_size=group_size, sampling=self.sampling)
        return Collection(prompts, draws, group_size=group_size, sampling=self.sampling)
