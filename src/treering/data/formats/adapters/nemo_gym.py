"""NeMo Gym's rollouts: `responses_create_params` and `response`, of OpenAI's Responses API.

Source: the `example_rollouts.jsonl` of NVIDIA-NeMo/Gym.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.chat_messages import decode_messages, nested_tools
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, checked_object, integer_field, is_blank, number_field, text_field
from treering.data.formats.model_calls import TokenCall, as_context, token_call, token_trajectories
from treering.data.formats.record_format import NO_ANSWER, TASK_KEYS, Note, RecordFormat, task_of
from treering.data.trajectory import Message, Trajectory

_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")
_SAMPLED = ("message", "function_call", "reasoning")
_ASKED = "responses_create_params"


def decode_nemo_gym(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode the rollout of a row, as token ids if each answer has them; skip a row without an output."""
    check_readable(record)
    asked = checked_object(_ASKED, record.get(_ASKED), fields="input")
    response = checked_object("response", record.get("response"), fields="output")
    output = array("response.output", response.get("output") or [])
    # The policy wrote nothing, for example because the context was full.
    while output and isinstance(output[-1], dict) and _is_empty(output[-1]):
        output = output[:-1]
    if not output:
        note(NO_ANSWER)
        return []
    text, given = text_field(asked, "instructions", f"{_ASKED}.instructions"), asked.get("input")
    given = [{"role": "user", "content": given}] if isinstance(given, str) else given
    prompt = decode_messages(given, f"{_ASKED}.input")
    begin = (Message(role="system", content=text),) if text else ()
    messages = (*begin, *as_context(prompt), *decode_messages(output, "response.output"))
    reward = number_field(record, "reward")
    known: dict[str, Any] = {
        "task_id": task_of(record, note, messages=messages, keys=(*TASK_KEYS, "_ng_task_index", "task_index")),
        "trial": integer_field(record, "_ng_rollout_index"),
        "reward": number_field(response, "reward") if reward is None else reward,
    }
    if calls := _token_calls(output):
        return token_trajectories(calls, **known)
    tools = asked.get("tools") or response.get("tools")
    return [Trajectory(messages=messages, tools=nested_tools(tools, f"{_ASKED}.tools"), **known)]


def _is_empty(item: Mapping[str, Any]) -> bool:
    content = item.get("content")
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, dict) else part for part in parts]
    return item.get("role") == "assistant" and not any(texts) and not item.get("tool_calls")


def _token_calls(output: list[Any]) -> list[TokenCall]:
    """Return the calls of the model if each has token ids, which are in its last item; else an empty list."""
    calls, is_open = [], False
    for i, item in enumerate(output):
        if not isinstance(item, dict) or not _is_sampled(item):
            if is_open:
                return []
            continue
        is_open = is_blank(item.get(_IDS[1]))
        if not is_open:
            calls.append(token_call(item, _IDS, f"response.output[{i}]"))
    return [] if is_open else calls


def _is_sampled(item: Mapping[str, Any]) -> bool:
    return item.get("type", "message") in _SAMPLED and item.get("role", "assistant") == "assistant"


FORMATS = (
    RecordFormat(
        name="nemo_gym",
        decode=decode_nemo_gym,
        keys=((_ASKED, "response"),),
        signs=((30, lambda record, filled: _ASKED in filled and isinstance(record.get("response"), dict)),),
    ),
)
