"""Token ids of a call in a record with text are trained as they were sampled, or refused by name."""

import pytest

from tests.data.formats.reading import ANSWER, QUESTION, RECORDS, read
from treering.data.formats.model_calls import IDS_USED
from treering.errors import InputError

TEXTS = {
    **{name: RECORDS[name] for name in ("chat", "sharegpt", "trl", "verifiers", "verl")},
    "text": {"task_id": 1, "prompt": "2+2=", "completion": "4", "reward": 1.0},
    "treering": {"task_id": 1, "messages": [QUESTION, ANSWER]},
    "turns": {"messages": [QUESTION, {**ANSWER, "train": 0}, QUESTION, ANSWER]},
}
NAMES = [
    ("prompt_token_ids", "completion_token_ids"),
    ("prompt_token_ids", "output_token_ids"),
    ("prompt_ids", "response_token_ids"),
    ("prompt_tokens", "completion_tokens"),
    ("promptTokenIds", "responseTokenIds"),
    ("prompt_input_ids", "generated_ids"),
]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("names", NAMES)
def test_the_sampled_ids_are_trained_and_not_the_text_with_them(tmp_path, name, names):
    ids = dict(zip(names, ([5, 6], [7, 8]), strict=True))
    (one,), said = read(tmp_path, TEXTS[name] | ids | {"completion_logprobs": [-0.5, -0.25], "reward": 0.5})
    assert (one.messages, one.tokens.tolist(), one.loss_mask.tolist()) == (None, [5, 6, 7, 8], [0, 0, 1, 1])
    assert one.logprobs.tolist() == [0, 0, -0.5, -0.25]
    assert one.reward == (0.0 if name == "verl" else 0.5)
    assert any(IDS_USED in sentence for sentence in said)


def test_a_mask_of_the_ids_decides_which_of_several_turns_are_trained(tmp_path):
    record = {"prompt": [QUESTION], "completion": [ANSWER, {"role": "tool", "content": "x"}, ANSWER], "task_id": 1}
    ids = {"prompt_token_ids": [5], "completion_token_ids": [6, 7, 8]}
    (one,), _ = read(tmp_path, record | ids | {"completion_mask": [1, 0, 1]})
    assert one.loss_mask.tolist() == [0, 1, 0, 1]
    with pytest.raises(InputError, match=r"set.jsonl:1: completion_token_ids are of one call.* trains 2 turns"):
        read(tmp_path, record | ids)


REFUSED = [
    {"completion_token_ids": [7]},
    {"prompt_token_ids": [5]},
    {"input_ids": [5, 7]},
    {"tokens": [5, 7]},
    {"token_ids": [5, 7]},
    {"input_ids": [5], "output_ids": [7]},
    {"prompt_token_ids": [5], "completion_token_ids": [7], "response_token_ids": [8]},
    {"prompt_token_ids": [5, 6], "output_ids": [5, 6, 7]},
    {"prompt_token_ids": [5.0, 6.0]},
    {"completion_token_ids": [7], "prompt_token_ids": "[5, 6]"},
    {"tokens": {"prompt_ids": [5, 6], "completion_ids": [7]}},
    {"prompt_token_ids": [5], "chosen_input_ids": [5]},
    {"prompt_token_ids": [5, 6], "completion_token_ids": [7], "completion_logprobs": [-1.0, -2.0]},
]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("ids", REFUSED)
def test_ids_that_would_be_lost_are_refused_by_name(tmp_path, name, ids):
    with pytest.raises(InputError, match=f"set.jsonl:1: .*{list(ids)[-1]}"):
        read(tmp_path, TEXTS[name] | ids)


def test_numbers_of_other_things_change_nothing(tmp_path):
    plain, _ = read(tmp_path, TEXTS["text"])
    others = {"completion_tokens": 3, "message_ids": [1, 2], "tokens": [], "usage": {"prompt_tokens": 3}}
    (one,), said = read(tmp_path, TEXTS["text"] | others)
    assert one.messages == plain[0].messages
    assert not said


def test_ids_of_a_message_are_refused_by_name(tmp_path):
    with pytest.raises(InputError, match=r"set.jsonl:1: messages\[1\].token_ids would be lost"):
        read(tmp_path, {"messages": [QUESTION, {**ANSWER, "token_ids": [5, 6]}]})
