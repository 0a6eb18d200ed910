import json

import pytest

from tests.data.formats.reading import read, turns
from treering.data import ToolCall, read_trajectories
from treering.errors import InputError

SYSTEM = {"role": "system", "content": "You fix bugs.", "agent": "main"}
TASK = {"role": "user", "content": "Fix a.py", "agent": "main"}
LOOK = {"role": "assistant", "content": "Look.\n```\nls\n```", "thought": "Look.", "action": "ls", "agent": "main"}
SEEN = {"role": "user", "content": "a.py", "agent": "main", "message_type": "observation"}
DONE = {"role": "assistant", "content": "Done.\n```\nsubmit\n```", "action": "submit\n", "agent": "main"}


def run(*history, **more):
    return {"environment": "swe_main", "trajectory": [], "history": [*history], "info": {}, **more}


def test_a_history_trains_what_the_assistant_wrote(tmp_path):
    [one], _ = read(tmp_path, run(SYSTEM, TASK, LOOK, SEEN, DONE))
    assert [(role, trained) for role, _, trained in turns(one)] == [
        ("system", False),
        ("user", False),
        ("assistant", True),
        ("user", False),
        ("assistant", True),
    ]


def test_a_traj_file_is_one_json_document_over_many_lines(tmp_path):
    file = tmp_path / "a.traj"
    config = json.dumps({"problem_statement": {"id": "django-1"}})
    file.write_text(json.dumps(run(SYSTEM, TASK, LOOK, replay_config=config), indent=2), encoding="utf-8")
    [one] = read_trajectories(file)
    assert (one.task_id, len(one.messages)) == ("django-1", 3)


def test_an_action_that_is_missing_from_the_text_is_added_and_reported(tmp_path):
    [one], notes = read(tmp_path, run(SYSTEM, TASK, {**LOOK, "content": "Look."}, instance_id="i"))
    assert turns(one)[2][1] == "Look.\n```\nls\n```"
    assert [note.split(",")[0] for note in notes] == [
        "the action of an assistant's message stands in neither its text nor a call"
    ]


def test_calls_results_thoughts_and_demonstrations_are_read_as_such(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "ls"}'}}
    demo = {"role": "assistant", "content": "Like this.", "agent": "main", "is_demo": True}
    thought = [{"type": "thinking", "thinking": "Hm.", "signature": "s"}]
    acting = {**LOOK, "content": "Look.", "tool_calls": [call], "thinking_blocks": thought}
    result = {"role": "tool", "content": "a.py", "agent": "main", "tool_call_ids": ["c1"]}
    [one], _ = read(tmp_path, run(SYSTEM, TASK, demo, TASK, acting, result))
    assert [trained for role, _, trained in turns(one) if role == "assistant"] == [False, True]
    acted = one.messages[4]
    assert acted.tool_calls == (ToolCall(id="c1", name="bash", arguments='{"command": "ls"}'),)
    assert (acted.reasoning, one.messages[5].tool_call_id) == ("Hm.", "c1")


def test_each_agent_has_its_own_conversation(tmp_path):
    inner = [{**one, "agent": "sub"} for one in (SYSTEM, TASK, LOOK)]
    found, _ = read(tmp_path, run(SYSTEM, TASK, *inner, DONE))
    assert [[role for role, _, _ in turns(one)] for one in found] == [["system", "user", "assistant"]] * 2
    assert [turns(one)[-1][1] for one in found] == [DONE["content"], LOOK["content"]]


def plain(*items):
    return [{"role": item["role"], "content": item["content"]} for item in items]


def test_a_rewritten_query_begins_a_branch_that_trains_its_own_answer_only(tmp_path):
    short = {**SEEN, "content": "(old)"}
    again = {**LOOK, "content": "Again.\n```\nls\n```"}
    queries = [plain(SYSTEM, TASK), plain(SYSTEM, TASK, LOOK, SEEN), plain(SYSTEM, TASK, LOOK, short, again, SEEN)]
    steps = [{"action": "x", "response": "x", "query": query} for query in queries]
    history = (SYSTEM, TASK, LOOK, SEEN, again, SEEN, DONE)
    first, second = read(tmp_path, run(*history, trajectory=steps))[0]
    assert [trained for role, _, trained in turns(first) if role == "assistant"] == [True, True]
    assert [content for _, content, _ in turns(first)][-1] == again["content"]
    assert [trained for role, _, trained in turns(second) if role == "assistant"] == [False, False, True]
    assert [content for _, content, _ in turns(second)][3] == "(old)"


def test_attempts_are_trials_and_messages_of_mini_swe_agent_end_before_its_exit(tmp_path):
    found, _ = read(tmp_path, {"attempts": [run(SYSTEM, TASK, LOOK), run(SYSTEM, TASK, DONE)], "info": {}})
    assert found[0].task_id == found[1].task_id
    exit_message = {"role": "exit", "content": "", "extra": {}}
    mini = {
        "trajectory_format": "mini-swe-agent-1.1",
        "messages": [*plain(SYSTEM, TASK, LOOK), exit_message],
        "info": {},
    }
    [one], _ = read(tmp_path, mini)
    assert [role for role, _, _ in turns(one)] == ["system", "user", "assistant"]


def test_actions_without_a_history_are_refused(tmp_path):
    with pytest.raises(InputError, match="a run of SWE-agent has its history, got the keys"):
        read(tmp_path, {"trajectory": [{"action": "ls", "response": "Look.", "observation": "a.py"}], "info": {}})
