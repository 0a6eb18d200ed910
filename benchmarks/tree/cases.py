"""Three shapes of forest that tree trainers are compared on, and the small model that they are compared with."""

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from treering.errors import InputError
from treering.types import ModelShape

SHAPE = ModelShape(
    name="qwen3-2x256",
    num_layers=2,
    hidden_size=256,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    intermediate_size=768,
    vocab_size=256,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Case:
    """Sequences to train on, loss on the last tokens of each.

    Example: `star(prompt=1024, response=64, group=8)` has 8 sequences of 1,088 tokens, 8,704 flat and 1,536 distinct.
    """

    name: str
    sequences: tuple[NDArray[np.int32], ...]
    """K branches, int32 [length] each."""
    num_trained: int
    """Loss falls on the last `num_trained` tokens of every branch."""
    num_prompt_tokens: int | None = None
    """Tokens before the only branch point; None if there are several, where sharing the prompt alone cannot be used."""

    def __post_init__(self) -> None:
        shortest = min(sequence.size for sequence in self.sequences)
        if not 1 <= self.num_trained < shortest:
            raise InputError(
                f"case {self.name!r} trains the last {self.num_trained} tokens of branches as short as {shortest}: "
                "each branch needs at least one token before a trained one"
            )

    @property
    def groups(self) -> tuple[tuple[NDArray[np.int32], ...], ...]:
        """The branches of each tree: one tree of all of them."""
        return (self.sequences,)

    @property
    def num_trained_tokens(self) -> int:
        """Trained tokens of all branches together: the denominator of the loss."""
        return self.num_trained * len(self.sequences)

    def loss_masks(self) -> list[NDArray[np.int8]]:
        """One 0/1 mask per branch."""
        lengths = (sequence.size for sequence in self.sequences)
        return [(np.arange(length) >= length - self.num_trained).astype(np.int8) for length in lengths]


def star(*, prompt: int = 1024, response: int = 64, group: int = 8) -> Case:
    """One prompt, several responses: a group of single-turn rollouts."""
    rng = np.random.default_rng(0)
    shared = _run(rng, prompt)
    branches = [np.concatenate([shared, _run(rng, response, first=i)]) for i in range(group)]
    return Case(name="star", sequences=tuple(branches), num_trained=response, num_prompt_tokens=prompt)


def two_level(*, prompt: int = 512, middle: int = 256, response: int = 64, num_middles: int = 2, fan: int = 4) -> Case:
    """One prompt, middles that branch off it, responses that branch off them: a search tree of depth two."""
    rng = np.random.default_rng(1)
    shared = _run(rng, prompt)
    branches = []
    for i in range(num_middles):
        trunk = np.concatenate([shared, _run(rng, middle, first=i)])
        branches += [np.concatenate([trunk, _run(rng, response, first=j)]) for j in range(fan)]
    return Case(name="two_level", sequences=tuple(branches), num_trained=response)


def caterpillar(*, turn: int = 128, side: int = 64, num_turns: int = 8) -> Case:
    """A trunk that grows by turns, each with a side leaf: an agent whose context is edited after every turn."""
    rng = np.random.default_rng(2)
    trunk = np.concatenate([_run(rng, turn, first=0) for _ in range(num_turns)])
    branches = [np.concatenate([trunk[: turn * (i + 1)], _run(rng, side, first=1)]) for i in range(num_turns)]
    return Case(name="caterpillar", sequences=tuple(branches), num_trained=side)


def published_cases() -> list[Case]:
    """The sizes at which other tree trainers were measured; 1,536 distinct tokens each."""
    return [star(), two_level(), caterpillar()]


def build_model(*, shape: ModelShape = SHAPE) -> PreTrainedModel:
    """A Qwen3 of that shape with seeded random weights, training mode, stock SDPA attention."""
    config = Qwen3Config(**model_settings(shape))
    config._attn_implementation = "sdpa"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(config)
    return model.train()


def model_settings(shape: ModelShape = SHAPE) -> dict[str, int]:
    """A shape in the words of Hugging Face's `Qwen3Config`."""
    return {
        "num_hidden_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_size,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
    }


def _run(rng: np.random.Generator, length: int, *, first: int | None = None) -> NDArray[np.int32]:
    """Random tokens. Siblings are given different first ones, or chance would merge some of them."""
    tokens = rng.integers(0, SHAPE.vocab_size, length, dtype=np.int32)
    if first is not None:
        tokens[0] = first
    return tokens
