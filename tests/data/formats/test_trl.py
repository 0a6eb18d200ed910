from pathlib import Path

import pytest
from tokenizers import Tokenizer

from tests.data.conftest import save_tokenizer
from tests.data.formats.reading import ANSWER, QUESTION, read, turns
from treering.data import Renderer
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
        # UltraFeedback has the question as text, and whole conversations.
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
        ({"prompt": "a", "completion": [ANSWER]}, "both text or both messages"),
        ({"prompt": "a", "chosen": "b", "rejected": "b"}, "chosen and rejected are the same"),
        ({"chosen": [QUESTION, ANSWER], "rejected": [QUESTION]}, "one is all of the other"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, record, message):
    with pytest.raises(InputError, match=rf"set\.jsonl:1: .*{message}"):
        read(tmp_path, record)


@pytest.mark.parametrize(
    "record",
    [
        {"prompt": "2+2=", "completion": "4"},
        {"prompt": "2+2=", "completion": "4</s>"},
        {"prompt": "2+2=", "chosen": "4", "rejected": "5</s>"},
        {"chosen": "2+2= 4", "rejected": "2+2= 5"},
    ],
)
@pytest.mark.filterwarnings("ignore:.*holds? the text of special tokens")
def test_a_text_ends_once_with_the_end_of_texts_which_is_trained(tmp_path: Path, record: dict[str, str]) -> None:
    found, _ = read(tmp_path, record)
    for eos in ("</s>", None):
        folder = save_tokenizer(tmp_path / "tokenizer", ["</s>", "<s>"], eos_token=eos)
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        renderer = Renderer(tokenizer=folder, template="plain")
        for one, trajectory in zip(renderer.render_batch(found), found, strict=True):
            answer = str(trajectory.messages[-1].content)
            trained = tokenizer.decode(one.tokens[one.loss_mask].tolist(), skip_special_tokens=False)
            assert trained == (answer if eos is None else answer.removesuffix("</s>") + "</s>")
            assert one.turn_ends.tolist() == [one.tokens.size]
        (note,) = renderer.notes
        assert note.startswith(f"the {len(found)} texts of TRL's rows")
        assert ("names no eos_token" if eos is None else "end with </s>, which is trained, as TRL adds it") in note


def test_messages_and_texts_of_other_sources_get_no_end_from_trl(tmp_path: Path) -> None:
    chat, _ = read(tmp_path, {"prompt": [QUESTION], "completion": [ANSWER]})
    raw, _ = read(tmp_path, {"task_id": 1, "format": "raw", "messages": [QUESTION, ANSWER]})
    assert [one.adds_end for one in (*chat, *raw)] == [False, False]
