"""Records of prime-rl, SkyRL, NeMo-RL, ART, rLLM and verl: what is trained, with which log-probs, rewards and tasks."""

import numpy as np
import pytest

from tests.data.formats.reading import read as read_all
from tests.data.formats.reading import turns
from treering.errors import InputError

ASKED = {"role": "user", "content": "Where?"}
BASEL = {"role": "assistant", "content": "Basel"}


def read(tmp_path, *records):
    return read_all(tmp_path, *records)[0]


PRIME = {
    **{"task_id": "t", "prompt_ids": [1, 2], "prompt_mask": [0, 0], "completion_ids": [3, 4, 5]},
    **{"completion_mask": [1, 0, 1], "completion_logprobs": [-0.1, 0.0, -0.3], "advantage": 0.5, "reward": 1.0},
}
SKYRL = {"task_id": "t", "prompt_token_ids": [1, 2], "response_ids": [3, 4], "loss_mask": [1, 0], "reward": 1.0}
NEMO = {
    "task_id": "t",
    "message_log": [
        {"role": "user", "token_ids": [1, 2], "content": "x"},
        {"role": "assistant", "token_ids": [3], "content": "y", "generation_logprobs": [-0.5]},
        {"role": "tool", "token_ids": [4], "content": "z"},
        {"role": "assistant", "token_ids": [5, 6], "content": "y", "generation_logprobs": [-0.1, -0.2]},
    ],
    "total_reward": 2.0,
}
ART = {"messages_and_choices": [ASKED, {"finish_reason": "stop", "index": 0, "message": BASEL}], "reward": 1.0}
RLLM = {
    **{"id": "t:3", "task": {"question": "Where?"}, "is_correct": True},
    "trajectories": [{"name": "agent", "steps": [{"chat_completions": [ASKED, BASEL]}], "reward": 0.25}],
}
VERL = {"input": "user\nWhere?\nassistant\n", "output": "Basel", "gts": "Basel", "score": 1.0, "step": 1}


def test_a_sample_of_prime_rl_trains_what_its_masks_say(tmp_path):
    [one] = read(tmp_path, PRIME)
    assert (one.task_id, one.reward, one.advantage) == ("t", 1.0, 0.5)
    np.testing.assert_array_equal(one.tokens, [1, 2, 3, 4, 5])
    np.testing.assert_array_equal(one.loss_mask, [0, 0, 1, 0, 1])
    np.testing.assert_allclose(one.logprobs, [0, 0, -0.1, 0, -0.3])


def test_a_row_and_a_batch_of_skyrl_are_the_same_sequences(tmp_path):
    [one] = read(tmp_path, SKYRL)
    np.testing.assert_array_equal(one.tokens, [1, 2, 3, 4])
    np.testing.assert_array_equal(one.loss_mask, [0, 0, 1, 0])
    batch = {
        **{"prompt_token_ids": [[1, 2], [7]], "response_ids": [[3, 4], [8]], "loss_masks": [[1, 0], [1]]},
        **{"rewards": [1.0, [0.0, 0.5]], "rollout_logprobs": [[-0.5, 0.0], [-1.0]]},
        "trajectory_ids": [{"instance_id": "a"}, {"instance_id": "b"}],
    }
    first, second = read(tmp_path, batch)
    np.testing.assert_array_equal(first.tokens, one.tokens)
    np.testing.assert_array_equal(first.loss_mask, one.loss_mask)
    np.testing.assert_allclose(first.logprobs, [0, 0, -0.5, 0])
    assert [(each.task_id, each.reward) for each in (first, second)] == [("a", 1.0), ("b", 0.5)]
    np.testing.assert_array_equal(second.loss_mask, [0, 1])


def test_a_message_log_of_nemo_rl_trains_the_assistants_tokens(tmp_path):
    [one] = read(tmp_path, NEMO)
    np.testing.assert_array_equal(one.tokens, [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(one.loss_mask, [0, 0, 1, 0, 1, 1])
    np.testing.assert_allclose(one.logprobs, [0, 0, -0.5, 0, -0.1, -0.2])
    assert one.reward == 2.0
    log = [dict(message) for message in NEMO["message_log"]]
    log[3]["token_loss_mask"] = [0, 1]
    del log[1]["generation_logprobs"]
    [masked] = read(tmp_path, {**NEMO, "message_log": log})
    np.testing.assert_array_equal(masked.loss_mask, [0, 0, 1, 0, 0, 1])
    assert masked.logprobs is None
    [texts] = read(tmp_path, {"message_log": [ASKED, BASEL], "idx": 7})
    assert (texts.task_id, [message.is_trained for message in texts.messages]) == (7, [False, True])


def test_a_log_that_counts_nothing_is_left_out(tmp_path):
    found, [note] = read_all(tmp_path, NEMO, {**NEMO, "loss_multiplier": 0.0})
    assert (len(found), "left out" in note) == (1, True)


def test_choices_of_art_are_trained_and_messages_are_context(tmp_path):
    other = {"messages_and_choices": [ASKED, BASEL, ASKED, {"message": {"role": "assistant", "content": "Bern"}}]}
    one, more = read(tmp_path, {**ART, "additional_histories": [other]})
    assert [message.is_trained for message in one.messages] == [False, True]
    assert [message.is_trained for message in more.messages] == [False, False, False, True]
    assert one.task_id == more.task_id
    assert one.reward == more.reward == 1.0


def test_steps_of_rllm_that_continue_are_one_sequence_and_others_branch(tmp_path):
    bern = {"role": "assistant", "content": "Bern"}
    chats = [[ASKED, BASEL], [ASKED, BASEL, ASKED, bern], [{"role": "user", "content": "New"}, bern]]
    episode = {**RLLM, "trajectories": [{"name": "a", "steps": [{"chat_completions": chat} for chat in chats]}]}
    first, second = read(tmp_path, episode)
    assert [message.content for message in first.messages] == ["Where?", "Basel", "Where?", "Bern"]
    assert [message.is_trained for message in first.messages] == [False, True, False, True]
    assert [message.content for message in second.messages] == ["New", "Bern"]
    assert (first.task_id, first.reward) == ("t", 1.0)
    [one] = read(tmp_path, RLLM)
    assert one.reward == 0.25


def test_token_ids_of_rllm_are_read_where_each_step_has_them(tmp_path):
    prompts, answers = [[1, 2], [1, 2, 3, 4]], [[3], [5, 6]]
    steps = [
        {"chat_completions": [ASKED, BASEL], "prompt_ids": prompt, "response_ids": ids, "logprobs": [-0.5] * len(ids)}
        for prompt, ids in zip(prompts, answers, strict=True)
    ]
    [one] = read(tmp_path, {**RLLM, "trajectories": [{"steps": steps}]})
    np.testing.assert_array_equal(one.tokens, [1, 2, 3, 4, 5, 6])
    np.testing.assert_array_equal(one.loss_mask, [0, 0, 1, 0, 1, 1])
    np.testing.assert_allclose(one.logprobs, [0, 0, -0.5, 0, -0.5, -0.5])


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        ({**PRIME, "completion_logprobs": [0.0]}, "completion_logprobs has one entry per sampled token"),
        ({**SKYRL, "prompt_token_ids": [[1]], "response_ids": [[1], [2]]}, "one entry per row, got .*align them"),
        ({**NEMO, "loss_multiplier": 0.5}, "loss_multiplier weights the whole log, got 0.5"),
        ({**ART, "messages_and_choices": [ASKED, 3]}, r"messages_and_choices\[1\] must be an object"),
        ({**RLLM, "trajectories": [{"steps": [{"chat_completions": [BASEL, ASKED]}]}]}, "must end with the policy"),
        ({**VERL, "num_turns": 4}, "num_turns is 4, so output holds the tools' texts"),
    ],
)
def test_an_ambiguous_record_is_refused_with_its_location(tmp_path, record, rule):
    with pytest.raises(InputError, match=rf"set\.jsonl:1: .*{rule}"):
        read(tmp_path, record)


def test_a_row_is_raw_text_with_its_score_and_step_and_equal_inputs_are_a_task(tmp_path):
    found, notes = read_all(tmp_path, VERL, {**VERL, "output": "Bern", "score": 0.0})
    assert [(one.format, one.reward, one.step, turns(one)[1][1]) for one in found] == [
        ("raw", 1.0, 1, "Basel"),
        ("raw", 0.0, 1, "Bern"),
    ]
    assert found[0].task_id == found[1].task_id
    assert [note.split(",")[0] for note in notes] == [
        "verl writes texts without their special tokens",
        "no task is named",
    ]


def test_an_empty_output_is_left_out_and_counted(tmp_path):
    found, notes = read_all(tmp_path, VERL, {**VERL, "output": ""})
    assert (len(found), notes[-1]) == (1, "nothing was sampled, so these are left out (1 of 2 records)")
