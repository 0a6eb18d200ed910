"""Pickling of rollouts."""

import pickle

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from treering.engine.rollout import Rollout

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


def test_slices_arrive_without_what_they_were_cut_from() -> None:
    whole = rollout_of(1000)
    part = Rollout(
        **{name: getattr(whole, name)[::100] for name in ARRAYS},
        prompt_id="q",
        draw=0,
        sample=0,
        finish_reason="stop",
    )
    data = pickle.dumps(part)
    assert len(data) < 1000
    assert pickle.loads(data).tokens.tolist() == whole.tokens[::100].tolist()
