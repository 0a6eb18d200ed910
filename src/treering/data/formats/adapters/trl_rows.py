"""TRL's datasets: prompt and completion, messages, and preference pairs, as text or as messages.

Source: "Dataset formats and types" of TRL's documentation.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any, Literal

from treering.data.formats.adapters.chat_records import decode_chat
from treering.data.formats.chat_messages import decode_messages, decode_tools
from treering.data.formats.codec import check_readable, decode_scalars, first_prompt_id
from treering.data.formats.json_fields import MASK_KEYS, is_blank, number_field, show, text_field
from treering.data.formats.model_calls import as_context, ids_or_text
from treering.data.formats.record_format import Note, RecordFormat, has_keys, task_of
from treering.data.trajectory import RAW_FORMAT, Message, Trajectory
from treering.errors import InputError

_PAIR = ("chosen", "rejected")


def decode_trl(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode a record, or the two sides of a preference pair; a prompt is never trained.

    Text is not templated (format "raw") and is followed by the tokenizer's `eos_token`, as in TRL. The prompt of a pair
    without one is the common beginning of both answers.
    """
    is_chat = is_blank(record.get("prompt")) and is_blank(record.get("completion"))
    check_readable(record, but=(*_PAIR, "tools", "functions", *(("system", *MASK_KEYS) if is_chat else ())))
    if all(not is_blank(record.get(key)) for key in _PAIR):
        return _pair(record, note)
    if is_chat:
        return decode_chat(record, note)
    text_format, prompt, completion = prompt_and_completion(record)
    messages = (*prompt, *completion)
    return [
        Trajectory(
            task_id=task_of(record, note, messages=messages),
            messages=messages,
            tools=decode_tools(record) if text_format != RAW_FORMAT else (),
            format=text_format,
            adds_end=text_format == RAW_FORMAT,
            **decode_scalars(record),
        )
    ]


def prompt_and_completion(record: Mapping[str, Any]) -> tuple[str, tuple[Message, ...], tuple[Message, ...]]:
    """Return the format of a trajectory, the untrained messages of its prompt, and the messages of its completion."""
    values = {key: record.get(key) for key in ("prompt", "completion")}
    if missing := [key for key, value in values.items() if is_blank(value)]:
        raise InputError(f"a record has prompt and completion, got no {' and no '.join(missing)}; add it")
    if all(isinstance(value, list | dict) for value in values.values()):
        prompt, completion = (_messages(value, key) for key, value in values.items())
        return "chat", as_context(prompt), completion
    if not all(isinstance(value, str) for value in values.values()):
        raise InputError(
            f"prompt and completion are both text or both messages, got {show(values['prompt'])} and "
            f"{show(values['completion'])}; write both as messages"
        )
    texts = [text_field(record, key) for key in values]
    return RAW_FORMAT, (Message(role="user", content=texts[0]),), (Message(role="assistant", content=texts[1]),)


def _messages(value: object, key: str) -> tuple[Message, ...]:
    return decode_messages([value] if isinstance(value, dict) else value, key)


def _pair(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    chosen, rejected = (record[key] for key in _PAIR)
    if isinstance(chosen, str) and isinstance(rejected, str):
        return _text_pair(record, note, chosen, rejected)
    if isinstance(chosen, str) or isinstance(rejected, str):
        raise InputError(
            f"chosen and rejected are both text or both messages, got {show(chosen)} and {show(rejected)}; write both "
            "as messages"
        )
    answers = [_messages(record[key], key) for key in _PAIR]
    # With answers that are messages, a prompt that is text repeats their first question.
    prompt = record.get("prompt")
    begin = () if prompt is None or isinstance(prompt, str) else _messages(prompt, "prompt")
    if not begin:
        begin = _common(*answers)
        answers = [answer[len(begin) :] for answer in answers]
    return preference_pair(record, note, begin, answers[0], answers[1], tools=decode_tools(record))


def _common(one: tuple[Message, ...], other: tuple[Message, ...]) -> tuple[Message, ...]:
    num_same = next((i for i, pair in enumerate(zip(one, other, strict=False)) if pair[0] != pair[1]), None)
    if num_same is None:
        raise InputError(
            "chosen and rejected must differ after a common beginning, and one is all of the other; add turns"
        )
    return one[:num_same]


def _text_pair(record: Mapping[str, Any], note: Note, chosen: str, rejected: str) -> list[Trajectory]:
    prompt = text_field(record, "prompt")
    if prompt is None:
        same = zip(chosen, rejected, strict=False)
        num_same = next((i for i, pair in enumerate(same) if pair[0] != pair[1]), min(len(chosen), len(rejected)))
        # TRL leaves a space to the answer.
        prompt = chosen[:num_same].removesuffix(" ")
        chosen, rejected = chosen[len(prompt) :], rejected[len(prompt) :]
    begin = (Message(role="user", content=prompt),) if prompt else ()
    answers = [(Message(role="assistant", content=text),) for text in (chosen, rejected)]
    return preference_pair(record, note, begin, answers[0], answers[1], text_format=RAW_FORMAT)


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
    """Return both sides of a pair; only the answers are trained, with rewards `score_chosen` and `score_rejected`."""
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
            adds_end=text_format == RAW_FORMAT,
            reward=number_field(record, f"score_{side}"),
            preference=side,
        )
        for side, answer in zip(sides, (chosen, rejected), strict=True)
    ]


FORMATS = (
    RecordFormat(
        name="trl",
        decode=partial(ids_or_text, decode=decode_trl),
        keys=(("prompt", "completion"), ("prompt", *_PAIR), _PAIR, ("messages",)),
        signs=(
            (80, has_keys(*_PAIR)),
            (82, lambda record, filled: filled >= {"prompt", "completion"} and "messages" not in filled),
        ),
        has_images=True,
    ),
)
