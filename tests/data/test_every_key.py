"""No key of a record that could change what is trained is ignored silently.

Each key of the formats' specifications gets values of its type, and a record with it is compared with the record
without. The record must be refused, skipped with a note, or read differently, unless the key is listed as irrelevant to
training.
"""

import pytest
from tools.data_keys import BEGIN, END, PAGE, as_table

from tests.data.formats.reading import ANSWER, QUESTION, RECORDS, read
from treering.errors import InputError


def valued(keys, values):
    return {key: list(values) for key in keys}


SYSTEMS = ("system", "system_prompt", "instructions", "developer_prompt")
TOOLS = ("tools", "functions", "tool_defs", "oai_tools")
LENGTHS = ("prompt_length", "response_length", "prompt_len", "completion_length")
MASKS = [[0, 0, 1], [0, 1], [0, 1, 1, 1]]
# Names of masks, weights, contexts and ends in the specifications and in trainers.
OF_TRAINING: dict[str, list[object]] = {
    **valued(("loss_mask", "loss_masks", "response_mask", "completion_mask", "action_mask"), MASKS),
    **valued(("assistant_mask", "assistant_masks", "env_mask", "tool_mask", "target_mask", "mask"), MASKS),
    **valued(("weights", "loss_weights", "token_weights"), [[0.0, 0.5, 1.0], [0.0, 1.0]]),
    **valued(LENGTHS, [1, 2]),
    **valued(("images", "image", "videos", "audio"), [["a.png"]]),
    **valued(("weight", "sample_weight", "loss_weight"), [0.5]),
    **valued(("label", "chat_template_kwargs", "documents"), [{"x": 1}]),
    **valued(SYSTEMS, ["Be brief."]),
    **valued(TOOLS, [[{"name": "f", "parameters": {}}]]),
    **valued(("error", "exception"), ["timeout"]),
    **valued(("status", "exit_status", "termination_reason"), ["error", "aborted"]),
    **valued(("is_truncated", "truncated"), [True]),
    **valued(("finish_reason", "stop_reason"), ["length", "max_tokens", "error"]),
    **valued(("is_completed", "completed"), [False]),
}
# Keys that are ignored with token ids, because the ids include all that the policy saw.
OF_CHATS = {*SYSTEMS, *TOOLS}
OF_CUTS = {"is_truncated", "truncated", "finish_reason", "stop_reason"}
WITH_IDS = {"treering", "prime_rl", "skyrl"}
OF_A_MESSAGE: dict[str, list[object]] = {
    **valued(("train", "trained", "training", "trainable", "is_trained", "train_on", "learn", "supervise"), [0]),
    **valued(("weight", "loss", "loss_mask", "has_loss", "is_loss", "compute_loss", "loss_scale"), [0, False]),
    **valued(("no_loss", "ignore_loss", "mask_loss", "skip_loss", "ignore", "skip"), [1, True]),
    **valued(("mask", "masked", "prefix", "partial", "training_detail", "train_detail"), [True]),
    **valued(("reasoning", "reasoning_content", "thinking", "thought"), ["hm"]),
    **valued(("images", "image", "audio"), [["a.png"]]),
    "provider_specific_fields": [{"reasoning_content": "hm"}],
    "tool_calls": [[{"name": "f", "arguments": {}}]],
    "function_call": [{"name": "f", "arguments": "{}"}],
    "finish_reason": ["length"],
    "stop_reason": ["max_tokens"],
}


def outcome(tmp_path, record):
    """Return the outcome of a record: its refusal, or what is trained of it with the notes."""
    try:
        found, said = read(tmp_path, record)
    except InputError as error:
        return "refused", str(error)
    trained = [
        (one.messages, one.tools, one.format)
        if one.tokens is None
        else (one.tokens.tolist(), None if one.loss_mask is None else one.loss_mask.tolist())
        for one in found
    ]
    return trained, sorted(said)


@pytest.mark.parametrize("name", RECORDS)
@pytest.mark.parametrize("key", OF_TRAINING)
def test_a_key_of_a_record_is_read_refused_or_said(tmp_path, name, key):
    # Lengths add nothing where prompt and response are separate.
    if (name in WITH_IDS and key in OF_CHATS | OF_CUTS) or (name != "treering" and key in LENGTHS):
        return
    plain = outcome(tmp_path, RECORDS[name])
    assert plain[0] != "refused", plain
    for value in OF_TRAINING[key]:
        assert outcome(tmp_path, {**RECORDS[name], key: value}) != plain, (name, key, value)
    assert outcome(tmp_path, {**RECORDS[name], key: None})[0] == plain[0]
    for nothing in ([], {}, ""):
        assert outcome(tmp_path, {**RECORDS[name], key: nothing})[0] in (plain[0], "refused")


@pytest.mark.parametrize("key", OF_A_MESSAGE)
def test_a_key_of_the_policys_message_is_read_refused_or_said(tmp_path, key):
    plain = outcome(tmp_path, RECORDS["chat"])
    for value in OF_A_MESSAGE[key]:
        record = {"task_id": 1, "messages": [QUESTION, {**ANSWER, key: value}]}
        assert outcome(tmp_path, record) != plain, (key, value)


def test_the_page_has_the_table_of_the_code():
    assert f"{BEGIN}{as_table()}{END}" in PAGE.read_text(encoding="utf-8")
