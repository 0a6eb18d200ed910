import pytest

from tests.data.formats.reading import CALLED, QUESTION, read, turns
from treering.data import ToolCall
from treering.errors import InputError


def said(text):
    return {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": text}]}


CALL = {"type": "function_call", "call_id": "c1", "id": "fc1", "name": "track", "arguments": '{"id":  17}'}
RESULT = {"type": "function_call_output", "call_id": "c1", "output": "Basel"}
THOUGHT = {"type": "reasoning", "id": "r1", "summary": [{"type": "summary_text", "text": "I look it up."}]}
TOOL = {"type": "function", "name": "track", "parameters": {"type": "object"}, "strict": True}


def rollout(*output, **more):
    return {
        "responses_create_params": {"input": [QUESTION], "tools": [TOOL]},
        "response": {"output": [*output]},
        **more,
    }


def test_items_of_one_answer_are_one_message(tmp_path):
    [one], _ = read(tmp_path, rollout(THOUGHT, CALL, RESULT, said("It is in Basel."), reward=1.0))
    assert turns(one) == CALLED
    assert one.messages[1].reasoning == "I look it up."
    assert one.messages[1].tool_calls == (ToolCall(id="c1", name="track", arguments='{"id":  17}'),)
    assert one.messages[2].tool_call_id == "c1"
    flat = {key: value for key, value in TOOL.items() if key != "type"}
    assert (one.tools, one.reward) == (({"type": "function", "function": flat},), 1.0)


def test_reasoning_and_text_after_text_or_a_call_are_the_next_answer(tmp_path):
    [one], _ = read(tmp_path, rollout(THOUGHT, said("a"), THOUGHT, CALL, said("b")))
    answers = [(message.reasoning, message.content, len(message.tool_calls)) for message in one.messages[1:]]
    assert answers == [("I look it up.", "a", 0), ("I look it up.", None, 1), (None, "b", 0)]


def test_the_index_of_the_task_names_it_and_that_of_the_rollout_is_the_trial(tmp_path):
    found, notes = read(
        tmp_path, *(rollout(said("x"), _ng_task_index=3, _ng_rollout_index=trial, reward=0.0) for trial in (0, 1))
    )
    assert ([(one.task_id, one.trial) for one in found], notes) == ([(3, 0), (3, 1)], [])


def test_answers_in_the_input_are_context_and_instructions_the_system_message(tmp_path):
    record = rollout(said("It is in Basel."))
    record["responses_create_params"] |= {"instructions": "Be brief.", "input": [QUESTION, said("What?"), QUESTION]}
    [one], _ = read(tmp_path, record)
    assert [trained for _, _, trained in turns(one)] == [False, False, False, False, True]
    assert turns(one)[0] == ("system", "Be brief.", False)


def test_an_empty_last_message_is_not_a_turn_and_a_rollout_without_output_is_skipped(tmp_path):
    found, notes = read(tmp_path, rollout(said("x"), said("")), rollout(said("")))
    assert [turns(one)[-1][1] for one in found] == ["x"]
    assert "nothing was sampled, so these are left out (1 of 2 records)" in notes


def test_token_ids_are_read_where_each_call_of_the_model_has_them(tmp_path):
    first = {**CALL, "prompt_token_ids": [1], "generation_token_ids": [2], "generation_log_probs": [-0.5]}
    last = {**said("x"), "prompt_token_ids": [1, 2, 3], "generation_token_ids": [4], "generation_log_probs": [-1.0]}
    [one], _ = read(tmp_path, rollout(THOUGHT, first, RESULT, last))
    assert (one.tokens.tolist(), one.loss_mask.tolist()) == ([1, 2, 3, 4], [0, 1, 0, 1])
    assert one.logprobs.tolist() == [0, -0.5, 0, -1]
    [text], _ = read(tmp_path, rollout(CALL, RESULT, last))
    assert text.tokens is None


@pytest.mark.parametrize(
    ("item", "message"),
    [
        ({"type": "web_search_call", "id": "w"}, "is an item of type 'web_search_call'"),
        ({"type": "reasoning", "summary": [], "encrypted_content": "zzz"}, "reasoning that is encrypted"),
    ],
)
def test_items_without_text_are_refused_by_name(tmp_path, item, message):
    with pytest.raises(InputError, match=rf"set\.jsonl:1: .*{message}"):
        read(tmp_path, rollout(item, said("x")))


def test_items_may_stand_among_messages(tmp_path):
    record = {"task_id": 1, "messages": [QUESTION, THOUGHT, CALL, RESULT, {"role": "assistant", "content": "Basel."}]}
    [one], _ = read(tmp_path, record)
    assert [role for role, _, _ in turns(one)] == ["user", "assistant", "tool", "assistant"]
    assert one.messages[1].reasoning == "I look it up."
