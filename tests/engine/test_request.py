"""Requests: exact conversions of their arguments, and clear errors for the rest. Rollouts arrive as they were sent."""

import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from treering.engine.request import Request, Sampling
from treering.engine.rollout import Rollout
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


ARRAYS = ("tokens", "logprobs", "policy_logprobs", "loss_mask", "versions")


def rollout_of(num_tokens: int, reward: float | None = None, prompt_id: int | str = "q") -> Rollout:
    rng = np.random.default_rng(num_tokens)
    return Rollout(
        prompt_id=prompt_id,
        draw=3,
        sample=2,
        tokens=rng.integers(0, 1 << 31, num_tokens).astype(np.int32),
        logprobs=rng.normal(size=num_tokens),
        policy_logprobs=rng.normal(size=num_tokens),
        loss_mask=rng.random(num_tokens) < 0.5,
        versions=rng.integers(0, 9, num_tokens).astype(np.int32),
        finish_reason="length",
        reward=reward,
    )


@given(st.integers(0, 70), st.none() | st.floats(allow_nan=False), st.integers() | st.text())
def test_a_pickled_rollout_is_equal(num_tokens, reward, prompt_id) -> None:
    sent = rollout_of(num_tokens, reward, prompt_id)
    came = pickle.loads(pickle.dumps(sent))
    assert (came.key, came.finish_reason, came.reward) == (sent.key, "length", reward)
    for name in ARRAYS:
        mine, its = getattr(came, name), getattr(sent, name)
        assert mine.dtype == its.dtype
        assert mine.tolist() == its.tolist()
        assert mine.flags.writeable
        assert mine.flags.aligned
