"""Sample the groups of a step; check prompts and contexts before a run, and failed rewards after each step."""

from collections.abc import Mapping, Sequence
from functools import partial

from torch import nn

from treering.config.rl_options import RlOptions
from treering.engine.admission import check_context
from treering.engine.protocol import Engine, Rollout, Sampling
from treering.errors import InputError, StateError, plural
from treering.model.checks import max_positions
from treering.ranks.group import RankGroup
from treering.rl.collect import Collected, Collection, Order, collect, join
from treering.rl.drafting import Drafting
from treering.rl.environments.collect_episodes import EpisodeForecast, check_failures, collect_episodes
from treering.rl.environments.environment import EnvironmentTask
from treering.rl.rehearsal import Rehearsal
from treering.rl.tasks.task import Prompt, Task
from treering.train.progress import OnProgress, PhaseProgress
from treering.types import PromptId, TokenIds


def with_stops(sampling: Sampling, task: Task) -> Sampling:
    """Add the task's stop tokens and strings to the sampling parameters."""
    return sampling.changed(
        stop_tokens=tuple(dict.fromkeys([*sampling.stop_tokens, *task.stop_tokens])),
        stop_strings=tuple(dict.fromkeys([*sampling.stop_strings, *task.stop_strings])),
    )


def check_contexts(task: Task, max_tokens: int, model: nn.Module) -> None:
    """Refuse a prompt that an engine would refuse later, before anything is sampled.

    Raises:
        InputError: a rollout of `max_tokens` tokens could exceed the model's positions.
    """
    limit = max_positions(model)
    for prompt in task.prompts:
        try:
            check_context(prompt.tokens, max_tokens, limit)
        except InputError as error:
            raise InputError(f"prompt {prompt.name}: {error}") from error


def check_prompts(task: Task) -> None:
    """Refuse a task without prompts or with duplicate prompt ids.

    Raises:
        InputError: no prompt, or two prompts with the same id.
    """
    if not task.prompts:
        raise InputError("training needs at least one prompt, and the task has none; add some")
    seen: set[PromptId] = set()
    for prompt in task.prompts:
        if prompt.prompt_id in seen:
            raise InputError(f"prompt ids must be distinct, and {prompt.name} repeats one; rename or drop one")
        seen.add(prompt.prompt_id)


MAX_FAILED_STEPS = 3
"""Number of consecutive steps without any reward that ends a run; step 1 without a reward ends it at once."""


class FailedSteps:
    """Count consecutive steps in which every reward failed, and end the run after too many.

    The limit is one in step 1: a reward that has never worked is probably wrong.

    Example: with steps of 8 rollouts, 7, 8, 8, 7, 8, 8 and 8 failures end the run at the seventh step; 8 failures in
    step 1 end it there.
    """

    def __init__(self, reward_name: str) -> None:
        """`reward_name` names the reward function in errors."""
        self._reward_name = reward_name
        self._count = 0

    def note(self, step: int, collected: Collected) -> None:
        """Note a sampled step; call this in the order of steps.

        Raises:
            StateError: every reward of the last `MAX_FAILED_STEPS` steps or of step 1 failed.
        """
        has_failed = collected.num_rollouts == 0 and collected.num_reward_errors > 0
        self._count = self._count + 1 if has_failed else 0
        if self._count < (1 if step == 1 else MAX_FAILED_STEPS):
            return
        steps = "step 1" if step == 1 else f"steps {step - MAX_FAILED_STEPS + 1} to {step}"
        error, count = max(collected.error_counts.items(), key=lambda item: item[1])
        example = next((each for each in collected.reward_errors if each.endswith(error)), error)
        raise StateError(
            f"{example} ({count} of {plural(collected.num_reward_errors, 'rollout')}; {self._reward_name} failed for "
            f"every rollout of {steps})"
        )


class Sampler:
    """Sample the groups of a step, and add their rollouts to the history.

    Each of N ranks samples every Nth prompt; afterwards all ranks have all groups and the same history.
    """

    def __init__(self, task: Task, options: RlOptions, drafting: Drafting | None, rank_group: RankGroup) -> None:
        """Prepare sampling; every finished rollout is added to `drafting`, unless it is None."""
        self._task = task
        self._options = options
        self._sampling = with_stops(options.sampling, task)
        self._drafting = drafting
        self._rank_group = rank_group
        self.forecast = EpisodeForecast()
        """Order in which the next episodes start; part of a checkpoint."""
        self.rehearsal = Rehearsal(options.rehearse)

    def collect(
        self,
        engine: Engine,
        prompts: Sequence[Prompt],
        draws: Mapping[PromptId, int],
        *,
        following: Sequence[Prompt] = (),
        on_progress: OnProgress | None = None,
    ) -> Collected:
        """Sample the groups of the prompts; all ranks call this with the same prompts, each with its own engine.

        Args:
            engine: idle before and after.
            prompts: prompts of the step.
            draws: how often each prompt has been scheduled before.
            following: prompts of the next batch, which idle rows may rehearse.
            on_progress: called with the numbers of finished and of all rollouts of this rank.

        Raises:
            InputError: the engine refuses a prompt.
            StateError: too many episodes failed, or one blocks the others.
        """
        own = prompts[self._rank_group.rank :: self._rank_group.size]
        finished: list[tuple[Rollout, TokenIds]] = []
        progress = PhaseProgress("sampling", len(own) * self._options.group_size, on_progress)

        def remember(rollout: Rollout) -> None:
            rest = self.rehearsal.rest_of(rollout)
            finished.append((rollout, rest))
            if self._drafting is not None:
                self._drafting.add(rollout, rest)

        is_environment = isinstance(self._task, EnvironmentTask)
        num_episodes = len(prompts) * self._options.group_size
        # If a prompt has no history, early rollouts of its group draft later ones.
        is_known = self._drafting is None or all(self._drafting.knows(prompt.prompt_id) for prompt in own)
        order: Order = "by_prompt" if is_known else "by_sample"
        sample = (
            partial(collect_episodes, num_episodes=num_episodes, forecast=self.forecast)
            if is_environment
            else partial(collect, order=order, rehearsed=self.rehearsal.tokens)
        )
        before = engine.stats
        rehearses = self.rehearsal.is_on(engine) and not is_environment
        if rehearses:
            # This rank's requests of the next batch, with the noise of their step.
            after = {**draws, **{prompt.prompt_id: draws.get(prompt.prompt_id, 0) + 1 for prompt in prompts}}
            early = following[self._rank_group.rank :: self._rank_group.size]
            early_requests = Collection(
                early, after, group_size=self._options.group_size, sampling=self._sampling
            ).requests()
            self.rehearsal.begin(engine, early_requests)
        try:
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
        finally:
            if rehearses:
                self.rehearsal.end(engine)
            else:
                # The tokens of a checkpoint were for this batch.
                self.rehearsal.tokens = {}
        joined = self._joined(prompts, collected, finished)
        if rehearses:
            lengths = [rollout.num_tokens for group in joined.groups for rollout in group.rollouts]
            self.rehearsal.note(engine.stats.since(before), lengths, self._rank_group)
        if is_environment:
            self.forecast.observe(joined.groups)
        return joined

    def _joined(
        self, prompts: Sequence[Prompt], own: Collected, finished: Sequence[tuple[Rollout, TokenIds]]
    ) -> Collected:
        """Return the groups of all ranks, and add the rollouts of other ranks to the history, rank by rank."""
        if self._rank_group.size == 1:
            return own
        parts = self._rank_group.gather((own, finished))
        if self._drafting is not None:
            for rank, (_, rollouts) in enumerate(parts):
                for rollout, rest in rollouts if rank != self._rank_group.rank else ():
                    self._drafting.add(rollout, rest)
        joined = join(prompts, [collected for collected, _ in parts])
        if isinstance(self._task, EnvironmentTask):
            num_episodes = len(prompts) * self._options.group_size
            check_failures(joined.error_counts, num_episodes, self._task.options.max_failed)
        return joined
