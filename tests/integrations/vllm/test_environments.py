"""Episodes of an environment whose calls vLLM answers: one run, from the command line to the checkpoints."""

import json
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.integrations.vllm.llms import logprobs_of
from tests.integrations.vllm.runs import ENGINE, MODEL, train
from treering.data import read_trajectories

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM: make vllm-test")

ENVIRONMENT = """
import asyncio

from treering.rl.environments import Environment, EnvTask


class Letters(Environment):
    tasks = [EnvTask(id=f"t{i}", data=i) for i in range(2)]

    async def run(self, task, policy):
        # Long enough for whole blocks of vLLM's cache.
        question = {"role": "user", "content": f"Task {task.data}, at some length, as prompts of agents are."}
        first = await policy.chat([question])
        chat = [question, first.message, {"role": "user", "content": "Again"}]
        second, other = await asyncio.gather(policy.chat(chat), policy.agent("other").chat([question]))
        return sum(map(str.islower, first.text + second.text + other.text)) / 24
"""
TASK = """
[task]
kind = "environment"
class = "envs.py:Letters"
max_turn_tokens = 8
[sampling]
max_tokens = 160
[rl]
num_steps = 3
prompts_per_step = 2
group_size = 4
"""


def test_every_call_of_an_episode_is_sampled_by_the_weights_of_its_version(tmp_path: Path) -> None:
    (tmp_path / "envs.py").write_text(ENVIRONMENT)
    (tmp_path / "run.toml").write_text(f"{MODEL}{TASK}{ENGINE}keep = 3\n")
    summary = train(tmp_path / "run.toml")
    assert summary["total"]["num_updates"] == 3
    rows = [json.loads(line) for line in (tmp_path / "out" / "metrics.jsonl").read_text().splitlines()]
    assert [row["rollout/version"] for row in rows] == [0, 1, 2]
    assert [row["rewards/calls"] for row in rows] == [3.0] * 3
    assert sum(row["rollout/num_drafted"] * row["rollout/acceptance"] for row in rows) > 0
    found = [t for file in (tmp_path / "out" / "rollouts").iterdir() for t in read_trajectories(file)]
    # A run is one branch of the policy and one of the other agent.
    assert len(found) == 3 * 2 * 4 * 2
    for step in (2, 3):
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "checkpoints" / f"step-{step - 1:06d}")
        rollouts = [t for t in found if t.step == step]
        assert {t.version for t in rollouts} == {step - 1}
        for rollout in rollouts:
            own = np.flatnonzero(rollout.loss_mask)
            expected = logprobs_of(model, rollout.tokens[:1], rollout.tokens[1:])
            np.testing.assert_allclose(rollout.logprobs[own], expected[own - 1], atol=2e-5)
