"""OpenHands' runs: a `history` of events, `messages`, or a logged call of its model.

Source: evaluation/utils/shared.py of OpenHands, its events, and those of its software agent SDK.
"""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

from treering.data.formats.adapters.chat_records import decode_chat
from treering.data.formats.chat_messages import decode_messages, nested_tools
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, checked_object, is_blank, number_field, object_in, show, text_field
from treering.data.formats.model_calls import as_context, ids_or_text
from treering.data.formats.record_format import NO_ANSWER, Note, RecordFormat, task_of
from treering.data.trajectory import Message, Trajectory
from treering.errors import InputError

_EVENTS = ("history", "events", "trajectory")
NO_CALL_KEPT = (
    "events of actions do not have the model's own words, so their calls are written from the events' arguments; read "
    "the run's messages or llm_completions to train the words themselves"
)
_NO_MESSAGE = frozenset(
    {"recall", "change_agent_state", "agent_state_changed", "null", "condense", "condensation_request", "loop_recovery"}
)
_Id: TypeAlias = str | int | None
_OWN_ARGS = frozenset(
    {
        *("thought", "blocking", "keep_prompt", "is_input", "is_static", "hidden", "cwd", "confirmation_state"),
        *("security_risk", "wait_for_response", "include_extra", "kernel_init_code", "impl_source", "view_range"),
        *("return_browser_output", "translated_ipython_code"),
    }
)
"""Arguments that OpenHands adds to those of the call."""


@dataclass(slots=True, kw_only=True)
class _Events:
    """State of a run while its events are read."""

    note: Note
    messages: list[tuple[_Id, dict[str, Any]]] = field(default_factory=list)
    before: list[list[dict[str, Any]]] = field(default_factory=list)
    tools: object = None
    answers: dict[_Id, dict[str, Any]] = field(default_factory=dict)
    """Messages of the model by response id; a message holds all calls of a response."""

    def add(self, event: Mapping[str, Any], message: dict[str, Any]) -> None:
        self.messages.append((_id_of(event, "id"), message))


def decode_openhands(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode the conversation of a run, and one more after each condensation; skip a run without events."""
    check_readable(record, but=("tools",))
    if isinstance(record.get("response"), dict):
        return [_logged_call(record, note)]
    if not is_blank(record.get("messages")):
        return decode_chat(record, note)
    key = next((key for key in _EVENTS if not is_blank(record.get(key))), None)
    if key is None:
        note(NO_ANSWER)
        return []
    events = [event for one in array(key, record[key]) for event in (one if isinstance(one, list) else [one])]
    found, tools = _conversations(events, key, note)
    instruction = text_field(record, "instruction")
    if not any(message.role == "user" for message in found[0]) and instruction:
        asked = Message(role="user", content=instruction)
        sizes = [int(messages[0].role == "system") for messages in found]
        found = [(*one[:size], asked, *one[size:]) for one, size in zip(found, sizes, strict=True)]
    task_id = task_of(record, note, messages=found[0])
    return [Trajectory(task_id=task_id, messages=one, tools=tools, reward=_reward(record)) for one in found]


def _logged_call(record: Mapping[str, Any], note: Note) -> Trajectory:
    """Decode a call from a file of `llm_completions`; only its answer is trained."""
    choices = record["response"].get("choices")
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise InputError(f"response.choices holds one answer, got {show(choices)}; keep one of them")
    prompt = decode_messages(record.get("messages"))
    answer = decode_messages([choices[0].get("message")], "response.choices")
    tools = record.get("tools") or object_in(record, "kwargs").get("tools")
    messages = (*as_context(prompt), *answer)
    return Trajectory(
        task_id=task_of(record, note, messages=messages), messages=messages, tools=nested_tools(tools, "kwargs.tools")
    )


def _reward(record: Mapping[str, Any]) -> float | None:
    """Return 1.0 if the instance was resolved and 0.0 if not; without an evaluation, the record's reward."""
    result = object_in(record, "test_result")
    for source in (record, object_in(record, "report"), result, object_in(result, "report")):
        if isinstance(source.get("resolved"), bool):
            return float(source["resolved"])
    return number_field(record, "reward")


def _conversations(
    events: Iterable[object], name: str, note: Note
) -> tuple[list[tuple[Message, ...]], tuple[Mapping[str, Any], ...]]:
    """Return one conversation per part of the run between condensations, and the tools.

    After a condensation the kept messages are context. Only the agent's messages are trained.
    """
    run = _Events(note=note)
    for i, event in enumerate(events):
        where = f"{name}[{i}]"
        _read(checked_object(where, event, fields="an action, an observation or a kind"), run, where)
    stretches = [*run.before, [message for _, message in run.messages]]
    if not any(stretches):
        raise InputError(f"{name} holds no message, action or observation; drop the record")
    return [decode_messages(one, name) for one in stretches if one], nested_tools(run.tools, f"tools of {name}")


def _read(event: Mapping[str, Any], run: _Events, where: str) -> None:
    kind = event.get("kind")
    if isinstance(kind, str):
        if (read := _KINDS.get(kind)) is not None:
            read(event, run, where)
        return
    if isinstance(event.get("role"), str):
        run.add(event, dict(event))
    elif isinstance(event.get("action"), str):
        _read_action(event, run, where)
    elif isinstance(event.get("observation"), str):
        if event["observation"] not in _NO_MESSAGE:
            call_id = object_in(event, "tool_call_metadata").get("tool_call_id")
            run.add(event, {"role": "tool", "tool_call_id": call_id, "content": event.get("content") or ""})
    else:
        raise InputError(
            f"{where} is an event with action, observation or kind, got the keys {', '.join(event) or 'none'}; drop it"
        )


def _read_action(event: Mapping[str, Any], run: _Events, where: str) -> None:
    action, args = event["action"], object_in(event, "args")
    if action == "condensation":
        _condense(args, run, where)
    elif action == "system":
        run.tools = args.get("tools") or run.tools
        run.add(event, {"role": "system", "content": args.get("content")})
    elif action == "message" and event.get("source") == "user":
        run.add(event, {"role": "user", "content": args.get("content")})
    elif action not in _NO_MESSAGE and event.get("source") != "user":
        _add_answer(event, run, args)


def _add_answer(event: Mapping[str, Any], run: _Events, args: Mapping[str, Any]) -> None:
    """Add the model's message if the event has it, once per response; else a call from the event's arguments."""
    response = object_in(object_in(event, "tool_call_metadata"), "model_response")
    choices = response.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if isinstance(message, dict):
        identity = _id_of(response, "id")
        if identity is None or identity not in run.answers:
            run.answers[identity] = message
            run.add(event, {**message, "role": "assistant"})
        return
    if event["action"] == "message":
        run.add(event, {"role": "assistant", "content": args.get("content")})
        return
    run.note(NO_CALL_KEPT)
    given = {key: value for key, value in args.items() if key not in _OWN_ARGS and value is not None}
    thought = args.get("thought") if isinstance(args.get("thought"), str) else None
    call = {"name": event["action"], "arguments": given}
    run.add(event, {"role": "assistant", "content": thought or None, "tool_calls": [call]})


def _condense(args: Mapping[str, Any], run: _Events, where: str) -> None:
    """End a conversation; the next one starts with the kept messages and the summary, if there is one."""
    run.before.append([message for _, message in run.messages])
    start, end = args.get("forgotten_events_start_id"), args.get("forgotten_events_end_id")
    span = (start, end) if isinstance(start, int) and isinstance(end, int) else None
    named = array(f"{where}.forgotten_event_ids", args.get("forgotten_event_ids") or [])

    def is_forgotten(event_id: _Id) -> bool:
        if span:
            return isinstance(event_id, int) and span[0] <= event_id <= span[1]
        return event_id is not None and event_id in named

    kept = [
        (event_id, {**message, "weight": 0} if message.get("role") == "assistant" else message)
        for event_id, message in run.messages
        if not is_forgotten(event_id)
    ]
    if summary := text_field(args, "summary", f"{where}.summary"):
        offset = args.get("summary_offset")
        index = offset if isinstance(offset, int) else min(1, len(kept))
        kept.insert(index, (None, {"role": "user", "content": summary}))
    run.messages = kept


def _id_of(record: Mapping[str, Any], key: str) -> _Id:
    value = record.get(key)
    return value if isinstance(value, str | int) else None


def _read_system(event: Mapping[str, Any], run: _Events, where: str) -> None:
    run.tools = event.get("tools") or run.tools
    run.add(event, {"role": "system", "content": event.get("system_prompt")})


def _read_message(event: Mapping[str, Any], run: _Events, where: str) -> None:
    message = event.get("llm_message")
    if not isinstance(message, dict):
        raise InputError(f"{where} is a MessageEvent and needs llm_message, got {show(message)}; drop it")
    role = message.get("role") or ("assistant" if event.get("source") == "agent" else "user")
    known = ("content", "tool_calls", "reasoning_content", "thinking_blocks", "tool_call_id", "name")
    run.add(event, {"role": role, **{key: message[key] for key in known if not is_blank(message.get(key))}})


def _read_call(event: Mapping[str, Any], run: _Events, where: str) -> None:
    call = event.get("tool_call")
    if not isinstance(call, dict):
        run.note(NO_CALL_KEPT)
        action = object_in(event, "action")
        given = {key: value for key, value in action.items() if key != "kind" and value is not None}
        call = {"id": event.get("tool_call_id"), "name": event.get("tool_name"), "arguments": given}
    identity = _id_of(event, "llm_response_id")
    if identity is not None and identity in run.answers:
        run.answers[identity]["tool_calls"].append(call)
        return
    known = ("reasoning_content", "thinking_blocks")
    message = {
        "role": "assistant",
        "content": event.get("thought") or None,
        "tool_calls": [call],
        **{key: event[key] for key in known if not is_blank(event.get(key))},
    }
    run.answers[identity] = message
    run.add(event, message)


def _read_result(event: Mapping[str, Any], run: _Events, where: str) -> None:
    observation = event.get("observation")
    content: object = event.get("error") or event.get("rejection_reason") or event.get("content")
    if isinstance(observation, dict):
        content = observation.get("content") or observation.get("output") or content
    run.add(event, {"role": "tool", "tool_call_id": event.get("tool_call_id"), "content": content or ""})


_KINDS: Mapping[str, Callable[[Mapping[str, Any], _Events, str], None]] = {
    "SystemPromptEvent": _read_system,
    "MessageEvent": _read_message,
    "ActionEvent": _read_call,
    "ObservationEvent": _read_result,
    "AgentErrorEvent": _read_result,
    "UserRejectObservation": _read_result,
    "Condensation": _condense,
}
"""Events of the SDK that the model sees; other events belong to the user interface."""


def whose_events(record: Mapping[str, Any], filled: Set[str]) -> str | None:
    """Return which format the events of a run have, "swe_agent" or "openhands"; None without events."""
    if "messages" in filled:
        return None
    for key in _EVENTS:
        first = next((one for one in record[key] if one), None) if isinstance(record.get(key), list) else None
        first = first[0] if isinstance(first, list) else first
        if not isinstance(first, dict):
            continue
        if key == "history" and "role" in first:
            return "swe_agent"
        if "kind" in first or ("source" in first and ("action" in first or "observation" in first)):
            return "openhands"
        if "action" in first and ("response" in first or "thought" in first):
            return "swe_agent"
    # The run failed before its first event.
    return "openhands" if "instance_id" in filled and "history" in record and "test_result" in record else None


FORMATS = (
    RecordFormat(
        name="openhands",
        decode=partial(ids_or_text, decode=decode_openhands),
        keys=(
            *(("instance_id", "history"), ("history",), ("events",), ("trajectory",), ("messages",)),
            ("messages", "response"),
        ),
        signs=(
            (61, lambda record, filled: "messages" in filled and "choices" in object_in(record, "response")),
            (62, lambda record, filled: whose_events(record, filled) == "openhands"),
        ),
    ),
)
