"""Samplers of trained models: the draws of a prompt go on, as long as it is remembered."""

import asyncio

import numpy as np
import pytest

from tests.models import build_float64
from treering.engine.protocol import Sampling
from treering.rl import model_samplers
from treering.rl.model_samplers import EngineOptions, ModelSampler, SamplerWeights

BASE = SamplerWeights(owner="", name="")
SAMPLING = Sampling(max_tokens=12)


def draws(*firsts: int) -> list[list[int]]:
    """Return a sample of each prompt, in order, from a new sampler."""
    sampler = ModelSampler(build_float64().eval(), EngineOptions(max_batch=4, max_tokens=256))

    async def sample() -> list[list[int]]:
        prompts = [np.array([first, 5, 7], np.int32) for first in firsts]
        found = [await sampler.sample(BASE, prompt, SAMPLING, 1, None) for prompt in prompts]
        return [rollout.tokens.tolist() for (rollout,) in found]

    try:
        return asyncio.run(sample())
    finally:
        sampler.close()


def test_the_draws_of_recent_prompts_go_on_while_the_oldest_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    order = (1, 2, 3, 2, 3, 1)
    every = draws(*order)
    assert len({tuple(tokens) for tokens in every}) == len(order)
    monkeypatch.setattr(model_samplers, "MAX_COUNTED_PROMPTS", 2)
    # The third prompt makes room, and the first one begins again.
    assert draws(*order) == [*every[:5], every[0]]
