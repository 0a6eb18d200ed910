import pytest

from tests.data.formats.reading import ANSWER, QUESTION, read, turns
from treering.data import ToolCall
from treering.errors import InputError

CALL = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command":  "ls"}'}}
TOOL = {"type": "function", "function": {"name": "bash", "parameters": {}}}


def kept(message, response_id="r1"):
    """Return what an event keeps of the model's response and of the call."""
    return {"tool_call_id": "c1", "model_response": {"id": response_id, "choices": [{"message": message}]}}


def run(*history, **more):
    return {"instance_id": "p__a-1", "history": [*history], "test_result": {"git_patch": ""}, **more}


SYSTEM = {"id": 0, "source": "agent", "action": "system", "args": {"content": "Fix it.", "tools": [TOOL]}}
TASK = {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix a.py"}}
SAID = {"role": "assistant", "content": "Look.", "tool_calls": [CALL]}
LOOK = {"id": 2, "source": "agent", "action": "run", "args": {"command": "ls"}, "tool_call_metadata": kept(SAID)}
SEEN = {"id": 3, "source": "agent", "observation": "run", "content": "a.py", "tool_call_metadata": kept(SAID)}
DONE = {"id": 4, "source": "agent", "action": "message", "args": {"content": "Done."}}


def test_events_are_the_messages_that_they_keep(tmp_path):
    state = {"id": 9, "source": "environment", "observation": "agent_state_changed", "content": ""}
    [one], notes = read(tmp_path, run(SYSTEM, TASK, LOOK, SEEN, state, DONE, report={"resolved": True}))
    assert turns(one) == [
        ("system", "Fix it.", False),
        ("user", "Fix a.py", False),
        ("assistant", "Look.", True),
        ("tool", "a.py", False),
        ("assistant", "Done.", True),
    ]
    assert one.messages[2].tool_calls == (ToolCall(id="c1", name="bash", arguments='{"command":  "ls"}'),)
    assert (one.task_id, one.reward, one.tools, notes) == ("p__a-1", 1.0, (TOOL,), [])


def test_calls_of_one_response_are_one_message(tmp_path):
    both = {**SAID, "tool_calls": [CALL, {**CALL, "id": "c2"}]}
    events = [{**event, "tool_call_metadata": kept(both)} for event in (LOOK, SEEN, LOOK, SEEN)]
    [one], _ = read(tmp_path, run(TASK, *events))
    assert [role for role, _, _ in turns(one)] == ["user", "assistant", "tool", "tool"]
    assert [call.id for call in one.messages[1].tool_calls] == ["c1", "c2"]


def test_without_the_models_text_the_arguments_of_the_events_are_the_call_and_a_note_is_made(tmp_path):
    bare = {"id": 0, "source": "agent", "action": "run", "args": {"command": "ls", "thought": "Look.", "hidden": False}}
    seen = {"id": 1, "source": "agent", "observation": "run", "content": "a.py", "cause": 0}
    [one], notes = read(tmp_path, run([bare, seen], instruction="Fix a.py"))
    assert [(role, content) for role, content, _ in turns(one)] == [
        ("user", "Fix a.py"),
        ("assistant", "Look."),
        ("tool", "a.py"),
    ]
    assert one.messages[1].tool_calls == (ToolCall(name="run", arguments={"command": "ls"}),)
    assert [note.split(",")[0] for note in notes] == ["events of actions do not have the model's own words"]


def test_after_a_condensation_what_is_kept_is_context_of_another_trajectory(tmp_path):
    condensed = {"id": 5, "source": "agent", "action": "condensation"}
    condensed["args"] = {"forgotten_event_ids": [2, 3], "summary": "Looked.", "summary_offset": 2}
    first, second = read(tmp_path, run(SYSTEM, TASK, LOOK, SEEN, DONE, condensed, TASK, {**DONE, "id": 7}))[0]
    assert [trained for role, _, trained in turns(first) if role == "assistant"] == [True, True]
    assert turns(second) == [
        ("system", "Fix it.", False),
        ("user", "Fix a.py", False),
        ("user", "Looked.", False),
        ("assistant", "Done.", False),
        ("user", "Fix a.py", False),
        ("assistant", "Done.", True),
    ]


def test_events_of_the_agent_sdk_are_read(tmp_path):
    def action(call_id, **more):
        call = {"id": call_id, "name": "terminal", "arguments": '{"command":  "ls"}', "origin": "completion"}
        return {"kind": "ActionEvent", "source": "agent", "tool_call": call, "llm_response_id": "r1", **more}

    def seen(call_id):
        observation = {"content": [{"type": "text", "text": "a.py"}], "kind": "TerminalObservation"}
        return {"kind": "ObservationEvent", "tool_call_id": call_id, "observation": observation}

    text = [{"type": "text", "text": "Look."}]
    user = {"role": "user", "content": [{"type": "text", "text": "Fix a.py"}]}
    [one], notes = read(
        tmp_path,
        run(
            {"kind": "SystemPromptEvent", "system_prompt": {"type": "text", "text": "Fix it."}, "tools": [TOOL]},
            {"kind": "MessageEvent", "source": "user", "llm_message": user},
            action("c1", thought=text, reasoning_content="Hm."),
            action("c2"),
            seen("c1"),
            {"kind": "AgentErrorEvent", "tool_call_id": "c2", "error": "failed"},
            {"kind": "ConversationStateUpdateEvent", "key": "x", "value": 1},
        ),
    )
    assert turns(one) == [
        ("system", "Fix it.", False),
        ("user", "Fix a.py", False),
        ("assistant", "Look.", True),
        ("tool", "a.py", False),
        ("tool", "failed", False),
    ]
    assert [call.arguments for call in one.messages[2].tool_calls] == ['{"command":  "ls"}'] * 2
    assert (one.messages[2].reasoning, one.tools, notes) == ("Hm.", (TOOL,), [])


def test_a_logged_call_trains_its_answer_only(tmp_path):
    said = {"role": "assistant", "content": "Now in Bern.", "refusal": None, "audio": None}
    record = {"messages": [QUESTION, ANSWER, QUESTION], "response": {"choices": [{"message": said}]}}
    [one], _ = read(tmp_path, record)
    assert [trained for role, _, trained in turns(one) if role == "assistant"] == [False, True]


def test_messages_of_a_run_are_of_its_instance_and_an_empty_run_is_left_out(tmp_path):
    [one], notes = read(tmp_path, {"instance_id": "p__a-1", "messages": [QUESTION, ANSWER], "resolved": True})
    assert (one.task_id, notes) == ("p__a-1", [])
    found, notes = read(tmp_path, run(TASK, DONE), run(error="timeout"))
    assert (len(found), notes) == (1, ["nothing was sampled, so these are left out (1 of 2 records)"])


def test_an_event_without_a_kind_is_refused_with_its_location(tmp_path):
    with pytest.raises(InputError, match=r"set\.jsonl:1: history\[1\] is an event with action, observation or kind"):
        read(tmp_path, run(TASK, {"id": 2}))
