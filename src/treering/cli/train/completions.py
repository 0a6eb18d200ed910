"""Samples of a step's rollouts for trackers, as `metrics.log_completions` asks for them."""

from collections.abc import Sequence

import numpy as np

from treering.cli.train.task import TaskSource
from treering.config.metrics import RlMetricsConfig
from treering.data import Trajectory
from treering.metrics import Completion
from treering.rl.tasks.sums import SumTask
from treering.types import TokenIds

MAX_CHARACTERS = 4000
"""Of a prompt and of a completion in a table; the middle of a longer one is left out."""


def is_table_due(config: RlMetricsConfig, step: int) -> bool:
    """Whether a step has a table.

    Example: every 10 steps it is due after the steps 1, 10, 20 and so on.
    """
    return config.log_completions > 0 and (step == 1 or step % config.log_completions_every == 0)


def completions_of(trajectories: Sequence[Trajectory], num_rows: int, source: TaskSource) -> list[Completion]:
    """Rollouts from the worst reward to the best, evenly spaced among all, all of them where there are fewer.

    Example: 3 of five rollouts with rewards 0.1 to 0.5 are those with 0.1, 0.3 and 0.5.
    """
    ranked = sorted(trajectories, key=lambda each: -np.inf if each.reward is None else each.reward)
    chosen = np.unique(np.linspace(0, len(ranked) - 1, min(num_rows, len(ranked))).round().astype(int))
    return [_completion(ranked[place], source) for place in chosen]


def _completion(each: Trajectory, source: TaskSource) -> Completion:
    assert each.tokens is not None, "rollouts have tokens"
    assert each.loss_mask is not None, "rollouts have a mask"
    start = int(each.loss_mask.argmax()) if each.loss_mask.any() else each.tokens.size
    return Completion(
        prompt=_text(each.tokens[:start], source),
        completion=_text(each.tokens[start:], source),
        reward=each.reward,
        advantage=each.advantage,
    )


def _text(tokens: TokenIds, source: TaskSource) -> str:
    task = source.task
    decode = task.decode if isinstance(task, SumTask) else source.decode
    text = " ".join(map(str, tokens.tolist())) if decode is None else decode(tokens)
    half = MAX_CHARACTERS // 2
    return text if len(text) <= MAX_CHARACTERS else f"{text[:half]} […] {text[-half:]}"
