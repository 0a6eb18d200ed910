"""Rollouts of verifiers: rows of v0's `results.jsonl`, and v1's traces.

Source: `RolloutOutput` in verifiers/types.py and `state_to_output` in verifiers/utils/save_utils.py, verifiers 0.1.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.adapters.token_calls import token_calls, token_trajectories
from treering.data.formats.adapters.trl import prompt_and_completion
from treering.data.formats.codec import check_readable
from treering.data.formats.fields import is_blank, number_field, parsed
from treering.data.formats.model_calls import TokenCall
from treering.data.formats.tasks import NO_ANSWER, Note, task_of
from treering.data.formats.tool_calls import nested_tools
from treering.data.trajectory import RAW_FORMAT, Trajectory

_TOOLS = ("tools", "tool_defs", "oai_tools")
_IDS = ("prompt_ids", "completion_ids", "completion_logprobs")


def decode_verifiers(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """The rollout of a row, of token ids where its `trajectory` has those of each call; a failed one is left out.

    Raises:
        InputError: a bad field, by its name.

    Example: `{"example_id": 0, "prompt": [...], "completion": [...], "reward": 1.0}` is a trial of task 0.
    """
    check_readable(record, but=_TOOLS)
    if is_blank(record.get("completion")):
        note(NO_ANSWER)
        return []
    calls = _token_calls(record.get("trajectory"))
    text_format, prompt, completion = prompt_and_completion(_with_parsed_calls(record))
    messages = (*prompt, *completion)
    known: dict[str, Any] = {
        "task_id": task_of(record, note, messages=messages),
        "reward": number_field(record, "reward"),
    }
    if calls:
        return token_trajectories(calls, **known)
    tools = () if text_format == RAW_FORMAT else _tools(record)
    return [Trajectory(messages=messages, tools=tools, format=text_format, **known)]


def _tools(record: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    info = record.get("info")
    for place in (record, info if isinstance(info, dict) else {}):
        for key in _TOOLS:
            if not is_blank(place.get(key)):
                return nested_tools(place[key], key)
    return ()


def _with_parsed_calls(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The record, where `tool_calls` that were saved as JSON texts are objects."""
    return {**record, **{key: _parsed_calls(record.get(key), key) for key in ("prompt", "completion")}}


def _parsed_calls(messages: object, key: str) -> object:
    if not isinstance(messages, list):
        return messages
    found = []
    for i, message in enumerate(messages):
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        if isinstance(calls, list) and any(isinstance(call, str) for call in calls):
            message = {**message, "tool_calls": [parsed(call, f"{key}[{i}].tool_calls") for call in calls]}
        found.append(message)
    return found


def _token_calls(steps: object) -> list[TokenCall]:
    tokens = (
        [step.get("tokens") if isinstance(step, dict) else None for step in steps] if isinstance(steps, list) else []
    )
    return token_calls(tokens, _IDS, lambda i: f"trajectory[{i}].tokens")
