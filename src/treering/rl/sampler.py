"""The sampling half of an RL step: prompts in, groups of rewarded rollouts out, on one rank or on several."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from treering.engine.protocol import Engine
from treering.engine.rollout import Rollout
from treering.ranks.group import RankGroup
from treering.rl.checks import with_stops
from treering.rl.collect import Collected, Order, collect, join
from treering.rl.drafting import Drafting
from treering.rl.environments.collect import check_failures, collect_episodes
from treering.rl.environments.task import EnvironmentTask
from treering.rl.environments.waiting import EpisodeForecast
from treering.rl.options import RlOptions
from treering.rl.tasks.task import Prompt, Task
from treering.train.progress import OnProgress, PhaseProgress
from treering.types import PromptId


class Sampler:
    """Samples the groups of a step, and remembers their rollouts.

    Each rank samples every Nth prompt by itself; then all have the groups of all, and the same history.

    Example:
        >>> sampler = Sampler(task, options, drafting=None, group=RankGroup())               # doctest: +SKIP
        >>> sampler.collect(engine, task.prompts[:8], draws={}).num_rollouts                 # doctest: +SKIP
        64
    """

    def __init__(self, task: Task, options: RlOptions, drafting: Drafting | None, group: RankGroup) -> None:
        """`drafting`: the history that gets every finished rollout; None keeps none."""
        self._task = task
        self._options = options
        self._sampling = with_stops(options.sampling, task)
        self._drafting = drafting
        self._group = group
        self._forecast = EpisodeForecast()

    def collect(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        draws: Mapping[PromptId, int],
        *,
        on_progress: OnProgress | None = None,
    ) -> Collected:
        """The groups of the prompts; all ranks call it with the same prompts, each with its own engine.

        Args:
            engine: idle before and after.
            prompts: of the step.
            draws: how often each prompt has been scheduled before.
            on_progress: called with the rollouts that this rank has finished, and all of its.

        Raises:
            InputError: the engine refuses a prompt.
            StateError: too many episodes failed, or one blocks the others.
        """
        own = prompts[self._group.rank :: self._group.size]
        finished: list[Rollout] = []
        progress = PhaseProgress("sampling", len(own) * self._options.group_size, on_progress)

        def remember(rollout: Rollout) -> None:
            finished.append(rollout)
            if self._drafting is not None:
                self._drafting.add(rollout)

        is_environment = isinstance(self._task, EnvironmentTask)
        num_episodes = len(prompts) * self._options.group_size
        sample = (
            partial(collect_episodes, num_episodes=num_episodes, forecast=self._forecast)
            if is_environment
            else partial(collect, order=self._order(own))
        )
        collected = sample(
            engine,
            self._task,
            own,
            draws,
            group_size=self._options.group_size,
            sampling=self._sampling,
            on_finished=remember,
            on_progress=progress.add,
        )
        joined = self._joined(prompts, collected, finished)
        if is_environment:
            self._forecast.observe(joined.groups)
        return joined

    def state(self) -> dict[str, Any]:
        """What is expected of the next episodes, for a checkpoint."""
        return self._forecast.state()

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restores a `state`."""
        self._forecast.load_state(state)

    def _joined(self, prompts: Sequence[Prompt], own: Collected, finished: Sequence[Rollout]) -> Collected:
        """The groups of all ranks; what the others finished is history here too, in their order."""
        if self._group.size == 1:
            return own
        parts = self._group.gather((own, finished))
        if self._drafting is not None:
            for rank, (_, rollouts) in enumerate(parts):
                for rollout in rollouts if rank != self._group.rank else ():
                    self._drafting.add(rollout)
        joined = join(prompts, [collected for collected, _ in parts])
        if isinstance(self._task, EnvironmentTask):
            num_episodes = len(prompts) * self._options.group_size
            check_failures(joined.error_counts, num_episodes, self._task.options.max_failed)
        return joined

    def _order(self, prompts: Sequence[Prompt]) -> Order:
        """by_sample if a prompt has no history: its group's first rollouts become its history."""
        if self._drafting is None or all(self._drafting.knows(prompt.prompt_id) for prompt in prompts):
            return "by_prompt"
        return "by_sample"
