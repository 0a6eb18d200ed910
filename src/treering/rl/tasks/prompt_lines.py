"""The records of a prompts file: the chat of a line, and beside it the answer, the id and the columns."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from treering.data.formats.codec import CONTEXT_KEYS, decode
from treering.data.formats.containers import read_records
from treering.data.formats.fields import is_blank, placed
from treering.data.formats.pictures import BEFORE_TEXT, with_pictures
from treering.data.trajectory import Message, Trajectory
from treering.data.unicode import valid_text
from treering.errors import InputError
from treering.types import PromptId

_PROMPT_KEYS = (*CONTEXT_KEYS, "images", "image", "videos", "video", "audio", "documents", "chat_template_kwargs")
"""Keys beside the prompt that change it; the trajectory decoder reads or refuses them."""
_LIKELY_PROMPTS = ("messages", "problem", "query", "instruction", "input", "text")
_LIKELY_ANSWERS = ("solution", "label", "target", "final_answer", "expected_answer", "gold", "output", "response")
_ID_KEYS = ("prompt_id", "task_id", "id")


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptLine:
    """A line without its chat, which `chat` reads.

    Example: `{"question": "2+2?", "answer": 4, "unit": "kg"}` has the answer "4", no id, and all three columns.
    """

    where: str
    """Its place, such as FILE:LINE."""
    record: Mapping[str, Any]
    """As it stands in the file."""
    answer: str | None
    """The reference answer; None without one."""
    prompt_id: PromptId | None
    """None if it has no id."""

    @property
    def columns(self) -> Mapping[str, Any]:
        """Its record, with the answer as `answer`."""
        is_elsewhere = self.answer is not None and self.record.get("answer") is None
        return {**self.record, "answer": self.answer} if is_elsewhere else self.record

    @property
    def likely_answer(self) -> str | None:
        """A key that may hold the answer under another name."""
        return next((name for name in _LIKELY_ANSWERS if not is_blank(self.record.get(name))), None)

    def chat(self, folder: Path) -> tuple[Trajectory, bool]:
        """Its messages and tools, and whether its pictures have no part among the messages.

        Args:
            folder: of local pictures.

        Raises:
            InputError: a bad field.
        """
        key = "question" if self.record.get("prompt") is None else "prompt"
        value = self.record[key]
        if key == "question" and not isinstance(value, str):
            raise InputError(f"a question is text, got {value!r}; quote it, or give messages as prompt")
        messages = value if isinstance(value, list) else [{"role": "user", "content": value}]
        fields = {name: self.record.get(name) for name in _PROMPT_KEYS}
        notes: list[str] = []
        chat = with_pictures({**fields, "messages": messages}, folder, self.where, notes.append)
        trajectory = decode({**chat, "task_id": 0})
        _check(trajectory.messages or (), value)
        return trajectory, BEFORE_TEXT in notes


def prompt_lines(path: Path) -> Iterator[PromptLine]:
    """The lines of a file or folder, in order.

    Raises:
        InputError: a bad line, as "FILE:LINE: rule, value, fix".

    Example: of a file with the line `{"prompt": "a", "id": 3}` it is one, with the id 3.
    """
    for where, record in read_records(path, parse_float=_ExactFloat):
        with placed(where):
            line = _line(record, where)
        yield line


class _ExactFloat(float):
    """A number of a JSON text with the digits that it was written with."""

    def __new__(cls, text: str) -> Self:
        number = super().__new__(cls, text)
        number.text = text
        return number

    text: str


def _line(record: object, where: str) -> PromptLine:
    if not isinstance(record, dict):
        raise InputError(f"a line is a JSON object, got {type(record).__name__}; write one object per line")
    if record.get("prompt") is None and record.get("question") is None:
        likely = next((name for name in _LIKELY_PROMPTS if record.get(name) is not None), None)
        fix = "add one" if likely is None else f"rename {likely}, if that is the prompt"
        raise InputError(f"a line needs prompt or question, got the keys {', '.join(record) or 'none'}; {fix}")
    return PromptLine(where=where, record=record, answer=_answer(_given_answer(record)), prompt_id=_prompt_id(record))


def _check(messages: tuple[Message, ...], value: object) -> None:
    if messages[-1].is_trained:
        raise InputError("a prompt ends before the policy's turn, got an assistant message at its end; drop that one")
    if not any(message.content or message.pictures for message in messages):
        raise InputError(f"a prompt holds text, got {value!r}; drop the line")


def _given_answer(record: Mapping[str, Any]) -> object:
    """The answer under `answer`, or as verl has it, under `ground_truth`, also inside of `reward_model`."""
    inner = record.get("reward_model")
    places = {
        "answer": record.get("answer"),
        "ground_truth": record.get("ground_truth"),
        "reward_model.ground_truth": inner.get("ground_truth") if isinstance(inner, dict) else None,
    }
    given = {key: value for key, value in places.items() if value is not None}
    if len(given) > 1 and len(set(map(repr, given.values()))) > 1:
        raise InputError(f"{' and '.join(given)} hold different answers; keep one of them")
    return next(iter(given.values()), None)


def _answer(value: object) -> str | None:
    if value is None:
        return None
    if isinstance(value, str):
        return valid_text(value, "answer")
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise InputError(f"an answer is text or a number, got {value!r}; write it as text")
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        # JSON has no such numbers, and a number that is too large for Python's floats reads as one.
        raise InputError(f"an answer that is a number is finite, got {value!r}; write it as text")
    return value.text if isinstance(value, _ExactFloat) else str(value)


def _prompt_id(record: Mapping[str, Any]) -> PromptId | None:
    key = next((key for key in _ID_KEYS if record.get(key) is not None), None)
    value = None if key is None else record[key]
    if value is None or (isinstance(value, str | int) and not isinstance(value, bool) and value != ""):
        return valid_text(value, str(key)) if isinstance(value, str) else value
    raise InputError(f"{key} is text or an integer, got {value!r}; correct it or drop it")
