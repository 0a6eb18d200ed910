"""Figures of a run by epoch, and its account of rollouts, from the rows of its metrics."""

from collections.abc import Iterable, Mapping, Sequence

from treering import metrics
from treering.report.run import Row, number


def by_epoch(rows: Sequence[Row]) -> list[dict[str, float | None]]:
    """Means over the steps of each epoch, weighted by what they are means of; None where nothing was counted.

    Tokens per forward are tokens over rows of forward passes, the acceptance is accepted over drafted tokens, sharing
    is 1 - computed over flat tokens. The reward and the length are means over rollouts.

    Example: steps with 300 tokens in 100 rows and 100 tokens in 100 rows have 2.0 tokens per forward together.
    """
    epochs: dict[int, list[Row]] = {}
    for row in rows:
        epoch = number(row.get(metrics.EPOCH))
        if epoch is not None:
            epochs.setdefault(int(epoch), []).append(row)
    return [{"epoch": epoch, **figures(epochs[epoch])} for epoch in sorted(epochs)]


def figures(rows: Sequence[Row]) -> dict[str, float | None]:
    """The means of `by_epoch` over all of the given steps; None where nothing was counted.

    Example: without a row of sampled tokens "tokens_per_forward" is None.
    """
    sampled = _pairs(rows, metrics.NUM_SAMPLED, metrics.TOKENS_PER_FORWARD)
    drafted = _pairs(rows, metrics.NUM_DRAFTED, metrics.ACCEPTANCE)
    flat = total(rows, metrics.NUM_BRANCH_TOKENS)
    return {
        "tokens_per_forward": _ratio(sum(n for n, _ in sampled), sum(n / gain for n, gain in sampled if gain)),
        "acceptance": _ratio(sum(n * share for n, share in drafted), sum(n for n, _ in drafted)),
        "reward": _mean(rows, metrics.REWARD_MEAN),
        "length": _mean(rows, metrics.LENGTH_MEAN),
        "sharing": _ratio(flat - total(rows, metrics.NUM_TOKENS), flat),
        "token_bound": _ratio(flat, total(rows, metrics.NUM_TOKENS)),
    }


def phase_seconds(row: Row) -> dict[str, float]:
    """Seconds of a step by phase; "other" is what the phases leave, 0 where they overlap.

    Example: a step of 10 s with 6 s of rollout, 3 s of training and 0.5 s of update has 0.5 s of "other".
    """
    names = {"rollout": metrics.ROLLOUT_S, "training": metrics.TRAIN_S, "update": metrics.UPDATE_S}
    found = {phase: seconds for phase, name in names.items() if (seconds := number(row.get(name))) is not None}
    step_s = number(row.get(metrics.STEP_S))
    # A supervised step has no phases: all of it is training.
    if step_s is None:
        return found
    return found | {"other": max(0.0, step_s - sum(found.values()))} if found else {"training": step_s}


def account(rows: Sequence[Row], *, has_branches: bool = False) -> dict[str, int]:
    """What became of the rollouts, by name; each is trained, or left out for one of four reasons.

    `has_branches`: they are runs of an environment, of which metrics count the trained branches and not the trained
    runs; then those that are trained and those of equal rewards are one count.

    Example: 64 rollouts of which 2 had no reward and 22 were in groups of equal rewards are 40 trained.
    """
    with_reward, trained = total(rows, metrics.NUM_ROLLOUTS), total(rows, metrics.NUM_BRANCHES)
    scored = {"trained": trained, "equal rewards in the group": with_reward - trained}
    counts = {
        **({"with a reward": with_reward} if has_branches else scored),
        "reward failed": total(rows, metrics.NUM_REWARD_ERRORS),
        "not scored": total(rows, metrics.NUM_UNSCORED),
        "empty": total(rows, metrics.NUM_EMPTY),
    }
    return {name: round(count) for name, count in counts.items()}


def faults(rows: Sequence[Row]) -> dict[str, int]:
    """Counts of what went wrong or was moved, over all steps; only those that the run counts."""
    names = {
        "rollouts at their maximum length": metrics.NUM_OVERLONG,
        "groups without a rollout": metrics.NUM_EMPTY_GROUPS,
        "rollouts sampled again after a worker died": metrics.NUM_RESAMPLED,
        "rollouts started on another worker than planned": metrics.NUM_STOLEN,
        "moves of a running rollout": metrics.NUM_MOVED,
    }
    return {words: round(total(rows, name)) for words, name in names.items() if any(name in row for row in rows)}


def total(rows: Iterable[Row], name: str) -> float:
    """The sum of a metric over the rows that have it."""
    return sum(number(row.get(name)) or 0.0 for row in rows)


def _pairs(rows: Iterable[Row], first: str, second: str) -> list[tuple[float, float]]:
    found = [(number(row.get(first)), number(row.get(second))) for row in rows]
    return [(a, b) for a, b in found if a is not None and b is not None]


def _mean(rows: Iterable[Row], name: str) -> float | None:
    pairs = _pairs(rows, metrics.NUM_ROLLOUTS, name)
    return _ratio(sum(count * mean for count, mean in pairs), sum(count for count, _ in pairs))


def _ratio(over: float, under: float) -> float | None:
    return over / under if under else None


def names_of(rows: Sequence[Row]) -> list[str]:
    """The names of all metrics in the rows, sorted."""
    return sorted({name for row in rows for name in row if name != "step"})


def last_values(rows: Sequence[Row]) -> Mapping[str, float]:
    """The newest finite value of each metric."""
    return {name: value for row in rows for name in row if (value := number(row[name])) is not None}
