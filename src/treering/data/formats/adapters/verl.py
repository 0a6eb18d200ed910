"""verl's rollout dumps: `input`, `output`, `score` and `step`, of `trainer.rollout_data_dir`.

Source: `_dump_generations` in verl/trainer/ppo/ray_trainer.py.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import integer_field, number_field, text_field
from treering.data.formats.model_calls import ids_or_text
from treering.data.formats.record_format import NO_ANSWER, Note, RecordFormat, task_of
from treering.data.trajectory import RAW_FORMAT, Message, Trajectory
from treering.errors import InputError

STRIPPED = (
    "verl writes texts without their special tokens, so turns have no end, and an output of several turns holds tool "
    "texts that would be trained; log token ids to train on them"
)


def decode_verl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode the rollout of a row as raw text (format "raw")."""
    check_readable(record)
    texts = {key: text_field(record, key) for key in ("input", "output")}
    if not texts["input"]:
        raise InputError("a rollout has an input that the policy was shown, got none; drop the row")
    if not texts["output"]:
        note(NO_ANSWER)
        return []
    num_turns = integer_field(record, "num_turns")
    if num_turns is not None and num_turns > 2:
        raise InputError(
            f"num_turns is {num_turns}, so output holds the tools' texts too, and they would be trained; log token ids "
            "and their mask"
        )
    note(STRIPPED)
    messages = (Message(role="user", content=texts["input"]), Message(role="assistant", content=texts["output"]))
    score = number_field(record, "score")
    return [
        Trajectory(
            task_id=task_of(record, note, messages=messages),
            messages=messages,
            format=RAW_FORMAT,
            reward=number_field(record, "reward") if score is None else score,
            step=integer_field(record, "step"),
        )
    ]


FORMATS = (
    RecordFormat(
        name="verl",
        decode=partial(ids_or_text, decode=decode_verl),
        keys=(("input", "output", "score"), ("input", "output")),
        signs=(
            (
                90,
                lambda record, filled: (
                    record.keys() >= {"input", "output"} and not record.keys().isdisjoint(("score", "step", "gts"))
                ),
            ),
        ),
    ),
)
