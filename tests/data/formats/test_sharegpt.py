import json

import pytest

from tests.data.formats.reading import CALLED, read, turns
from treering.data import ToolCall
from treering.errors import InputError

TALK = [{"from": "human", "value": "Where is parcel 17?"}, {"from": "gpt", "value": "It is in Basel."}]
TOOL = {"name": "track", "description": "Tracks a parcel.", "parameters": {"type": "object", "properties": {}}}


def test_a_conversation_trains_the_turns_of_gpt_and_its_row_id_names_no_task(tmp_path):
    found, notes = read(tmp_path, {"id": "x1", "conversations": TALK}, {"id": "x2", "conversations": TALK})
    assert [turns(one) for one in found] == [
        [("user", "Where is parcel 17?", False), ("assistant", "It is in Basel.", True)]
    ] * 2
    assert found[0].task_id == found[1].task_id != "x1"
    assert notes == ["no task is named, so those with equal first prompts are trials of one task (2 of 2 records)"]


def test_calls_and_observations_are_calls_and_tool_messages_and_tools_arrive_nested(tmp_path):
    call = {"name": "track", "arguments": {"id": 17}}
    record = {
        "system": "Be brief.",
        "tools": json.dumps([TOOL]),
        "conversations": [
            TALK[0],
            {"from": "function_call", "value": json.dumps(call)},
            {"from": "observation", "value": "Basel"},
            TALK[1],
        ],
    }
    [one], _ = read(tmp_path, record)
    assert turns(one) == [("system", "Be brief.", False), *CALLED]
    assert one.messages[2].tool_calls == (ToolCall(name="track", arguments={"id": 17}),)
    assert one.tools == ({"type": "function", "function": TOOL},)


def test_several_calls_are_one_message_and_a_call_in_free_text_stays_text(tmp_path):
    words = "<function=track>\n<parameter=id>17</parameter>\n</function>"
    calls = json.dumps([{"name": "a", "arguments": "{}"}, {"name": "b", "arguments": "{}"}])
    [several], _ = read(tmp_path, {"conversations": [TALK[0], {"from": "function_call", "value": calls}]})
    assert [call.name for call in several.messages[1].tool_calls] == ["a", "b"]
    [text], _ = read(tmp_path, {"conversations": [TALK[0], {"from": "function_call", "value": words}]})
    assert turns(text)[1] == ("assistant", words, True)


def test_a_preference_pair_is_two_trajectories_of_one_prompt(tmp_path):
    record = {"conversations": TALK[:1], "chosen": TALK[1], "rejected": {"from": "gpt", "value": "No idea."}}
    found, _ = read(tmp_path, record)
    assert [(one.preference, one.messages[-1].content) for one in found] == [
        ("chosen", "It is in Basel."),
        ("rejected", "No idea."),
    ]
    assert found[0].task_id == found[1].task_id


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"conversations": [{"from": "function_call", "value": '{"name": '}]}, "a function_call, must be JSON"),
        ({"conversations": [{"value": "x"}]}, r"conversations\[0\] needs from and value, got the keys value"),
        ({"conversations": TALK, "kto_tag": True}, "kto_tag is for KTO"),
        ({"conversations": TALK, "tools": [{"type": "web_search"}]}, r"tools\[0\] is a tool of type 'web_search'"),
    ],
)
def test_what_cannot_be_read_is_refused_by_name(tmp_path, record, message):
    with pytest.raises(InputError, match=rf"set\.jsonl:1: .*{message}"):
        read(tmp_path, record)
