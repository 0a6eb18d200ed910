"""SWE-agent's `.traj` files: `history`, in newer files the `query` of each step; and mini-SWE-agent's `messages`.

Source: sweagent/types.py and sweagent/agent/agents.py.
"""

import json
from collections.abc import Mapping
from functools import partial
from typing import Any

from treering.data.formats.adapters.openhands import whose_events
from treering.data.formats.chat_messages import decode_messages, nested_tools
from treering.data.formats.codec import check_readable
from treering.data.formats.json_fields import array, checked_object, text_field
from treering.data.formats.model_calls import ids_or_text, message_branches
from treering.data.formats.record_format import Note, RecordFormat, task_of
from treering.data.trajectory import Message, Trajectory
from treering.errors import InputError

ACTION_ADDED = (
    "the action of an assistant's message stands in neither its text nor a call, so it is added to the text in a code "
    "block, as SWE-agent's thought_action parser reads it"
)


def decode_swe_agent(record: Mapping[str, Any], note: Note) -> list[Trajectory]:
    """Decode the conversations of a run: one per attempt and agent, and one more after each rewritten query.

    Demonstrations are context. The query of a step is what the policy saw; without queries the history is read.
    """
    check_readable(record, but=("tools",))
    attempts = record.get("attempts") or [record]
    found = [
        messages
        for attempt in array("attempts", attempts)
        for messages in _conversations(attempt if isinstance(attempt, dict) else {}, note)
    ]
    task_id = task_of({**_problem(record), **record}, note, messages=found[0])
    tools = nested_tools(record.get("tools"), "tools")
    return [Trajectory(task_id=task_id, messages=messages, tools=tools) for messages in found]


def _conversations(attempt: Mapping[str, Any], note: Note) -> list[tuple[Message, ...]]:
    if not attempt.get("history") and attempt.get("messages"):
        given = array("messages", attempt["messages"])
        # The model did not see the last message of mini-SWE-agent.
        return [decode_messages([one for one in given if not isinstance(one, dict) or one.get("role") != "exit"])]
    if not attempt.get("history"):
        raise InputError(
            f"a run of SWE-agent has its history, got the keys {', '.join(attempt) or 'none'}; a trajectory of actions "
            "does not have what the policy was shown"
        )
    by_agent: dict[str, list[Mapping[str, Any]]] = {}
    for i, item in enumerate(array("history", attempt["history"])):
        message, where = checked_object(f"history[{i}]", item, fields="role and content"), f"history[{i}]"
        agent = text_field(message, "agent", f"{where}.agent") or ""
        by_agent.setdefault(agent, []).append(_as_chat(message, note, where))
    # Each agent saw only its own messages.
    histories = [decode_messages(items, "history") for items in by_agent.values()]
    if len(histories) == 1 and (calls := _calls(attempt.get("trajectory"), histories[0], note)):
        return list(message_branches(calls))
    return histories


def _calls(steps: object, history: tuple[Message, ...], note: Note) -> list[tuple[Message, ...]]:
    """Return each step's query with its answer in the history; an empty list if they do not match."""
    answers = [message for message in history if message.is_trained]
    queries = [step.get("query") for step in steps if isinstance(step, dict)] if isinstance(steps, list) else []
    if len(answers) != len(queries):
        return []
    calls = []
    for i, (query, answer) in enumerate(zip(queries, answers, strict=True)):
        if not isinstance(query, list) or not any(query):
            return []
        location = f"trajectory[{i}].query"
        shown = [_as_chat(item, note, location) if isinstance(item, dict) else item for item in query]
        calls.append((*decode_messages(shown, location), answer))
    return calls


def _as_chat(item: Mapping[str, Any], note: Note, where: str) -> Mapping[str, Any]:
    """Convert an entry to a chat message; a demonstration has weight 0."""
    kept = ("role", "content", "tool_calls", "tool_call_id", "thinking_blocks", "reasoning_content")
    chat = {key: item[key] for key in kept if item.get(key) is not None}
    answered = item.get("tool_call_ids")
    if chat.get("role") == "tool" and isinstance(answered, list) and len(answered) == 1:
        chat["tool_call_id"] = answered[0]
    if chat.get("role") != "assistant":
        return chat
    if item.get("is_demo"):
        chat["weight"] = 0
    action, content = text_field(item, "action", f"{where}.action"), chat.get("content") or ""
    action = (action or "").strip()
    if not chat.get("tool_calls") and isinstance(content, str) and action not in content:
        note(ACTION_ADDED)
        chat["content"] = f"{content}\n```\n{action}\n```".lstrip("\n")
    return chat


def _problem(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the instance id in the replay configuration."""
    config = record.get("replay_config")
    try:
        problem = json.loads(config)["problem_statement"]["id"] if isinstance(config, str) else None
    except (ValueError, TypeError, KeyError, RecursionError):
        problem = None
    return {} if problem is None else {"instance_id": problem}


FORMATS = (
    RecordFormat(
        name="swe_agent",
        decode=partial(ids_or_text, decode=decode_swe_agent),
        keys=(("history", "trajectory", "info"), ("history",), ("attempts",), ("messages", "trajectory_format")),
        signs=(
            (
                60,
                lambda record, filled: (
                    "attempts" in filled or str(record.get("trajectory_format")).startswith("mini-swe-agent")
                ),
            ),
            (62, lambda record, filled: whose_events(record, filled) == "swe_agent"),
        ),
    ),
)
