import json

import pytest

from tests.data.formats.reading import ANSWER, QUESTION, read, turns
from treering.data import ToolCall
from treering.errors import InputError

ROW = {
    "example_id": 0,
    "prompt": [QUESTION],
    "completion": [ANSWER],
    "task": "default",
    "reward": 1.0,
    "answer": "Basel",
    "info": {},
    "generation_ms": 12.0,
}


def test_a_row_is_a_trial_of_its_example(tmp_path):
    found, notes = read(tmp_path, ROW, {**ROW, "reward": 0.0})
    assert [(one.task_id, one.reward, turns(one)) for one in found] == [
        (0, reward, [("user", QUESTION["content"], False), ("assistant", "It is in Basel.", True)])
        for reward in (1.0, 0.0)
    ]
    assert notes == []


def test_calls_that_were_saved_as_json_texts_are_calls(tmp_path):
    call = {"id": "c1", "type": "function", "function": {"name": "track", "arguments": '{"id":  17}'}}
    said = {"role": "assistant", "content": "", "tool_calls": [json.dumps(call)]}
    [one], _ = read(tmp_path, {**ROW, "completion": [said], "tool_defs": [{"name": "track", "parameters": {}}]})
    assert one.messages[1].tool_calls == (ToolCall(id="c1", name="track", arguments='{"id":  17}'),)
    assert one.tools == ({"type": "function", "function": {"name": "track", "parameters": {}}},)


def step(prompt, completion, logprobs):
    return {"tokens": {"prompt_ids": prompt, "completion_ids": completion, "completion_logprobs": logprobs}}


def test_token_ids_of_the_calls_are_read_and_a_rewritten_prompt_begins_a_branch(tmp_path):
    steps = [step([1, 2], [3], [-0.5]), step([1, 2, 3, 4], [5, 6], [-1.0, -2.0]), step([1, 4], [7], [-3.0])]
    found, _ = read(tmp_path, {**ROW, "trajectory": steps})
    assert [one.tokens.tolist() for one in found] == [[1, 2, 3, 4, 5, 6], [1, 4, 7]]
    assert [one.loss_mask.tolist() for one in found] == [[0, 0, 1, 0, 1, 1], [0, 0, 1]]
    assert [one.logprobs.tolist() for one in found] == [[0, 0, -0.5, 0, -1, -2], [0, 0, -3]]
    assert {(one.task_id, one.reward) for one in found} == {(0, 1.0)}


def test_ids_of_some_calls_only_are_no_trajectory_and_the_text_is_read(tmp_path):
    [one], _ = read(tmp_path, {**ROW, "trajectory": [step([1], [2], [0.0]), {"tokens": None}]})
    assert one.tokens is None


def test_failed_rollouts_are_left_out_and_counted(tmp_path):
    found, notes = read(tmp_path, ROW, {**ROW, "completion": None, "error": {"error": "ModelError"}})
    assert (len(found), notes) == (1, ["nothing was sampled, so these are left out (1 of 2 records)"])


def masked(**fields):
    call = step([1, 2], [3, 4], [-0.5, -0.25])
    return {"tokens": {**call["tokens"], "prompt_mask": [0, 0], **fields}}


def test_the_mask_of_a_call_leaves_sampled_tokens_out(tmp_path):
    [one], _ = read(tmp_path, {**ROW, "trajectory": [masked(completion_mask=[1, 0])]})
    assert one.loss_mask.tolist() == [False, False, True, False]


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"prompt_mask": [0, 1]}, "prompt_mask trains what the call was shown"),
        ({"completion_mask": [1]}, "completion_mask has one entry per sampled token, got 1 for 2"),
        (
            {"completion_mask": [1, 1], "loss_mask": [1, 0]},
            "loss_mask and .*completion_mask say which tokens are trained, and they differ; keep one",
        ),
        ({"env_mask": [1, 0]}, "env_mask seems to say which tokens are trained"),
    ],
)
def test_a_mask_of_a_call_that_is_not_certain_is_refused(tmp_path, fields, rule):
    with pytest.raises(InputError, match=rf"set\.jsonl:1: .*{rule}"):
        read(tmp_path, {**ROW, "trajectory": [masked(**fields)]})
