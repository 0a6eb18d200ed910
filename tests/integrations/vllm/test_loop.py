"""`RlLoop` on `VLLMEngine`: it learns as on `TorchEngine`, and an unmoved step gives a new engine with the same LLM."""

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests.integrations.vllm.hosts import Host
from tests.integrations.vllm.llms import build, make_llm

VOCAB, NUM_STEPS, SEEDS = 32, 6, (0, 1, 2)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Host:
    model = build(tied=True, vocab_size=VOCAB)
    return Host(model, make_llm(model, tmp_path_factory.mktemp("tied")), is_tied=True)


@pytest.fixture(scope="module")
def sums(tmp_path_factory: pytest.TempPathFactory) -> Host:
    """A policy that gets about a third of chained sums right, after a short supervised start."""
    pytest.importorskip("vllm", reason="needs vLLM: make vllm-test")
    from treering.train.loop.optim import OptimOptions
    from treering.train.loop.sft import LoopOptions, SftLoop

    task, num_steps = sums_task(), 175
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=task.vocab_size, hidden_size=192, intermediate_size=576, num_hidden_layers=4, num_attention_heads=6,
        num_key_value_heads=3, head_dim=32, max_position_embeddings=512,
    )  # fmt: skip
    model = Qwen3ForCausalLM(config)
    optim = OptimOptions(learning_rate=2e-3, warmup_steps=20, weight_decay=0.01, betas=(0.9, 0.99))
    solved = task.held_out(32 * num_steps).solutions()
    loop = SftLoop(model, solved, optim=optim, options=LoopOptions(trees_per_step=32, seed=0))
    for _ in range(num_steps):
        loop.step()
    return Host(model, make_llm(model, tmp_path_factory.mktemp("sums")), is_tied=False)


def sums_task() -> Any:
    # Imported here, as everything of the loop: numba must not be loaded before the LLMs of other tests start.
    from treering.rl.tasks.sums import ChainedSums

    # As many as a step takes: rewards of different steps are of the same sums.
    return ChainedSums(8, 0, max_number=9)


def learned(make_engine: Any, model: Any, **changes: Any) -> list[float]:
    """Mean rewards of each step."""
    from tests.rl.runs import PLAIN, TinyTask, options
    from treering.rl.loop import RlLoop

    loop = RlLoop(model, TinyTask(), make_engine, optim=PLAIN, options=options(group_size=16, **changes))
    rewards = [loop.step().rollouts.reward_mean for _ in range(NUM_STEPS)]
    return [reward for reward in rewards if reward is not None]


def learned_sums(make_engine: Any, model: Any) -> list[float]:
    """Mean rewards of each step on chained sums."""
    from treering.engine.request import Sampling
    from treering.rl.loop import RlLoop
    from treering.rl.options import RlOptions
    from treering.train.loop.optim import OptimOptions

    options = RlOptions(prompts_per_step=8, group_size=8, sampling=Sampling(max_tokens=64))
    loop = RlLoop(model, sums_task(), make_engine, optim=OptimOptions(learning_rate=1e-4), options=options)
    return [float(loop.step().rollouts.reward_mean or 0.0) for _ in range(NUM_STEPS)]


def rewards_of_both(host: Host, learn: Any) -> tuple[dict[str, float], dict[str, float]]:
    """By engine the mean reward of the first step, and of the last two, over all seeds."""
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
            rewards[name].append(learn(engine, host.model))
    first, last = (
        {name: float(np.array(r)[:, part].mean()) for name, r in rewards.items()}
        for part in (slice(0, 1), slice(-2, None))
    )
    return first, last


@pytest.mark.slow
def test_it_learns_sums_as_on_the_torch_engine(sums: Host) -> None:
    """Means over the last two of six GRPO steps and three seeds, 384 rollouts each."""
    first, last = rewards_of_both(sums, learned_sums)
    # A reward is 0 or 1: its deviation is at most 0.5, that of a difference of means at most 0.04.
    deviation = 0.5 * np.sqrt(2 / 384)
    assert last["vllm"] > last["torch"] - 3 * deviation
    assert last["vllm"] > first["vllm"]


def test_it_learns_as_on_the_torch_engine(host: Host) -> None:
    """Means over the last two of six GRPO steps and three seeds, 384 rollouts each."""
    first, last = rewards_of_both(host, learned)
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
