"""Unpaired surrogates are refused on input, from files and from Python, never on output."""

import numpy as np
import pytest

from treering.data import Message, ToolCall, Trajectory
from treering.engine.protocol import Request, Sampling
from treering.errors import InputError

HALF = "\ud83d"
ASKED, SAID = Message(role="user", content="?"), Message(role="assistant", content="!")
CALL = ToolCall(name="f", arguments={"x": HALF})
TOOL = {"type": "function", "function": {"name": "f", "description": HALF}}


def chat(**fields) -> Trajectory:
    return Trajectory(**{"task_id": 1, "messages": (ASKED, SAID), **fields})


@pytest.mark.parametrize(
    ("fields", "where"),
    [
        ({"task_id": HALF}, "task_id"),
        ({"messages": (ASKED, Message(role="assistant", content=f"so {HALF}"))}, r"messages\[1\]\.content"),
        ({"messages": (ASKED, Message(role=HALF, content="so"))}, r"messages\[1\]\.role"),
        ({"messages": (ASKED, Message(role="assistant", content="a", reasoning=HALF))}, r"messages\[1\]\.reasoning"),
        (
            {"messages": (ASKED, Message(role="assistant", content=None, tool_calls=(CALL,)))},
            r"messages\[1\]\.tool_calls",
        ),
        ({"tools": (TOOL,)}, "tools"),
    ],
)
def test_a_trajectory_from_python_is_refused_by_field(fields, where):
    with pytest.raises(InputError, match=rf"^{where} must be valid Unicode, got .*surrogates not allowed.*repair it"):
        chat(**fields)


def test_the_prompt_id_of_a_request_is_refused():
    with pytest.raises(InputError, match="prompt_id must be valid Unicode"):
        Request(prompt_id=HALF, prompt=np.array([1], np.int32), sampling=Sampling(max_tokens=1))
