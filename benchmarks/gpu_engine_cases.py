"""Models, batches and acceptances that the engine is measured with, and what a step reads at least. Knows no clocks."""

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu_model_cases import TINY_SHAPE, ModelPlan, build_on_device
from treering.engine.request import Request, Sampling
from treering.types import NAMED_SHAPES, ModelShape

TEMPERATURE = 100.0
"""Far above the logits: which token is drawn hardly depends on how a pass rounds, so recordings are met again. A step
costs the same at every temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """A model to decode with and how.

    Attributes:
        shape: its sizes.
        is_tied: whether the head is the embedding, as in the published model.
        num_prompt: tokens of a prompt, each row's its own.
        num_new: tokens of a rollout.
        verify_batches: rows of the passes whose cost is measured by their tokens.
        tokens_per_row: of those passes, ascending from 1.
        rollout_batches: rows of the rollouts that are replayed as drafts.
        num_drafted: tokens of a draft.
        acceptances: how often a drafted token is the recorded one.
        generate_batches: rows of the compiled `generate` that is compared with.
        dtype: of weights and activations.
    """

    shape: ModelShape
    is_tied: bool
    num_prompt: int = 512
    num_new: int = 96
    verify_batches: tuple[int, ...] = (1, 16, 128, 4, 64)
    tokens_per_row: tuple[int, ...] = (1, 2, 4, 8, 16)
    rollout_batches: tuple[int, ...] = (1, 16, 128, 4, 64)
    num_drafted: int = 7
    acceptances: tuple[float, ...] = (0.0, 0.5, 0.8, 0.95)
    generate_batches: tuple[int, ...] = (1, 16)
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_slots(self) -> int:
        """Tokens of keys and values that its largest rollouts take."""
        return max(*self.rollout_batches, *self.verify_batches) * (self.num_prompt + self.num_new + 32)

    @property
    def weight_bytes(self) -> int:
        """What a step reads of the weights, which is all of them but the embedding; norms left out."""
        return self.dtype.itemsize * self.shape.params_per_token

    @property
    def slot_bytes(self) -> int:
        """Keys and values of one token."""
        shape = self.shape
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * self.dtype.itemsize

    def floor_bytes(self, batch: int, context: int) -> int:
        """What a step of that many rows reads at least: the weights, and what each row has before it.

        Example: Qwen3-8B in bfloat16 with 16 rows of 512 tokens: 15.1 GB of weights and 1.2 GB of keys and values.
        """
        return self.weight_bytes + batch * context * self.slot_bytes

    @property
    def needed_bytes(self) -> int:
        """The model, the snapshots of two engines, and their keys and values."""
        embedding = self.dtype.itemsize * self.shape.hidden_size * self.shape.vocab_size
        return 3 * (self.weight_bytes + embedding) + 2 * self.num_slots * self.slot_bytes


def full_plans() -> list[EnginePlan]:
    """The large model first, whose goal is the tighter one."""
    return [
        EnginePlan(shape=NAMED_SHAPES["qwen3-8b"], is_tied=False, num_new=64),
        EnginePlan(shape=NAMED_SHAPES["qwen3-1.7b"], is_tied=True),
    ]


def tiny_plans() -> list[EnginePlan]:
    """A small one of everything, for machines without a device."""
    return [
        EnginePlan(
            shape=TINY_SHAPE,
            is_tied=False,
            num_prompt=6,
            num_new=5,
            verify_batches=(2,),
            tokens_per_row=(1, 2),
            rollout_batches=(2,),
            num_drafted=2,
            acceptances=(0.0, 1.0),
            generate_batches=(2,),
            dtype=torch.float32,
        )
    ]


def build(plan: EnginePlan, device: str) -> PreTrainedModel:
    """The plan's model with seeded random weights, in evaluation mode."""
    model_plan = ModelPlan(
        shape=plan.shape, is_tied=plan.is_tied, checkpointed=False, token_options=(), workloads=(), dtype=plan.dtype
    )
    return build_on_device(model_plan, device).eval()


def requests_of(plan: EnginePlan, batch: int) -> list[Request]:
    """A prompt of random tokens for every row."""
    rng = np.random.default_rng(0)
    sampling = Sampling(max_tokens=plan.num_new, temperature=TEMPERATURE)
    prompts = rng.integers(0, plan.shape.vocab_size, (batch, plan.num_prompt)).astype(np.int32)
    return [Request(prompt_id=f"r{row}", prompt=prompt, sampling=sampling) for row, prompt in enumerate(prompts)]
