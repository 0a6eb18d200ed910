from typing import get_args

import pytest

from tests.data.formats.reading import ANSWER, QUESTION, RECORDS, read
from treering.data import FormatName, read_trajectories
from treering.data.formats.reader import detect
from treering.errors import InputError

TALK = [QUESTION, ANSWER]


def test_each_format_is_found_by_its_keys_even_with_empty_columns():
    assert {"auto", *RECORDS} == set(get_args(FormatName))
    empty = {"chosen": None, "rejected": None, "conversations": [], "attempts": None}
    assert {name: detect({**empty, **record}) for name, record in RECORDS.items()} == {name: name for name in RECORDS}


@pytest.mark.parametrize("name", RECORDS)
def test_each_format_is_read_by_its_name_and_refused_under_another(tmp_path, name):
    found, _ = read(tmp_path, RECORDS[name], format=name)
    assert len(found) == 1
    other = "sharegpt" if name != "sharegpt" else "verl"
    with pytest.raises(InputError, match=f'set.jsonl:1: format "{other}" needs .*, got the keys'):
        read(tmp_path, RECORDS[name], format=other)


def test_a_file_that_mixes_formats_is_refused_at_the_line(tmp_path):
    with pytest.raises(InputError, match=r"set\.jsonl:2: a file has one format, and this record is trl after chat"):
        read(tmp_path, RECORDS["chat"], RECORDS["trl"])


def test_chats_with_and_without_a_task_are_one_format(tmp_path):
    found, notes = read(tmp_path, {"task_id": 7, "messages": TALK}, RECORDS["chat"])
    assert found[0].task_id == 7
    assert notes == ["no task is named, so those with equal first prompts are trials of one task (1 of 2 records)"]


def test_what_an_adapter_returns_is_read_in_the_place_of_its_record(tmp_path):
    file = tmp_path / "log.jsonl"
    file.write_text('{"ids": [[5, 6], [7]]}\n{"ids": []}\n{"ids": [[8]]}\n{}\n')
    read_ids = []

    def adapt(record):
        read_ids.append(record["ids"])
        return [{"task_id": 1, "tokens": ids} for ids in record["ids"]]

    with pytest.raises(InputError, match=r"log\.jsonl:4: the adapter raised KeyError: 'ids'"):
        read_trajectories(file, adapter=adapt)
    file.write_text(file.read_text().removesuffix("{}\n"))
    found = read_trajectories(file, adapter=adapt)
    assert [(one.tokens.tolist(), one.where) for one in found] == [
        *(([5, 6], f"{file}:1"), ([7], f"{file}:1"), ([8], f"{file}:3")),
    ]
    with pytest.raises(InputError, match=r"log\.jsonl:1: a trajectory is a JSON object, got None"):
        read_trajectories(file, adapter=lambda record: None)


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"question": "2+2?", "answer": "4"}, "keys question, answer: it is of a prompts file for `treering train`"),
        ({"prompt": [QUESTION], "answer": "4"}, "it is of a prompts file for `treering train`"),
        ({"instruction": "a", "input": "b", "output": "c"}, "it is Alpaca's; write instruction and input as prompt"),
        (QUESTION, "it is one message; write a conversation as"),
        ({"source": "user", "action": "message"}, "it is one event of OpenHands"),
        ({"text": "a"}, "nothing says what the policy wrote"),
        ({"example_id": 1, "completion": [ANSWER]}, "it looks most like .*, and prompt"),
        ({"a": 1}, "no format has a record with the keys a: treering has task_id and messages"),
        ({}, "no format has a record with the keys none"),
        ({"conversations": []}, "it looks most like sharegpt, and conversations is missing or empty"),
    ],
)
def test_the_error_for_an_unknown_format_lists_the_keys_and_what_is_missing(tmp_path, record, message):
    with pytest.raises(InputError, match=rf"set\.jsonl:1: .*{message}"):
        read(tmp_path, record)


@pytest.mark.parametrize("key", ["response", "completion"])
@pytest.mark.parametrize("value", [{"text": "x"}, [ANSWER], "x"])
def test_an_answer_next_to_messages_is_not_dropped(tmp_path, key, value):
    with pytest.raises(InputError, match=f"{key} stands next to messages, and only one of them can be trained"):
        read(tmp_path, {"messages": TALK, "prompt": [QUESTION], key: value})


def test_messages_of_an_unknown_role_are_context_with_a_note(tmp_path):
    misspelt = {"task_id": 1, "messages": [QUESTION, ANSWER | {"role": "asistant"}]}
    found, notes = read(tmp_path, misspelt, {"task_id": 2, "messages": [QUESTION, ANSWER | {"role": "Assistant"}]})
    assert [one.messages[1].is_trained for one in found] == [False, True]
    assert notes == ["the role 'asistant' is not known, so its messages are context (1 of 2 records)"]
