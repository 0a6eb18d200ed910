"""Rewards of held-out prompts and episodes. Nothing of them enters a history, a drafter or a training step."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import comb

from treering import metrics
from treering.engine.protocol import Engine, Sampling
from treering.engine.sampling.noise import row_key
from treering.errors import ConfigError
from treering.ranks.group import RankGroup
from treering.rl.collect import Collected, collect, join
from treering.rl.environments.collect_episodes import collect_episodes
from treering.rl.environments.environment import EnvironmentTask
from treering.rl.sampler import check_prompts, with_stops
from treering.rl.tasks.task import Task
from treering.train.progress import OnProgress, PhaseProgress


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Return the unbiased estimate 1 - C(n-c, k) / C(n, k) of the chance that at least one of k samples passes.

    It is the share of all subsets of k samples with a sample that passed.

    Example:
        >>> pass_at_k(4, 1, 1), pass_at_k(4, 1, 2), pass_at_k(4, 3, 2)
        (0.25, 0.5, 1.0)
    """
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)


def mean_pass_at_k(num_samples: int, num_passed: Sequence[int]) -> dict[int, float]:
    """Return the mean over prompts of `pass_at_k` by k, for the powers of two up to the number of samples.

    Args:
        num_samples: samples of each prompt.
        num_passed: samples that passed, by prompt; at least one prompt.

    Example:
        >>> mean_pass_at_k(4, [1, 0])
        {1: 0.125, 2: 0.25, 4: 0.5}
    """
    powers = [1 << bits for bits in range(num_samples.bit_length())]
    return {k: sum(pass_at_k(num_samples, c, k) for c in num_passed) / len(num_passed) for k in powers}


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """How held-out prompts are sampled and judged."""

    sampling: Sampling
    """Sampling parameters; the task's stops are added."""
    num_samples: int = 1
    """Rollouts per prompt."""
    pass_reward: float = 1.0
    """Smallest reward that passes."""

    def __post_init__(self) -> None:
        if self.num_samples < 1:
            raise ConfigError(f"num_samples is at least 1, got {self.num_samples}; raise it")


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalReport:
    """Rewards of held-out prompts, or of each agent's runs of held-out tasks."""

    reward: float | None
    """Mean over rollouts with a reward, or over runs including their calls' rewards; None without any."""
    pass_at: Mapping[int, float]
    """Mean chance that one of k samples passes, by k; a rollout without a reward does not pass."""
    length_mean: float | None
    """Tokens of a rollout with a reward, or of all branches of a run; None without any."""
    num_reward_errors: int
    """Rollouts whose reward raised."""
    reward_errors: tuple[str, ...] = ()
    """The first error messages."""

    def values(self) -> dict[str, float]:
        """Return the metrics by the names of `treering.metrics`; reward metrics only if there are rewards."""
        own: dict[str, float | None] = {
            metrics.EVAL_REWARD: self.reward,
            **{f"{metrics.EVAL_PASS_AT}{k}": value for k, value in self.pass_at.items()},
            metrics.EVAL_LENGTH_MEAN: self.length_mean,
            metrics.EVAL_NUM_REWARD_ERRORS: self.num_reward_errors,
        }
        return {name: value for name, value in own.items() if value is not None}


class HeldOutRewards:
    """Measures a policy on held-out prompts.

    Each measurement uses its own engine without a drafter, so the training engine's caches stay. Its noise is always
    that of draw 0, which makes the values of two steps comparable.

    Example:
        >>> options = EvalOptions(sampling=Sampling(max_tokens=64), num_samples=4)
        >>> measure = HeldOutRewards(task, lambda: TorchEngine(model, seed=eval_seed(0)), options)     # doctest: +SKIP
        >>> measure().pass_at                                                                          # doctest: +SKIP
        {1: 0.31, 2: 0.44, 4: 0.56}
    """

    def __init__(
        self, task: Task, make_engine: Callable[[], Engine], options: EvalOptions, rank_group: RankGroup | None = None
    ) -> None:
        """Set up the measurement; several ranks (`rank_group`) share the prompts.

        Args:
            task: held-out prompts and their rewards.
            make_engine: makes an engine with the current weights.
            options: how prompts are sampled and judged.
            rank_group: ranks of the run.

        Raises:
            InputError: no prompt, or two prompts with the same id.
        """
        check_prompts(task)
        self._task, self._make_engine, self._options = task, make_engine, options
        self._sampling = with_stops(options.sampling, task)
        self._rank_group = RankGroup() if rank_group is None else rank_group

    def __call__(self, on_progress: OnProgress | None = None) -> EvalReport:
        """Measure the current weights.

        Raises:
            InputError: the engine refuses a prompt.
            StateError: too many episodes of an environment failed.
        """
        prompts, options = self._task.prompts, self._options
        own = prompts[self._rank_group.rank :: self._rank_group.size]
        progress = PhaseProgress("sampling", len(own) * options.num_samples, on_progress)
        sample = collect
        if isinstance(self._task, EnvironmentTask):
            sample = partial(collect_episodes, num_episodes=len(prompts) * options.num_samples)
        collected = sample(
            self._make_engine(),
            self._task,
            own,
            {},
            group_size=options.num_samples,
            sampling=self._sampling,
            on_progress=progress.add,
        )
        return _report(join(prompts, self._rank_group.gather(collected)), options)


def eval_seed(seed: int) -> int:
    """Derive an evaluation engine's seed from the training seed, so that their rollouts never share noise.

    Example:
        >>> eval_seed(0) == eval_seed(0), eval_seed(0) == 0
        (True, False)
    """
    return row_key(seed, "evaluation", 0, 0) & (2**63 - 1)


def _report(collected: Collected, options: EvalOptions) -> EvalReport:
    num_tokens = sum(rollout.num_tokens for group in collected.groups for rollout in group.rollouts)
    num_rollouts = collected.num_rollouts
    num_passed = [int((group.returns >= options.pass_reward).sum()) for group in collected.groups]
    total = sum(float(group.returns.sum()) for group in collected.groups)
    return EvalReport(
        reward=total / num_rollouts if num_rollouts else None,
        pass_at=mean_pass_at_k(options.num_samples, num_passed),
        length_mean=num_tokens / num_rollouts if num_rollouts else None,
        num_reward_errors=collected.num_reward_errors,
        reward_errors=collected.reward_errors,
    )
