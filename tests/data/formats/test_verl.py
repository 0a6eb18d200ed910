import pytest

from tests.data.formats.reading import read, turns
from treering.errors import InputError

ROW = {"input": "user\nWhere?\nassistant\n", "output": "Basel", "gts": "Basel", "score": 1.0, "step": 1}


def test_a_row_is_raw_text_with_its_score_and_step_and_equal_inputs_are_a_task(tmp_path):
    found, notes = read(tmp_path, ROW, {**ROW, "output": "Bern", "score": 0.0})
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
    found, notes = read(tmp_path, ROW, {**ROW, "output": ""})
    assert (len(found), notes[-1]) == (1, "nothing was sampled, so these are left out (1 of 2 records)")


def test_an_output_that_holds_the_texts_of_tools_is_refused(tmp_path):
    with pytest.raises(InputError, match="num_turns is 4, so output holds the tools' texts"):
        read(tmp_path, {**ROW, "num_turns": 4})
