"""Synthetic groups whose lengths repeat between epochs as well as the paper reports, not better.

G rollouts of a prompt in an epoch, P prompts
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from treering.errors import InputError
from treering.schedule.predict.calibration import RankGroups, group_ranks
from treering.schedule.traces.synthetic import LengthLaw, as_trace, check_counts, parse_law, whole_lengths
from treering.schedule.traces.trace import Trace

NUM_GROUPS = 8
"""Number of rank groups."""
MATH_SHARE = 0.16
CODE_SHARE = 0.28
"""Shares of rollouts that move to a longer group, as RhymeRL reports them for mathematics and for code."""

_MAX_SPREAD = 8.0
_NUM_HALVINGS = 24
_NUM_COARSE_HALVINGS = 10


def stable_trace(
    spec: str | LengthLaw,
    *,
    num_steps: int,
    num_rollouts: int,
    group_size: int = 16,
    spread: float,
    early: float = 0.0,
    seed: int,
) -> Trace:
    """Steps of prompts, each predicted by the median of its rollouts in an earlier epoch.

    A prompt's length follows the law, and each of its rollouts, in either epoch, has that length times exp(spread z).
    Some end early, anywhere before that.

    Args:
        spec: a law, or its text as `treering.schedule.traces.synthetic.parse_law` reads it.
        num_steps: at least 1.
        num_rollouts: of each step, a multiple of `group_size`.
        group_size: G.
        spread: sigma within a prompt, at least 0, such as `sigma_for_stability` finds.
        early: share of rollouts that end early, from 0 up to 1, such as `noise_for_stability` finds.
        seed: of lengths.

    Raises:
        InputError: a law that cannot be read, or a number that does not fit.

    Example: a spread of 0 predicts every rollout exactly, and all rollouts of a prompt have one length.
    """
    law = parse_law(spec) if isinstance(spec, str) else spec
    check_counts(num_steps, num_rollouts, group_size)
    if not (np.isfinite(spread) and spread >= 0):
        raise InputError(f"spread is the sigma within a prompt, at least 0, got {spread!r}; correct it")
    if not 0 <= early < 1:
        raise InputError(f"early is a share of rollouts, at least 0 and below 1, got {early!r}; correct it")
    random = np.random.default_rng(seed)
    pairs = []
    for _ in range(num_steps):
        epochs = _Epochs(law, random, num_rollouts // group_size, group_size)
        lengths, medians = epochs.lengths(1, spread, early), epochs.medians(spread, early)
        pairs.append((lengths.reshape(-1), np.repeat(medians, group_size)))
    return as_trace(pairs, law, group_size)


def sigma_for_stability(
    spec: str | LengthLaw, share: float, *, group_size: int = 16, num_rollouts: int = 32768, seed: int = 0
) -> float:
    """The spread within prompts at which a share of rollouts moves to a longer one of eight groups.

    Found by bisection over fixed random numbers, so equal calls give equal results.

    Args:
        spec: a law, or its text.
        share: of upward moves, such as `MATH_SHARE`; above 0, and below what chance alone gives (about 0.44).
        group_size: G.
        num_rollouts: that it is measured with.
        seed: of those.

    Raises:
        InputError: a share that no spread gives.

    Example: for "lognormal:8.2,0.8,16384" and groups of 16, 0.16 is met by a spread of about 0.14.
    """
    law = parse_law(spec) if isinstance(spec, str) else spec
    check_counts(1, num_rollouts, group_size)
    epochs = _Epochs(law, np.random.default_rng(seed), num_rollouts // group_size, group_size)
    least, most = 0.0, _MAX_SPREAD
    if not 0 < share < epochs.moved_up(most):
        raise InputError(
            f"a share of upward moves lies above 0 and below the {epochs.moved_up(most):.2f} of lengths that nothing "
            f"predicts, got {share!r}; the paper has {MATH_SHARE} for mathematics and {CODE_SHARE} for code"
        )
    for _ in range(_NUM_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if epochs.moved_up(middle) < share else (least, middle)
    return most


def noise_for_stability(
    spec: str | LengthLaw,
    share: float,
    crossed: float,
    *,
    group_size: int = 16,
    num_rollouts: int = 16384,
    seed: int = 0,
) -> tuple[float, float]:
    """The spread within prompts, and the share of rollouts that end early, that both figures of the paper follow from.

    Spread alone moves as many rollouts far as it moves near where it moves many. Rollouts that end early move all
    others up a little, across the next boundary and no further; how many end early decides what is far and what near.
    Of mathematics the paper's figures (0.16, 0.13) follow from spread alone, of code (0.28, 0.24) they do not.

    Args:
        spec: a law, or its text.
        share: of rollouts in a longer one of eight groups than predicted.
        crossed: of rollouts that are one group up, and in its shorter half; below `share`.
        group_size: G.
        num_rollouts: that it is measured with.
        seed: of those.

    Returns:
        Spread and share, as `stable_trace` takes them; the share is 0 where spread alone crosses as much.

    Raises:
        InputError: shares that no spread gives, or that cross more than rollouts that end early make cross.

    Example: for "lognormal:8.2,0.8,16384", 0.28 and 0.24 are met by a spread of about 0.07 and 18 % that end early.
    """
    law = parse_law(spec) if isinstance(spec, str) else spec
    options = {"group_size": group_size, "num_rollouts": num_rollouts, "seed": seed}
    spread = sigma_for_stability(law, share, **options)
    epochs = _Epochs(law, np.random.default_rng(seed), num_rollouts // group_size, group_size)
    if epochs.crossed(spread, 0.0) >= crossed:
        return spread, 0.0
    # The largest share of early ends, at spread 0.
    most = _bisected(lambda early: epochs.moved_up(0.0, early) >= share, 0.0, 1.0)

    def spread_with(early: float) -> float:
        return _bisected(lambda sigma: epochs.moved_up(sigma, early) >= share, 0.0, spread)

    reached = epochs.crossed(spread_with(most), most)
    if reached < crossed:
        raise InputError(
            f"where {share} move up, rollouts that end early make at most {reached:.2f} cross a boundary and no more, "
            f"got crossed={crossed!r}; lower it"
        )
    early = _bisected(lambda tried: epochs.crossed(spread_with(tried), tried) >= crossed, 0.0, most)
    return spread_with(early), early


def _bisected(is_enough: Callable[[float], bool], least: float, most: float) -> float:
    """The least value that is enough, by bisection; `most` if no smaller one is."""
    for _ in range(_NUM_COARSE_HALVINGS):
        middle = (least + most) / 2
        least, most = (least, middle) if is_enough(middle) else (middle, most)
    return most


class _Epochs:
    """Two epochs of prompts, with random numbers that stay the same whatever the spread."""

    def __init__(self, law: LengthLaw, random: np.random.Generator, num_prompts: int, group_size: int) -> None:
        self._law = law
        self._middles = law.sample(random, num_prompts)[:, None]
        self._errors = random.standard_normal((2, num_prompts, group_size))
        # A separate generator, so that lengths are unchanged if no rollout ends early.
        (ends,) = random.spawn(1)
        self._luck, self._ends = ends.random((2, num_prompts, group_size)), ends.random((2, num_prompts, group_size))

    def lengths(self, epoch: int, spread: float, early: float) -> NDArray[np.int64]:
        """int64 [P, G]."""
        parts = np.where(self._luck[epoch] < early, self._ends[epoch], 1.0)
        return whole_lengths(self._middles * np.exp(spread * self._errors[epoch]) * parts, self._law)

    def medians(self, spread: float, early: float) -> NDArray[np.float64]:
        """float64 [P]: of the first epoch's rollouts."""
        medians: NDArray[np.float64] = np.median(self.lengths(0, spread, early), axis=1)
        return medians

    def moved_up(self, spread: float, early: float = 0.0) -> float:
        """Share of the second epoch's rollouts in a longer group than that of their prompt's median in the first."""
        return 1.0 - self._ranks(spread, early).accurate

    def crossed(self, spread: float, early: float) -> float:
        """Share that moved up one group, into its shorter half."""
        return self._ranks(spread, early).crossed_boundary

    def _ranks(self, spread: float, early: float) -> RankGroups:
        lengths = self.lengths(1, spread, early)
        predicted = np.repeat(self.medians(spread, early), lengths.shape[1])
        return group_ranks(predicted, lengths.reshape(-1), num_groups=NUM_GROUPS)
