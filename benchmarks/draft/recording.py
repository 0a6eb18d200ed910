"""Recorded rollouts of a trajectory file, for the replay: as `Recorded` has them, epochs being generations.

A generation is the epoch where every rollout has one, else the step, else 0.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from treering.analysis import recording
from treering.analysis.recording import Recorded, some_prompts
from treering.data import RenderedTrajectory, Renderer, Trajectory, read_trajectories


def record(trajectories: Sequence[Trajectory], rendered: Sequence[RenderedTrajectory]) -> tuple[Recorded, list[str]]:
    """The recording of trajectories, and a sentence each for an epoch or step that only some of them have.

    Raises:
        InputError: none has a sampled token.
    """
    generations, gaps = _generations(trajectories)
    dated = [replace(one, epoch=n, step=None) for one, n in zip(trajectories, generations, strict=True)]
    return recording.record(dated, rendered), gaps


def read_recording(file: Path, tokenizer: Path | None, limit_tokens: int | None = None) -> tuple[Recorded, list[str]]:
    """The rollouts of a trajectory file, and notes on what is left out.

    Args:
        file: JSON Lines, plain or .gz, of messages or tokens.
        tokenizer: folder that messages are rendered with.
        limit_tokens: whole tasks, in a seeded order, until they have as many sampled tokens; None takes all.

    Raises:
        InputError: a missing or bad file, messages without a tokenizer, or nothing that was sampled.
    """
    trajectories = read_trajectories(file)
    everything, notes = record(trajectories, Renderer(tokenizer=tokenizer, template="plain").render(trajectories))
    if limit_tokens is None:
        return everything, notes
    recorded = some_prompts(everything, weights=everything.lengths, limit=limit_tokens)
    num_left_out = len(set(everything.prompts.tolist())) - len(set(recorded.prompts.tolist()))
    if num_left_out:
        notes.append(
            f"{num_left_out} tasks were left out, {int(recorded.lengths.sum()):,} sampled tokens stayed; "
            "--limit-tokens N takes more, and 0 all"
        )
    return recorded, notes


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
