"""Whatever value a field of a record has, the record is read or refused by name."""

import copy
from collections.abc import Iterator
from typing import Any

import pytest

from tests.data.formats.reading import RECORDS
from treering.data.formats.reader import RecordReader
from treering.errors import InputError

CALL = {"id": "c", "function": {"name": "f", "arguments": "{}"}}
FURTHER = {
    "parts": {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "x"}]},
            {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {"x": 1}}]},
            {"role": "tool", "tool_call_id": "c", "content": [{"type": "tool_result", "content": "x"}]},
        ],
        "tools": [{"type": "function", "function": {"name": "f"}}],
    },
    "events": {
        "history": [
            {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix it"}},
            {
                "id": 2,
                "source": "agent",
                "action": "run",
                "tool_call_metadata": {
                    "model_response": {"id": "r", "choices": [{"message": {"role": "assistant", "tool_calls": [CALL]}}]}
                },
            },
            {"id": 3, "action": "condensation", "args": {"forgotten_events_start_id": 2, "forgotten_events_end_id": 2}},
            {"id": 4, "source": "agent", "action": "finish", "args": {"thought": "Done"}},
        ]
    },
    "SDK": {
        "history": [
            {"kind": "MessageEvent", "id": "1", "llm_message": {"role": "user", "content": "x"}},
            {"kind": "ActionEvent", "id": "2", "llm_response_id": "r", "tool_call": CALL, "thought": "t"},
            {"kind": "Condensation", "id": "3", "forgotten_event_ids": ["2"], "summary": "s"},
            {"kind": "ActionEvent", "id": "4", "tool_name": "f", "action": {"kind": "A", "x": 1}},
        ]
    },
}
WRONG = (None, "", "x", 0, -1, 1.5, 10**400, True, [], [None], [[]], {}, {"a": None}, b"x", float("nan"))


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield (*path, key)
        yield from paths(one, (*path, key))


@pytest.mark.filterwarnings("ignore::treering.errors.DataWarning")
@pytest.mark.parametrize("name", [*RECORDS, *FURTHER])
def test_a_value_of_any_type_is_read_or_refused_by_name(name: str) -> None:
    record = {**RECORDS, **FURTHER}[name]
    for *path, last in paths(record):
        for wrong in WRONG:
            changed = at = copy.deepcopy(record)
            for key in path:
                at = at[key]
            at[last] = wrong
            refusal = "set.jsonl:1: "
            try:
                RecordReader("set.jsonl").decode("set.jsonl:1", changed)
            except InputError as error:
                refusal = str(error)
            assert refusal.startswith("set.jsonl:1: ")
