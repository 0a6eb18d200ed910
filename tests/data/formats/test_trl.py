import pytest

from tests.data.formats.reading import ANSWER, QUESTION, read, turns
from treering.errors import InputError

WRONG = {"role": "assistant", "content": "No idea."}


def test_only_the_completion_is_trained_also_where_a_prompt_has_answers(tmp_path):
    [one], _ = read(tmp_path, {"prompt": [QUESTION, WRONG, QUESTION], "completion": [ANSWER], "reward": 0.5})
    assert [trained for _, _, trained in turns(one)] == [False, False, False, True]
    assert (one.format, one.reward) == ("chat", 0.5)


def test_texts_stand_as_they_are(tmp_path):
    [one], _ = read(tmp_path, {"prompt": "2+2=", "completion": "4"})
    assert (one.format, turns(one)) == ("raw", [("user", "2+2=", False), ("assistant", "4", True)])


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": [QUESTION], "chosen": [ANSWER], "rejected": [WRONG]},
        {"prompt": [QUESTION], "chosen": ANSWER, "rejected": WRONG},
        {"chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG]},
        # As UltraFeedback has it: the question as text, beside whole conversations.
        {"prompt": QUESTION["content"], "chosen": [QUESTION, ANSWER], "rejected": [QUESTION, WRONG], "messages": []},
    ],
    ids=["prompt", "one message", "implicit", "text prompt"],
)
def test_a_pair_has_one_prompt_and_two_answers(tmp_path, record):
    found, _ = read(tmp_path, {**record, "score_chosen": 9.0})
    expected = [[("user", QUESTION["content"], False), (*answer.values(), True)] for answer in (ANSWER, WRONG)]
    assert [turns(one) for one in found] == expected
    assert [(one.preference, one.reward) for one in found] == [("chosen", 9.0), ("rejected", None)]
    assert found[0].task_id == found[1].task_id


def test_a_pair_of_texts_parts_where_the_texts_differ_and_a_space_belongs_to_the_answer(tmp_path):
    found, _ = read(tmp_path, {"chosen": "The sky is blue.", "rejected": "The sky is green."})
    assert [[message.content for message in one.messages] for one in found] == [
        ["The sky is", " blue."],
        ["The sky is", " green."],
    ]
    assert {one.format for one in found} == {"raw"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, "label changes what is trained"),
        ({"prompt": "a", "completion": [ANSWER]}, "both text or both messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION]}, "one is all of the other"),
        ({"prompt": "a", "chosen": "b", "rejected": [ANSWER]}, "both text or both messages"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, record, message):
    with pytest.raises(InputError, match=rf"set\.jsonl:1: .*{message}"):
        read(tmp_path, record)
