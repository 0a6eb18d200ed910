"""The trees of single episodes: what each call read and sampled, along the paths of its contexts."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from treering.data import Trajectory
from treering.data.episode import EpisodePart
from treering.report.forest import mean_advantage, place_bars
from treering.report.rollouts import MAX_DRAWN_TOKENS, tokens_of
from treering.tree.forest import Forest
from treering.types import TokenIds

MAX_DRAWN_EPISODES = 40
_MAX_TEXT = 240
_READ = -1
"""In place of an agent: tokens that no call of a trained agent sampled."""


def episodes_of(trajectories: Sequence[Trajectory], text_of: Callable[[int], str] | None) -> list[dict[str, Any]]:
    """The episodes of the newest step of some rollouts, as the page draws them; those with most branches first.

    Args:
        trajectories: of a run; those that are no branches of episodes are left out.
        text_of: of a token; None shows ids.

    Returns:
        At most `MAX_DRAWN_EPISODES`, and as many as `MAX_DRAWN_TOKENS` allow, but at least one if there is any.
    """
    branches = [each for each in trajectories if each.episode is not None]
    newest = max((each.step or 0 for each in branches), default=0)
    found: dict[tuple[Any, ...], list[Trajectory]] = {}
    for each in branches:
        if (each.step or 0) == newest:
            found.setdefault((each.task_id, each.trial), []).append(each)
    ordered = sorted(found.values(), key=len, reverse=True)
    sizes = np.cumsum([sum(tokens_of(each).size for each in episode) for episode in ordered])
    num_fitting = max(1, int((sizes <= MAX_DRAWN_TOKENS).sum()))
    return [_drawn(episode, text_of) for episode in ordered[: min(MAX_DRAWN_EPISODES, num_fitting)]]


def _drawn(branches: Sequence[Trajectory], text_of: Callable[[int], str] | None) -> dict[str, Any]:
    parts = [_part(each) for each in branches]
    agents = list(dict.fromkeys(part.agent for part in parts))
    forest = Forest.from_sequences([tokens_of(each) for each in branches])
    owner, call = np.full(forest.num_tokens, _READ), np.full(forest.num_tokens, _READ)
    for number, part in enumerate(parts):
        path = forest.path(number)
        for span in part.calls:
            owner[path[span.start : span.stop]] = agents.index(part.agent)
            call[path[span.start : span.stop]] = span.number
    changes = np.flatnonzero((np.diff(owner) != 0) | (np.diff(call) != 0)) + 1
    bars = place_bars(forest, changes)
    turns = [turn for part in parts for turn in part.turns]
    return {
        "id": str(branches[0].task_id),
        "trial": branches[0].trial,
        "step": branches[0].step,
        "agents": agents,
        "spans": [
            [
                int(forest.position[start]),
                length,
                top,
                bottom,
                int(owner[start]),
                int(call[start]),
                _words(forest.tokens[start : start + length], text_of),
            ]
            for start, length, top, bottom in bars.rectangles
        ],
        "rows": [
            [agents.index(parts[row].agent), branches[row].reward, mean_advantage(branches[row])] for row in bars.rows
        ],
        "num_tokens": forest.num_tokens,
        "num_branch_tokens": forest.num_branch_tokens,
        "num_calls": sum(len(part.calls) for part in parts),
        "num_turns": len(turns),
        "wait_s": round(sum(turn.wait_s for turn in turns), 4),
    }


def _part(each: Trajectory) -> EpisodePart:
    assert each.episode is not None, "branches of episodes were chosen"
    return each.episode


def _words(tokens: TokenIds, text_of: Callable[[int], str] | None) -> str:
    """The beginning of a span's text."""
    words = [str(token) if text_of is None else text_of(token) for token in tokens[:_MAX_TEXT].tolist()]
    return ("" if text_of is not None else " ").join(words)[:_MAX_TEXT]
