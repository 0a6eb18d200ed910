"""The demo's policy: a small model that gets about half of its sums right, so that rewards can improve it."""

from collections.abc import Callable
from dataclasses import dataclass

from transformers import PreTrainedModel

from treering.cli.models import build_model
from treering.config.model import ModelConfig
from treering.engine.request import Request, Sampling
from treering.engine.torch_engine import TorchEngine
from treering.history.draft.drafter import Drafter
from treering.history.store.store import HistoryStore
from treering.rl.tasks.sums import ChainedSums
from treering.train.loop.optim import OptimOptions
from treering.train.loop.sft import LoopOptions, SftLoop

MODEL = ModelConfig(hidden_size=128, num_layers=4, num_heads=4, num_kv_heads=2, head_size=32, intermediate_size=384)
MAX_NUMBER = 9
"""Largest number in a sum: small enough for this model to learn in a minute."""
MAX_ROLLOUT_TOKENS = 64
"""The longest right response has 35 tokens."""
ENOUGH = 0.4
"""Share of right answers at which the warm start ends. The share rises steeply here and often ends nearer 0.6."""

MAX_STEPS = 600
"""Most supervised steps."""

_SUMS_PER_STEP = 32
_CHECK_EVERY = 25
_NUM_CHECKED = 128


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WarmStart:
    """A policy and how it was trained."""

    model: PreTrainedModel
    num_steps: int
    """Supervised steps."""
    accuracy: float
    """Share of right answers to sums outside its training data."""


OnStep = Callable[[int, float], None]
"""Called after each step with its number and the last measured accuracy."""


def demo_task(num_prompts: int, seed: int) -> ChainedSums:
    """The prompts that both loops train on."""
    return ChainedSums(num_prompts, seed, max_number=MAX_NUMBER)


def warm_start(task: ChainedSums, *, seed: int, enough: float = ENOUGH, on_step: OnStep) -> WarmStart:
    """Supervised training on solved sums outside the task, until the policy gets `enough` of held-out ones right.

    Example: with seed 0 it takes 225 steps of 32 sums to an accuracy of 0.38, and 275 to 0.84.
    """
    model = build_model(MODEL, num_ids=task.vocab_size, seed=seed, folder=None)
    checked = task.held_out(_NUM_CHECKED)
    solved = checked.held_out(MAX_STEPS * _SUMS_PER_STEP).solutions()
    loop = SftLoop(
        model,
        solved,
        optim=OptimOptions(learning_rate=3e-3, warmup_steps=20, weight_decay=0.01, betas=(0.9, 0.99)),
        options=LoopOptions(trees_per_step=_SUMS_PER_STEP, seed=seed),
    )
    accuracy = 0.0
    while loop.num_steps_done < MAX_STEPS and accuracy < enough:
        loop.step()
        if loop.num_steps_done % _CHECK_EVERY == 0:
            accuracy = measure_accuracy(model, checked)
        on_step(loop.num_steps_done, accuracy)
    return WarmStart(model=model, num_steps=loop.num_steps_done, accuracy=accuracy)


def measure_accuracy(model: PreTrainedModel, task: ChainedSums) -> float:
    """Share of a task's prompts that one sampled rollout each gets right.

    The engine drafts from its own history, so that all compiled code is ready before either loop is timed.
    """
    store = HistoryStore()
    engine = TorchEngine(model, Drafter(store), max_batch=16, num_threads=1, costs="none")
    sampling = Sampling(max_tokens=MAX_ROLLOUT_TOKENS, stop_tokens=task.stop_tokens)
    prompts = {prompt.prompt_id: prompt for prompt in task.prompts}
    rewards = []
    for rollout in engine.generate(
        Request(prompt_id=prompt.prompt_id, prompt=prompt.tokens, sampling=sampling) for prompt in task.prompts
    ):
        rewards.append(task.reward(prompts[rollout.prompt_id], rollout))
        store.add(rollout.prompt_id, [rollout.tokens], version=0)
    store.publish()
    return sum(rewards) / len(rewards)
