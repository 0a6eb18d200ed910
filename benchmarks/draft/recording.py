"""Recorded rollouts of a trajectory file, for the replay: as `Recorded` has them, epochs being generations.

A generation is the epoch where every rollout has one, else the step, else 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from treering.analysis import recording
from treering.analysis.recording import Outline, Recorded, some_prompts
from treering.data import RenderedTrajectory, Renderer, Trajectory, read_trajectories


def record(
    trajectories: Sequence[Trajectory], rendered: Sequence[RenderedTrajectory], limit_tokens: int | None = None
) -> tuple[Recorded, list[str]]:
    """The recording of trajectories, and notes on what is left out, or on an epoch or step that only some of them have.

    Args:
        trajectories: in file order.
        rendered: their tokens.
        limit_tokens: whole tasks, in a seeded order, until they have as many sampled tokens; None takes all.

    Raises:
        InputError: none has a sampled token.
    """
    generations, notes = _generations(trajectories)
    dated = [replace(one, epoch=n, step=None) for one, n in zip(trajectories, generations, strict=True)]

    def choose(whole: Outline) -> Outline:
        if limit_tokens is None:
            return whole
        chosen = some_prompts(whole, weights=whole.lengths, limit=limit_tokens)
        num_left_out = len(whole.prompt_ids) - np.unique(chosen.prompts).size
        if num_left_out:
            notes.append(
                f"{num_left_out} tasks were left out, {int(chosen.lengths.sum()):,} sampled tokens stayed; "
                "--limit-tokens N takes more, and 0 all"
            )
        return chosen

    return recording.record(dated, rendered, choose=choose), notes


def read_recording(file: Path, tokenizer: Path | None, limit_tokens: int | None = None) -> tuple[Recorded, list[str]]:
    """The rollouts of a trajectory file of messages or tokens, and notes on what is left out; see `record`.

    Raises:
        InputError: a missing or bad file, messages without a tokenizer, or nothing that was sampled.
    """
    trajectories = read_trajectories(file)
    rendered = Renderer(tokenizer=tokenizer, template="plain").render(trajectories)
    return record(trajectories, rendered, limit_tokens)


def _generations(trajectories: Sequence[Trajectory]) -> tuple[list[int], list[str]]:
    gaps: list[str] = []
    for name in ("epoch", "step"):
        values = [getattr(one, name) for one in trajectories]
        num_without = values.count(None)
        if not num_without:
            return values, gaps
        if num_without < len(values):
            gaps.append(
                f"{num_without} of {len(values)} rollouts have no {name}, so {name}s do not say which rollouts are "
                "earlier: give all of them one"
            )
    return [0] * len(trajectories), gaps
