"""`RlLoop` on `VLLMEngine`: it learns as on `TorchEngine`, and an unmoved step gives a new engine with the same LLM."""

from typing import Any

import numpy as np
import pytest

from tests.integrations.vllm.hosts import Host
from tests.integrations.vllm.llms import build, make_llm

VOCAB, NUM_STEPS, SEEDS = 32, 6, (0, 1, 2)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    model = build(tied=True, vocab_size=VOCAB)
    return Host(model, make_llm(model, tmp_path_factory.mktemp("tied")), is_tied=True)


def learned(make_engine: Any, model: Any, **changes: Any) -> list[float]:
    """Mean rewards of each step."""
    # Imported here: numba must not be loaded before the LLMs of other tests start in this process.
    from tests.rl.runs import PLAIN, TinyTask, options
    from treering.rl.loop import RlLoop

    loop = RlLoop(model, TinyTask(), make_engine, optim=PLAIN, options=options(group_size=16, **changes))
    rewards = [loop.step().rollouts.reward_mean for _ in range(NUM_STEPS)]
    return [reward for reward in rewards if reward is not None]


def test_it_learns_as_on_the_torch_engine(host: Host) -> None:
    """Means over the last two of six GRPO steps and three seeds, 384 rollouts each."""
    from treering.engine.torch_engine import TorchEngine

    def torch_engine(seed: int) -> Any:
        return lambda _, version: TorchEngine(host.model, max_batch=8, version=version, seed=seed, num_threads=1)

    rewards: dict[str, list[list[float]]] = {"torch": [], "vllm": []}
    for seed in SEEDS:
        for name in rewards:
            host.reset()
            engine = (
                torch_engine(seed) if name == "torch" else lambda _, v, seed=seed: host.engine(version=v, seed=seed)
            )
            rewards[name].append(learned(engine, host.model))
    first, last = (
        {name: np.array(r)[:, part].mean() for name, r in rewards.items()} for part in (slice(0, 1), slice(-2, None))
    )
    # A reward is a share of at most 12 tokens: its deviation is below 0.5, that of a difference of means below 0.04.
    assert last["vllm"] > first["vllm"] + 0.1
    assert last["vllm"] > last["torch"] - 3 * 0.5 * np.sqrt(2 / 384)


def test_unknown_policy_log_probs_reach_no_loss(host: Host) -> None:
    from treering.engine.request import Sampling
    from treering.errors import StateError

    host.reset()
    make_engine = lambda _, version: host.engine(version=version, truncated="recompute")  # noqa: E731
    sampling = Sampling(max_tokens=12, top_k=8)
    with pytest.raises(StateError, match=r"the engine gave none.*old_logprobs=\"recomputed\""):
        learned(make_engine, host.model, sampling=sampling)
    rewards = learned(make_engine, host.model, sampling=sampling, old_logprobs="recomputed")
    assert len(rewards) == NUM_STEPS
    assert all(np.isfinite(weight.detach().numpy()).all() for weight in host.model.parameters())


def test_a_step_without_an_update_keeps_the_llm(host: Host) -> None:
    from tests.rl.runs import PLAIN, TinyTask, options
    from treering.rl.loop import RlLoop

    host.reset()
    loop = RlLoop(
        host.model,
        TinyTask(reward=lambda rollout: 1.0),
        lambda _, version: host.engine(version=version),
        optim=PLAIN,
        options=options(),
    )
    reports = [loop.step() for _ in range(2)]
    assert [report.update for report in reports] == [None, None]
    assert all(report.engine.num_sampled > 0 for report in reports)
    assert loop.version == 0
