"""A preference pair as two trajectories: the chosen one and the rejected one that follows it."""

from collections.abc import Mapping
from typing import Any, Literal

from treering.data.formats.codec import first_prompt_id
from treering.data.formats.fields import number_field
from treering.data.formats.model_calls import as_context
from treering.data.formats.tasks import Note, task_of
from treering.data.trajectory import Message, Trajectory
from treering.errors import InputError


def preference_pair(
    record: Mapping[str, Any],
    note: Note,
    prompt: tuple[Message, ...],
    chosen: tuple[Message, ...],
    rejected: tuple[Message, ...],
    *,
    tools: tuple[Mapping[str, Any], ...] = (),
    text_format: str = "chat",
) -> list[Trajectory]:
    """Both answers to one prompt, of which only the answers are trained; rewards are `score_chosen`, `score_rejected`.

    Raises:
        InputError: equal answers.
    """
    if chosen == rejected:
        raise InputError("chosen and rejected are the same, so neither is preferred; drop the record")
    shown = as_context(prompt)
    sides: tuple[Literal["chosen", "rejected"], ...] = ("chosen", "rejected")
    task_id = task_of(record, note, messages=shown) if prompt else first_prompt_id((*chosen, *rejected), None, None)
    return [
        Trajectory(
            task_id=task_id,
            messages=(*shown, *answer),
            tools=tools,
            format=text_format,
            reward=number_field(record, f"score_{side}"),
            preference=side,
        )
        for side, answer in zip(sides, (chosen, rejected), strict=True)
    ]
