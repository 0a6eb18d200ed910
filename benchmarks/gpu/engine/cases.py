"""Models, batches and acceptances that the engine is measured with, and the least bytes that a step reads."""

from dataclasses import dataclass, replace

import numpy as np
import torch
from transformers import PreTrainedModel

from benchmarks.gpu.model.cases import TINY_SHAPE, ModelPlan, build_on_device
from treering.engine.protocol import Request, Sampling
from treering.types import NAMED_SHAPES, ModelShape

TEMPERATURE = 100.0
"""Far above the logits, so that rounding hardly ever changes a token and rollouts repeat their recordings. A step costs
the same at every temperature."""


PASS_TOKENS = 4096
"""Tokens of a pass at most: prompts leave room for the rows that decode in the same pass."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EnginePlan:
    """A model to decode with and how.

    Attributes:
        shape: its sizes.
        is_tied: whether the head is the embedding, as in the published model.
        batches: rows of the passes whose cost is measured by their tokens, and of rollouts.
        generate_batches: rows of the compiled `generate` that is compared with.
        num_prompt: tokens of a prompt, each row's its own.
        num_new: tokens of a rollout.
        num_generated: tokens of `generate`, fewer since each of them is a step.
        generate_s: seconds that a case of `generate` takes, about, of which most is compiling.
        tokens_per_row: of the passes, ascending from 1.
        num_drafted: tokens of a draft.
        acceptances: how often a drafted token is the recorded one.
        dtype: of weights and activations.
    """

    shape: ModelShape
    is_tied: bool
    batches: tuple[int, ...]
    generate_batches: tuple[int, ...] = ()
    num_prompt: int = 512
    num_new: int = 96
    num_generated: int = 32
    generate_s: float = 50.0
    tokens_per_row: tuple[int, ...] = (1, 2, 4, 8, 16)
    num_drafted: int = 7
    acceptances: tuple[float, ...] = (0.0, 0.5, 0.8, 0.95)
    dtype: torch.dtype = torch.bfloat16

    @property
    def num_slots(self) -> int:
        """Tokens of keys and values that its largest rollouts take."""
        return self.num_slots_of(max(self.batches))

    def num_slots_of(self, batch: int) -> int:
        """Tokens of keys and values that rollouts of that many rows take, with room for drafted ones."""
        return batch * (self.num_prompt + self.num_new + 32)

    def max_prefill(self, batch: int) -> int:
        """Prompt tokens of a pass of that many rows, so that it has `PASS_TOKENS` with all drafts of the others.

        Example: 16 rows with drafts of 7 tokens leave room for 3,968.
        """
        return PASS_TOKENS - batch * (1 + self.num_drafted)

    @property
    def weight_bytes(self) -> int:
        """Bytes of weights that a step reads: all but the embedding; norms left out."""
        return self.dtype.itemsize * self.shape.params_per_token

    @property
    def slot_bytes(self) -> int:
        """Keys and values of one token."""
        shape = self.shape
        return 2 * shape.num_layers * shape.num_kv_heads * shape.head_size * self.dtype.itemsize

    def floor_bytes(self, batch: int, context: int) -> int:
        """The least bytes that a step of that many rows reads: the weights, and each row's keys and values.

        Example: Qwen3-8B in bfloat16 with 16 rows of 512 tokens: 15.1 GB of weights and 1.2 GB of keys and values.
        """
        return self.weight_bytes + batch * context * self.slot_bytes


def full_plans() -> list[EnginePlan]:
    """First the batches of the goals, of the large model and then of the small one, each with one `generate`.

    Other batches, and `generate` with a single row, come last, because it compiles for most of a minute again.
    """
    large = EnginePlan(
        shape=NAMED_SHAPES["qwen3-8b"], is_tied=False, batches=(1, 16), generate_batches=(16,), num_new=64
    )
    small = EnginePlan(
        shape=NAMED_SHAPES["qwen3-1.7b"], is_tied=True, batches=(1, 16), generate_batches=(16,), generate_s=40.0
    )
    return [large, small, *(replace(plan, batches=(128, 4, 64), generate_batches=(1,)) for plan in (large, small))]


def tiny_plans() -> list[EnginePlan]:
    """A small one of everything, for machines without a device."""
    return [
        EnginePlan(
            shape=TINY_SHAPE,
            is_tied=False,
            batches=(2,),
            generate_batches=(2,),
            num_prompt=6,
            num_new=5,
            num_generated=4,
            generate_s=0.0,
            tokens_per_row=(1, 2),
            num_drafted=2,
            acceptances=(0.0, 1.0),
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
