"""Weights that change within an episode: every token has the version and the log-prob that sampled it."""

from typing import Any

import numpy as np
import torch

from tests.models import build_float64, flat_logprobs
from tests.rl.environments.worlds import TURN_END, VOCAB, World, engine_of, model_of, task_of, user
from treering.engine.protocol import Sampling
from treering.rl.batch import make_rl_batch
from treering.rl.environments.collect_episodes import EpisodeCollection
from treering.rl.environments.environment import EnvTask
from treering.rl.environments.episodes import Episodes
from treering.rl.environments.policy_calls import Policy

NUM_TURNS = 3


class Updated(World):
    """Environment that gets new weights before its last turn."""

    def __init__(self) -> None:
        self.update: Any = None

    async def run(self, task: EnvTask, policy: Policy) -> float:
        messages, texts = [user(f"task {task.data}")], []
        for turn in range(NUM_TURNS):
            if turn == NUM_TURNS - 1:
                self.update()
            reply = await policy.chat(messages)
            messages += [reply.message, user(f"and {turn}")]
            texts.append(reply.text)
        return self.reward(texts)


@torch.no_grad()
def test_every_token_has_the_version_and_the_log_prob_that_sampled_it() -> None:
    old, new = (build_float64("qwen3", vocab_size=VOCAB, seed=seed).eval() for seed in (0, 1))
    model = model_of()
    model.load_state_dict(old.state_dict())
    environment, engine = Updated(), engine_of(model)
    task = task_of(environment, episodes_in_flight=1)
    sampling = Sampling(max_tokens=500, stop_tokens=(TURN_END,))
    step = EpisodeCollection(task, task.prompts[:1], {}, group_size=2, sampling=sampling)

    def update() -> None:
        model.load_state_dict(new.state_dict())
        engine.update_weights(1)

    with Episodes(engine, task) as episodes:
        environment.update = lambda: engine.version == 0 and episodes.in_engine(update)
        episodes.start(step.requests())
        while step.num_open:
            for run in episodes.take(1.0):
                step.take(run)
    [group] = step.result().groups
    first, second = group.rollouts
    batch = make_rl_batch([group], estimator="grpo", layout="tree", keeps_equal=True)
    for rollout, behaviour in zip((first, second), batch.behaviour_logprobs, strict=True):
        by_version = np.stack(
            [np.concatenate([[0.0], flat_logprobs(each, rollout.tokens.tolist())[0]]) for each in (old, new)]
        )
        own = np.flatnonzero(rollout.loss_mask)
        wanted = by_version[rollout.versions[own], own]
        np.testing.assert_allclose(rollout.logprobs[own], wanted, atol=1e-10, rtol=0)
        # Importance weights divide by these.
        np.testing.assert_allclose(behaviour[own], wanted, atol=1e-10, rtol=0)
    assert group.runs is not None
    turns = group.runs.turns[0]
    assert first.versions[turns >= 0].tolist() == (turns[turns >= 0] == NUM_TURNS - 1).astype(int).tolist()
    # Tokens read before the last turn have the version that read them for that turn.
    last = int(np.flatnonzero(turns == NUM_TURNS - 1)[0])
    assert first.versions[last - 1] == 1
    assert (second.versions == 1).all()
