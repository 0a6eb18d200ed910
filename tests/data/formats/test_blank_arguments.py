"""Blank arguments count as no arguments, in every format and every rendering."""

from typing import Any

import pytest

from tests.data.formats.reading import QUESTION, read
from tests.data.rendering.chat_folder import shown, texts, with_template
from tests.data.rendering.test_families import PARAMETERS
from tests.data.rendering.test_template import DUMPING
from treering.data.trajectory import ToolCall

BLANK = ("", " ", "\n\t", "null", " null\n", '""', '" "', '"null"')
RESULT = {"role": "tool", "tool_call_id": "c", "content": "x"}
DONE = {"role": "assistant", "content": "Done."}


def turn(arguments: Any) -> dict[str, Any]:
    function = {"name": "now", "arguments": arguments}
    return {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]}


def records(arguments: Any) -> dict[str, dict[str, Any]]:
    """Yield a record of each format that has calls, and of each spelling of one."""
    called, flat = turn(arguments), {"id": "c", "name": "now", "arguments": arguments}
    chat = [QUESTION, called, RESULT, DONE]
    use = {"type": "tool_use", "id": "c", "name": "now", "input": arguments}
    item = {"type": "function_call", "call_id": "c", "name": "now", "arguments": arguments}
    output = {"type": "function_call_output", "call_id": "c", "output": "x"}
    events = [
        {"id": 1, "source": "user", "action": "message", "args": {"content": "Fix it"}},
        {
            **{"id": 2, "source": "agent", "action": "run"},
            "tool_call_metadata": {"model_response": {"id": "r", "choices": [{"message": called}]}},
        },
    ]
    return {
        "treering": {"task_id": 1, "messages": [QUESTION, {"role": "assistant", "tool_calls": [flat]}, RESULT, DONE]},
        "chat": {"messages": chat},
        "function_call": {
            "messages": [
                QUESTION,
                {"role": "assistant", "content": None, "function_call": {"name": "now", "arguments": arguments}},
                {"role": "function", "name": "now", "content": "x"},
                DONE,
            ]
        },
        "anthropic": {"messages": [QUESTION, {"role": "assistant", "content": [use]}, DONE]},
        "responses": {"messages": [QUESTION, item, output, DONE]},
        "trl": {"task_id": 1, "prompt": [QUESTION], "completion": chat[1:]},
        "verifiers": {"example_id": 0, "prompt": [QUESTION], "completion": chat[1:], "reward": 1.0, "task": "x"},
        "nemo_gym": {
            **{"task_id": 1, "responses_create_params": {"input": [QUESTION]}},
            "response": {"output": [item, output, {"type": "message", **DONE}]},
        },
        "atif": {
            **{"task_id": 1, "schema_version": "ATIF-v1.6", "agent": {}},
            "steps": [
                {"source": "user", "message": "?"},
                {
                    **{"source": "agent", "message": "!"},
                    "tool_calls": [{"tool_call_id": "c", "function_name": "now", "arguments": arguments}],
                },
            ],
        },
        "openhands": {"instance_id": "a", "history": events},
        "nemo_rl": {"task_id": 1, "message_log": chat},
        "art": {"task_id": 1, "messages_and_choices": [QUESTION, {"message": called}, RESULT, {"message": DONE}]},
        "rllm": {"task_id": 1, "trajectories": [{"steps": [{"chat_completions": chat}]}]},
    }


@pytest.mark.parametrize("arguments", BLANK, ids=repr)
@pytest.mark.parametrize("format", records(""))
def test_blank_arguments_of_every_format_render_as_an_empty_object(
    tokenizer_dir: Any, tmp_path: Any, format: str, arguments: str
) -> None:
    [found], _ = read(tmp_path, records(arguments)[format])
    [call] = [call for message in found.messages for call in message.tool_calls]
    assert (call.name, call.given, call.arguments_text) == ("now", {}, "{}")
    for template, text in ((DUMPING, "now {}"), (PARAMETERS, "<f=now></f>")):
        folder = with_template(tokenizer_dir, tmp_path, template)
        assert text in shown(folder, *found.messages)[0][0]
    assert '{"name":"now","arguments":{}}' in texts(tokenizer_dir, [found], "plain")[0][0]


@pytest.mark.parametrize("arguments", ['"x"', '"', "0", "[]", "{", "None", "nullx", "{}"])
def test_other_arguments_stay_as_the_model_wrote_them(arguments: str) -> None:
    assert ToolCall(name="now", arguments=arguments).given == arguments
