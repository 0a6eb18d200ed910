import pytest

from tests.data.formats.reading import CALLED, read, turns
from treering.data import ToolCall
from treering.errors import InputError

CALL = {"tool_call_id": "c1", "function_name": "track", "arguments": {"id": 17}}
TOOL = {"type": "function", "function": {"name": "track", "parameters": {}}}


def step(number, source, message, **more):
    return {"step_id": number, "source": source, "message": message, **more}


def document(*steps, **more):
    agent = {"name": "a", "version": "1", "tool_definitions": [TOOL]}
    return {"schema_version": "ATIF-v1.8", "session_id": "s", "agent": agent, "steps": [*steps], **more}


STEPS = (
    step(1, "system", "Be brief."),
    step(2, "user", "Where is parcel 17?"),
    step(
        3,
        "agent",
        "",
        reasoning_content="I look it up.",
        tool_calls=[CALL],
        observation={"results": [{"source_call_id": "c1", "content": "Basel"}]},
    ),
    step(4, "agent", [{"type": "text", "text": "It is in Basel."}]),
)


def test_steps_are_messages_with_calls_results_thoughts_and_tools(tmp_path):
    [one], _ = read(tmp_path, document(*STEPS))
    assert turns(one) == [("system", "Be brief.", False), *CALLED]
    assert one.messages[2].tool_calls == (ToolCall(id="c1", name="track", arguments={"id": 17}),)
    assert (one.messages[2].reasoning, one.messages[3].tool_call_id, one.tools) == ("I look it up.", "c1", (TOOL,))


def test_copied_steps_and_steps_without_a_model_are_context(tmp_path):
    steps = [
        step(1, "user", "Hi"),
        step(2, "agent", "a", is_copied_context=True),
        step(3, "agent", "b", llm_call_count=0),
    ]
    [one], _ = read(tmp_path, document(*steps, step(4, "agent", "c")))
    assert [trained for _, _, trained in turns(one)] == [False, False, False, True]


def test_a_result_of_no_call_is_what_a_user_says(tmp_path):
    result = {"results": [{"content": "a.py"}]}
    [one], _ = read(tmp_path, document(step(1, "user", "Hi"), step(2, "agent", "ls", observation=result)))
    assert turns(one)[-1] == ("user", "a.py", False)


def test_sub_agents_are_further_trajectories_of_the_same_task(tmp_path):
    inner = document(step(1, "user", "Look."), step(2, "agent", "Found."), trajectory_id="t2")
    found, notes = read(tmp_path, document(*STEPS, subagent_trajectories=[inner], extra={"task_name": "parcels"}))
    assert [(one.task_id, turns(one)[-1][1]) for one in found] == [
        ("parcels", "It is in Basel."),
        ("parcels", "Found."),
    ]
    assert notes == []


def test_token_ids_are_read_where_each_sampled_step_has_them(tmp_path):
    def ids(prompt, completion):
        return {"prompt_token_ids": prompt, "completion_token_ids": completion, "logprobs": [-1.0] * len(completion)}

    steps = [
        step(1, "user", "Hi"),
        step(2, "agent", "a", metrics=ids([1], [2])),
        step(3, "agent", "b", metrics=ids([1, 2], [3])),
    ]
    [one], _ = read(tmp_path, document(*steps))
    assert (one.tokens.tolist(), one.loss_mask.tolist(), one.logprobs.tolist()) == ([1, 2, 3], [0, 1, 1], [0, -1, -1])
    [text], _ = read(tmp_path, document(*steps, step(4, "agent", "c", metrics={"prompt_tokens": 3})))
    assert text.tokens is None


def test_a_step_that_cannot_be_read_is_refused_with_its_location(tmp_path):
    with pytest.raises(
        InputError, match=r"set\.jsonl:1: steps\[0\] must be an object with source, one of system, user"
    ):
        read(tmp_path, document(step(1, "robot", "x"), step(2, "agent", "x")))
