"""Models, prompts and requests that engines are compared on."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from transformers import PreTrainedModel

from benchmarks.common.progress import OnProgress
from treering.engine.protocol import Request, Sampling
from treering.rl.tasks.task import Task
from treering.types import ModelShape

NUM_PROMPTS = 16
GROUP_SIZE = 8

SHAPE = ModelShape(
    name="qwen3-5x160",
    num_layers=5,
    hidden_size=160,
    num_heads=4,
    num_kv_heads=2,
    head_size=32,
    intermediate_size=480,
    vocab_size=512,
)
"""1.6 million parameters, with its output head."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Policy:
    """A model that has learnt something of a task, so that its rollouts resemble one another."""

    model: PreTrainedModel
    task: Task
    group_size: int
    """Rollouts of a prompt in a draw."""
    max_tokens: int
    """Tokens of a rollout at most."""
    num_steps: int
    """Supervised steps that it took."""
    accuracy: float
    """Share of right answers to prompts that it was not trained on."""

    def requests(self, *, draw: int) -> list[Request]:
        """A group for each prompt of the task, one group after another."""
        sampling = Sampling(max_tokens=self.max_tokens, stop_tokens=self.task.stop_tokens)
        return [
            Request(prompt_id=prompt.prompt_id, prompt=prompt.tokens, sampling=sampling, draw=draw, sample=sample)
            for prompt in self.task.prompts
            for sample in range(self.group_size)
        ]


def warm_policy(on_progress: OnProgress) -> Policy:
    """The demo's policy and task, trained until it gets about half of its sums right."""
    # Imported late: CUDA machines, where this file's tests are collected too, lack the command line's packages.
    from treering.cli.demo import MAX_ROLLOUT_TOKENS, demo_task, warm_start

    task = demo_task(NUM_PROMPTS)
    start = warm_start(
        task, seed=0, on_step=lambda step, accuracy: on_progress(f"warm start: step {step}, {accuracy:.0%} right")
    )
    return Policy(
        model=start.model.eval(),
        task=task,
        group_size=GROUP_SIZE,
        max_tokens=MAX_ROLLOUT_TOKENS,
        num_steps=start.num_steps,
        accuracy=start.accuracy,
    )


def random_prompts(num_prompts: int, length: int) -> NDArray[np.int32]:
    """Random tokens, int32 [num_prompts, length]."""
    return np.random.default_rng(0).integers(0, SHAPE.vocab_size, (num_prompts, length), dtype=np.int32)
