"""The Agent Trajectory Interchange Format (ATIF), in which Harbor and others store the runs of agents.

Source: the models of the package atif 1.8.0.
"""

from collections.abc import Mapping
from typing import Any

from treering.data.formats.chat_messages import decode_messages, nested_tools
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, checked_object, object_in, show, text_field
from treering.data.formats.model_calls import token_calls, token_trajectories
from treering.data.formats.record_format import TASK_KEYS, Note, RecordFormat, task_of
from treering.data.trajectory import TaskId, Trajectory
from treering.errors import InputError

_ROLES = {"system": "system", "user": "user", "agent": "assistant"}
_KEYS = (*TASK_KEYS, "task_name")
_IDS = ("prompt_token_ids", "completion_token_ids", "logprobs")


def decode_atif(
    record: Mapping[str, Any], note: Note, task_id: TaskId | None = None, where: str = ""
) -> list[Trajectory]:
    """Decode a document and its sub-agents' trajectories, all of one task; `where` is the path of a sub-agent.

    Token ids are read if every sampled step has them. Steps that were copied from another trajectory, and steps that
    no model wrote, are context.
    """
    check_readable(record)
    steps = [_step(step, f"{where}steps[{i}]") for i, step in enumerate(array(f"{where}steps", record.get("steps")))]
    records = [one for i, step in enumerate(steps) for one in _messages(step, f"{where}steps[{i}]")]
    messages = decode_messages(records, f"messages of {where}steps")
    if task_id is None:
        task_id = task_of({**object_in(record, "extra"), **record}, note, messages=messages, keys=_KEYS)
    sampled = [i for i, step in enumerate(steps) if _is_sampled(step)]
    metrics = [steps[i].get("metrics") for i in sampled]
    if calls := token_calls(metrics, _IDS, lambda number: f"{where}steps[{sampled[number]}].metrics"):
        found = token_trajectories(calls, task_id=task_id)
    else:
        tools = nested_tools(object_in(record, "agent").get("tool_definitions"), f"{where}agent.tool_definitions")
        found = [Trajectory(task_id=task_id, messages=messages, tools=tools)]
    for i, inner in enumerate(array(f"{where}subagent_trajectories", record.get("subagent_trajectories") or [])):
        name = f"{where}subagent_trajectories[{i}]"
        found += decode_atif(checked_object(name, inner, fields="steps"), note, task_id, f"{name}.")
    return found


def _step(step: object, where: str) -> Mapping[str, Any]:
    source = step.get("source") if isinstance(step, dict) else None
    if not isinstance(step, dict) or not isinstance(source, str) or source not in _ROLES:
        raise InputError(
            f"{where} must be an object with source, one of {', '.join(_ROLES)}, got {show(step)}; repair it"
        )
    return step


def _is_sampled(step: Mapping[str, Any]) -> bool:
    return step["source"] == "agent" and not step.get("is_copied_context") and step.get("llm_call_count") != 0


def _messages(step: Mapping[str, Any], where: str) -> list[Mapping[str, Any]]:
    given = array(f"{where}.tool_calls", step.get("tool_calls") or [])
    calls = [_call(call, f"{where}.tool_calls[{i}]") for i, call in enumerate(given)]
    message: dict[str, Any] = {"role": _ROLES[step["source"]], "content": step.get("message")}
    if message["role"] == "assistant":
        # Without text, the content is null with a call, and "" without one, an empty turn that is refused.
        message["content"] = message["content"] or (None if calls else "")
        message.update(tool_calls=calls, reasoning_content=step.get("reasoning_content"))
        message["weight"] = int(_is_sampled(step))
    name = f"{where}.observation.results"
    results = array(name, object_in(step, "observation").get("results") or [])
    return [message, *(_result(one, calls, f"{name}[{i}]") for i, one in enumerate(results))]


def _call(call: object, where: str) -> Mapping[str, Any]:
    given = checked_object(where, call, fields="function_name")
    return {"id": given.get("tool_call_id"), "name": given.get("function_name"), "arguments": given.get("arguments")}


def _result(result: object, calls: list[Mapping[str, Any]], where: str) -> Mapping[str, Any]:
    given = checked_object(where, result, fields="content")
    call_id = text_field(given, "source_call_id", f"{where}.source_call_id")
    # The result of an action in plain text, without a call, reaches the policy as a user's message.
    role = "tool" if call_id is not None or calls else "user"
    return {"role": role, "tool_call_id": call_id, "content": given.get("content") or ""}


FORMATS = (
    RecordFormat(
        name="atif",
        decode=decode_atif,
        keys=(("schema_version", "agent", "steps"), ("steps",)),
        signs=(
            (10, lambda record, filled: str(record.get("schema_version")).startswith("ATIF") and "steps" in filled),
        ),
    ),
)
