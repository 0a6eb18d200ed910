"""Items of OpenAI's Responses API as chat messages: an answer's reasoning, text and calls are one message."""

from collections.abc import Iterable, Mapping
from typing import Any

from treering.data.formats.fields import show
from treering.errors import InputError

_STAMPS = ("id", "status", "type")


def has_items(records: Iterable[object]) -> bool:
    """Whether some of the records are items of the Responses API and no chat messages."""
    return any(_kind(record) not in (None, "message") for record in records)


def merge_items(records: Iterable[object], name: str) -> list[object]:
    """Chat messages, where reasoning, text and calls that follow each other are one message of the assistant.

    A `message` item is a chat message; records that are none of the items stay as they are.

    Raises:
        InputError: an item that has no form as text.

    Example: a `reasoning` item and a `function_call` item become one message with `reasoning_content` and `tool_calls`.
    """
    messages: list[object] = []
    answer: dict[str, Any] | None = None
    for i, record in enumerate(records):
        kind = _kind(record)
        if kind is None or not isinstance(record, dict) or not _is_of_answer(kind, record):
            answer = None
            messages.append(_output(record, f"{name}[{i}]") if kind == "function_call_output" else record)
            continue
        if answer is None or _begins_anew(answer, kind):
            answer = {"role": "assistant", "content": None}
            messages.append(answer)
        _add(answer, kind, record, f"{name}[{i}]")
    return messages


def _kind(record: object) -> str | None:
    if not isinstance(record, dict):
        return None
    kind = record.get("type")
    if kind in (None, "message"):
        return "message" if "role" in record else None
    return kind if isinstance(kind, str) and "role" not in record else None


def _is_of_answer(kind: str, record: Mapping[str, Any]) -> bool:
    return kind != "function_call_output" and (kind != "message" or record.get("role") == "assistant")


def _begins_anew(answer: Mapping[str, Any], kind: str) -> bool:
    """Whether an item of this kind begins another answer: a message holds reasoning, text and calls in this order."""
    has_calls = bool(answer.get("tool_calls"))
    has_text = answer["content"] is not None
    if kind == "reasoning":
        return has_calls or has_text
    return kind == "message" and (has_calls or has_text)


def _add(answer: dict[str, Any], kind: str, record: Mapping[str, Any], where: str) -> None:
    if kind == "message":
        answer.update({key: value for key, value in record.items() if key not in _STAMPS})
    elif kind == "reasoning":
        if thought := _thought(record, where):
            before = answer.get("reasoning_content")
            answer["reasoning_content"] = thought if before is None else f"{before}\n\n{thought}"
    elif kind == "function_call":
        call = {key: record.get(key) for key in ("name", "arguments")}
        answer.setdefault("tool_calls", []).append({"id": record.get("call_id") or record.get("id"), **call})
    else:
        raise InputError(
            f"{where} is an item of type {show(kind)}, and Treering reads message, reasoning, function_call and "
            "function_call_output; remove the trajectory"
        )


def _thought(record: Mapping[str, Any], where: str) -> str:
    # The content is the thought itself; the summary stands for it where the provider keeps it back.
    parts = record.get("content") or record.get("summary") or []
    texts = [
        part.get("text") if isinstance(part, dict) else part for part in (parts if isinstance(parts, list) else [])
    ]
    if not texts and record.get("encrypted_content"):
        raise InputError(
            f"{where} is reasoning that is encrypted, so what the policy wrote is unknown; drop the record"
        )
    known = [text for text in texts if isinstance(text, str)]
    if len(known) < len(texts):
        raise InputError(f"{where} is reasoning whose parts need text, got {show(parts)}; repair it")
    return "\n\n".join(known)


def _output(record: object, where: str) -> Mapping[str, Any]:
    assert isinstance(record, dict), "an item is an object"
    if "output" not in record:
        raise InputError(f"{where} is a function_call_output and needs output, got {', '.join(record)}; add it")
    return {"role": "tool", "tool_call_id": record.get("call_id"), "content": record["output"]}
