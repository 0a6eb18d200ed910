"""Requests: exact conversions of their arguments, and clear errors for the rest."""

from typing import Any

import numpy as np
import pytest

from treering.engine.request import Request, Sampling
from treering.engine.scripted import ScriptedEngine
from treering.errors import InputError

SAMPLING = Sampling(max_tokens=2)


def request(**changes: Any) -> Request:
    return Request(**{"prompt_id": "q", "prompt": np.array([5, 6], np.int32), "sampling": SAMPLING, **changes})


@pytest.mark.parametrize("prompt", [[5, 6], (5, 6), [np.int64(5), 6], np.array([5, 6], np.uint8)])
def test_any_list_of_token_ids_is_a_prompt(prompt: Any) -> None:
    made = request(prompt=prompt)
    assert (made.prompt.dtype, made.prompt.tolist()) == (np.int32, [5, 6])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompt": [5.0]}, "an integer array of token ids, got list for 'q'"),
        ({"prompt": ["5"]}, "got list for 'q'"),
        ({"prompt": [True]}, "got list for 'q'"),
        ({"prompt": []}, r"at least one token, got shape \(0,\)"),
        ({"prompt": [-1]}, r"in \[0, 2147483647\], got -1..-1"),
        ({"prompt": [1 << 70]}, "got object for 'q'"),
        ({"prompt": "56"}, "got str for 'q'"),
        ({"prompt_id": 1.5}, "a prompt_id is text or an integer, got 1.5"),
        ({"prompt_id": True}, "got True"),
    ],
)
def test_invalid_prompts_are_refused_by_name(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        request(**changes)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (request(), "an engine takes requests, one or more in a list, got Request.*write .request. for one"),
        (None, "one or more in a list, got None"),
        ([("q", [5, 6])], r"treering.Request records, got \('q', \[5, 6\]\); give each its prompt_id"),
        ([request(), None], "Request records, got None"),
    ],
)
def test_invalid_requests_are_refused_and_nothing_is_queued(requests: Any, message: str) -> None:
    engine = ScriptedEngine(lambda request: [7, 8])
    with pytest.raises(InputError, match=message):
        list(engine.generate(requests))
    assert engine.num_unfinished == 0
